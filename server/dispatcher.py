"""Dispatcher: who waits, who runs, and what happens between two steps. The scheduler's half without asyncio.

    segments = dispatcher.plan()                      cancellations, admissions, the choice of segments
    report = await engine.step(segments)              the scheduler's part, or a simulator's
    dispatcher.complete(segments, report, seconds)    tokens to their callers, accounts, ends

Knows requests, leases and the engine's verbs; no HTTP, no event loop, no torch. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, cast

from server.admission import Admission
from server.errors import EngineError, log_fault
from server.metrics import Metrics
from server.policy import PROMOTED, Policy, core_rows
from server.request import CLIENT, SHUTDOWN, PreparedRequest, RequestState, ScheduledRequest
from server.types import FinishReason, GenerationChunk, GenerationRequest, GenerationResult
from server.waiting import WaitingQueue
from tinyloop.errors import RequestError
from tinyloop.kv.prefix import PrefixPool
from tinyloop.sequence import Lease, Segment, StepReport, TokenEvent

if TYPE_CHECKING:
    from server.engine import KVUsage, ModelInfo
    from tinyloop.tokenizer import Tokenizer

MOST_LOOKED_AT = 32  # waiters that cannot enter just now and that others may enter behind, in one turn
MOST_AT_ONCE = 24  # tokens that are handed over before others on the event loop get a turn
AGING_EVERY_S = 0.02  # between two looks at who has waited too long


class SteppingEngine(Protocol):
    """What the scheduler asks of an engine that many requests share; `server.engine.Engine` is one.

    All but `step` and `register_prefix` return at once. A lease is never released while a step that holds it runs.
    """

    @property
    def info(self) -> ModelInfo: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    def prepare(self, req: GenerationRequest) -> PreparedRequest: ...
    def at_depth(self, prepared: Any, loops: int) -> PreparedRequest: ...
    def cached_tokens(self, prepared: Any, pool: PrefixPool) -> int: ...
    def admit(self, prepared: Any, pool: PrefixPool | None) -> Lease | None: ...
    def ready(self) -> list[Segment]: ...
    async def step(self, segments: list[Segment]) -> StepReport: ...
    def release(self, lease: Lease) -> None: ...
    def must_wait(self, prepared: Any, pool: PrefixPool) -> bool: ...
    def shortage(self, segments: list[Segment]) -> int: ...
    def suspend(self, lease: Lease) -> None: ...
    def resume(self, lease: Lease) -> bool: ...
    def unpin_shortest(self) -> bool: ...
    def keep_prefix(self, lease: Lease, pool: PrefixPool) -> int: ...
    def register_prefix(
        self, pool: PrefixPool, tokens: Sequence[int], loops: int, cache_window: int, salt: str
    ) -> int: ...
    def usage(self) -> KVUsage: ...


@dataclass
class Share:
    """Whose work it is that belongs to no request."""

    tenant: str
    level: int = 0


class Dispatcher:
    """The requests of one engine. `running` is by lease, or by the request itself where the engine has no leases;
    `yielded` are in flight too, but without pages for now."""

    def __init__(
        self,
        engine: Any,
        policy: Policy,
        admission: Admission,
        metrics: Metrics,
        pool: PrefixPool,
        clock: Callable[[], float],
    ) -> None:
        self.engine, self.policy, self.admission, self.metrics = engine, policy, admission, metrics
        self.pool, self._clock = pool, clock
        self.on_change: Callable[[ScheduledRequest, RequestState | None], None] = lambda request, previous: None
        self.waiting: WaitingQueue[ScheduledRequest] = WaitingQueue()
        self.running: dict[object, ScheduledRequest] = {}
        self.yielded: dict[ScheduledRequest, Lease] = {}
        self.failures = 0  # engine calls in a row
        self._work: list[tuple[ScheduledRequest, int, bool]] = []  # of the step that was planned
        self._without_room: set[ScheduledRequest] = set()  # found no room since pages last came back
        self._turns = count(1)
        self._aged_at = clock()

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.yielded)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.in_flight)

    def everybody(self) -> list[ScheduledRequest]:
        return [*self.running.values(), *self.yielded, *self.waiting]

    # Coming and going

    def enter(self, request: ScheduledRequest) -> None:
        """An admitted newcomer joins the queue."""
        self.waiting.push(request)
        self.admission.enter(request)
        self.on_change(request, None)

    def on_move(self, request: ScheduledRequest, previous: RequestState) -> None:
        """To be called once for every move of every request."""
        try:
            if request.ended:
                self.waiting.leave(request)
            self.admission.on_move(request, previous)
            self.metrics.on_move(request, previous)
            self.on_change(request, previous)
        except Exception as error:  # a fault in the bookkeeping must not cost others their answers
            log_fault("accounting for a request failed", error)

    def cancel(self, request: ScheduledRequest) -> None:
        """The caller has gone. What waits is dropped at once, what runs stops at the next loop boundary."""
        if request.ended:
            return
        request.cancelled = True
        if self.waiting.remove(request) or request in self.yielded:
            self.yielded.pop(request, None)
            request.move(RequestState.CANCELLED, reason=CLIENT)

    def drop_waiting(self) -> None:
        """The server shuts down: who waits is told."""
        for request in list(self.waiting):
            self.waiting.remove(request)
            request.move(RequestState.CANCELLED, reason=SHUTDOWN)

    # One turn

    def plan(self) -> list[Segment]:
        """Apply cancellations, admit, and choose what steps next; nothing if nobody runs."""
        for lease in [lease for lease, request in self.running.items() if request.abandoned]:
            self.end(lease, RequestState.CANCELLED, reason=CLIENT)
        if self.waiting or self.yielded:
            self._promote()
            self._admit()
        segments = self._choose() if self.running else []
        self._work = [(self.running[s.lease], core_rows(s), s.is_prompt) for s in segments]  # a step changes segments
        return segments

    def complete(self, segments: Sequence[Segment], report: StepReport, seconds: float) -> None:
        """All that follows a step that took `seconds`, everything included."""
        for _ in self.deliver(segments, report, seconds):
            pass

    def deliver(self, segments: Sequence[Segment], report: StepReport, seconds: float) -> Iterator[None]:
        """Tokens to their callers, then the accounts of the step, then ends; with a pause after every few tokens and
        after the last. What belongs to a caller who has gone meanwhile is dropped here or at the end of its request."""
        gaps: list[tuple[int, float | None]] = []
        for number, event in enumerate(report.tokens, 1):
            request = self.running[event.lease]
            if not request.abandoned:
                request.stop_reason = event.stop_reason
                gaps.append((event.loops, request.emit(_chunk(event))))
            if number % MOST_AT_ONCE == 0 or number == len(report.tokens):
                yield
        for loops, gap_s in gaps:
            self.metrics.on_token(loops, gap_s)
        self._account(segments, report, seconds)
        for number, lease in enumerate(report.finished, 1):
            request = self.running[lease]
            if request.req.keep and not request.abandoned:
                self.engine.keep_prefix(lease, self.pool)
            self.finish(lease, request.result_from(lease))
            if number % MOST_AT_ONCE == 0:
                yield

    def _account(self, segments: Sequence[Segment], report: StepReport, seconds: float) -> None:
        self.failures = 0
        self.policy.stepped(segments)
        self.admission.work.cost.add(report, seconds)
        self.policy.boundary_in_steps = self.admission.work.cost.boundary_in_steps
        self.metrics.on_step(report.rows, report.seconds)
        for request, rows, is_prompt in self._work:
            self._progress(request, rows, prompt=is_prompt)

    def _progress(self, request: ScheduledRequest, rows: int, *, prompt: bool) -> None:
        self.admission.progress(request, rows, prompt=prompt)
        if not prompt:
            self._charge(request, rows)

    def _charge(self, request: ScheduledRequest, loops: float) -> None:
        """To a tenant's share of the work: so many token loops, and what goes with them outside of the core."""
        self.waiting.serve(request, loops * (1 + request.boundary_per_loop))

    def count_work(self, tenant: str, rows: int, seconds: float) -> None:
        """A loop that the engine ran for a tenant and no request: in the metrics, and in the tenant's share."""
        self.metrics.on_step(rows, seconds)
        self.waiting.serve(Share(tenant), rows)

    # Admission

    def _promote(self) -> None:
        now = self._clock()
        if not self.waiting or now - self._aged_at < AGING_EVERY_S:
            return
        self._aged_at = now
        oldest = self.policy.aged(self.waiting.heads(), now, self.admission.work.service_s)
        if oldest is not None:
            self.admission.relevel(oldest, PROMOTED)
            self.waiting.promote(oldest, PROMOTED)
            self.metrics.on_promotion()

    def _admit(self) -> None:
        """In order. Who cannot enter just now is passed by others: freely while it waits for a prefix that is being
        computed, a bounded number of times while it does not fit. From queue to lease without await."""
        backlog = sum(map(_rows_to_enter, self.running))
        passed: dict[ScheduledRequest, bool] = {}  # whether being passed counts
        while len(passed) <= MOST_LOOKED_AT and (request := self._next(passed)):
            if not self.policy.has_place(len(self.running), backlog):
                victim = self._victim_for(request, entering=backlog >= self.policy.row_budget)
                if victim is None:
                    return
                backlog -= _rows_to_enter(victim)
                self._suspend(victim)
            elif self._waits_for_prefix(request):
                passed[request] = False
            elif self.policy.may_join(request, self.running.values()) and (lease := self._start(request)):
                backlog += _rows_to_enter(lease)
                if not self._count_passes([one for one, counts in passed.items() if counts]):
                    return
            elif request.ended:
                continue
            elif victim := self._victim_for(request):
                backlog -= _rows_to_enter(victim)
                self._suspend(victim)
            elif request.passed >= self.policy.most_passes:
                return
            else:
                passed[request] = True

    def _count_passes(self, passed: Collection[ScheduledRequest]) -> bool:
        """Somebody has entered ahead of these; whether it may happen again."""
        for one in passed:
            one.passed += 1
        return all(one.passed < self.policy.most_passes for one in passed)

    def _next(self, passed: Collection[ScheduledRequest]) -> ScheduledRequest | None:
        """The first whose caller is still there, leaving out those that have been passed. Of one level, who yielded
        goes before who waits."""
        yielded = max(
            (one for one in self.yielded if one not in passed), key=lambda one: (one.level, -one.turn), default=None
        )
        waiting = self.next_waiting(passed)
        if yielded is None or (waiting is not None and waiting.level > yielded.level):
            return waiting
        return yielded

    def next_waiting(self, passed: Collection[ScheduledRequest] = ()) -> ScheduledRequest | None:
        while request := self._first_but(passed):
            if not request.abandoned:
                return request
            self.cancel(request)
        return None

    def _first_but(self, passed: Collection[ScheduledRequest]) -> ScheduledRequest | None:
        first = self.waiting.peek()
        return first if first not in passed else next((one for one in self.waiting if one not in passed), None)

    def _waits_for_prefix(self, request: ScheduledRequest) -> bool:
        waits = self.running and request not in self.yielded and request not in self._without_room
        return bool(waits and self.engine.must_wait(request.prepared, self.pool))

    def _start(self, request: ScheduledRequest) -> Lease | None:
        """Put a request into the engine. None if there is no room, or if that ended it: an answer was given."""
        if request in self._without_room:
            return None  # running requests only grow: to try again before one of them ends would be in vain
        try:
            lease = self._resume(request) if request in self.yielded else self._lease(request)
        except Exception as error:
            self._refuse(request, error)
            return None
        if lease is None:
            self._without_room.add(request)
            self.admission.work.limit = min(self.admission.work.limit, max(len(self.running), 1))
        return lease

    def _lease(self, request: ScheduledRequest) -> Lease | None:
        lease = cast("Lease | None", self.engine.admit(request.prepared, self.pool))
        if lease is None:
            if not self.running:
                raise RuntimeError("an idle engine has no room for a request that should fit")
            return None
        self.dispatch(request, lease)
        self.admission.resize(request, _prompt_work(lease))
        self._charge(request, request.prompt_left)  # ahead of the work, or a tenant could start many while it is cheap
        if request.req.mode == "generate":  # no other mode is pooled
            self.metrics.on_prefix_lookup(lease.prompt_tokens, lease.cached, lease.hit or "exact")
        return lease

    def _resume(self, request: ScheduledRequest) -> Lease | None:
        lease = self.yielded[request]
        if not self.engine.resume(lease):
            if not self.running:
                raise RuntimeError("an idle engine has no room for a request that yielded")
            return None
        del self.yielded[request]
        self.running[lease] = request
        self.admission.resize(request, _prompt_work(lease))
        return lease

    def _refuse(self, request: ScheduledRequest, error: Exception) -> None:
        """The engine cannot take what it had prepared: an answer, so that nobody waits for ever."""
        self.waiting.remove(request)
        self.yielded.pop(request, None)
        if isinstance(error, RequestError):
            request.move(RequestState.ERROR, reason="invalid", error=error)
        else:
            hiding = EngineError.hiding(error, log_fault("admitting a request failed", error))
            request.move(RequestState.ERROR, reason="engine", error=hiding)

    def dispatch(self, request: ScheduledRequest, key: object) -> None:
        self.waiting.remove(request)
        self.running[key] = request
        request.turn = next(self._turns)
        self.policy.admitted(request)
        request.move(RequestState.DISPATCHED)

    # Pressure

    def _victim_for(self, request: ScheduledRequest, *, entering: bool = False) -> Lease | None:
        """Who makes way for one of a higher level that has waited long enough. `entering`: it must be somebody whose
        prompt is in the way."""
        if not self.policy.may_interrupt or self._clock() - request.waiting_since < self.policy.yield_after_s:
            return None
        lower = [key for key, one in self.running.items() if one.level < request.level]
        return self._least([key for key in lower if _rows_to_enter(key)] if entering else lower)

    def _choose(self) -> list[Segment]:
        """The next step's segments, after as many have yielded as must. Then the choice is made anew."""
        while True:
            segments = self.policy.choose_segments(self.engine.ready())
            if not segments or not self.engine.shortage(segments) or not self._make_room():
                return segments

    def _make_room(self) -> bool:
        """Somebody yields. One alone pushes out registered prefixes."""
        if len(self.running) == 1:
            return bool(self.engine.unpin_shortest())
        lease = self._least(self.running)
        assert lease is not None
        self._suspend(lease)
        return True

    def _least(self, keys: Collection[object]) -> Lease | None:
        """The newest of the lowest level."""
        order = {key: (self.running[key].level, -self.running[key].turn) for key in keys}
        return cast("Lease | None", min(order, key=order.__getitem__, default=None))

    def _suspend(self, lease: Lease) -> None:
        request = self.running.pop(lease)
        self.engine.suspend(lease)
        self._without_room.clear()
        self.yielded[request] = lease
        request.waiting_since = self._clock()
        self.metrics.on_preemption()

    # Ends

    def fail(self, keys: Iterable[object], error: Exception, *, shown: Exception | None = None) -> None:
        """An engine call has failed. Callers see `shown`, or an error that hides this one."""
        self.failures += 1
        error_id = log_fault("an engine call failed", error)
        for key in keys:
            hiding = shown or EngineError.hiding(error, error_id)
            self.end(key, RequestState.ERROR, reason="engine", error=hiding)

    def finish(self, key: object, result: GenerationResult) -> None:
        self.end(key, RequestState.DONE, reason=result.finish_reason, result=result)

    def end(self, key: object, state: RequestState, **outcome: Any) -> None:
        """Give back what the request holds, then tell its caller; whoever has gone counts as cancelled."""
        request = self.running.pop(key)
        self._charge(request, -request.prompt_left)  # of a prompt that was not read to its end
        if request.abandoned:
            state, outcome = RequestState.CANCELLED, {"reason": CLIENT}
            request.cancelled = True
        try:
            if isinstance(key, Lease):
                self.engine.release(key)
                self._without_room.clear()
                self.admission.work.limit = self.policy.limit
        finally:
            request.move(state, **outcome)

    def clear(self) -> list[Lease]:
        """Forget everybody, after they have been told. Returns the leases that are still to be released."""
        leases = [key for key in self.running if isinstance(key, Lease)]
        self.running.clear()
        self.yielded.clear()
        self.waiting = WaitingQueue()
        return leases


def _rows_to_enter(lease: object) -> int:
    """Prompt rows that are not in the core yet."""
    return sum(span.end - span.start for span in lease.todo) if isinstance(lease, Lease) else 0


def _prompt_work(lease: Lease) -> float:
    """What a lease still has to read, in tokens x loops."""
    return sum((span.end - span.start) * (lease.loops_at(span.start) - span.loop) for span in lease.todo)


def _chunk(event: TokenEvent) -> GenerationChunk:
    reason = cast("FinishReason | None", event.finish_reason)
    scores = tuple(event.lease.prompt_logprob_values) if event.lease.answer_tokens == 1 else ()
    return GenerationChunk(event.token_id, event.text, event.logprobs, reason, event.loops, scores)
