"""What clients of /v1/responses send. Knows no scheduler; what they get is in responses_answers.

https://www.openresponses.org and the published `openai` package are what the shapes were read from.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from server.schemas.common import MAX_MESSAGES, Closed, Count, Dialled, Effort, Strict, Text
from server.schemas.openai_forms import MAX_TOOLS, FunctionName
from tinyloop.errors import RequestError

MAX_LABELS = 16  # entries of `metadata`
Key = Annotated[str, Field(max_length=64)]
Role = Literal["user", "assistant", "system", "developer"]


class TextPart(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: Text


class Refusal(Strict):
    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


Parts = Annotated[list[TextPart | Refusal], Field(fail_fast=True, max_length=MAX_MESSAGES)]


def _joined(content: "str | list[TextPart | Refusal]") -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class MessageItem(Strict):
    """A turn. `type` may be left out."""

    type: Literal["message"] = "message"
    role: Role
    content: Text | Parts

    def plain(self) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": _joined(self.content)}


class CallItem(Strict):
    """A function call that an answer made."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text

    def plain(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": self.call_id, "type": "function", "function": function}],
        }


class OutputItem(Strict):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Text | Parts

    def plain(self) -> dict[str, Any]:
        return {"role": "tool", "content": _joined(self.output), "tool_call_id": self.call_id}


class ReasoningItem(Strict):
    """What a reasoning model thought. No template here has a place for it."""

    type: Literal["reasoning"]

    def plain(self) -> None:
        return None


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return kind if isinstance(kind, str) else ""


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item",
        custom_error_message="type must be message, function_call, function_call_output or reasoning",
    ),
]
Items = Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class Reasoning(Closed):
    """`effort` says how many loops; there is no reasoning text, so nothing to summarise."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Closed):
    type: Literal["text"]


class ObjectFormat(Closed):
    type: Literal["json_object"]


class SchemaFormat(Closed):
    type: Literal["json_schema"]
    name: Annotated[str, Field(max_length=64)]
    description: Text | None = None
    strict: bool | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None


class TextConfig(Closed):
    format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    def asked(self) -> dict[str, Any] | None:
        """The form of the answer as chat completions put it."""
        if not isinstance(self.format, SchemaFormat):
            return None if self.format is None else {"type": self.format.type}
        schema = {"name": self.format.name, "schema": self.format.schema_}
        return {"type": "json_schema", "json_schema": schema}


class FunctionTool(Strict):
    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def asked(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class FunctionRef(Closed):
    type: Literal["function"]
    name: Text

    def asked(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}


class AllowedTools(Closed):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionRef], Field(max_length=MAX_TOOLS, fail_fast=True)]

    def asked(self) -> dict[str, Any]:
        tools = [tool.asked() for tool in self.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": tools}}


class StreamOptions(Closed):
    include_obfuscation: bool = False


class Prompted(Dialled):
    """What both making and counting take."""

    model: Text
    input: Text | Items
    instructions: Text | None = None
    previous_response_id: Text | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default=[])
    tool_choice: (
        Literal["none", "auto", "required"] | Annotated[FunctionRef | AllowedTools, Field(discriminator="type")]
    ) = "auto"
    parallel_tool_calls: bool = True
    truncation: Literal["disabled"] = "disabled"

    def said(self) -> list[dict[str, Any]]:
        """This turn as messages. Calls that follow an assistant's text, or each other, belong to one message."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[dict[str, Any]] = []
        for item in self.input:
            message = item.plain()
            if message is None:
                continue
            last: dict[str, Any] = messages[-1] if messages else {"role": ""}
            if "tool_calls" in message and last["role"] == "assistant":
                last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
            else:
                messages.append(message)
        return messages


class CountRequest(Prompted):
    """POST /v1/responses/input_tokens."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"conversation": ()}


class CreateRequest(Prompted):
    """POST /v1/responses. The sampling fields after `top_logprobs` are extensions."""

    ignored: ClassVar[frozenset[str]] = frozenset({"prompt_cache_options", "prompt_cache_retention", "moderation"})
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "conversation": (), "prompt": (), "background": (False,), "context_management": ([],), "max_tool_calls": (),
    }  # fmt: skip

    stream: bool = False
    stream_options: StreamOptions | None = None
    store: bool = True
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    metadata: Annotated[dict[Key, Annotated[str, Field(max_length=512)]], Field(max_length=MAX_LABELS)] | None = None
    include: Annotated[list[Key], Field(max_length=16, fail_fast=True)] | None = None
    user: Key | None = None
    safety_identifier: Key | None = None
    prompt_cache_key: Annotated[str, Field(max_length=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    top_k: Count | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: int | None = None

    @property
    def logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", "stream_options is only allowed when stream is true")
