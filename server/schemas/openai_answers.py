"""What the OpenAI endpoints answer, as the published clients read it; `tinyloop` objects are this server's own."""

from typing import Literal

from pydantic import BaseModel

from server.types import FinishReason


class PromptDetails(BaseModel):
    cached_tokens: int = 0


class CompletionDetails(BaseModel):
    reasoning_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()
    completion_tokens_details: CompletionDetails = CompletionDetails()


class LoopReport(BaseModel):
    """What depth the answer was given at and how long it took, in milliseconds from arrival."""

    loops_requested: int | None
    loops_granted: int | None
    loops_used_mean: float | None  # over the answer's tokens
    loops_histogram: dict[str, int]  # loops -> tokens
    degraded: bool
    cache_hit: str  # "exact", "shallower", "deepened", or "" for none
    queue_ms: float
    ttft_ms: float | None
    tpot_ms: float | None
    total_ms: float
    slo_met: bool | None  # None: no limit was set


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChosenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Arrays of one length. The first token of an echoed prompt has no probability: None."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Answer(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class CallingAnswer(Answer):
    """An answer that calls tools, with whatever was said before."""

    content: str | None  # type: ignore[assignment]
    tool_calls: list[ToolCall]


class ChatChoice(BaseModel):
    index: int
    message: CallingAnswer | Answer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    stop_reason: str | int | None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class Generated(BaseModel):
    """What every answer says of itself, and every event of a streamed one."""

    id: str
    created: int
    model: str
    service_tier: str = "default"


class ChatCompletion(Generated):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    tinyloop: LoopReport


class Completion(Generated):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage
    tinyloop: LoopReport


class CallDelta(BaseModel):
    """A call opens with id, type and name; after that only its arguments come."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: dict[Literal["name", "arguments"], str]


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"] | None
    stop_reason: str | int | None = None


class ChatChunk(Generated):
    """One event of a streamed chat; the last has no choices, if usage was asked for."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    tinyloop: LoopReport | None = None


class CompletionChunk(Generated):
    """One event of a streamed completion; the last has no choices, if usage was asked for."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None
    tinyloop: LoopReport | None = None


class LoopRange(BaseModel):
    min: int
    max: int
    default: int
    trained: int
    adaptive: bool
    exit_signals: list[str]


class ModelDepth(BaseModel):
    loops: LoopRange
    reasoning_effort_map: dict[str, int]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tinyloop"
    max_model_len: int
    tinyloop: ModelDepth


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
