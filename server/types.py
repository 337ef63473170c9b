"""What goes into the scheduler and what comes out. Plain values: no HTTP, no torch, no asyncio."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from tinyloop.errors import RequestError
from tinyloop.sampling import Logprobs, SamplingParams

Mode = Literal["generate", "adaptive", "speculative", "score"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GenerationRequest:
    """One request as the caller means it. `prompt` is text or token ids; `loops` None is the model's default.

    `min_loops` allows the scheduler to grant fewer loops under pressure; `prefill_loops` None is `loops`;
    `exit_threshold` only with mode "adaptive", compared with `exit_signal` (None: the model's first); `cache_window` is
    how many recent tokens a token attends to, 0 for all.
    `prompt_logprobs` n asks for log-probabilities of the prompt's own tokens (None: none). `tenant` says on whose
    behalf this is: inside a priority, tenants get equal shares of the work. `token_ms` is the longest time between two
    tokens that the caller accepts. `keep` registers the prompt as a prefix once it has been read.
    Raises RequestError naming the field for values that no model could accept.
    """

    prompt: str | Sequence[int]
    mode: Mode = field(default="generate", kw_only=True)
    max_new_tokens: int = field(default=128, kw_only=True)
    loops: int | None = field(default=None, kw_only=True)
    min_loops: int | None = field(default=None, kw_only=True)
    prefill_loops: int | None = field(default=None, kw_only=True)
    exit_threshold: float | None = field(default=None, kw_only=True)
    exit_signal: str | None = field(default=None, kw_only=True)
    cache_window: int = field(default=0, kw_only=True)
    sampling: SamplingParams = field(default=SamplingParams(), kw_only=True)
    cache_salt: str = field(default="", kw_only=True)
    request_id: str | None = field(default=None, kw_only=True)
    prompt_logprobs: int | None = field(default=None, kw_only=True)
    tenant: str = field(default="", kw_only=True)
    token_ms: float | None = field(default=None, kw_only=True)
    keep: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise RequestError("mode", f"mode must be one of {', '.join(get_args(Mode))}, got {self.mode!r}")
        for name, low in (("max_new_tokens", 0), ("loops", 1), ("min_loops", 1), ("prefill_loops", 1),
                          ("cache_window", 0), ("prompt_logprobs", 0)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < low:
                raise RequestError(name, f"{name} must be at least {low}, got {value}")
        if self.min_loops and self.loops and self.min_loops > self.loops:
            raise RequestError("min_loops", f"min_loops must be at most loops ({self.loops}), got {self.min_loops}")


@dataclass(frozen=True)
class Timings:
    """Seconds, measured by the scheduler. `first_token_s` counts from arrival."""

    queued_s: float = 0.0
    first_token_s: float | None = None
    total_s: float = 0.0


@dataclass(frozen=True)
class GenerationResult:
    """A finished answer. `loops_granted` is what was run.

    `cached_tokens` of the prompt came from a prefix; `cache_hit` says how the depth it was held at compares: "exact",
    "shallower" (the request ran fewer loops), "deepened" (it ran more, from the kept states), or "" for no hit.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason = "stop"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_hit: str = ""
    loops_requested: int | None = None
    loops_granted: int | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()  # of prompt tokens 1, 2, ...
    token_loops: tuple[int, ...] = ()  # what was run for each answer token, where the engine tells
    timings: Timings = Timings()

    @property
    def token_s(self) -> float | None:
        """Mean seconds between two tokens; None for fewer than two."""
        first, pauses = self.timings.first_token_s, len(self.token_ids) - 1
        return None if first is None or pauses < 1 else (self.timings.total_s - first) / pauses

    @property
    def degraded(self) -> bool:
        """Whether fewer loops were granted than asked for."""
        return (self.loops_granted or 0) < (self.loops_requested or 0)


@dataclass(frozen=True)
class GenerationChunk:
    """One token as it is produced; unpacks as (token_id, text). `text` may be empty while characters are held back.

    `prompt_logprobs` of prompt tokens 1, 2, ... come with the first, where they were asked for.
    """

    token_id: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    loops: int | None = None
    prompt_logprobs: tuple[Logprobs, ...] = ()

    def __iter__(self) -> Iterator[int | str]:
        return iter((self.token_id, self.text))
