"""Text to token ids and back over HTTP, in the words of vLLM and of llama.cpp at once."""

from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from server.schemas.common import MAX_MESSAGES, Strict, Text, TokenIds, load_object, raise_readable, refuse_unknown
from server.schemas.openai import Message
from server.schemas.openai_forms import ToolList
from tinyloop.errors import RequestError


class TokenizeRequest(Strict):
    """A `prompt` (or `content`), or `messages` that the chat template turns into one."""

    model: Text | None = None
    prompt: Text | None = None
    content: Text | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: ToolList | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @property
    def text(self) -> str | None:
        """None for messages. Raises RequestError unless exactly one of the three is there."""
        given = [value for value in (self.prompt, self.content, self.messages) if value is not None]
        if len(given) != 1:
            raise RequestError("prompt", "exactly one of prompt, content and messages is needed")
        return self.content if self.prompt is None else self.prompt


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Strict):
    model: Text | None = None
    tokens: TokenIds


class DetokenizeAnswer(BaseModel):
    """The text under both names that clients look for."""

    prompt: str
    content: str


class TokenizerInfo(BaseModel):
    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    add_bos_token: bool
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


def parse_strictly(kind: type[Strict], raw: bytes) -> Any:
    """A request of this kind from a body. Raises RequestError."""
    try:
        request = kind.model_validate(load_object(raw))
    except ValidationError as error:
        raise_readable(error)
    for name in request.model_extra or ():
        refuse_unknown(name)
    return request
