"""The exposition text: every name of the contract, one outcome per arrival, nothing a client can choose."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.metrics import OUTCOMES, Gauges, Metrics
from server.request import RequestState, ScheduledRequest
from server.types import GenerationChunk, GenerationRequest, GenerationResult
from tests.fakes import Clock

GAUGES = [
    "queue_depth",
    "in_flight",
    "ema_dispatch_seconds",
    "prefix_pool_entries",
    "prefix_pool_tokens",
    "kv_usage_ratio",
    "draining",
    "engine_healthy",
]
INFOS = {"cache_config_info": {"page_size", "num_pages"}, "build_info": {"version", "python"}}
COUNTERS = {
    "requests_total": {"outcome", "reason"},
    "prompt_tokens_total": set(),
    "generated_tokens_total": set(),
    "loops_total": set(),
    "prefix_lookup_tokens_total": set(),
    "prefix_hit_tokens_total": {"depth"},
    "preemptions_total": set(),
    "loop_downgrades_total": {"reason"},
    "aging_promotions_total": set(),
    "steps_total": set(),
}
HISTOGRAMS = [
    "queue_seconds",
    "time_to_first_token_seconds",
    "inter_token_seconds",
    "time_per_output_token_seconds",
    "request_seconds",
    "dispatch_seconds",
    "predicted_wait_seconds",
    "prediction_error_ratio",
    "step_seconds",
    "step_rows",
    "loops_per_token",
    "prompt_tokens",
    "output_tokens",
]

NOW = Gauges(
    queue_depth=3, in_flight=2, ema_dispatch_seconds=None, prefix_pool_entries=1, prefix_pool_tokens=9,
    kv_usage_ratio=0.25, draining=False, engine_healthy=True, page_size=16, num_pages=64,
)  # fmt: skip


def parse(text):
    """{sample name: {labels as a frozenset: value}}"""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return samples


def value(text, name, **labels):
    return parse(text)[f"tinyloop_{name}"][frozenset(labels.items())]


def outcomes(text):
    """{(outcome, reason): count} of those that happened"""
    counts = parse(text)["tinyloop_requests_total"]
    return {(dict(k)["outcome"], dict(k)["reason"]): int(v) for k, v in counts.items() if v}


def test_every_name_of_the_contract_is_there_from_the_start_with_its_labels():
    samples = parse(Metrics(lambda: NOW).text())
    labels = {name: {key for labels in series for key, _ in labels} for name, series in samples.items()}
    expected = {f"tinyloop_{name}": set() for name in GAUGES}
    expected |= {f"tinyloop_{name}": keys for name, keys in (INFOS | COUNTERS).items()}
    for name in HISTOGRAMS:
        expected |= {f"tinyloop_{name}_bucket": {"le"}, f"tinyloop_{name}_sum": set(), f"tinyloop_{name}_count": set()}
    assert labels == expected


def test_no_created_series():
    assert "_created" not in Metrics(lambda: NOW).text()


def test_times_have_buckets_down_to_a_millisecond():
    samples = parse(Metrics(lambda: NOW).text())
    for name in HISTOGRAMS:
        if name.endswith("_seconds"):
            bounds = [float(dict(labels)["le"]) for labels in samples[f"tinyloop_{name}_bucket"]]
            assert min(bounds) == 0.001


def test_gauges_are_read_when_asked_for():
    state = [NOW]
    metrics = Metrics(lambda: state[0])
    assert value(metrics.text(), "queue_depth") == 3
    assert math.isnan(value(metrics.text(), "ema_dispatch_seconds"))
    state[0] = Gauges(**(vars(NOW) | {"queue_depth": 0, "ema_dispatch_seconds": 0.5, "draining": True}))
    assert value(metrics.text(), "queue_depth") == 0
    assert value(metrics.text(), "ema_dispatch_seconds") == 0.5
    assert value(metrics.text(), "draining") == 1
    assert value(metrics.text(), "cache_config_info", page_size="16", num_pages="64") == 1


def test_extra_lines_come_first():
    metrics = Metrics(lambda: NOW)
    plain = metrics.text()
    assert metrics.text(["up 1", "other 2\n"]) == "up 1\nother 2\n" + plain
    assert metrics.text("up 1\nother 2") == "up 1\nother 2\n" + plain


def test_two_schedulers_do_not_share_counts():
    one, other = Metrics(lambda: NOW), Metrics(lambda: NOW)
    one.on_rejected("slo")
    assert outcomes(one.text()) == {("rejected", "slo"): 1}
    assert outcomes(other.text()) == {}


def request_of(metrics, clock, prompt=(1, 2, 3)):
    return ScheduledRequest(req=GenerationRequest(prompt), streaming=True, clock=clock, on_move=metrics.on_move)


async def test_a_finished_request_is_seen_in_every_histogram_of_its_life():
    metrics, clock = Metrics(lambda: NOW), Clock()
    request = request_of(metrics, clock)
    clock.advance(1)
    request.move(RequestState.DISPATCHED)
    for _ in range(3):
        clock.advance(2)
        request.emit(GenerationChunk(1, "a"))
    clock.advance(1)
    request.move(RequestState.DONE, reason="length", result=GenerationResult((1, 1, 1), prompt_tokens=3))
    sums = {name: value(metrics.text(), f"{name}_sum") for name in HISTOGRAMS}
    expected = {
        "queue_seconds": 1,
        "time_to_first_token_seconds": 3,
        "time_per_output_token_seconds": 2,
        "request_seconds": 8,
        "dispatch_seconds": 7,
        "prompt_tokens": 3,
        "output_tokens": 3,
    }
    assert {name: total for name, total in sums.items() if total} == expected
    assert value(metrics.text(), "prompt_tokens_total") == 3
    assert outcomes(metrics.text()) == {("done", "length"): 1}


@pytest.mark.parametrize(
    ("state", "reason"), [(RequestState.CANCELLED, "client"), (RequestState.CANCELLED, "shutdown"),
                          (RequestState.ERROR, "engine"), (RequestState.ERROR, "internal")]
)  # fmt: skip
async def test_an_aborted_request_is_counted_by_its_reason(state, reason):
    metrics = Metrics(lambda: NOW)
    request_of(metrics, Clock()).move(state, reason=reason)
    assert outcomes(metrics.text()) == {(state.value, reason): 1}


def test_a_reason_from_outside_never_becomes_a_label():
    metrics = Metrics(lambda: NOW)
    metrics.on_rejected("x" * 1000)
    samples = parse(metrics.text())["tinyloop_requests_total"]
    assert {dict(labels)["reason"] for labels in samples} <= {r for reasons in OUTCOMES.values() for r in reasons} | {
        "other"
    }
    assert outcomes(metrics.text()) == {("rejected", "other"): 1}


def test_steps_tokens_and_prefixes_are_counted():
    metrics = Metrics(lambda: NOW)
    metrics.on_step(rows=5, seconds=0.5)
    metrics.on_token(loops=4, gap_s=None)
    metrics.on_token(loops=2, gap_s=0.25)
    metrics.on_answer(10)
    metrics.on_prefix_lookup(8, hit=3)
    text = metrics.text()
    assert [value(text, name) for name in ("steps_total", "loops_total", "generated_tokens_total")] == [1, 5, 12]
    assert [value(text, f"{name}_sum") for name in ("step_rows", "step_seconds", "loops_per_token")] == [5, 0.5, 6]
    assert (value(text, "inter_token_seconds_count"), value(text, "inter_token_seconds_sum")) == (1, 0.25)
    assert value(text, "prefix_lookup_tokens_total") == 8
    assert value(text, "prefix_hit_tokens_total", depth="exact") == 3
