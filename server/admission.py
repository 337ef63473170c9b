"""The two gates at the door, the prediction that the second one uses, and the depth that a request may be granted.

Everything is synchronous: between the check and the place in the queue there is no await in which others could slip in.
Knows numbers and requests; does not know the engine, how the queue is kept, or torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from server.cost import HALF_LIFE_S, StepCost
from server.errors import AdmissionRejected, QueueFullError
from server.request import RequestState, ScheduledRequest

MOST_BIAS = 4.0  # how far a prediction may be corrected by what became of earlier ones
BIAS_ALPHA = 0.1
LEAST_PROMPT_SHARE = 0.25  # of the row budget that prompts are taken to get, however many answers run


class Ema:
    """Exponential moving average; the first sample sets it, None before."""

    def __init__(self, alpha: float) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"ema_alpha must be above 0 and at most 1, got {alpha}")
        self.alpha = alpha
        self.value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + self.alpha * (sample - self.value)


@dataclass(frozen=True)
class Ask:
    """What a prediction looks at in a newcomer. Work is in tokens x loops, `boundary` what its prompt costs outside of
    the core in the same unit; what a prefix saves is left out."""

    prompt_work: float
    loops: int
    boundary: float = 0.0
    level: int = 0


@dataclass
class Load:
    """Requests and their work that is still to do."""

    requests: int = 0
    prompt: float = 0.0
    boundary: float = 0.0
    answer: float = 0.0

    def add(self, other: Load, sign: int = 1) -> None:
        self.requests += sign * other.requests
        self.prompt = max(self.prompt + sign * other.prompt, 0.0)
        self.boundary = max(self.boundary + sign * other.boundary, 0.0)
        self.answer = max(self.answer + sign * other.answer, 0.0)
        if not self.requests:  # no rounding error outlives the requests it came from
            self.prompt = self.boundary = self.answer = 0.0


class Predictor(Protocol):
    """Foretells a wait in milliseconds, None when it cannot. `judged_at` is the state that ends the wait it means."""

    judged_at: RequestState

    def predict_ms(self, queue_depth: int, in_flight: int, ask: Ask) -> float | None: ...


class QueuePredictor:
    """The seed's formula, for one request at a time. The +1 is the request in flight."""

    judged_at = RequestState.DISPATCHED

    def __init__(self, ema_dispatch_ms: Ema) -> None:
        self._ema = ema_dispatch_ms

    def predict_ms(self, queue_depth: int, in_flight: int, ask: Ask) -> float | None:
        if not in_flight or self._ema.value is None:
            return None
        return (queue_depth + 1) * self._ema.value


class WorkPredictor:
    """For requests that share steps: the time to the first token, from the work that comes before it.

    That is the prompts ahead and the newcomer's own, in steps of at most `row_budget` rows that the running answers
    share; or, where no more may run at once, the end of as many requests as stand before it. `limit` is how many can
    run at once, infinite while nobody has been kept out.
    """

    judged_at = RequestState.DECODING

    def __init__(self, clock: Callable[[], float], row_budget: int = 512) -> None:
        self.cost = StepCost(clock)
        self.row_budget = row_budget
        self.limit = math.inf
        self.running = Load()
        self.queued: dict[int, Load] = {}
        self._clock = clock
        self._log_bias = 0.0
        self._judged_at = clock()
        self._answer_work = Ema(BIAS_ALPHA)  # of requests that ran to the end

    @property
    def ahead(self) -> float:
        """All work of queued and running requests, in tokens x loops."""
        return sum(load.prompt + load.answer for load in (self.running, *self.queued.values()))

    def predict_ms(self, queue_depth: int, in_flight: int, ask: Ask) -> float | None:
        if not (queue_depth or in_flight) or self.cost.rate is None:
            return None
        before = Load()
        for level, load in self.queued.items():
            if level >= ask.level:
                before.add(load)
        seconds = max(self._prompts_s(before, ask), self._slots_s(before, ask))
        return 1000 * seconds * math.exp(self._bias())

    def token_ms(self, loops: int, boundary: float) -> float | None:
        """The time between two tokens of an answer at so many loops, with everybody who runs or waits now beside it;
        None while nothing has been measured. `boundary`: what a token costs outside of the core, in loops of it."""
        if self.cost.rate is None:
            return None
        waiting = sum(load.requests for load in self.queued.values())
        streams = min(self.running.requests + waiting + 1, self.limit)
        return 1000 * (loops * self.cost.core.seconds(streams) + self.cost.boundary.seconds(streams * boundary))

    def service_s(self, request: ScheduledRequest) -> float | None:
        """How long the rest of a request takes at the present rate."""
        rate = self.cost.rate
        return None if rate is None else (request.prompt_left + request.answer_left) / rate

    def _prompts_s(self, before: Load, ask: Ask) -> float:
        """Until every prompt ahead and the newcomer's own have been read."""
        core, boundary = self.cost.core, self.cost.boundary
        work = self.running.prompt + before.prompt + ask.prompt_work
        streams = min(self.running.requests + before.requests / 2, self.limit)
        room = max(self.row_budget - streams, self.row_budget * LEAST_PROMPT_SHARE)
        steps = max(work / room, ask.loops)
        turns = 1 + steps / max(ask.loops, 1)  # how often prompts enter and leave meanwhile
        outside = self.running.boundary + before.boundary + ask.boundary
        return (
            steps * core.seconds(streams)
            + work * core.per_row
            + turns * boundary.fixed
            + outside * boundary.per_row
        )  # fmt: skip

    def _slots_s(self, before: Load, ask: Ask) -> float:
        """Until enough requests have ended for the newcomer to start, and its prompt has been read."""
        ends = self.running.requests + before.requests + 1 - self.limit
        if ends <= 0:
            return 0.0
        everybody = self.running.requests + before.requests
        answer = self._answer_work.value or (self.running.answer + before.answer) / everybody
        step = self.cost.core.seconds(self.limit) + self.cost.boundary.fixed / max(ask.loops, 1)
        prompts = (before.prompt + ask.prompt_work) * self.cost.core.per_row
        return ends / self.limit * answer * step + prompts

    # What it learns

    def judge(self, waited_ms: float, predicted_ms: float) -> None:
        """Correct later predictions by what became of this one."""
        off = math.log(max(waited_ms, 1e-3) / predicted_ms)
        bias = self._bias() + BIAS_ALPHA * off
        self._log_bias = min(max(bias, -math.log(MOST_BIAS)), math.log(MOST_BIAS))
        self._judged_at = self._clock()

    def _bias(self) -> float:
        """Forgotten while nothing is judged."""
        return self._log_bias * math.exp2((self._judged_at - self._clock()) / (6 * HALF_LIFE_S))

    def ended(self, request: ScheduledRequest) -> None:
        """An answer that ran to its end says how long answers are."""
        self._answer_work.add(request.answer_work - request.answer_left)


class Admission:
    """Both gates and what they learn from. Told of every request that enters, works, moves and ends.

    Usage: `check_depth`, then the expensive preparation, then `check_wait`, then `enter`, with no await between.
    """

    def __init__(
        self,
        *,
        max_queue_depth: int,
        default_slo_ms: float | None,
        ema_alpha: float,
        sequential: bool,
        clock: Callable[[], float],
        row_budget: int = 512,
        on_prediction: Callable[[float], None] = lambda predicted_ms: None,
        on_error: Callable[[float], None] = lambda ratio: None,
    ) -> None:
        self.max_queue_depth, self.default_slo_ms = max_queue_depth, default_slo_ms
        self.ema_dispatch_ms = Ema(ema_alpha)
        self.work = WorkPredictor(clock, row_budget)
        self.predictor: Predictor = QueuePredictor(self.ema_dispatch_ms) if sequential else self.work
        self._clock, self._on_prediction, self._on_error = clock, on_prediction, on_error

    def check_depth(self, queue_depth: int) -> None:
        """The first gate. Raises QueueFullError."""
        if queue_depth >= self.max_queue_depth:
            raise QueueFullError(f"{queue_depth} requests are waiting already, the most allowed")

    def meets(self, slo_ms: float | None, queue_depth: int, in_flight: int, ask: Ask) -> bool:
        """Whether the second gate would let this through. Exports nothing."""
        predicted, limit = self.predictor.predict_ms(queue_depth, in_flight, ask), self.limit_ms(slo_ms)
        return predicted is None or limit is None or predicted <= limit

    def check_wait(self, slo_ms: float | None, queue_depth: int, in_flight: int, ask: Ask) -> float | None:
        """The second gate. Returns the predicted wait in ms, None if there is none; raises AdmissionRejected."""
        predicted = self.predictor.predict_ms(queue_depth, in_flight, ask)
        if predicted is None:
            return None
        self._on_prediction(predicted)
        limit = self.limit_ms(slo_ms)
        if limit is not None and predicted > limit:
            raise AdmissionRejected(f"predicted wait of {predicted:.0f} ms exceeds the SLO of {limit:g} ms", predicted)
        return predicted

    def keeps_pace(self, token_ms: float | None, loops: int, boundary: float) -> bool:
        """Whether an answer at so many loops is foretold to come at the pace that its caller accepts."""
        predicted = self.work.token_ms(loops, boundary)
        return predicted is None or token_ms is None or predicted <= token_ms

    def check_pace(self, token_ms: float | None, loops: int, boundary: float, wait_ms: float | None) -> None:
        """The second gate's other half. Raises AdmissionRejected."""
        if not self.keeps_pace(token_ms, loops, boundary):
            predicted = self.work.token_ms(loops, boundary)
            message = f"predicted {predicted:.0f} ms between tokens exceed the SLO of {token_ms:g} ms"
            raise AdmissionRejected(message, wait_ms or 0.0)

    def limit_ms(self, slo_ms: float | None) -> float | None:
        """The longest wait that a request accepts, None for any."""
        return self.default_slo_ms if slo_ms is None else slo_ms

    # Accounts

    def enter(self, request: ScheduledRequest) -> None:
        """The request now stands in the queue, and its work ahead of whoever comes next."""
        self._queue(request.level).add(_load(request))

    def relevel(self, request: ScheduledRequest, level: int) -> None:
        """A waiting request moves to another level."""
        self._leave_queue(request)
        self._queue(level).add(_load(request))

    def resize(self, request: ScheduledRequest, prompt_work: float) -> None:
        """What a running request has to read is known exactly only once it has its lease, and again after a yield."""
        self._done(request, prompt=request.prompt_left - prompt_work)

    def progress(self, request: ScheduledRequest, work: int, *, prompt: bool) -> None:
        """So much of a running request's work is done."""
        if prompt:
            self._done(request, prompt=min(work, request.prompt_left))
        else:
            self._done(request, answer=min(work, request.answer_left))

    def _done(self, request: ScheduledRequest, prompt: float = 0.0, answer: float = 0.0) -> None:
        request.prompt_left -= prompt
        request.answer_left -= answer
        running = self.work.running
        running.prompt = max(running.prompt - prompt, 0.0)
        running.boundary = max(running.boundary - prompt * request.boundary_per_loop, 0.0)
        running.answer = max(running.answer - answer, 0.0)

    def on_move(self, request: ScheduledRequest, previous: RequestState) -> None:
        if request.state is self.predictor.judged_at:
            self._judge(request)
        if previous is RequestState.QUEUED:
            self._leave_queue(request)
            if not request.ended:
                self.work.running.add(_load(request))
        elif request.ended:
            self.work.running.add(_load(request), -1)
        if request.state is RequestState.DONE:
            assert request.completed_at is not None
            assert request.dispatched_at is not None
            self.ema_dispatch_ms.add(1000 * (request.completed_at - request.dispatched_at))
            self.work.ended(request)

    def _queue(self, level: int) -> Load:
        return self.work.queued.setdefault(level, Load())

    def _leave_queue(self, request: ScheduledRequest) -> None:
        load = self._queue(request.level)
        load.add(_load(request), -1)
        if not load.requests:
            del self.work.queued[request.level]

    def _judge(self, request: ScheduledRequest) -> None:
        """How far the prediction was off, relative to itself."""
        if request.predicted_ms:
            waited_ms = 1000 * (self._clock() - request.queued_at)
            self.work.judge(waited_ms, request.predicted_ms)
            self._on_error(abs(waited_ms - request.predicted_ms) / request.predicted_ms)


def _load(request: ScheduledRequest) -> Load:
    return Load(1, request.prompt_left, request.prompt_left * request.boundary_per_loop, request.answer_left)
