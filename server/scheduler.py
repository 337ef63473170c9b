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
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from server.admission import Admission
from server.depth import DepthCeilings
from server.dispatcher import Dispatcher, SteppingEngine
from server.door import Door
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
from server.generating import DEFAULT_LOOPS, GeneratingEngine, generated
from server.metrics import Gauges, Metrics
from server.policy import DispatchMode, Policy
from server.request import SHUTDOWN, ChunkStream, RequestState, ScheduledRequest
from server.types import GenerationRequest, GenerationResult
from server.watch import Watchers
from tinyloop.errors import RequestError
from tinyloop.kv.prefix import Entry, PrefixPool
from tinyloop.sequence import Lease

if TYPE_CHECKING:
    from tinyloop.tokenizer import Tokenizer
    from tinyloop.trace import Trace

__all__ = [
    "AdmissionRejected",
    "Arrival",
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

UNHEALTHY_AFTER = 2  # engine errors in a row


class Arrival:
    """A place in the queue for a request that is still being prepared. Nobody is refused for lack of room after the
    expensive part, and nobody is prepared in vain."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held = False

    async def take(self) -> None:
        """Once its bytes are here: whoever sends slowly holds no place. Raises like `submit`, and else returns when it
        is this one's turn to be prepared. Many that come at once take turns with everything else on the event loop."""
        self._scheduler.check_open()
        self._scheduler.door.arriving += 1
        self._held = True
        async with self._scheduler.turnstile:
            await asyncio.sleep(0)

    def release(self) -> None:
        """Just before the submission, or when there will be none. Again is harmless."""
        self._scheduler.door.arriving -= self._held
        self._held = False


class Scheduler:
    """Queue, admission, prefix pool, metrics and the dispatcher over one engine.

    `ema_alpha` smooths the dispatch latency. `dispatch` names one of the four modes and `max_running` how many requests
    may run at once; a `policy` replaces both. `default_min_loops` is the least that a request which names no depth may
    be granted; `saturation_ms` the predicted wait above which those that allow it are granted less. `stall_after_s`: no
    step for so long while there is work is ill health. `clock` counts seconds and never goes back. To be started first.
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
        default_min_loops: int | None = None,
        saturation_ms: float | None = 5000.0,
        stall_after_s: float = 60.0,
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
            row_budget=self.policy.row_budget,
            on_prediction=self.metrics.on_prediction,
            on_error=self.metrics.on_prediction_error,
        )
        self.admission.work.limit = self.policy.limit
        self.dispatcher = Dispatcher(engine, self.policy, self.admission, self.metrics, self.pool, clock)
        self.door = Door(
            self.dispatcher, DepthCeilings(saturation_ms, clock), clock, default_min_loops if self._steps else None
        )
        self.watchers = Watchers()
        self.dispatcher.on_change = self.watchers.tell
        self.stall_after_s = stall_after_s
        self._clock = clock
        self._beat = clock()  # when the last step ended, or work came to an idle engine
        self._bell = asyncio.Event()  # rung for new work and for the stop alike: nothing has to be raced
        self.turnstile = asyncio.Lock()
        self._tracing = asyncio.Lock()
        self._turn_lock = asyncio.Lock()  # held for a turn, and by what must not happen during one
        self._task: asyncio.Task[None] | None = None
        self._call_task: asyncio.Future[Any] | None = None
        self._draining = self._stopping = False
        self._died = False

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
        self.dispatcher.cancel(request)

    def cancel_named(self, name: str, tenant: str) -> int:
        """Cancel what runs or waits under this name, its own id or the caller's label. Returns how many; a tenant's
        own only."""
        found = [
            request
            for request in self.dispatcher.everybody()
            if name in (request.request_id, request.req.request_id)
            and request.tenant == tenant
            and not request.cancelled
        ]
        for request in found:
            self.cancel(request)
        return len(found)

    def _enter(
        self, req: GenerationRequest, priority: int, slo_ms: float | None, *, streaming: bool
    ) -> ScheduledRequest:
        """No await in here: nobody can slip in between check and place."""
        with self.counting_refusals():
            self.check_open()
            was_busy = self.dispatcher.busy
            request = self.door.enter(req, priority, slo_ms, streaming=streaming)
        if not was_busy:
            self._beat = self._clock()
        self._bell.set()
        return request

    def check_open(self) -> None:
        """Raise at once what `submit` would raise whatever the request, before work is put into preparing it."""
        self._check_not_draining()
        if reason := self._stopped_reason():
            raise SchedulerNotRunning(reason)
        self.door.check_depth()

    def _check_not_draining(self) -> None:
        if self._draining:
            raise SchedulerShutdown("the server is shutting down")

    @contextmanager
    def arrival(self) -> Iterator[Arrival]:
        """For a router: a request that is being read and prepared. It can hold a place in the queue meanwhile."""
        arrival = Arrival(self)
        try:
            yield arrival
        finally:
            arrival.release()

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
        self.dispatcher.drop_waiting()
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
        if self.dispatcher.failures >= UNHEALTHY_AFTER:
            return f"the last {self.dispatcher.failures} engine calls failed"
        return self._stopped_reason() or self._stalled_reason()

    def _stalled_reason(self) -> str | None:
        """The heartbeat is a step. An engine that only generates has none to show."""
        silent_s = self._clock() - self._beat
        if not self._steps or not self.dispatcher.busy or silent_s < self.stall_after_s:
            return None
        waiting, in_flight = len(self.dispatcher.waiting), self.dispatcher.in_flight
        return f"no step for {silent_s:.0f} s while {waiting} requests wait and {in_flight} run"

    def _stopped_reason(self) -> str | None:
        if self._died:
            return "the dispatcher has died of an internal error"
        if self._task is None:
            return "the scheduler is not running: start() comes first"
        return "the scheduler is not running: it was shut down" if self._task.done() else None

    # The dispatcher's turns

    async def _dispatcher_loop(self) -> None:
        turn = self._step_turn if self._steps else self._generate_turn
        while self.dispatcher.in_flight or not self._stopping:
            self._bell.clear()
            if self.dispatcher.busy:
                async with self._turn_lock:
                    await turn()
            else:
                await self._bell.wait()

    async def _step_turn(self) -> None:
        began = self._clock()
        segments = self.dispatcher.plan()
        running = self.dispatcher.running
        if not running:
            return
        try:
            if not segments:
                raise RuntimeError("requests are running, but nothing can step")
            report = await self._call(self.engine.step(segments))
        except Exception as error:
            self.dispatcher.fail(list(dict.fromkeys(s.lease for s in segments)) or list(running), error)
        else:
            for _ in self.dispatcher.deliver(segments, report, self._clock() - began):
                await asyncio.sleep(0)  # who reads these tokens, and probes
        self._beat = self._clock()

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
        request = self.dispatcher.next_waiting()
        if request is None:
            return
        self.dispatcher.dispatch(request, request)
        try:
            result = await self._call(generated(self.dispatcher, request))
        except RequestError as error:  # the caller's fault, and no sign of ill health
            self.dispatcher.end(request, RequestState.ERROR, reason="invalid", error=error)
        except Exception as error:
            self.dispatcher.fail([request], error, shown=error)  # as the seed has it
        else:
            self.dispatcher.failures = 0
            self.dispatcher.finish(request, result)

    # The end of the dispatcher

    def _on_dispatcher_end(self, task: asyncio.Task[None]) -> None:
        """However the dispatcher ended, nobody may be left waiting."""
        bug = None if task.cancelled() else task.exception()
        if bug is None and not self._stopping:
            bug = RuntimeError("the dispatcher was cancelled")
        self._died = bug is not None
        error_id = log_fault("the dispatcher has died", bug) if bug else ""
        for request in self.dispatcher.everybody():
            if bug:
                request.move(RequestState.ERROR, reason="internal", error=EngineError.hiding(bug, error_id))
            else:
                request.move(RequestState.CANCELLED, reason=SHUTDOWN)
        self._let_go()

    def _let_go(self) -> None:
        """Return all leases, but not before a step that still holds them has ended."""
        leases = self.dispatcher.clear()
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

    def register_prefix(
        self, tokens: Sequence[int], loops: int = DEFAULT_LOOPS, cache_window: int = 0, salt: str = ""
    ) -> int:
        """Keep a tokenised prefix for reuse; returns the number of tokens cached. Blocks while the engine computes."""
        if self._steps:
            return int(self.engine.register_prefix(self.pool, tokens, loops, cache_window, salt))
        return self.pool.register_tokens(tokens, loops, cache_window, salt)

    async def aregister_prefix(
        self, tokens: Sequence[int], loops: int = DEFAULT_LOOPS, cache_window: int = 0, salt: str = "", tenant: str = ""
    ) -> int:
        """`register_prefix` as a request among the others, whose tokens go on. Raises like `submit`."""
        if not self._steps or not self.pool.capacity:
            return self.pool.register_tokens(tokens, loops, cache_window, salt)
        kept = GenerationRequest(
            tokens, max_new_tokens=0, loops=loops, cache_window=cache_window, cache_salt=salt, tenant=tenant, keep=True
        )
        return (await self.submit(kept, slo_ms=math.inf)).prompt_tokens

    async def adrop_prefix(self, entry: Entry) -> None:
        """Keep a registered prefix no longer, between two turns of the dispatcher."""
        async with self._turn_lock:
            if entry in self.pool.registered:
                self.pool.unregister(entry)

    # Traces

    @property
    def traces(self) -> bool:
        """Whether the engine can show what it would say after each loop."""
        return hasattr(self.engine, "trace_loop")

    async def trace(self, tokens: Sequence[int], loops: int, top: int, tenant: str = "") -> Trace:
        """What the model would say after each loop: see `tinyloop.trace`. One trace at a time, a loop of it between two
        turns of the dispatcher, and then as long a pause if requests run: others get half of the engine's time at
        least. Raises RequestError or SchedulerShutdown."""
        tracing = self.engine.tracing(tokens, loops, top)
        async with self._tracing:
            while not tracing.done:
                async with self._turn_lock:
                    self._check_not_draining()
                    began = self._clock()
                    await self.engine.trace_loop(tracing)
                    seconds = self._clock() - began
                    self.dispatcher.count_work(tenant, len(tokens), seconds)
                if self.dispatcher.busy:
                    await asyncio.sleep(seconds)
        return cast("Trace", tracing.result())

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
            "queue_depth": len(self.dispatcher.waiting),
            "in_flight": self.dispatcher.in_flight,
            "ema_dispatch_ms": self.admission.ema_dispatch_ms.value,
            "prefix_pool": self.prefix_pool_stats(),
            "dispatch": self.policy.mode.value,
            "draining": self.draining,
            "healthy": self.healthy,
        }

    def requests(self) -> list[ScheduledRequest]:
        """Everybody who runs or waits."""
        return self.dispatcher.everybody()

    @property
    def pages(self) -> KVUsage | None:
        """Of the KV budget; None for an engine that keeps its KV to itself."""
        return self.engine.usage() if self._steps else None

    def metrics_text(self, extra_lines: str | Iterable[str] | None = None) -> str:
        """Prometheus exposition text; `extra_lines` come first."""
        return self.metrics.text(extra_lines)

    def _gauges(self) -> Gauges:
        pool, ema_ms = self.pool.stats(), self.admission.ema_dispatch_ms.value
        usage: KVUsage | None = self.engine.usage() if self._steps else None
        return Gauges(
            queue_depth=len(self.dispatcher.waiting),
            in_flight=self.dispatcher.in_flight,
            ema_dispatch_seconds=None if ema_ms is None else ema_ms / 1000,
            prefix_pool_entries=pool["entries"],
            prefix_pool_tokens=pool["total_cached_tokens"],
            kv_usage_ratio=1 - usage.available / usage.num_pages if usage and usage.num_pages else 0.0,
            draining=self.draining,
            engine_healthy=self.healthy,
            page_size=usage.page_size if usage else 0,
            num_pages=usage.num_pages if usage else 0,
        )


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
