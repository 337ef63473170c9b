"""Recorder: stands where the metrics do, and keeps what a report needs. One for all replicas.

Exact per request: arrival, first token, end, loops. Gaps between tokens go into buckets of 2 %, since there may be many
millions. What changes over time (queue, pages, depth) is kept in slices of equal width. Knows no engine.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from itertools import accumulate

from server.request import RequestState, ScheduledRequest

_BUCKETS = 50  # per factor e


class Histogram:
    """Positive values in logarithmic buckets."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, value: float, times: int = 1) -> None:
        bucket = round(math.log(value if value > 1e-9 else 1e-9) * _BUCKETS)
        self.counts[bucket] = self.counts.get(bucket, 0) + times

    def quantile(self, share: float) -> float:
        """NaN while empty."""
        buckets = sorted(self.counts)
        total = sum(self.counts.values())
        for bucket, below in zip(buckets, accumulate(self.counts[b] for b in buckets), strict=True):
            if below >= share * total:
                return math.exp(bucket / _BUCKETS)
        return math.nan


class Series:
    """A quantity summed into slices of `width` seconds."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.sums: list[float] = []

    def add(self, index: int, amount: float) -> None:
        while index >= len(self.sums):
            self.sums.append(0.0)
        self.sums[index] += amount

    def add_span(self, end: float, seconds: float, value: float) -> None:
        """`value` over the seconds before `end`: its integral goes to the slices that the span covers."""
        index = int((end - seconds) / self.width)
        last = int(end / self.width)
        while index < last:
            inside = min(seconds, seconds - (end - (index + 1) * self.width))
            self.add(index, value * inside)
            seconds -= inside
            index += 1
        self.add(last, value * seconds)


class Recorder:
    """`width`: seconds of a slice."""

    def __init__(self, width: float = 1.0) -> None:
        self.arrivals = 0
        self.refused: Counter[str] = Counter()
        self.done = 0
        self.failed: Counter[str] = Counter()
        self.arrived_at, self.first_token_s, self.total_s = array("d"), array("d"), array("d")
        self.asked, self.granted = array("h"), array("h")
        self.gaps = Histogram()
        self.errors = array("d")  # |waited - predicted| / predicted
        self.tokens = self.steps = self.preemptions = self.promotions = 0
        self.downgrades: Counter[str] = Counter()
        self.pages_peak = 0
        self.last_at = 0.0
        self.queue, self.pages = Series(width), Series(width)

    # From the simulation

    def on_refused(self, at: float, reason: str) -> None:
        self.refused[reason] += 1
        self.last_at = max(self.last_at, at)

    def on_time(self, now: float, seconds: float, queue: int, pages: float, most_pages: int) -> None:
        """So it was for `seconds` on one server. Idle time is not told: nobody waits and nothing is held then."""
        if now > self.last_at:
            self.last_at = now
        if most_pages > self.pages_peak:
            self.pages_peak = most_pages
        self.pages.add_span(now, seconds, pages)
        if queue:
            self.queue.add_span(now, seconds, queue)

    def on_steps(self, steps: int) -> None:
        self.steps += steps

    def on_tokens(self, tokens: int, gap_s: float) -> None:
        self.tokens += tokens
        self.gaps.add(gap_s, tokens)

    # From the dispatcher, the door and admission: the names are those of Metrics

    def on_move(self, request: ScheduledRequest, previous: RequestState) -> None:
        if request.state is RequestState.DONE:
            self._on_done(request)
        elif request.ended:
            self.failed[request.outcome_reason] += 1

    def _on_done(self, request: ScheduledRequest) -> None:
        assert request.prepared is not None
        assert request.completed_at is not None
        self.done += 1
        granted = request.prepared.plan.loops
        self.arrived_at.append(request.queued_at)
        self.first_token_s.append((request.first_token_at or request.completed_at) - request.queued_at)
        self.total_s.append(request.completed_at - request.queued_at)
        self.asked.append(request.loops_requested or granted)
        self.granted.append(granted)

    def on_token(self, loops: int | None, gap_s: float | None) -> None:
        self.tokens += 1
        if gap_s is not None:
            self.gaps.add(gap_s)

    def on_step(self, rows: int, seconds: float) -> None:
        self.steps += 1

    def on_prefix_lookup(self, tokens: int, hit: int, depth: str = "exact") -> None:
        pass

    def on_preemption(self) -> None:
        self.preemptions += 1

    def on_promotion(self) -> None:
        self.promotions += 1

    def on_downgrade(self, reason: str) -> None:
        self.downgrades[reason] += 1

    def on_prediction(self, predicted_ms: float) -> None:
        pass

    def on_prediction_error(self, ratio: float) -> None:
        self.errors.append(ratio)
