"""One request from arrival to its end: its states, the legal moves between them, and how its caller hears.

    QUEUED ──► DISPATCHED ──► DECODING ──► DONE
       │            │             │
       └────────────┴─────────────┴──────► CANCELLED | ERROR

Knows futures, queues and the clock. Does not know the engine, who goes first, HTTP or torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, cast

from server.types import FinishReason, GenerationChunk, GenerationRequest, GenerationResult, Timings

if TYPE_CHECKING:
    from tinyloop.plan import LoopPlan
    from tinyloop.sampling import Logprobs
    from tinyloop.sequence import Lease

# Outcome reasons of a cancelled request.
CLIENT = "client"
SHUTDOWN = "shutdown"


class RequestState(StrEnum):
    QUEUED = "queued"
    DISPATCHED = "dispatched"
    DECODING = "decoding"
    DONE = "done"
    CANCELLED = "cancelled"
    ERROR = "error"


TERMINAL = frozenset({RequestState.DONE, RequestState.CANCELLED, RequestState.ERROR})

# DISPATCHED goes straight to DONE where no token was seen on the way: an answer of no tokens, or an engine that only
# hands over whole answers.
MOVES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.QUEUED: frozenset({RequestState.DISPATCHED, RequestState.CANCELLED, RequestState.ERROR}),
    RequestState.DISPATCHED: TERMINAL | {RequestState.DECODING},
    RequestState.DECODING: TERMINAL,
    RequestState.DONE: frozenset(),
    RequestState.CANCELLED: frozenset(),
    RequestState.ERROR: frozenset(),
}
_STAMPS = {RequestState.DISPATCHED: "dispatched_at", RequestState.DECODING: "first_token_at"}


class IllegalMove(RuntimeError):
    """A state was asked for that cannot follow the present one: a bug in the scheduler."""


class PreparedRequest(Protocol):
    """What a stepping engine makes of a request before it is queued."""

    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def plan(self) -> LoopPlan: ...
    @property
    def prompt_work(self) -> float:
        """Tokens x loops of the prompt."""
        ...

    @property
    def answer_work(self) -> float:
        """Tokens x loops of the longest answer."""
        ...

    @property
    def boundary(self) -> float:
        """What a token costs outside of the core, in loops of the core."""
        ...


MoveHook = Callable[["ScheduledRequest", RequestState], None]


@dataclass(eq=False, kw_only=True)
class ScheduledRequest:
    """A request and everything the scheduler knows of it. Times are seconds of `clock`; `unix_time` converts them.

    `request_id` is always fresh, so two requests cannot collide whatever the callers call them; the caller's own id
    stays on `req`. `level` orders the queue: the priority, until age promotes the request. `outcome_reason` says why it
    ended: the finish reason, "client", "shutdown", "engine" or "internal".
    """

    req: GenerationRequest
    priority: int = 0
    slo_ms: float | None = None
    streaming: bool = False
    clock: Callable[[], float] = time.monotonic
    on_move: MoveHook = lambda request, previous: None
    prepared: PreparedRequest | None = None

    request_id: str = field(default_factory=lambda: secrets.token_hex(12), init=False)
    state: RequestState = field(default=RequestState.QUEUED, init=False)
    queued_at: float = field(init=False)
    dispatched_at: float | None = field(default=None, init=False)
    first_token_at: float | None = field(default=None, init=False)
    last_token_at: float | None = field(default=None, init=False)
    completed_at: float | None = field(default=None, init=False)
    result: GenerationResult | None = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)
    cancelled: bool = field(default=False, init=False)
    outcome_reason: str = field(default="", init=False)

    level: int = field(init=False)
    loops_requested: int | None = field(default=None, init=False)  # the default, where none were asked for
    downgraded_by: str = field(default="", init=False)  # "slo", "pressure" or "memory" if fewer loops were granted
    predicted_ms: float | None = field(default=None, init=False)  # the wait foretold at arrival
    turn: int = field(default=0, init=False)  # order of dispatch
    passed: int = field(default=0, init=False)  # how many others entered ahead of it
    waiting_since: float = field(init=False)  # arrival, or the last yield
    prompt_left: float = field(default=0.0, init=False)  # work still to do, in tokens x loops
    answer_left: float = field(default=0.0, init=False)
    answer_tokens: int = field(default=0, init=False)
    logprobs: list[Logprobs] = field(default_factory=list, init=False)
    token_loops: list[int] = field(default_factory=list, init=False)
    stop_reason: str | int | None = field(default=None, init=False)
    future: asyncio.Future[GenerationResult] | None = field(default=None, init=False)
    chunks: asyncio.Queue[GenerationChunk | None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.queued_at = self.waiting_since = self.clock()
        self.level, self.loops_requested = self.priority, self.req.loops
        if self.prepared is not None:
            self.prompt_left, self.answer_left = self.prepared.prompt_work, self.prepared.answer_work
        self._queued_unix = time.time()
        if self.streaming:
            self.chunks = asyncio.Queue()  # holds at most max_new_tokens chunks, however slow the reader is
        else:
            self.future = asyncio.get_running_loop().create_future()

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL

    @property
    def abandoned(self) -> bool:
        """Whether the caller has gone. The future knows it one turn of the event loop before `cancelled` does."""
        return self.cancelled or (self.future is not None and self.future.cancelled())

    @property
    def tenant(self) -> str:
        return self.req.tenant

    @property
    def answer_work(self) -> float:
        """Tokens x loops of the longest answer."""
        return 0.0 if self.prepared is None else self.prepared.answer_work

    @property
    def boundary_per_loop(self) -> float:
        """What goes with a loop of a prompt token outside of the core, in loops of the core."""
        return 0.0 if self.prepared is None else self.prepared.boundary / self.prepared.plan.prefill_loops

    @property
    def prompt_tokens(self) -> int:
        """0 while unknown: text that an engine has not told us the length of."""
        if self.prepared is not None:
            return len(self.prepared.prompt)
        if self.result is not None:
            return self.result.prompt_tokens
        return 0 if isinstance(self.req.prompt, str) else len(self.req.prompt)

    def move(
        self,
        state: RequestState,
        *,
        reason: str = "",
        result: GenerationResult | None = None,
        error: BaseException | None = None,
    ) -> None:
        """The only way a state changes: checks the move, stamps the time, answers the caller, tells the hook."""
        if state not in MOVES[self.state]:
            expected = ", ".join(sorted(MOVES[self.state])) or "no further move"
            raise IllegalMove(f"request {self.request_id} is {self.state}: expected {expected}, got {state}")
        previous, self.state = self.state, state
        setattr(self, _STAMPS.get(state, "completed_at"), self.clock())
        if self.ended:
            self.outcome_reason, self.result, self.error = reason, result, error
            self._answer()
        self.on_move(self, previous)

    def emit(self, chunk: GenerationChunk) -> float | None:
        """One token of the answer, and the seconds since the one before it. Never waits for a reader."""
        if self.state is RequestState.DISPATCHED:
            self.move(RequestState.DECODING)
        before, self.last_token_at = self.last_token_at, self.clock()
        self.answer_tokens += 1
        if chunk.logprobs is not None:
            self.logprobs.append(chunk.logprobs)
        if chunk.loops is not None:
            self.token_loops.append(chunk.loops)
        if self.chunks is not None:
            self.chunks.put_nowait(chunk)
        return None if before is None else self.last_token_at - before

    def result_from(self, lease: Lease) -> GenerationResult:
        """The answer of a finished lease."""
        return GenerationResult(
            token_ids=tuple(lease.tokens[lease.prompt_tokens :]),
            text=lease.text.text,
            finish_reason=cast(FinishReason, lease.finish_reason),
            prompt_tokens=lease.prompt_tokens,
            cached_tokens=lease.cached,
            cache_hit=lease.hit,
            loops_requested=self.loops_requested or lease.plan.loops,
            loops_granted=lease.plan.loops,
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs),
            prompt_logprobs=tuple(lease.prompt_logprob_values),
            token_loops=tuple(self.token_loops),
            timings=self.timings(),
        )

    def result_from_chunks(self, chunks: Sequence[GenerationChunk]) -> GenerationResult:
        """The answer of an engine that streams chunks and says no more."""
        full = len(chunks) >= self.req.max_new_tokens
        return GenerationResult(
            token_ids=tuple(chunk.token_id for chunk in chunks),
            text="".join(chunk.text for chunk in chunks),
            finish_reason=(chunks[-1].finish_reason if chunks else None) or ("length" if full else "stop"),
            prompt_tokens=self.prompt_tokens,
            loops_requested=self.req.loops,
            logprobs=tuple(self.logprobs),
            prompt_logprobs=chunks[0].prompt_logprobs if chunks else (),
            token_loops=tuple(self.token_loops),
            timings=self.timings(),
        )

    def timings(self) -> Timings:
        """Durations so far, or of the whole life once it has ended."""
        now = self.clock() if self.completed_at is None else self.completed_at
        return Timings(
            queued_s=(now if self.dispatched_at is None else self.dispatched_at) - self.queued_at,
            first_token_s=None if self.first_token_at is None else self.first_token_at - self.queued_at,
            total_s=now - self.queued_at,
        )

    def unix_time(self, stamp: float) -> float:
        """Wall-clock time of one of the stamps, in seconds since 1970."""
        return self._queued_unix + stamp - self.queued_at

    def _answer(self) -> None:
        if self.chunks is not None:
            self.chunks.put_nowait(None)
        elif self.future is not None and not self.future.done():  # done: the caller has cancelled it
            self._resolve(self.future)

    def _resolve(self, future: asyncio.Future[GenerationResult]) -> None:
        if self.state is RequestState.CANCELLED:
            future.cancel(msg=self.outcome_reason)
        elif self.error is not None:
            future.set_exception(self.error)
        else:
            assert self.result is not None, "DONE comes with a result"
            future.set_result(self.result)


class ChunkStream:
    """The chunks of one request, in order; ends silently when it is cancelled, raises after the last chunk on ERROR.

    Whoever drops the stream, closes it, or is cancelled while waiting for a chunk has cancelled the request. To wait
    with a time limit and go on afterwards, give `asyncio.wait` a task that waits for the chunk.
    """

    def __init__(self, request: ScheduledRequest, cancel: Callable[[ScheduledRequest], None]) -> None:
        self.request = request
        self._cancel = cancel
        self._closed = False
        self._loop = asyncio.get_running_loop()

    @property
    def result(self) -> GenerationResult | None:
        """The whole answer, once the request is DONE."""
        return self.request.result

    def __aiter__(self) -> ChunkStream:
        return self

    async def __anext__(self) -> GenerationChunk:
        assert self.request.chunks is not None
        if self._closed:
            raise StopAsyncIteration
        try:
            chunk = await self.request.chunks.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if chunk is not None:
            return chunk
        self._closed = True
        if self.request.error is not None:
            raise self.request.error
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Stop the request. A reader still gets the chunks that were made before, then the end."""
        self._cancel(self.request)

    async def aclose(self) -> None:
        """Stop the request and the iteration."""
        self._closed = True
        self.cancel()

    def __del__(self) -> None:
        # The garbage collector may run this in any thread, and after the loop has closed.
        if not self.request.ended:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel, self.request)
