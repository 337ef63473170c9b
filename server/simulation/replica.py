"""Replica: one server on virtual time. The door, dispatcher, policy and admission are the server's own; the engine
counts, and the clock moves by what the cost model says.

    replica.run_until(arrival.at)     every step that ends before
    replica.enter(arrival)            the door, at that moment, also in the middle of a step

Exact, given the costs: who enters, waits, steps and ends when; every token of every step.

`jump` takes many steps at once. A stretch repeats itself when every running request is in its answer and, since the
last comings and goings, has come back to the loop and the wait at the boundary that it had some steps ago: then the
policy, asked again, chooses what it chose before. What has been seen is repeated a whole number of times, until just
before somebody ends, somebody arrives or pages run out. Exact there: who steps how often, tokens, pages, the work
accounts. Averaged: the seconds of a period, which grow with the histories by a straight line; the gap between two
tokens of a request; and what the cost learned on the way would have changed in the policy's waits at the boundary.
Knows no trace and no report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, cast

from server.admission import Admission
from server.depth import DepthCeilings
from server.dispatcher import Dispatcher
from server.door import Door
from server.errors import AdmissionRejected, QueueFullError, rejection_reason
from server.policy import DispatchMode, Policy
from server.request import ScheduledRequest
from server.simulation.costs import Shape, StepCosts
from server.simulation.engine import SimEngine, SimLease
from server.simulation.recorder import Recorder
from server.simulation.trace import Arrival
from server.types import GenerationRequest
from tinyloop.errors import RequestError
from tinyloop.kv.prefix import PrefixPool
from tinyloop.sequence import Segment, StepReport

if TYPE_CHECKING:
    from server.metrics import Metrics

LONGEST_PERIOD = 64  # steps looked back for one like the present
LEAST_ROOM = 4  # steps before the next arrival that make it worth looking for a jump


@lru_cache(1 << 16)
def _request(prompt: int, answer: int, loops: int | None, least: int | None) -> GenerationRequest:
    """Requests of one shape are the same."""
    return GenerationRequest(range(prompt), max_new_tokens=answer, loops=loops, min_loops=least)


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, kw_only=True)
class Server:
    """How the simulated servers are set up; as `Scheduler`. `min_loops` and `slo_ms` are what each request carries."""

    policy: Callable[[], Policy] = Policy
    max_queue_depth: int = 128
    slo_ms: float | None = None
    min_loops: int | None = None
    saturation_ms: float | None = 5000.0
    ema_alpha: float = 0.2


State = tuple[tuple[int, int, int], ...]  # of each running request: loop, steps waited, doublings of its history


class Step(NamedTuple):
    """A step under way, or one that was."""

    segments: list[Segment]
    report: StepReport
    shape: Shape
    seconds: float


@dataclass
class Orbit:
    """The steps since the last comings and goings, and where each state was seen: before which step, at which answer
    lengths."""

    changes: int = -1
    steps: list[Step] = field(default_factory=list)
    seen: dict[State, tuple[int, list[int]]] = field(default_factory=dict)

    def restart(self, changes: int) -> None:
        self.changes = changes
        self.steps.clear()
        self.seen.clear()


class Replica:
    """One server. What becomes of its requests goes to `recorder`."""

    def __init__(self, costs: StepCosts, server: Server, recorder: Recorder, *, jump: bool = True) -> None:
        self.clock, self.engine, self.recorder = Clock(), SimEngine(costs), recorder
        self.policy = server.policy()
        self.admission = Admission(
            max_queue_depth=server.max_queue_depth,
            default_slo_ms=None,
            ema_alpha=server.ema_alpha,
            sequential=self.policy.mode is DispatchMode.SEQUENTIAL,
            clock=self.clock,
            row_budget=self.policy.row_budget,
            on_prediction=recorder.on_prediction,
            on_error=recorder.on_prediction_error,
        )
        self.admission.work.limit = self.policy.limit
        metrics = cast("Metrics", recorder)
        self.dispatcher = Dispatcher(self.engine, self.policy, self.admission, metrics, PrefixPool(0), self.clock)
        self.door = Door(self.dispatcher, DepthCeilings(server.saturation_ms, self.clock), self.clock)
        self._costs, self._server, self._jumps = costs, server, jump
        self._step: Step | None = None
        self._ends = self._last_s = 0.0
        self._tried = 0  # how many waited when it was last asked who can enter
        self._orbit = Orbit()

    @property
    def work_ahead(self) -> float:
        """Tokens x loops that stand before a newcomer."""
        return self.admission.work.ahead

    def enter(self, arrival: Arrival) -> ScheduledRequest | None:
        """One arrival, now; None if it was refused."""
        self.clock.now = arrival.at
        least = self._server.min_loops
        if least is not None:
            least = min(least, arrival.loops or self.engine.model.default_loops)
        try:
            req = _request(arrival.prompt, arrival.answer, arrival.loops, least)
            request = self.door.enter(req, 0, self._server.slo_ms, streaming=True)
        except (QueueFullError, AdmissionRejected, RequestError) as error:
            self.recorder.on_refused(arrival.at, rejection_reason(error))
            return None
        request.chunks = None  # nobody reads them
        return request

    def run_until(self, until: float) -> None:
        """All steps that end by then. One that would begin just then waits for who else arrives at that moment."""
        while self.dispatcher.busy:
            if self._step is None and (self.clock.now >= until or not self._begin(until)):
                return
            if self._ends > until:
                return
            self._finish()

    def _begin(self, until: float) -> bool:
        """The next step, after a jump if there can be one; False if none is left to begin before `until`."""
        untried = len(self.dispatcher.waiting) > self._tried
        if self._jumps and not untried and self.clock.now + LEAST_ROOM * self._last_s < until:
            self._jump(until)
            if self.clock.now >= until:
                return False
        segments = self.dispatcher.plan()
        self._tried = len(self.dispatcher.waiting)
        if not segments:
            assert not self.dispatcher.running, "requests are running, but nothing can step"
            return self.dispatcher.busy and self._begin(until)
        report, seconds = self.engine.advance(segments)
        self._step = Step(segments, report, self.engine.shape, seconds)
        self._ends, self._last_s = self.clock.now + seconds, seconds
        return True

    def _finish(self) -> None:
        assert self._step is not None
        step, self._step = self._step, None
        self.clock.now = self._ends
        self._record(step.seconds, self._used)
        self.dispatcher.complete(step.segments, step.report, step.seconds)
        if self._orbit.changes == self.engine.changes:
            self._orbit.steps.append(step)

    @property
    def _used(self) -> int:
        return self.engine.model.num_pages - self.engine.free

    def _record(self, seconds: float, before: int) -> None:
        """`before`: pages in use when these seconds began; they are taken evenly."""
        used = self._used
        self.recorder.on_time(self.clock.now, seconds, len(self.dispatcher.waiting), (before + used) / 2, used)

    # Many steps at once

    def _jump(self, until: float) -> None:
        """Repeat the last period as often as it fits before `until`, if the present state has been seen."""
        orbit = self._orbit
        state = self._state()
        if state is None:
            orbit.changes = -1
            return
        if orbit.changes != self.engine.changes or len(orbit.steps) > LONGEST_PERIOD:
            orbit.restart(self.engine.changes)
        lengths = [lease.answer_tokens for lease in self.engine.leases]
        if state in orbit.seen:
            since, before = orbit.seen[state]
            period = orbit.steps[since:]
            made = [now - then for now, then in zip(lengths, before, strict=True)]
            times, seconds = self._times(period, made, until)
            if times:
                self._repeat(period, made, times, seconds)
                self._move_orbit(since, made, times)
                lengths = [lease.answer_tokens for lease in self.engine.leases]
        orbit.seen[state] = len(orbit.steps), lengths

    def _move_orbit(self, since: int, made: list[int], times: int) -> None:
        """The states of the last period are seen again where the jump ends, and its steps take longer by now."""
        orbit = self._orbit
        for state, (index, lengths) in orbit.seen.items():
            if index >= since:
                moved = [one + times * tokens for one, tokens in zip(lengths, made, strict=True)]
                orbit.seen[state] = index, moved
        longer = times * self._growth(list(self.engine.leases), made) / (len(orbit.steps) - since)
        orbit.steps[since:] = [step._replace(seconds=step.seconds + longer) for step in orbit.steps[since:]]

    def _state(self) -> State | None:
        """Where each running request stands, if all are in their answers."""
        state, size = [], self.engine.model.page_size
        for lease in self.engine.leases:
            if lease.todo or len(lease.segments) != 1 or lease.segments[0].start < lease.known:
                return None
            state.append((lease.segments[0].loop, lease.waited, ((len(lease.tokens) - 1) // size).bit_length()))
        return tuple(state) if state else None

    def _times(self, period: list[Step], made: list[int], until: float) -> tuple[int, float]:
        """How often a period fits, and the seconds that takes."""
        leases = list(self.engine.leases)
        pairs = [(lease, tokens) for lease, tokens in zip(leases, made, strict=True) if tokens]
        left = [min(lease.max_new_tokens - lease.answer_tokens - 1, self._alike(lease)) // new for lease, new in pairs]
        seconds, growth = sum(step.seconds for step in period), self._growth(leases, made)
        if not left or min(left) < 1 or seconds <= 0:
            return 0, 0.0
        room = until - self.clock.now
        times = int(min(min(left), room / seconds))
        while times and self._taken(times, seconds, growth) > room:
            times -= max(1, times // 64)
        while times and self._pages(leases, made, times) > self.engine.free:
            times -= max(1, times // 16)
        return times, self._taken(times, seconds, growth)

    def _alike(self, lease: SimLease) -> int:
        """Tokens by which a history may grow before its attention may need another call."""
        size, tokens = self.engine.model.page_size, len(lease.tokens)
        return (size << ((tokens - 1) // size).bit_length()) - tokens

    @staticmethod
    def _taken(times: int, seconds: float, growth: float) -> float:
        return times * seconds + growth * times * (times + 1) / 2

    def _growth(self, leases: list[SimLease], made: list[int]) -> float:
        """Seconds by which each period is longer than the one before it: all its rows look further back."""
        costs, growth = self._costs, 0.0
        outside = costs.prelude.per_key * bool(costs.model.prelude) + costs.coda.per_key * bool(costs.model.coda)
        for lease, tokens in zip(leases, made, strict=True):
            growth += tokens * tokens * (lease.plan.loops * costs.core.per_key + outside)
        return growth

    def _pages(self, leases: list[SimLease], made: list[int], times: int) -> int:
        size = self.engine.model.page_size
        return sum(
            max(0, -(-(len(one.tokens) + times * new) // size) - one.blocks) * one.plan_rows
            for one, new in zip(leases, made, strict=True)
        )

    def _repeat(self, period: list[Step], made: list[int], times: int, seconds: float) -> None:
        """The accounts of all these steps in bulk."""
        began, before = self.clock.now, self._used
        self._learn(period, times, seconds)
        self.clock.now = began + seconds
        for lease, tokens in zip(list(self.engine.leases), made, strict=True):
            if tokens:
                self._advance(lease, times * tokens, seconds)
        self._record(seconds, before)
        self.recorder.on_steps(times * len(period))
        self.policy.boundary_in_steps = self.admission.work.cost.boundary_in_steps

    def _learn(self, period: list[Step], times: int, seconds: float) -> None:
        """The cost model of the admission sees every step, at its time."""
        share = seconds / (times * sum(step.seconds for step in period))
        add = self.admission.work.cost.add
        for _ in range(times):
            for step in period:
                self.clock.now += step.seconds * share
                add(step.report, step.seconds * share)

    def _advance(self, lease: SimLease, tokens: int, seconds: float) -> None:
        lease.tokens.extend([0] * tokens)
        lease.segments[0].start += tokens
        self.engine.grow(lease, len(lease.tokens))
        request = self.dispatcher.running[lease]
        assert request.last_token_at is not None
        request.answer_tokens += tokens
        request.last_token_at += seconds
        work = tokens * lease.plan.loops
        self.admission.progress(request, work, prompt=False)
        self.dispatcher.waiting.serve(request, work * (1 + request.boundary_per_loop))
        self.recorder.on_tokens(tokens, seconds / tokens)
