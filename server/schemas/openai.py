"""What clients send to the OpenAI endpoints. Knows no scheduler and runs nothing; answers are in openai_answers."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from server.schemas.common import (
    MAX_MESSAGES,
    Bias,
    Count,
    Dialled,
    OrRest,
    StopText,
    Strict,
    Text,
    Texts,
    TokenIds,
    refuse_unknown,
)
from server.schemas.openai_forms import ResponseFormat, ToolChoice, ToolList, schema_of, tools_of
from tinyloop.errors import RequestError
from tinyloop.sampling import MAX_LOGPROBS
from tinyloop.tools import Tools

# Accepted whatever they say: labels, and hints that ask for nothing.
_IGNORED = frozenset({
    "metadata", "moderation", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "store", "user", "verbosity",
})  # fmt: skip
# Not built yet; the values that ask for nothing pass.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "web_search_options": (),
}


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # nothing to do: it pads chunks against eavesdroppers
    continuous_usage_stats: bool = False


class TextPart(Strict):
    type: Literal["text"]
    text: Text


_SAME_ROLE = {"developer": "system", "function": "tool"}  # a newer and an older word; templates know the other


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: Text
    arguments: Text = ""


class Called(BaseModel):
    """A call that the assistant made before."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """One turn of a chat. `plain` is what a template gets to see."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[Called], Field(fail_fast=True)] | None = None
    tool_call_id: Text | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") != "text":
                raise ValueError("only parts of type text are supported")
        return content

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())

    def plain(self) -> dict[str, Any]:
        role = _SAME_ROLE.get(self.role, self.role)
        calls = [call.model_dump(exclude_none=True) for call in self.tool_calls or ()]
        extra = {"tool_calls": calls, "tool_call_id": self.tool_call_id}
        return {"role": role, "content": self.text} | {key: value for key, value in extra.items() if value}


class Request(Dialled):
    """What both endpoints take."""

    ignored = _IGNORED
    unsupported = _UNSUPPORTED

    model: Text
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: OrRest | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: OrRest | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Bias | None = None
    seed: int | None = None
    stop: StopText | Annotated[list[StopText], Field(fail_fast=True)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None

    @property
    def schema_asked(self) -> Any:
        """The JSON schema that an answer has to validate against, unchecked; None for free text."""
        return schema_of(self.response_format)

    @property
    def candidates(self) -> int:
        """How many answers are generated for each prompt."""
        return self.n

    @property
    @abstractmethod
    def logprob_count(self) -> int | None:
        """How many alternatives per token are shown; None: no log-probabilities at all."""

    def sampling(self) -> dict[str, Any]:
        """Arguments of SamplingParams; what the client left out is left out."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
                         "repetition_penalty", "min_tokens", "ignore_eos")
        }  # fmt: skip
        given |= {
            "top_k": None if self.top_k is None else max(self.top_k, 0),  # -1 is another way to say off
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            "stop": stop,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "include_stop": self.include_stop_str_in_output,
            "logprobs": 0 if self.logprob_count is None and self.candidates > self.n else self.logprob_count,
        }
        return {name: value for name, value in given.items() if value is not None}

    def check(self) -> None:
        for name in (self.stream_options and self.stream_options.model_extra) or ():
            refuse_unknown(f"stream_options.{name}")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", "stream_options is only allowed when stream is true")


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: OrRest | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def tools_asked(self) -> Tools | None:
        """The tools that may be called. Raises RequestError."""
        return tools_of(self.tools, self.tool_choice, many=self.parallel_tool_calls is not False)

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                raise RequestError("continue_final_message", "continue_final_message excludes add_generation_prompt")
            self.add_generation_prompt = False


class CompletionRequest(Request):
    """POST /v1/completions."""

    prompt: Text | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None

    @property
    def candidates(self) -> int:
        return self.best_of or self.n

    @property
    def logprob_count(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Always a list of prompts. Raises RequestError for one without any."""
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt or [] in prompt:
            raise RequestError("prompt", "prompt must not be empty")
        return [prompt] if isinstance(prompt[0], int) else prompt

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError("best_of", f"best_of must be at least n ({self.n}), got {self.best_of}")
        if self.stream and self.candidates > self.n:
            raise RequestError("best_of", "best_of above n cannot be streamed: which are the best is known at the end")
