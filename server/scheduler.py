"""Scheduler: the only caller of the engine. Requests come in through `submit` and `submit_stream`; one dispatcher
coroutine admits them, steps them and delivers what they make.

    scheduler = Scheduler(engine)
    await scheduler.start()
    result = await scheduler.submit(GenerationRequest("Once upon a time"))

Two kinds of engine will do: one with `step`, which many requests share, and one that only offers `generate` and
`generate_stream`, which gets one request at a time. Knows no HTTP and no tensors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from server.admission import Admission
from server.engine import Engine, KVUsage, ModelInfo
from server.errors import (
    AdmissionRejected,
    EngineError,
    QueueFullError,
    SchedulerNotRunning,
    SchedulerShutdown,
    log_fault,
    rejection_reason,
)
from server.metrics import Gauges, Metrics
from server.policy import DispatchMode, Policy, WaitingQueue, core_rows
from server.request import CLIENT, SHUTDOWN, ChunkStream, PreparedRequest, RequestState, ScheduledRequest
from server.types import FinishReason, GenerationChunk, GenerationRequest, GenerationResult
from tinyloop.errors import RequestError
from tinyloop.kv.prefix import PrefixPool
from tinyloop.sequence import Lease, Segment, StepReport, TokenEvent

if TYPE_CHECKING:
    from tinyloop.tokenizer import Tokenizer

__all__ = [
    "AdmissionRejected",
    "ChunkStream",
    "DispatchMode",
    "Engine",
    "EngineError",
    "Policy",
    "QueueFullError",
    "RequestState",
    "ScheduledRequest",
    "Scheduler",
    "SchedulerShutdown",
    "get_scheduler",
    "set_scheduler",
]

T = TypeVar("T")

DEFAULT_LOOPS = 8
UNHEALTHY_AFTER = 2  # engine errors in a row
MOST_PASSED = 32  # waiters that others may pass while a prefix they want is being computed


class GeneratingEngine(Protocol):
    """The seed's engine. `generate_with_pool(pool, req)` is optional."""

    async def generate(self, req: GenerationRequest) -> GenerationResult: ...
    def generate_stream(self, req: GenerationRequest) -> AsyncIterator[GenerationChunk]: ...


class SteppingEngine(Protocol):
    """What the scheduler asks of an engine that many requests share; `server.engine.Engine` is one.

    All but `step` and `register_prefix` return at once. A lease is never released while a step that holds it runs.
    """

    @property
    def info(self) -> ModelInfo: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    def prepare(self, req: GenerationRequest) -> PreparedRequest: ...
    def admit(self, prepared: Any, pool: PrefixPool | None) -> Lease | None: ...
    def ready(self) -> list[Segment]: ...
    async def step(self, segments: list[Segment]) -> StepReport: ...
    def release(self, lease: Lease) -> None: ...
    def must_wait(self, prepared: Any, pool: PrefixPool) -> bool: ...
    def shortage(self, segments: list[Segment]) -> int: ...
    def suspend(self, lease: Lease) -> None: ...
    def resume(self, lease: Lease) -> bool: ...
    def unpin_shortest(self) -> bool: ...
    def register_prefix(self, pool: PrefixPool, tokens: Sequence[int], loops: int, cache_window: int) -> int: ...
    def usage(self) -> KVUsage: ...


class Scheduler:
    """Queue, admission, prefix pool, metrics and the dispatcher over one engine.

    `ema_alpha` smooths the dispatch latency. `dispatch` names one of the four modes and `max_running` how many requests
    may run at once; a `policy` replaces both. `clock` counts seconds and never goes back. To be started before use.
    """

    def __init__(
        self,
        engine: GeneratingEngine | SteppingEngine,
        *,
        max_queue_depth: int = 128,
        default_slo_ms: float | None = None,
        prefix_pool_capacity: int = 16,
        ema_alpha: float = 0.2,
        dispatch: DispatchMode | str = DispatchMode.CONTINUOUS,
        max_running: int | None = None,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine: Any = engine
        self._steps = hasattr(engine, "step")
        self.policy = policy or Policy(DispatchMode(dispatch), max_running=max_running)
        if not self._steps:
            self.policy = Policy(DispatchMode.SEQUENTIAL)
        self.pool = PrefixPool(prefix_pool_capacity)
        self.metrics = Metrics(self._gauges)
        self.admission = Admission(
            max_queue_depth=max_queue_depth,
            default_slo_ms=default_slo_ms,
            ema_alpha=ema_alpha,
            sequential=self.policy.mode is DispatchMode.SEQUENTIAL,
            clock=clock,
            on_prediction=self.metrics.on_prediction,
            on_error=self.metrics.on_prediction_error,
        )
        self._clock = clock
        self._waiting: WaitingQueue[ScheduledRequest] = WaitingQueue()
        self._running: dict[object, ScheduledRequest] = {}  # by lease; by itself where the engine has no leases
        self._yielded: WaitingQueue[ScheduledRequest] = WaitingQueue()  # in flight, but without pages for now
        self._yielded_leases: dict[ScheduledRequest, Lease] = {}
        self._turns = count(1)
        self._bell = asyncio.Event()  # rung for new work and for the stop alike: nothing has to be raced
        self._turn_lock = asyncio.Lock()  # held for a turn, and by what must not happen during one
        self._task: asyncio.Task[None] | None = None
        self._call_task: asyncio.Future[Any] | None = None
        self._draining = self._stopping = False
        self._died = False
        self._failures = 0

    # The callers' side

    async def submit(
        self, req: GenerationRequest, *, priority: int = 0, slo_ms: float | None = None
    ) -> GenerationResult:
        """The finished answer. A higher `priority` goes first; `slo_ms` is the longest wait the caller accepts.

        Raises AdmissionRejected, QueueFullError, SchedulerShutdown, RequestError, or what went wrong in the engine.
        Cancelling the waiting task cancels the request. If shutdown cancels it, the CancelledError says "shutdown".
        """
        request = self._enter(req, priority, slo_ms, streaming=False)
        assert request.future is not None
        try:
            return await request.future
        except asyncio.CancelledError:
            self.cancel(request)
            raise

    def submit_stream(self, req: GenerationRequest, *, priority: int = 0, slo_ms: float | None = None) -> ChunkStream:
        """The answer's chunks as they are made. Raises like `submit`, here and now, not at the first chunk."""
        return ChunkStream(self._enter(req, priority, slo_ms, streaming=True), self.cancel)

    def cancel(self, request: ScheduledRequest) -> None:
        """The caller has gone. What waits is dropped at once, what runs stops at the next loop boundary."""
        if request.ended:
            return
        request.cancelled = True
        if self._waiting.remove(request) or self._forget_yielded(request):
            request.move(RequestState.CANCELLED, reason=CLIENT)

    def _enter(
        self, req: GenerationRequest, priority: int, slo_ms: float | None, *, streaming: bool
    ) -> ScheduledRequest:
        """The gates in order, the cheap ones first. No await in here: nobody can slip in between check and place."""
        with self.counting_refusals():
            self.check_open()
            prepared = self._prepare(req)
            predicted_ms = self.admission.check_wait(slo_ms, len(self._waiting), self._in_flight)
        request = ScheduledRequest(
            req=req, priority=priority, slo_ms=slo_ms, streaming=streaming, prepared=prepared, clock=self._clock,
            on_move=self._on_move,
        )  # fmt: skip
        request.predicted_ms = predicted_ms
        self.admission.enter(request)
        self._waiting.push(request)
        self._bell.set()
        return request

    def check_open(self) -> None:
        """Raise at once what `submit` would raise whatever the request, before work is put into preparing it."""
        if self._draining:
            raise SchedulerShutdown("the server is shutting down")
        if reason := self._stopped_reason():
            raise SchedulerNotRunning(reason)
        self.admission.check_depth(len(self._waiting))

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Whatever is raised in here turns an arrival away, and is counted: once, also where this is nested."""
        try:
            yield
        except Exception as error:
            if not getattr(error, "counted", False):
                self.metrics.on_rejected(rejection_reason(error))
                setattr(error, "counted", True)  # noqa: B010 - exceptions declare no such field
            raise

    def _prepare(self, req: GenerationRequest) -> PreparedRequest | None:
        if not self._steps:
            return None
        try:
            return cast(PreparedRequest, self.engine.prepare(req))
        except RequestError:
            raise
        except Exception as error:
            raise EngineError(log_fault("preparing a request failed", error)) from error

    def _on_move(self, request: ScheduledRequest, previous: RequestState) -> None:
        try:
            self.admission.on_move(request, previous)
            self.metrics.on_move(request, previous)
        except Exception as error:  # a fault in the bookkeeping must not cost others their answers
            log_fault("accounting for a request failed", error)

    # Life

    async def start(self) -> None:
        """Launch the dispatcher. Calling it again does nothing."""
        if self._task is None:
            self._task = asyncio.create_task(self._dispatcher_loop(), name="tinyloop-dispatcher")
            self._task.add_done_callback(self._on_dispatcher_end)

    def begin_drain(self) -> None:
        """Take no new work from now on; what waits and what runs goes on."""
        self._draining = True

    async def shutdown(self, drain_timeout_s: float = 30.0) -> None:
        """Cancel what waits, give what runs `drain_timeout_s` to finish, then cancel that too."""
        self.begin_drain()
        self._stopping = True
        self._bell.set()
        for request in list(self._waiting):
            self._waiting.remove(request)
            request.move(RequestState.CANCELLED, reason=SHUTDOWN)
        if self._task is not None:
            _, late = await asyncio.wait({self._task}, timeout=drain_timeout_s)
            if late:
                self._task.cancel()
                await asyncio.wait(late)

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def healthy(self) -> bool:
        return self.unhealthy_reason is None

    @property
    def unhealthy_reason(self) -> str | None:
        """One sentence for an operator; None while all is well."""
        if self._failures >= UNHEALTHY_AFTER:
            return f"the last {self._failures} engine calls failed"
        return self._stopped_reason()

    def _stopped_reason(self) -> str | None:
        if self._died:
            return "the dispatcher has died of an internal error"
        if self._task is None:
            return "the scheduler is not running: start() comes first"
        return "the scheduler is not running: it was shut down" if self._task.done() else None

    # The dispatcher

    async def _dispatcher_loop(self) -> None:
        turn = self._step_turn if self._steps else self._generate_turn
        while self._in_flight or not self._stopping:
            self._bell.clear()
            if self._waiting or self._in_flight:
                async with self._turn_lock:
                    await turn()
            else:
                await self._bell.wait()

    async def _step_turn(self) -> None:
        self._apply_cancellations()
        self._admit()
        if self._running:
            report = await self._step(self._choose())
            self._deliver(report)

    def _apply_cancellations(self) -> None:
        for lease in [lease for lease, request in self._running.items() if request.abandoned]:
            self._end(lease, RequestState.CANCELLED, reason=CLIENT)

    def _admit(self) -> None:
        """In order: while the first cannot enter, nobody behind it does, except past those who wait for a prefix.

        Who yielded goes first in its level. From queue to lease without await.
        """
        passed: set[ScheduledRequest] = set()
        while len(passed) <= MOST_PASSED:
            yielded, request = self._yielded.peek(), self._next_waiting(passed)
            if yielded is not None and (request is None or yielded.priority >= request.priority):
                if not self._resume(yielded):
                    return
            elif request is None or not self.policy.may_admit(request, self._running.values()):
                return
            elif self._running and self.engine.must_wait(request.prepared, self.pool):
                passed.add(request)
            elif not self._enter_engine(request):
                return

    def _enter_engine(self, request: ScheduledRequest) -> bool:
        """False if there is no room. A request that the engine refuses has had its answer."""
        try:
            lease = self._lease(request)
        except Exception as error:
            self._refuse(request, error)
            return True
        if lease is not None:
            self._dispatch(request, lease)
            self._count_cached(request, lease)
        return lease is not None

    # Memory pressure

    def _choose(self) -> list[Segment]:
        """The next step's segments, after as many have yielded as must. Then the choice is made anew."""
        while True:
            segments = self.policy.choose_segments(self.engine.ready())
            if not segments or not self.engine.shortage(segments) or not self._make_room():
                return segments

    def _make_room(self) -> bool:
        """The newest of the lowest priority yields. One alone pushes out registered prefixes."""
        if len(self._running) == 1:
            return bool(self.engine.unpin_shortest())
        lease, request = min(self._running.items(), key=lambda item: (item[1].priority, -item[1].turn))
        assert isinstance(lease, Lease)
        del self._running[lease]
        self.engine.suspend(lease)
        self._yielded.push_front(request)
        self._yielded_leases[request] = lease
        self.metrics.on_preemption()
        return True

    def _resume(self, request: ScheduledRequest) -> bool:
        """False if there is no room yet. On an idle engine there must be, or the request would wait for ever."""
        lease = self._yielded_leases[request]
        resumed = bool(self.engine.resume(lease))
        if resumed or not self._running:
            self._forget_yielded(request)
        if resumed:
            self._running[lease] = request
        elif not self._running:
            fault = RuntimeError("an idle engine has no room for a request that yielded")
            hiding = EngineError.hiding(fault, log_fault("resuming a request failed", fault))
            request.move(RequestState.ERROR, reason="engine", error=hiding)
        return resumed

    def _forget_yielded(self, request: ScheduledRequest) -> bool:
        self._yielded_leases.pop(request, None)
        return self._yielded.remove(request)

    @property
    def _in_flight(self) -> int:
        return len(self._running) + len(self._yielded)

    def _lease(self, request: ScheduledRequest) -> Lease | None:
        lease = cast("Lease | None", self.engine.admit(request.prepared, self.pool))
        if lease is None and not self._running:
            raise RuntimeError("an idle engine has no room for a request that should fit")
        return lease

    def _refuse(self, request: ScheduledRequest, error: Exception) -> None:
        """The engine cannot take what it had prepared: an answer, so that nobody waits for ever."""
        self._waiting.remove(request)
        if isinstance(error, RequestError):
            request.move(RequestState.ERROR, reason="invalid", error=error)
        else:
            hiding = EngineError.hiding(error, log_fault("admitting a request failed", error))
            request.move(RequestState.ERROR, reason="engine", error=hiding)

    def _next_waiting(self, passed: Collection[ScheduledRequest] = ()) -> ScheduledRequest | None:
        """The first whose caller is still there, leaving out those that have been passed."""
        while (request := next((one for one in self._waiting if one not in passed), None)) and request.abandoned:
            self.cancel(request)
        return request

    def _dispatch(self, request: ScheduledRequest, key: object) -> None:
        self._waiting.remove(request)
        self._running[key] = request
        request.turn = next(self._turns)
        request.move(RequestState.DISPATCHED)

    def _count_cached(self, request: ScheduledRequest, lease: Lease) -> None:
        if request.req.mode == "generate":  # no other mode is pooled
            self.metrics.on_prefix_lookup(lease.prompt_tokens, lease.cached, lease.hit or "exact")
        self.admission.progress(request, lease.cached * lease.plan.prefill_loops)

    async def _step(self, segments: list[Segment]) -> StepReport:
        """One engine step. If it fails, the requests in it end with ERROR and the report is empty."""
        leases: list[object] = list(dict.fromkeys(s.lease for s in segments))
        work = [(self._running[s.lease], core_rows(s)) for s in segments]
        began = self._clock()
        try:
            if not segments:
                raise RuntimeError("requests are running, but nothing can step")
            report: StepReport = await self._call(self.engine.step(segments))
        except Exception as error:
            self._fail(leases or list(self._running), error)
            return StepReport()
        self._failures = 0
        self.policy.stepped(segments)
        self.admission.work.rate.add(report.rows, self._clock() - began)
        self.metrics.on_step(report.rows, report.seconds)
        for request, rows in work:
            self.admission.progress(request, rows)
        return report

    def _deliver(self, report: StepReport) -> None:
        """What belongs to a caller who has gone meanwhile is dropped here or at the end of its request."""
        for event in report.tokens:
            request = self._running[event.lease]
            if not request.abandoned:
                request.stop_reason = event.stop_reason
                self._emit(request, _chunk(event))
        for lease in report.finished:
            self._finish(lease, self._running[lease].result_from(lease))

    def _fail(self, keys: Iterable[object], error: Exception) -> None:
        self._failures += 1
        error_id = log_fault("an engine call failed", error)
        for key in keys:
            # A generating engine's own error is what its caller sees, as the seed has it.
            shown = EngineError.hiding(error, error_id) if self._steps else error
            self._end(key, RequestState.ERROR, reason="engine", error=shown)

    def _finish(self, key: object, result: GenerationResult) -> None:
        self._end(key, RequestState.DONE, reason=result.finish_reason, result=result)

    def _end(self, key: object, state: RequestState, **outcome: Any) -> None:
        """Give back what the request holds, then tell its caller; whoever has gone counts as cancelled."""
        request = self._running.pop(key)
        if request.abandoned:
            state, outcome = RequestState.CANCELLED, {"reason": CLIENT}
            request.cancelled = True
        try:
            if isinstance(key, Lease):
                self.engine.release(key)
        finally:
            request.move(state, **outcome)

    def _emit(self, request: ScheduledRequest, chunk: GenerationChunk) -> None:
        before = request.last_token_at
        request.emit(chunk)
        assert request.last_token_at is not None
        self.metrics.on_token(chunk.loops, None if before is None else request.last_token_at - before)

    async def _call(self, call: Awaitable[T]) -> T:
        """Run an engine call as a task of its own: only so can its cancellation be told from the dispatcher's."""
        task = asyncio.ensure_future(call)
        self._call_task = task
        await asyncio.wait({task})
        self._call_task = None
        if task.cancelled():
            raise RuntimeError("the engine cancelled its own call")
        return task.result()

    # Engines that only generate

    async def _generate_turn(self) -> None:
        request = self._next_waiting()
        if request is None:
            return
        self._dispatch(request, request)
        try:
            result = await self._call(self._relay(request) if request.streaming else self._generate(request))
        except RequestError as error:  # the caller's fault, and no sign of ill health
            self._end(request, RequestState.ERROR, reason="invalid", error=error)
        except Exception as error:
            self._fail([request], error)
        else:
            self._failures = 0
            self._finish(request, result)

    async def _generate(self, request: ScheduledRequest) -> GenerationResult:
        req = request.req
        pooled = self._matches_pool(req)
        call = self.engine.generate_with_pool(self.pool, req) if pooled else self.engine.generate(req)
        result: GenerationResult = await call
        self.metrics.on_answer(len(result.token_ids))
        return result

    def _matches_pool(self, req: GenerationRequest) -> bool:
        if req.mode != "generate" or isinstance(req.prompt, str) or not hasattr(self.engine, "generate_with_pool"):
            return False
        prefix = self.pool.match_tokens(req.prompt, req.loops or DEFAULT_LOOPS, req.cache_window)
        self.metrics.on_prefix_lookup(len(req.prompt), len(prefix.tokens) if prefix else 0)
        return prefix is not None

    async def _relay(self, request: ScheduledRequest) -> GenerationResult:
        """Pass the engine's chunks on, and make the result that the engine does not give."""
        stream = self.engine.generate_stream(request.req)
        chunks: list[GenerationChunk] = []
        try:
            async for chunk in stream:
                if request.abandoned:
                    break
                chunks.append(chunk)
                self._emit(request, chunk)
        finally:
            if hasattr(stream, "aclose"):
                await stream.aclose()
        return request.result_from_chunks(chunks)

    # The end of the dispatcher

    def _on_dispatcher_end(self, task: asyncio.Task[None]) -> None:
        """However the dispatcher ended, nobody may be left waiting."""
        bug = None if task.cancelled() else task.exception()
        if bug is None and not self._stopping:
            bug = RuntimeError("the dispatcher was cancelled")
        self._died = bug is not None
        error_id = log_fault("the dispatcher has died", bug) if bug else ""
        for request in [*self._running.values(), *self._yielded, *self._waiting]:
            if bug:
                request.move(RequestState.ERROR, reason="internal", error=EngineError.hiding(bug, error_id))
            else:
                request.move(RequestState.CANCELLED, reason=SHUTDOWN)
        self._let_go()

    def _let_go(self) -> None:
        """Return all leases, but not before a step that still holds them has ended."""
        leases = [key for key in self._running if isinstance(key, Lease)]
        self._running.clear()
        self._yielded_leases.clear()
        self._waiting, self._yielded = WaitingQueue(), WaitingQueue()
        if self._call_task is None or self._call_task.done():
            self._release_all(leases)
            return
        self._call_task.add_done_callback(lambda call: self._after_late_call(call, leases))
        if not self._steps:
            self._call_task.cancel()

    def _after_late_call(self, call: asyncio.Future[Any], leases: Iterable[Lease]) -> None:
        if not call.cancelled() and (error := call.exception()):
            log_fault("an engine call failed after the dispatcher had ended", error)
        self._release_all(leases)

    def _release_all(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            try:
                self.engine.release(lease)
            except Exception as error:
                log_fault("releasing a lease failed", error)

    # Prefixes

    def register_prefix(self, tokens: Sequence[int], loops: int = DEFAULT_LOOPS, cache_window: int = 0) -> int:
        """Keep a tokenised prefix for reuse; returns the number of tokens cached. Blocks while the engine computes."""
        if self._steps:
            return int(self.engine.register_prefix(self.pool, tokens, loops, cache_window))
        return self.pool.register_tokens(tokens, loops, cache_window)

    async def aregister_prefix(self, tokens: Sequence[int], loops: int = DEFAULT_LOOPS, cache_window: int = 0) -> int:
        """`register_prefix` in a worker thread, between two turns of the dispatcher."""
        # Shielded: were the caller cancelled, the thread would go on without the lock.
        return await asyncio.shield(self._register_between_turns(tokens, loops, cache_window))

    async def _register_between_turns(self, tokens: Sequence[int], loops: int, cache_window: int) -> int:
        async with self._turn_lock:
            return await asyncio.to_thread(self.register_prefix, tokens, loops, cache_window)

    def prefix_pool_stats(self) -> dict[str, int]:
        """`{"entries", "total_cached_tokens"}`."""
        return self.pool.stats()

    # What can be seen

    @property
    def info(self) -> ModelInfo:
        """Facts about the model, for routers. Only a stepping engine has them."""
        return cast(ModelInfo, self.engine.info)

    @property
    def tokenizer(self) -> Tokenizer:
        return cast("Tokenizer", self.engine.tokenizer)

    def snapshot(self) -> dict[str, Any]:
        return {
            "queue_depth": len(self._waiting),
            "in_flight": self._in_flight,
            "ema_dispatch_ms": self.admission.ema_dispatch_ms.value,
            "prefix_pool": self.prefix_pool_stats(),
            "dispatch": self.policy.mode.value,
            "draining": self.draining,
            "healthy": self.healthy,
        }

    def metrics_text(self, extra_lines: str | Iterable[str] | None = None) -> str:
        """Prometheus exposition text; `extra_lines` come first."""
        return self.metrics.text(extra_lines)

    def _gauges(self) -> Gauges:
        pool, ema_ms = self.pool.stats(), self.admission.ema_dispatch_ms.value
        usage: KVUsage | None = self.engine.usage() if self._steps else None
        return Gauges(
            queue_depth=len(self._waiting),
            in_flight=self._in_flight,
            ema_dispatch_seconds=None if ema_ms is None else ema_ms / 1000,
            prefix_pool_entries=pool["entries"],
            prefix_pool_tokens=pool["total_cached_tokens"],
            kv_usage_ratio=1 - usage.available / usage.num_pages if usage and usage.num_pages else 0.0,
            draining=self.draining,
            engine_healthy=self.healthy,
            page_size=usage.page_size if usage else 0,
            num_pages=usage.num_pages if usage else 0,
        )


def _chunk(event: TokenEvent) -> GenerationChunk:
    reason = cast("FinishReason | None", event.finish_reason)
    return GenerationChunk(event.token_id, event.text, event.logprobs, reason, event.loops)


_scheduler: Scheduler | None = None


def get_scheduler() -> Scheduler:
    """The process's scheduler. Raises SchedulerShutdown if none has been set."""
    if _scheduler is None:
        raise SchedulerNotRunning("no scheduler has been set")
    return _scheduler


def set_scheduler(scheduler: Scheduler | None) -> None:
    """Name the scheduler that `get_scheduler` hands out; None forgets it."""
    global _scheduler
    _scheduler = scheduler
