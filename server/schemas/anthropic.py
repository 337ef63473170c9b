"""What clients send to /v1/messages, and what they read. Knows no scheduler.

The published `anthropic` package is what the shapes were read from.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from server.schemas.common import MAX_MESSAGES, Count, Dialled, StopText, Strict, Text
from server.schemas.openai_answers import LoopReport
from server.schemas.openai_forms import MAX_TOOLS, FunctionName

Effort = Literal["low", "medium", "high", "xhigh", "max"]


class TextBlock(Strict):
    """`cache_control` and `citations` are let through: prefixes are kept without asking."""

    type: Literal["text"]
    text: Text


Texts = Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class ToolUseBlock(Strict):
    """A call that an answer made."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


class ToolResultBlock(Strict):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | Texts | None = None
    is_error: bool | None = None


class ThinkingBlock(Strict):
    """What a reasoning model thought. No template here has a place for it."""

    type: Literal["thinking", "redacted_thinking"]


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return "thinking" if kind == "redacted_thinking" else str(kind)


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")],
    Discriminator(
        _kind,
        custom_error_type="block",
        custom_error_message="type must be text, tool_use, tool_result or thinking",
    ),
]


def joined(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content or ())


class Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(fail_fast=True, max_length=MAX_MESSAGES)]

    def plain(self) -> list[dict[str, Any]]:
        """The turn as chat completions put it: results of tools before what a user says with them."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [
            {"role": "tool", "content": joined(block.content), "tool_call_id": block.tool_use_id}
            for block in self.content
            if isinstance(block, ToolResultBlock)
        ]
        text = "".join(block.text for block in self.content if isinstance(block, TextBlock))
        calls = [_called(block) for block in self.content if isinstance(block, ToolUseBlock)]
        said = {"role": self.role, "content": text} | ({"tool_calls": calls} if calls else {})
        return [*results, *([said] if text or calls or not results else [])]


def _called(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


class Tool(Strict):
    type: Literal["custom"] = "custom"
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]

    def asked(self) -> dict[str, Any]:
        described = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, "parameters": self.input_schema, **described}}


class ToolChoice(Strict):
    """`name` with type tool only."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False

    def asked(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return "required" if self.type == "any" else self.type


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[Any, Field(alias="schema")] = None


class OutputConfig(Strict):
    """`effort` says how many loops."""

    effort: Effort | None = None
    format: SchemaFormat | None = None


class Thinking(Strict):
    """Read and of no effect: there is no reasoning text."""

    type: Literal["enabled", "disabled", "adaptive"]


class CountRequest(Dialled):
    """POST /v1/messages/count_tokens."""

    ignored: ClassVar[frozenset[str]] = frozenset({
        "cache_control", "context_management", "diagnostics", "inference_geo", "metadata", "speed", "user_profile_id",
        "workspace_id",
    })  # fmt: skip
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"container": (), "mcp_servers": ([],)}

    model: Text
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: Text | Texts | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def said(self) -> list[dict[str, Any]]:
        """The conversation as messages, led by the system's text."""
        lead = [] if self.system is None else [{"role": "system", "content": joined(self.system)}]
        return lead + [turn for message in self.messages for turn in message.plain()]


class MessagesRequest(CountRequest):
    """POST /v1/messages. `seed` and `min_p` are extensions."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stream: bool = False
    stop_sequences: Annotated[list[StopText], Field(fail_fast=True, max_length=64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Count | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    service_tier: Literal["auto", "standard_only", "flex", "priority"] | None = None  # type: ignore[assignment]


class TextContent(BaseModel):
    type: Literal["text"] = "text"
    text: str


class ToolUse(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class Usage(BaseModel):
    """`input_tokens` are those that no prefix held."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class Answer(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextContent | ToolUse]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: Usage
    tinyloop: LoopReport | None = None


class ErrorDetail(BaseModel):
    type: str
    message: str


class ErrorBody(BaseModel):
    """How a refusal looks."""

    type: Literal["error"] = "error"
    error: ErrorDetail
    request_id: str


class TokenCount(BaseModel):
    input_tokens: int
