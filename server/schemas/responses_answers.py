"""What /v1/responses answers. Every key is there, null where there is nothing: strict readers ask for it."""

from typing import Any, Literal

from pydantic import BaseModel

from server.schemas.openai_answers import ChosenLogprob, CompletionDetails, LoopReport

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[ChosenLogprob] = []


class OutputMessage(BaseModel):
    type: Literal["message"] = "message"
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class FunctionCall(BaseModel):
    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class InputDetails(BaseModel):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class Usage(BaseModel):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails = InputDetails()
    output_tokens_details: CompletionDetails = CompletionDetails()


class Incomplete(BaseModel):
    reason: Literal["max_output_tokens"]


class Failure(BaseModel):
    code: str
    message: str


class TextShape(BaseModel):
    format: dict[str, Any] = {"type": "text"}
    verbosity: Literal["low", "medium", "high"] = "medium"


class ReasoningShape(BaseModel):
    effort: str | None = None
    summary: str | None = None


class Resource(BaseModel):
    """A response as it stands. `tinyloop` is there once there is an answer."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    incomplete_details: Incomplete | None = None
    model: str
    previous_response_id: str | None = None
    instructions: str | None = None
    output: list[OutputMessage | FunctionCall] = []
    error: Failure | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    truncation: Literal["disabled"] = "disabled"
    parallel_tool_calls: bool = True
    text: TextShape = TextShape()
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0
    temperature: float = 1.0
    reasoning: ReasoningShape = ReasoningShape()
    usage: Usage | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    store: bool = True
    background: bool = False
    service_tier: str = "default"
    metadata: dict[str, str] = {}
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    tinyloop: LoopReport | None = None


class Deleted(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
