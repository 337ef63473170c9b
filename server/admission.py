"""The two gates at the door, and the prediction that the second one uses.

Everything is synchronous: between the check and the place in the queue there is no await in which others could slip in.
Knows numbers and requests; does not know the engine, the queue's order or torch.
"""

from collections.abc import Callable
from typing import Protocol

from server.errors import AdmissionRejected, QueueFullError
from server.request import RequestState, ScheduledRequest

HALF_LIFE_S = 10.0  # of a measured work rate, idle time included


class Ema:
    """Exponential moving average; the first sample sets it, None before."""

    def __init__(self, alpha: float) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"ema_alpha must be above 0 and at most 1, got {alpha}")
        self.alpha = alpha
        self.value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + self.alpha * (sample - self.value)


class WorkRate:
    """Row-loops per second over recent steps: two sums that fade with time, so old steps weigh little after idling."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._work = self._seconds = 0.0
        self._faded_at = clock()

    def add(self, work: int, seconds: float) -> None:
        now = self._clock()
        keep = 0.5 ** ((now - self._faded_at) / HALF_LIFE_S)
        self._work = self._work * keep + work
        self._seconds = self._seconds * keep + seconds
        self._faded_at = now

    @property
    def value(self) -> float | None:
        """None before the first step."""
        return self._work / self._seconds if self._work > 0 and self._seconds > 0 else None


class Predictor(Protocol):
    """Foretells a wait in milliseconds, None when it cannot. `judged_at` is the state that ends the wait it means."""

    judged_at: RequestState

    def predict_ms(self, queue_depth: int, in_flight: int) -> float | None: ...


class QueuePredictor:
    """The seed's formula, for one request at a time. The +1 is the request in flight."""

    judged_at = RequestState.DISPATCHED

    def __init__(self, ema_dispatch_ms: Ema) -> None:
        self._ema = ema_dispatch_ms

    def predict_ms(self, queue_depth: int, in_flight: int) -> float | None:
        if not in_flight or self._ema.value is None:
            return None
        return (queue_depth + 1) * self._ema.value


class WorkPredictor:
    """For requests that share steps: the work ahead over the measured rate. `ahead` is in tokens x loops."""

    judged_at = RequestState.DECODING

    def __init__(self, clock: Callable[[], float]) -> None:
        self.rate = WorkRate(clock)
        self.ahead = 0

    def predict_ms(self, queue_depth: int, in_flight: int) -> float | None:
        if not (queue_depth or in_flight) or self.rate.value is None:
            return None
        return 1000 * self.ahead / self.rate.value


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
        on_prediction: Callable[[float], None] = lambda predicted_ms: None,
        on_error: Callable[[float], None] = lambda ratio: None,
    ) -> None:
        self.max_queue_depth, self.default_slo_ms = max_queue_depth, default_slo_ms
        self.ema_dispatch_ms = Ema(ema_alpha)
        self.work = WorkPredictor(clock)
        self.predictor: Predictor = QueuePredictor(self.ema_dispatch_ms) if sequential else self.work
        self._clock, self._on_prediction, self._on_error = clock, on_prediction, on_error

    def check_depth(self, queue_depth: int) -> None:
        """The first gate. Raises QueueFullError."""
        if queue_depth >= self.max_queue_depth:
            raise QueueFullError(f"{queue_depth} requests are waiting already, the most allowed")

    def check_wait(self, slo_ms: float | None, queue_depth: int, in_flight: int) -> float | None:
        """The second gate. Returns the predicted wait in ms, None if there is none; raises AdmissionRejected."""
        predicted = self.predictor.predict_ms(queue_depth, in_flight)
        if predicted is None:
            return None
        self._on_prediction(predicted)
        limit = self.default_slo_ms if slo_ms is None else slo_ms
        if limit is not None and predicted > limit:
            raise AdmissionRejected(f"predicted wait of {predicted:.0f} ms exceeds the SLO of {limit:g} ms", predicted)
        return predicted

    def enter(self, request: ScheduledRequest) -> None:
        """The request now stands in the queue, and its work ahead of whoever comes next."""
        request.work_left = 0 if request.prepared is None else request.prepared.work
        self.work.ahead += request.work_left

    def progress(self, request: ScheduledRequest, work: int) -> None:
        """So much of the request's work is done, or a prefix has saved it."""
        done = min(work, request.work_left)
        request.work_left -= done
        self.work.ahead -= done

    def on_move(self, request: ScheduledRequest, previous: RequestState) -> None:
        if request.state is self.predictor.judged_at:
            self._judge(request)
        if request.ended:
            self.progress(request, request.work_left)
        if request.state is RequestState.DONE:
            assert request.completed_at is not None
            assert request.dispatched_at is not None
            self.ema_dispatch_ms.add(1000 * (request.completed_at - request.dispatched_at))

    def _judge(self, request: ScheduledRequest) -> None:
        """How far the prediction was off, relative to itself."""
        if request.predicted_ms:
            waited_ms = 1000 * (self._clock() - request.queued_at)
            self._on_error(abs(waited_ms - request.predicted_ms) / request.predicted_ms)
