"""What clients of the native endpoints, /tinyloop/v1, send and read. Knows no scheduler."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from server.schemas.common import Bias, Body, Count, Dialled, Salt, StopText, Text, TokenIds
from server.schemas.openai_answers import LoopRange
from server.types import FinishReason, Mode
from tinyloop.errors import RequestError
from tinyloop.sampling import MAX_LOGPROBS

Sampled = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
           "seed", "include_stop", "min_tokens", "ignore_eos", "logprobs")  # fmt: skip


class Generate(Dialled):
    """POST /tinyloop/v1/generate: everything that a GenerationRequest can say. `model` may be left out."""

    model: Text | None = None
    prompt: Text | TokenIds
    mode: Mode | None = None
    max_new_tokens: Count = 128
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Bias | None = None
    seed: int | None = None
    stop: StopText | Annotated[list[StopText], Field(fail_fast=True)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop: bool | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    def sampling(self) -> dict[str, Any]:
        """Arguments of SamplingParams; what the client left out is left out."""
        given = {name: getattr(self, name) for name in Sampled}
        given |= {
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
        }
        return {name: value for name, value in given.items() if value is not None}


class Candidate(BaseModel):
    id: int
    text: str
    logprob: float


class Token(BaseModel):
    """One token. `loops`: how many were run for it, where the engine tells. `text` of a part of a character is spelled
    as bytes; in a stream it is what became readable with the token."""

    id: int
    text: str
    loops: int | None = None
    logprob: float | None = None
    top: list[Candidate] | None = None


class Times(BaseModel):
    """Milliseconds; `first_token` and `total` from arrival."""

    queued: float
    first_token: float | None
    total: float


class Generated(BaseModel):
    """`prompt_logprobs` are those of prompt tokens 1, 2, ..."""

    request_id: str
    model: str
    text: str
    tokens: list[Token]
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_tokens: int
    cached_tokens: int
    cache_hit: str
    loops_requested: int | None
    loops_granted: int | None
    degraded: bool
    prompt_logprobs: list[Token] | None
    times_ms: Times


class TraceRequest(Body):
    """POST /tinyloop/v1/trace. `top`: how many of the likeliest next tokens each view holds."""

    prompt: Text | TokenIds
    loops: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    top: Annotated[int, Field(ge=1, le=20)] = 5


class Guess(BaseModel):
    """One of the likeliest next tokens."""

    token: int
    text: str
    probability: float


class View(BaseModel):
    """One token after one loop. `entropy` of all next tokens, in nats; `distance`: how far the loop moved the state,
    |h_r - h_(r-1)| / |h_r|; `exited`: the probability of having left by then, null where there is no exit gate."""

    top: list[Guess]
    entropy: float
    distance: float
    exited: float | None


class TokenTrace(BaseModel):
    """A token of the prompt; `loops[r]` is the view after loop r + 1."""

    token: int
    text: str
    loops: list[View]


class Traced(BaseModel):
    model: str
    loops: int
    tokens: list[TokenTrace]


class Register(Body):
    """POST /tinyloop/v1/prefixes. `prompt` begins whatever is to profit from it, token for token."""

    prompt: Text | TokenIds
    loops: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    cache_window: Count = 0
    cache_salt: Salt | None = None

    def check(self) -> None:
        if not self.prompt:
            raise RequestError("prompt", "prompt must not be empty")


class Prefix(BaseModel):
    id: str
    tokens: int
    loops: int
    cache_window: int


class Prefixes(BaseModel):
    """`capacity`: how many may be registered; when that is full the shortest goes first."""

    capacity: int
    prefixes: list[Prefix]


class Dropped(BaseModel):
    id: str
    dropped: Literal[True] = True


class Cancelled(BaseModel):
    id: str
    cancelled: int


class Row(BaseModel):
    """One request in the scheduler. `label` is its caller's name for it, shown to the caller alone. Milliseconds."""

    id: str
    label: str | None
    state: str
    priority: int
    level: int
    streaming: bool
    loops_requested: int | None
    loops_granted: int | None
    prompt_tokens: int
    answer_tokens: int
    max_new_tokens: int
    age_ms: float
    predicted_ms: float | None
    outcome: str


class PoolStats(BaseModel):
    entries: int
    total_cached_tokens: int


class Pages(BaseModel):
    """`available` pages are free, or held by prefixes that can be evicted."""

    num_pages: int
    available: int
    page_size: int


class Snapshot(BaseModel):
    queue_depth: int
    in_flight: int
    ema_dispatch_ms: float | None
    prefix_pool: PoolStats
    dispatch: str
    draining: bool
    healthy: bool
    requests: list[Row]


class ModelFacts(BaseModel):
    id: str
    family: str
    parameters: int
    weights: str  # what the matrices are kept in
    vocab_size: int
    max_context: int
    loops: LoopRange
    reasoning_effort_map: dict[str, int]
    has_chat_template: bool
    kv_memory: int
    pages: Pages | None
