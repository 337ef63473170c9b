"""What LM Studio's clients send and read: REST v0 (OpenAI's shapes and more) and v1. Knows no scheduler."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from server.schemas import openai
from server.schemas import openai_answers as answers
from server.schemas.common import MAX_MESSAGES, Body, Closed, Count, Dialled, Effort, Text

# Hints for a server that loads models while it runs.
_LOADING = frozenset({"ttl", "draft_model"})
StopReason = Literal["eosFound", "stopStringFound", "maxPredictedTokensReached", "contextLengthReached", "toolCalls"]


class ChatRequest(openai.ChatRequest):
    """POST /api/v0/chat/completions."""

    ignored: ClassVar[frozenset[str]] = openai.ChatRequest.ignored | _LOADING


class CompletionRequest(openai.CompletionRequest):
    """POST /api/v0/completions."""

    ignored: ClassVar[frozenset[str]] = openai.CompletionRequest.ignored | _LOADING


class Stats(BaseModel):
    """Rates and seconds of one answer. `time_to_first_token` counts from arrival, `generation_time` from that token."""

    tokens_per_second: float
    time_to_first_token: float
    generation_time: float
    stop_reason: StopReason


class ModelFacts(BaseModel):
    arch: str
    quant: str
    format: str
    context_length: int


class Runtime(BaseModel):
    name: str
    version: str
    supported_formats: list[str]


class Told(BaseModel):
    """What v0 adds to an OpenAI answer."""

    stats: Stats
    model_info: ModelFacts
    runtime: Runtime


class ChatCompletion(answers.ChatCompletion, Told):
    pass


class Completion(answers.Completion, Told):
    pass


class ToldLast(BaseModel):
    """The same in a stream, with the last chunk of a choice."""

    stats: Stats | None = None
    model_info: ModelFacts | None = None
    runtime: Runtime | None = None


class ChatChunk(answers.ChatChunk, ToldLast):
    pass


class CompletionChunk(answers.CompletionChunk, ToldLast):
    pass


class ModelEntry(BaseModel):
    id: str
    object: Literal["model"] = "model"
    type: Literal["llm"] = "llm"
    publisher: str = "tinyloop"
    arch: str
    compatibility_type: str
    quantization: str
    state: Literal["loaded"] = "loaded"
    max_context_length: int
    loaded_context_length: int
    capabilities: list[str] = []


class ModelEntries(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelEntry]


# v1


class TextItem(Closed):
    """A piece of the user's turn. LM Studio's table calls it a message, its example a text."""

    type: Literal["message", "text"]
    content: Text


Reasoning = Literal["off", "low", "medium", "high", "on"]
EFFORTS: Mapping[Reasoning, Effort] = {
    "off": "none", "low": "low", "medium": "medium", "high": "high", "on": "medium",
}  # fmt: skip


class ChatV1(Dialled):
    """POST /api/v1/chat. Its keys are exactly these, and this server's own."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"integrations": ([],)}
    unknown_says: ClassVar[str] = "Unrecognized key(s) in object: {}"

    model: Text
    input: Text | Annotated[list[TextItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system_prompt: Text | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Count | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    reasoning: Reasoning | None = None
    context_length: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    store: bool = True
    previous_response_id: Text | None = None

    @property
    def text(self) -> str:
        return self.input if isinstance(self.input, str) else "\n".join(item.content for item in self.input)


class MessageOutput(BaseModel):
    type: Literal["message"] = "message"
    content: str


class StatsV1(BaseModel):
    input_tokens: int
    total_output_tokens: int
    reasoning_output_tokens: int = 0
    tokens_per_second: float
    time_to_first_token_seconds: float


class ChatAnswerV1(BaseModel):
    """`response_id` is there if the answer was kept: it is what a next request may continue."""

    model_instance_id: str
    output: list[MessageOutput]
    stats: StatsV1
    response_id: str | None = None
    tinyloop: answers.LoopReport


class Quantization(BaseModel):
    name: str
    bits_per_weight: int


class LoadConfig(BaseModel):
    context_length: int
    flash_attention: bool = False
    offload_kv_cache_to_gpu: bool = False


class Instance(BaseModel):
    id: str
    config: LoadConfig


class ReasoningChoice(BaseModel):
    allowed_options: list[Reasoning]
    default: Reasoning


class Capabilities(BaseModel):
    vision: bool = False
    trained_for_tool_use: bool = False
    reasoning: ReasoningChoice


class ModelV1(BaseModel):
    type: Literal["llm"] = "llm"
    publisher: str = "tinyloop"
    key: str
    display_name: str
    architecture: str
    quantization: Quantization
    size_bytes: int
    params_string: str
    loaded_instances: list[Instance]
    max_context_length: int
    format: None = None
    capabilities: Capabilities
    description: str | None = None


class ModelsV1(BaseModel):
    models: list[ModelV1]


class ErrorDetail(BaseModel):
    type: str
    message: str
    code: str
    param: str | None = None


class ErrorBody(BaseModel):
    """How a refusal of v1 looks."""

    error: ErrorDetail


class Load(Body):
    """POST /api/v1/models/load. What concerns other engines is read and changes nothing; `load_config` says what is."""

    unknown_says: ClassVar[str] = ChatV1.unknown_says

    model: Text
    context_length: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    eval_batch_size: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    flash_attention: bool | None = None
    num_experts: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    offload_kv_cache_to_gpu: bool | None = None
    echo_load_config: bool = False


class Loaded(BaseModel):
    type: Literal["llm"] = "llm"
    instance_id: str
    load_time_seconds: float
    status: Literal["loaded"] = "loaded"
    load_config: LoadConfig | None = None


class Unload(Body):
    """POST /api/v1/models/unload."""

    unknown_says: ClassVar[str] = ChatV1.unknown_says

    instance_id: Text
