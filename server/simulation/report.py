"""Report: what became of a simulated trace, as numbers, a Markdown table and JSON. A frozen value."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from server.simulation.costs import ModelFacts
from server.simulation.recorder import Recorder, Series

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Quantiles:
    """Seconds. NaN where there was nothing to measure."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Floats) -> Quantiles:
        return cls(*(float(q) for q in np.quantile(values, (0.5, 0.9, 0.99)))) if len(values) else cls(*[math.nan] * 3)


@dataclass(frozen=True)
class Timeline:
    """Slices of `width` seconds. Latency and loops by time of arrival; queue and KV as means over the slice."""

    width: float
    p50_s: tuple[float, ...]
    p99_s: tuple[float, ...]
    loops: tuple[float, ...]
    queue: tuple[float, ...]
    kv: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Latencies and loops are those of the requests that were done. `wall_s` is virtual, from the first arrival to the
    last end. `goodput` is the share of all arrivals that were done with their first token within the SLO (done at all,
    without one); who was refused was not."""

    model: str
    replicas: int
    slo_ms: float | None
    requests: int
    done: int
    refused: dict[str, int]
    wall_s: float
    requests_per_s: float
    tokens_per_s: float
    first_token: Quantiles
    inter_token: Quantiles
    total: Quantiles
    goodput: float
    loops_asked: float
    loops_granted: float
    asked: dict[int, int]
    granted: dict[int, int]
    degraded: float
    downgrades: dict[str, int]
    kv_peak: float
    kv_mean: float
    kv_peak_bytes: int
    preemptions: int
    steps: int
    prediction_error: float
    timeline: Timeline

    @classmethod
    def of(cls, recorder: Recorder, model: ModelFacts, *, slo_ms: float | None, replicas: int) -> Report:
        first, total = np.array(recorder.first_token_s), np.array(recorder.total_s)
        asked, granted = np.array(recorder.asked), np.array(recorder.granted)
        wall, pages = recorder.last_at, model.num_pages * replicas
        good = len(first) if slo_ms is None else int((first * 1000 <= slo_ms).sum())
        return cls(
            model=model.name,
            replicas=replicas,
            slo_ms=slo_ms,
            requests=recorder.arrivals,
            done=recorder.done,
            refused=dict(recorder.refused),
            wall_s=wall,
            requests_per_s=recorder.done / wall if wall else 0.0,
            tokens_per_s=recorder.tokens / wall if wall else 0.0,
            first_token=Quantiles.of(first),
            inter_token=Quantiles(*(recorder.gaps.quantile(share) for share in (0.5, 0.9, 0.99))),
            total=Quantiles.of(total),
            goodput=good / recorder.arrivals,
            loops_asked=_mean(asked),
            loops_granted=_mean(granted),
            asked=_counts(asked),
            granted=_counts(granted),
            degraded=_mean(granted < asked),
            downgrades=dict(recorder.downgrades),
            kv_peak=recorder.pages_peak / model.num_pages,
            kv_mean=sum(recorder.pages.sums) / (wall * pages) if wall else 0.0,
            kv_peak_bytes=recorder.pages_peak * model.page_bytes,
            preemptions=recorder.preemptions,
            steps=recorder.steps,
            prediction_error=float(np.median(recorder.errors)) if recorder.errors else math.nan,
            timeline=_timeline(recorder, pages),
        )

    def to_json(self) -> str:
        """NaN, where nothing was measured, becomes null. The timeline is in the picture, not here."""
        values = {name: value for name, value in asdict(self).items() if name != "timeline"}
        return json.dumps(_without_nan(values), indent=1)

    def table(self) -> str:
        """Markdown."""
        rows = [
            ("requests", f"{self.requests} ({self.done} done, {_listed(self.refused)} refused)"),
            ("virtual time", f"{self.wall_s:.1f} s on {self.replicas} server{'s' * (self.replicas != 1)}"),
            ("done per second", f"{self.requests_per_s:.2f} requests, {self.tokens_per_s:.1f} tokens"),
            ("goodput", f"{self.goodput:.1%}" + ("" if self.slo_ms is None else f" within {self.slo_ms:g} ms")),
            ("loops", f"{self.loops_asked:.2f} asked, {self.loops_granted:.2f} granted, {self.degraded:.1%} lowered"),
            ("asked", ", ".join(f"{loops}: {count}" for loops, count in self.asked.items())),
            ("granted", ", ".join(f"{loops}: {count}" for loops, count in self.granted.items())),
            ("KV pages", f"{self.kv_mean:.1%} mean, {self.kv_peak:.1%} peak of a server ({self._peak_mib:.0f} MiB)"),
            ("yields", f"{self.preemptions}"),
            ("prediction error", f"{self.prediction_error:.0%} median"),
        ]
        times = [("first token", self.first_token), ("between tokens", self.inter_token), ("whole answer", self.total)]
        return "\n".join(
            [
                f"| {self.model} | |\n|---|---|",
                *(f"| {name} | {text} |" for name, text in rows),
                "\n| ms | p50 | p90 | p99 |\n|---|---|---|---|",
                *(f"| {name} | {q.p50 * 1000:.0f} | {q.p90 * 1000:.0f} | {q.p99 * 1000:.0f} |" for name, q in times),
            ]
        )

    @property
    def _peak_mib(self) -> float:
        return self.kv_peak_bytes / (1 << 20)


def _timeline(recorder: Recorder, pages: int) -> Timeline:
    width = recorder.queue.width
    slices = int(recorder.last_at / width) + 1
    at = (np.array(recorder.arrived_at) / width).astype(int)
    order = np.argsort(at, kind="stable")
    edges = np.searchsorted(at[order], np.arange(1, slices))
    totals, granted = np.array(recorder.total_s)[order], np.array(recorder.granted)[order]
    parts = np.split(totals, edges)
    return Timeline(
        width,
        p50_s=tuple(_quantile(part, 0.5) for part in parts),
        p99_s=tuple(_quantile(part, 0.99) for part in parts),
        loops=tuple(_mean(part) for part in np.split(granted, edges)),
        queue=_means(recorder.queue, slices, 1.0),
        kv=_means(recorder.pages, slices, pages),
    )


def _means(series: Series, slices: int, whole: float) -> tuple[float, ...]:
    sums = (series.sums + [0.0] * slices)[:slices]
    return tuple(value / series.width / whole for value in sums)


def _quantile(values: Floats, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else math.nan


def _mean(values: NDArray[np.generic]) -> float:
    return float(values.astype(float).mean()) if len(values) else math.nan


def _counts(values: NDArray[np.generic]) -> dict[int, int]:
    return dict(sorted(Counter(values.tolist()).items()))


def _listed(counts: dict[str, int]) -> str:
    return " + ".join(f"{count} {reason}" for reason, count in sorted(counts.items())) or "0"


def _without_nan(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nan(one) for name, one in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
