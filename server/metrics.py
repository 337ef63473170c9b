"""The tinyloop_* metrics of one scheduler, in a registry of its own.

Counters and histograms are fed by the scheduler's events; gauges are read from state when somebody asks, so they cannot
drift. No label holds anything that a client can choose. Knows no HTTP, no engine and no torch.
"""

import math
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from server.request import RequestState, ScheduledRequest

# Every arrival ends in exactly one of these.
OUTCOMES = {
    "done": ("stop", "length", "other"),
    "cancelled": ("client", "shutdown"),
    "error": ("engine", "invalid", "internal"),
    "rejected": ("queue_full", "slo", "invalid", "draining", "not_running", "internal"),
}
PREFIX_DEPTHS = ("exact", "shallower", "deepened")
DOWNGRADE_REASONS = ("slo", "pressure", "memory")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_COUNTS = tuple(float(2**n) for n in range(18))
_LOOPS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)
_RATIOS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class Gauges:
    """The scheduler's state at one moment."""

    queue_depth: int
    in_flight: int
    ema_dispatch_seconds: float | None
    prefix_pool_entries: int
    prefix_pool_tokens: int
    kv_usage_ratio: float
    draining: bool
    engine_healthy: bool
    page_size: int
    num_pages: int


class Metrics:
    """One instance per scheduler. `read` gives the gauges at scrape time."""

    def __init__(self, read: Callable[[], Gauges]) -> None:
        # Two registries, since one would not take both the counter prompt_tokens_total and the histogram prompt_tokens.
        self._registry, self._histogram_registry = _Registry(), _Registry()
        self._registry.register(_StateCollector(read))
        self._counters()
        self._histograms()

    def _counters(self) -> None:
        self._requests = self._counter("requests", "Arrivals by how they ended.", "outcome", "reason")
        self._prompt_total = self._counter("prompt_tokens", "Prompt tokens of dispatched requests.")
        self._generated = self._counter("generated_tokens", "Answer tokens made.")
        self._loops = self._counter("loops", "Loops of the core, summed over tokens.")
        self._prefix_lookups = self._counter("prefix_lookup_tokens", "Prompt tokens looked up in the prefix pool.")
        self._prefix_hits = self._counter("prefix_hit_tokens", "Prompt tokens found in the prefix pool.", "depth")
        self._preemptions = self._counter("preemptions", "Running requests that yielded their pages.")
        self._downgrades = self._counter("loop_downgrades", "Requests granted fewer loops than asked for.", "reason")
        self._promotions = self._counter("aging_promotions", "Waiting requests moved ahead because of their age.")
        self._steps = self._counter("steps", "Packed steps.")
        for outcome, reasons in OUTCOMES.items():  # a series that starts at 0 can be told from one that is missing
            for reason in reasons:
                self._requests.labels(outcome, reason)
        for depth in PREFIX_DEPTHS:
            self._prefix_hits.labels(depth)
        for reason in DOWNGRADE_REASONS:
            self._downgrades.labels(reason)

    def _histograms(self) -> None:
        self._queue_s = self._histogram("queue_seconds", "Arrival to dispatch.")
        self._first_token_s = self._histogram("time_to_first_token_seconds", "Arrival to first token.")
        self._inter_token_s = self._histogram("inter_token_seconds", "Between two tokens of an answer.")
        self._per_token_s = self._histogram("time_per_output_token_seconds", "Mean time per token after the first.")
        self._request_s = self._histogram("request_seconds", "Arrival to done.")
        self._dispatch_s = self._histogram("dispatch_seconds", "Dispatch to done.")
        self._predicted_s = self._histogram("predicted_wait_seconds", "Wait predicted at arrival.")
        self._prediction_error = self._histogram("prediction_error_ratio", "|waited - predicted| / predicted.", _RATIOS)
        self._step_s = self._histogram("step_seconds", "One packed step.")
        self._step_rows = self._histogram("step_rows", "Rows that went through the core in one step.", _COUNTS)
        self._loops_per_token = self._histogram("loops_per_token", "Loops run for one answer token.", _LOOPS)
        self._prompt_tokens = self._histogram("prompt_tokens", "Prompt length of finished requests.", _COUNTS)
        self._output_tokens = self._histogram("output_tokens", "Answer length of finished requests.", _COUNTS)

    def on_rejected(self, reason: str) -> None:
        self._outcome("rejected", reason)

    def on_move(self, request: ScheduledRequest, previous: RequestState) -> None:
        """Called once for every move of every request."""
        if request.state is RequestState.DISPATCHED:
            self._queue_s.observe(_span(request.queued_at, request.dispatched_at))
        elif request.state is RequestState.DECODING:
            self._first_token_s.observe(_span(request.queued_at, request.first_token_at))
        elif request.ended:
            self._on_end(request)

    def on_token(self, loops: int | None, gap_s: float | None) -> None:
        """`gap_s`: since the token before, None for the first."""
        self._generated.inc()
        if loops is not None:
            self._loops_per_token.observe(loops)
        if gap_s is not None:
            self._inter_token_s.observe(gap_s)

    def on_answer(self, tokens: int) -> None:
        """A whole answer from an engine that does not show its tokens one by one."""
        self._generated.inc(tokens)

    def on_step(self, rows: int, seconds: float) -> None:
        self._steps.inc()
        self._loops.inc(rows)  # every row runs one loop per step
        self._step_rows.observe(rows)
        self._step_s.observe(seconds)

    def on_prefix_lookup(self, tokens: int, hit: int, depth: str = "exact") -> None:
        """Once per admitted request, never per try."""
        self._prefix_lookups.inc(tokens)
        self._prefix_hits.labels(depth).inc(hit)

    def on_preemption(self) -> None:
        self._preemptions.inc()

    def on_downgrade(self, reason: str) -> None:
        self._downgrades.labels(reason).inc()

    def on_promotion(self) -> None:
        self._promotions.inc()

    def on_prediction(self, predicted_ms: float) -> None:
        self._predicted_s.observe(predicted_ms / 1000)

    def on_prediction_error(self, ratio: float) -> None:
        self._prediction_error.observe(ratio)

    def text(self, extra_lines: str | Iterable[str] | None = None) -> str:
        """Prometheus exposition text, with `extra_lines` before it."""
        lines = extra_lines.splitlines() if isinstance(extra_lines, str) else extra_lines or ()
        parts = (generate_latest(registry).decode() for registry in (self._registry, self._histogram_registry))
        return "".join((*(f"{line.rstrip()}\n" for line in lines), *parts))

    def _on_end(self, request: ScheduledRequest) -> None:
        self._outcome(request.state.value, request.outcome_reason)
        if request.dispatched_at is not None:
            self._prompt_total.inc(request.prompt_tokens)
        if request.state is RequestState.DONE and request.result is not None:
            tokens = len(request.result.token_ids)
            self._request_s.observe(_span(request.queued_at, request.completed_at))
            self._dispatch_s.observe(_span(request.dispatched_at, request.completed_at))
            self._prompt_tokens.observe(request.prompt_tokens)
            self._output_tokens.observe(tokens)
            if request.first_token_at is not None and tokens > 1:
                self._per_token_s.observe(_span(request.first_token_at, request.last_token_at) / (tokens - 1))

    def _outcome(self, outcome: str, reason: str) -> None:
        self._requests.labels(outcome, reason if reason in OUTCOMES[outcome] else "other").inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tinyloop_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(f"tinyloop_{name}", text, buckets=buckets, registry=self._histogram_registry)


class _Registry(CollectorRegistry):
    """Leaves out the `_created` series, which the library can switch off for the whole process only."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


class _StateCollector(Collector):
    """Gauges as they are at the moment of the scrape."""

    def __init__(self, read: Callable[[], Gauges]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()  # else registering would read the state of a scheduler that is still being built

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        ema = math.nan if now.ema_dispatch_seconds is None else now.ema_dispatch_seconds
        yield _gauge("queue_depth", "Requests that wait.", now.queue_depth)
        yield _gauge("in_flight", "Requests that run.", now.in_flight)
        yield _gauge("ema_dispatch_seconds", "Moving average of dispatch to done; NaN before the first.", ema)
        yield _gauge("prefix_pool_entries", "Registered prefixes.", now.prefix_pool_entries)
        yield _gauge("prefix_pool_tokens", "Tokens of registered prefixes.", now.prefix_pool_tokens)
        yield _gauge("kv_usage_ratio", "Part of the KV pages in use, 0 to 1.", now.kv_usage_ratio)
        yield _gauge("draining", "1 while no new work is taken.", now.draining)
        yield _gauge("engine_healthy", "1 while the engine and the dispatcher work.", now.engine_healthy)
        yield _info("cache_config", "KV pages.", {"page_size": str(now.page_size), "num_pages": str(now.num_pages)})
        yield _info("build", "Versions.", {"version": _version(), "python": platform.python_version()})


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tinyloop_{name}", text, value=float(value))


def _info(name: str, text: str, labels: dict[str, str]) -> Metric:
    return InfoMetricFamily(f"tinyloop_{name}", text, value=labels)


@cache
def _version() -> str:
    try:
        return version("tinyloop")
    except PackageNotFoundError:
        return "unknown"


def _span(start: float | None, end: float | None) -> float:
    assert start is not None
    assert end is not None
    return end - start
