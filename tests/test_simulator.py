"""The simulator: the server's own rules on virtual time; by hand, against itself and against the real engine."""

import gzip
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from server.admission import Admission
from server.cli_capacity import add_commands, parse_policy
from server.depth import DepthCeilings
from server.dispatcher import Dispatcher
from server.door import Door
from server.engine import Engine
from server.metrics import Metrics
from server.policy import DispatchMode, Policy
from server.simulation.calibrate import calibrate, facts_of
from server.simulation.costs import KNOTS, Load, ModelFacts, Part, Shape, StepCosts, Turn, shape_of
from server.simulation.engine import SimEngine
from server.simulation.fitting import Measured, fit, nnls
from server.simulation.fleet import simulate
from server.simulation.plot import GAP, LEFT, PANEL, TOP, WIDTH, save_plot, svg
from server.simulation.recorder import Histogram, Recorder, Series
from server.simulation.replica import Clock, Replica, Server
from server.simulation.trace import Arrival, Choice, Trace, poisson, with_loops
from server.types import GenerationRequest
from tests.test_families import case_of
from tests.tiny_models import GREEDY, RETROFIT, tiny_model
from tinyloop.errors import TinyLoopError
from tinyloop.kv.prefix import PrefixPool

ROOT = Path(__file__).parent.parent
FACTS = ModelFacts("toy", 2, 2, 2, 4, 4000, 512, 2, 8, 64, 1000, 0.5)


def part(fixed: float, row: float) -> Part:
    return Part(fixed, (row / 4, row / 2, row / 2, row, row), fixed / 50, fixed / 20, row / 500, row / 5000)


COSTS = StepCosts(FACTS, Turn(4e-4, 2e-5, 1e-5), part(4e-3, 2e-4), part(5e-3, 3e-4), part(6e-3, 4e-4), part(3e-3, 1e-4))
THREE_STEPS_S = 0.08  # about: after a jump somebody may enter a few steps earlier or later
SECONDS = StepCosts(FACTS, Turn(1.0), Part(), Part(), Part(), Part())  # every step takes one second


def run(
    arrivals: list[Arrival], server: Server | None = None, costs: StepCosts = COSTS, *, jump: bool = True
) -> Recorder:
    recorder = Recorder()
    replica = Replica(costs, server or Server(), recorder, jump=jump)
    for arrival in arrivals:
        replica.run_until(arrival.at)
        replica.enter(arrival)
    replica.run_until(math.inf)
    assert not recorder.failed
    assert replica.engine.free == replica.engine.model.num_pages
    assert not replica.dispatcher.busy
    return recorder


def crowd(count: int = 30, rate: float = 4.0, answer: str = "1-80", loops: str = "2", seed: int = 1) -> list[Arrival]:
    arrivals = poisson(count, rate, Choice.parse("p", "3-90"), Choice.parse("a", answer), seed)
    return list(with_loops(arrivals, Choice.parse("l", loops), seed))


def latencies(recorder: Recorder) -> np.ndarray[Any, Any]:
    """Arrival to end, in order of arrival."""
    return np.array(recorder.total_s)[np.argsort(recorder.arrived_at, kind="stable")]


# Jumps


@pytest.mark.parametrize("loops", ["1", "2", "1-4"])
@pytest.mark.parametrize("mode", list(DispatchMode))
def test_a_jump_equals_step_by_step(mode: DispatchMode, loops: str) -> None:
    server = Server(policy=lambda: Policy(mode), max_queue_depth=1000)
    arrivals = crowd(loops=loops, rate=0.5 if mode is DispatchMode.SEQUENTIAL else 2.0)
    slow, quick = run(arrivals, server, jump=False), run(arrivals, server)
    assert (quick.tokens, quick.done) == (slow.tokens, slow.done) == (sum(a.answer for a in arrivals), len(arrivals))
    assert latencies(quick) == pytest.approx(latencies(slow), rel=0.01, abs=THREE_STEPS_S)
    assert quick.steps == pytest.approx(slow.steps, rel=0.01)
    assert quick.pages_peak == pytest.approx(slow.pages_peak, rel=0.02)
    assert sum(quick.pages.sums) == pytest.approx(sum(slow.pages.sums), rel=0.02)


def test_a_jump_equals_step_by_step_while_others_wait() -> None:
    server = Server(policy=lambda: Policy(max_running=3), max_queue_depth=1000)
    arrivals = crowd(rate=20.0)
    slow, quick = run(arrivals, server, jump=False), run(arrivals, server)
    assert latencies(quick) == pytest.approx(latencies(slow), rel=0.01, abs=THREE_STEPS_S)


def test_a_jump_equals_step_by_step_when_pages_run_out() -> None:
    costs = replace(COSTS, model=replace(FACTS, num_pages=230))
    slow, quick = (run(crowd(rate=20.0), Server(max_queue_depth=1000), costs, jump=jump) for jump in (False, True))
    assert slow.preemptions > 0
    assert quick.preemptions == slow.preemptions
    assert latencies(quick) == pytest.approx(latencies(slow), rel=0.01, abs=THREE_STEPS_S)


def test_jumps_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = SimEngine.advance

    def counting(engine: SimEngine, segments: Any) -> Any:
        calls.append(1)
        return real(engine, segments)

    monkeypatch.setattr(SimEngine, "advance", counting)
    recorder = run([Arrival(0.0, 10, 400, 2)])
    assert recorder.tokens == 400
    assert len(calls) < 40 < recorder.steps == 801


# By hand


def test_times_follow_from_steps() -> None:
    """Two steps for the prompt, the third makes the first token, every further token takes two."""
    recorder = run([Arrival(5.0, 10, 3, 2)], costs=SECONDS)
    assert list(recorder.first_token_s) == [3.0]
    assert list(recorder.total_s) == [7.0]
    assert recorder.gaps.quantile(0.5) == pytest.approx(2.0, rel=0.02)


def test_who_comes_during_a_step_enters_after_it() -> None:
    recorder = run([Arrival(0.0, 10, 3, 1), Arrival(0.5, 10, 1, 1)], costs=SECONDS)
    assert list(recorder.total_s) == [2.5, 4.0]


def test_a_full_queue_refuses_and_counts_against_goodput() -> None:
    arrivals = [Arrival(float(at), 10, 3, 2) for at in range(4)]
    server = Server(policy=lambda: Policy(max_running=1), max_queue_depth=1)
    report = simulate(SECONDS, arrivals, server)
    assert (report.requests, report.done, report.refused) == (4, 2, {"queue_full": 2})
    assert report.goodput == 0.5
    assert report.wall_s == 14.0


def test_a_first_token_after_the_slo_is_not_good() -> None:
    report = simulate(SECONDS, [Arrival(0.0, 10, 1, 2), Arrival(0.0, 10, 1, 4)], Server(slo_ms=4000.0))
    assert (report.done, report.goodput) == (2, 0.5)


def test_what_never_fits_is_refused() -> None:
    report = simulate(COSTS, [Arrival(0.0, 500, 100), Arrival(0.0, 10, 5), Arrival(0.1, 10, 5, 9)], Server())
    assert (report.done, report.refused) == (1, {"invalid": 2})


def test_pages_follow_depth_and_length() -> None:
    """4 tokens a page; prelude and coda take one row each, and each loop one."""
    recorder = run([Arrival(0.0, 6, 3, 3)])
    assert recorder.pages_peak == math.ceil(8 / 4) * (2 + 3)  # the last token needs no KV


# Rules


def test_every_arrival_has_one_outcome() -> None:
    for seed in range(3):
        arrivals = crowd(150, rate=200.0, loops="1-8", seed=seed)
        report = simulate(COSTS, arrivals, Server(max_queue_depth=20, slo_ms=1500.0, min_loops=2), replicas=2)
        assert report.requests == 150 == report.done + sum(report.refused.values())
        assert report.refused.keys() == {"slo", "queue_full"} or report.refused.keys() == {"slo"}
        assert sum(report.granted.values()) == report.done


def test_min_loops_are_kept_and_only_those_who_allow_it_are_lowered() -> None:
    arrivals = crowd(150, rate=100.0, loops="6")
    tight = Server(slo_ms=2000.0, max_queue_depth=1000)
    lowered = simulate(COSTS, arrivals, replace(tight, min_loops=2))
    assert 2 <= min(lowered.granted) < max(lowered.granted) == 6
    assert lowered.degraded > 0
    assert lowered.loops_granted < lowered.loops_asked == 6
    firm = simulate(COSTS, arrivals, tight)
    assert firm.granted.keys() == {6}
    assert firm.degraded == 0


def test_more_servers_serve_more() -> None:
    arrivals = crowd(90, rate=60.0)
    one, three = (simulate(COSTS, arrivals, Server(max_queue_depth=1000), replicas=n) for n in (1, 3))
    assert three.total.p99 < one.total.p99 / 2
    assert three.requests_per_s > one.requests_per_s


def test_the_same_seed_gives_the_same_report() -> None:
    first, again, other = (
        simulate(COSTS, crowd(loops="1-8", seed=seed), Server(min_loops=1, slo_ms=900.0)).to_json()
        for seed in (1, 1, 2)
    )
    assert first == again != other


# Against the real engine


def engine_of(kind: str, pages: int = 900) -> Engine:
    """Of a tiny model: loops with planes of their own, with a coda, in one plane, or over a prompt read both ways."""
    if kind in ("ouro", "llama"):
        changes: dict[str, Any] = {} if kind == "ouro" else {"tinyloop": RETROFIT}
        return Engine(tiny_model(kind, pages=pages, max_chunk=24, **changes))
    return Engine(case_of(kind).model(pages=pages, max_chunk=24))


@pytest.mark.parametrize("kind", ["ouro", "llama", "dory", "dory last_loop", "hrm_text prefix_lm"])
def test_the_simulated_engine_takes_the_steps_of_the_real_one(kind: str) -> None:
    engine = engine_of(kind)
    simulated = SimEngine(replace(COSTS, model=facts_of(engine)))
    assert _history(simulated, simulated.advance) == _history(engine, lambda s: _real_step(engine, s))


@pytest.mark.parametrize(("kind", "pages", "yields"), [("dory last_loop", 120, 2), ("hrm_text prefix_lm", 76, 0)])
def test_the_simulated_engine_runs_out_of_pages_when_the_real_one_does(kind: str, pages: int, yields: int) -> None:
    """No prefix is kept of these, so who yields reads everything again in either."""
    engine = engine_of(kind, pages)
    simulated = SimEngine(replace(COSTS, model=facts_of(engine)))
    expected = _history(engine, lambda s: _real_step(engine, s))
    assert _history(simulated, simulated.advance) == expected
    assert expected[-1][-1] == yields
    assert min(available for *_, available, _ in expected) < 10


@pytest.mark.parametrize("kind", ["ouro", "llama", "dory", "dory last_loop", "hrm_text prefix_lm"])
@pytest.mark.parametrize("moment", [1, 8, 30])
def test_who_yields_reads_the_answer_again_as_in_the_real_engine(kind: str, moment: int) -> None:
    engine = engine_of(kind)
    simulated = SimEngine(replace(COSTS, model=facts_of(engine)))
    req = GenerationRequest(list(range(40)), max_new_tokens=14, loops=3, sampling=GREEDY)
    seen: list[list[Any]] = []
    for one, step in ((engine, engine.runner.step), (simulated, simulated.advance)):
        lease = one.admit(one.prepare(req), None)
        assert lease is not None
        seen.append([])
        while not lease.finish_reason:
            if len(seen[-1]) == moment:
                one.suspend(lease)
                assert one.resume(lease)
            seen[-1].append([(s.start, s.rows, s.loop, s.loops, s.whole) for s in one.ready()])
            step(one.ready())
        one.release(lease)
    assert seen[0] == seen[1]


def test_a_depth_in_one_plane_costs_no_pages() -> None:
    facts = facts_of(engine_of("dory last_loop"))
    assert (facts.one_plane, facts.whole_prompt) == (True, True)
    assert facts.layout.rows(8) == facts.layout.rows(1) < replace(facts, one_plane=False).layout.rows(8)


def _real_step(engine: Engine, segments: list[Any]) -> tuple[Any, float]:
    """The real step, as if it had taken the seconds of COSTS."""
    shape = shape_of(segments, engine.model.config.layout, engine.runner.page_size)
    outside = COSTS.boundary_seconds(shape)
    seconds = COSTS.core.seconds(shape.core) + outside
    report = engine.runner.step(segments)
    assert (report.rows, len(report.tokens)) == (shape.core.rows, shape.heads)
    return replace(report, seconds=seconds, boundary_seconds=outside), COSTS.seconds(shape)


def _history(engine: Any, step: Callable[[list[Any]], tuple[Any, float]]) -> list[tuple[Any, ...]]:
    """What every step did, for a crowd of all depths."""
    clock, policy, pool = Clock(), Policy(row_budget=48), PrefixPool(0)
    admission = Admission(max_queue_depth=99, default_slo_ms=None, ema_alpha=0.2, sequential=False, clock=clock)
    metrics: Any = Recorder()
    dispatcher = Dispatcher(engine, policy, admission, metrics, pool, clock)
    door = Door(dispatcher, DepthCeilings(None, clock), clock)
    rng, history = random.Random(3), []
    for number in range(400):
        if number % 9 == 0 and number < 150:
            prompt = [number, *(rng.randrange(256) for _ in range(rng.randint(2, 60)))]  # no two begin alike
            req = GenerationRequest(prompt, max_new_tokens=rng.randint(1, 12), loops=rng.randint(1, 4), sampling=GREEDY)
            door.enter(req, 0, None, streaming=True)
        if not (segments := dispatcher.plan()):
            continue
        report, seconds = step(segments)
        clock.now += seconds
        dispatcher.complete(segments, report, seconds)
        done = report.rows, report.boundary_rows, len(report.tokens), len(report.finished), round(clock.now, 9)
        history.append((*done, engine.usage().available, metrics.preemptions))
    assert not dispatcher.busy
    return history


def test_calibrating_a_tiny_model_gives_costs_that_last(tmp_path: Path) -> None:
    lines: list[str] = []
    costs = calibrate(Engine(tiny_model(pages=600)), seconds=0.01, say=lines.append)
    assert costs.turn.fixed > 0
    assert costs.core.by_rows(1) > 0
    assert costs.core.by_rows(200) > costs.core.by_rows(1)
    assert 0 < costs.error < 2
    assert "steps measured" in lines[0]
    costs.save(tmp_path / "costs.json")
    assert StepCosts.load(tmp_path / "costs.json") == costs


# Fitting


def _random_shapes(count: int, seed: int = 0) -> list[Shape]:
    rng = random.Random(seed)

    def load() -> Load:
        segments = rng.randint(0, 40)
        rows = sum(rng.choice((1, 1, 1, rng.randint(2, 100))) for _ in range(segments))
        keys = rng.randint(segments, 1000 * segments + 1)
        return Load(rows, segments, rng.randint(1, segments), keys, keys * rng.randint(1, 9)) if segments else Load()

    return [Shape(rng.randint(1, 60), load(), load(), load(), rng.randint(0, 40)) for _ in range(count)]


def test_the_fit_finds_known_costs() -> None:
    measured = [
        Measured(s, COSTS.seconds(s), COSTS.seconds(s) - COSTS.turn.seconds(s), COSTS.boundary_seconds(s))
        for s in _random_shapes(600)
    ]
    found = fit(FACTS, measured)
    assert found.error < 1e-3
    for shape in _random_shapes(50, seed=1):
        assert found.seconds(shape) == pytest.approx(COSTS.seconds(shape), rel=0.01)
        assert found.boundary_seconds(shape) == pytest.approx(COSTS.boundary_seconds(shape), rel=0.01)
    assert found.core.fixed == pytest.approx(COSTS.core.fixed, rel=0.02)
    assert found.turn.fixed == pytest.approx(COSTS.turn.fixed, rel=0.02)


def test_the_fit_meets_the_mean_of_noisy_steps() -> None:
    rng, shape = random.Random(0), Shape(1, Load(1, 1, 1, 9, 9), Load(), Load(), 0)
    seconds = [rng.choice((1.0, 1.0, 1.0, 5.0)) for _ in range(400)]
    found = fit(FACTS, [Measured(shape, s, s, 0.0) for s in seconds])
    assert found.seconds(shape) == pytest.approx(sum(seconds) / 400, rel=0.02)


def test_nnls_keeps_to_what_is_allowed() -> None:
    a = np.random.default_rng(0).normal(size=(50, 4))
    assert nnls(a, a @ [1.0, 2.0, 0.5, 3.0]) == pytest.approx([1.0, 2.0, 0.5, 3.0])
    bounded = nnls(a, a @ [1.0, -2.0, 0.5, 0.0])
    assert bounded.min() == 0.0
    slope = a.T @ (a @ bounded - a @ [1.0, -2.0, 0.5, 0.0])
    assert (slope > -1e-6).all()
    assert slope[bounded > 0] == pytest.approx(0.0, abs=1e-6)


def test_costs_by_rows_are_piecewise_linear() -> None:
    one = part(1.0, 0.4)
    assert one.by_rows(0) == 0
    assert one.by_rows(2) == pytest.approx(1.2)
    assert one.by_rows(KNOTS[3] + 10) == pytest.approx(1 + 0.2 + 0.2 * 30 + 0.4 * 10)
    assert one.by_rows(5000) > one.by_rows(1023) > one.by_rows(1022)


# Files


def test_traces_are_read_scaled_and_repeated(tmp_path: Path) -> None:
    azure, mooncake = tmp_path / "a.csv", tmp_path / "m.jsonl.gz"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.6805900,9,1\n"
    )
    rows = [{"timestamp": 0, "input_length": 374, "output_length": 44, "hash_ids": [1]},
            {"timestamp": 2000, "input_length": 9, "output_length": 1, "hash_ids": []}]  # fmt: skip
    mooncake.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    assert Trace.read(azure) == Trace.read(mooncake) == Trace((0.0, 2.0), (374, 9), (44, 1))
    trace = Trace.read(azure)
    assert [*trace.arrivals(scale=10, speedup=2)] == [(0.0, 37, 4, None), (1.0, 1, 1, None)]
    assert [a.at for a in trace.arrivals(4, rate=1.0)] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,3,4\n"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,0,4\n"),
        ("a.csv", ""),
        ("a.jsonl", "{}\n"),
        ("a.jsonl", '{"timestamp": 0, "input_length'),
        ("a.jsonl", "[1]\n"),
        ("a.jsonl.gz", "not gzip"),
    ],
)
def test_a_broken_trace_gets_one_clear_error(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TinyLoopError, match=name):
        Trace.read(tmp_path / name)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: "nonsense",
        lambda raw: [],
        lambda raw: {**raw, "version": 99},
        lambda raw: {**raw, "core": {**raw["core"], "fixed": -1}},
        lambda raw: {**raw, "core": {**raw["core"], "slopes": [1, 2]}},
        lambda raw: {**raw, "core": {**raw["core"], "more": 1}},
        lambda raw: {**raw, "turn": None},
        lambda raw: {**raw, "model": {**raw["model"], "page_size": 0}},
        lambda raw: {**raw, "model": {**raw["model"], "one_plane": 1}},
        lambda raw: {**raw, "model": {**raw["model"], "whole_prompt": "yes"}},
        lambda raw: {name: value for name, value in raw.items() if name != "head"},
        lambda raw: {**raw, "head": {**raw["head"], "fixed": math.nan}},
    ],
)
def test_a_broken_cost_file_gets_one_clear_error(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    path = tmp_path / "costs.json"
    COSTS.save(path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(TinyLoopError, match=r"costs\.json"):
        StepCosts.load(path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    for read in (StepCosts.load, Trace.read):
        with pytest.raises(TinyLoopError, match="nowhere"):
            read(tmp_path / "nowhere.json")


def test_choices_draw_what_they_say() -> None:
    rng = random.Random(0)
    assert {Choice.parse("x", "3").draw(rng) for _ in range(9)} == {3}
    assert {Choice.parse("x", "1-4").draw(rng) for _ in range(99)} == {1, 2, 3, 4}
    weighted = [Choice.parse("x", "1:9,2-3:1").draw(rng) for _ in range(1000)]
    assert 850 < weighted.count(1) < 950
    for wrong in ("", "0", "4-1", "a", "1:0", "1,,2"):
        with pytest.raises(TinyLoopError, match="--loops"):
            Choice.parse("--loops", wrong)


# What is told


def test_histogram_and_series_keep_what_they_are_given() -> None:
    histogram, series = Histogram(), Series(2.0)
    for value in range(1, 1001):
        histogram.add(float(value))
    assert histogram.quantile(0.99) == pytest.approx(990, rel=0.02)
    assert math.isnan(Histogram().quantile(0.5))
    series.add_span(5.0, 4.5, 2.0)
    assert series.sums == pytest.approx([3.0, 4.0, 2.0])


def test_a_report_is_told_as_table_json_and_picture(tmp_path: Path) -> None:
    report = simulate(COSTS, crowd(loops="1-4"), Server(slo_ms=800.0, min_loops=1), replicas=2)
    assert "| requests | 30 (" in report.table()
    assert json.loads(report.to_json())["requests"] == 30
    assert ElementTree.fromstring(svg(report)).tag.endswith("svg")
    assert "nan" not in svg(report)
    points = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", svg(report))
    assert len(points) > 20
    assert all(LEFT <= float(x) <= WIDTH and 0 <= float(y) <= 4 * (PANEL + GAP) + TOP for x, y in points)
    with pytest.raises(TinyLoopError, match="svg"):
        save_plot(report, tmp_path / "x.png")


def test_a_report_without_answers_can_be_told() -> None:
    report = simulate(COSTS, [Arrival(0.0, 600, 1)], Server())
    assert report.goodput == 0
    assert json.loads(report.to_json())["total"]["p50"] is None
    assert ElementTree.fromstring(svg(report)).tag.endswith("svg")


def test_the_recorder_hears_all_that_the_metrics_hear() -> None:
    """Both stand behind the dispatcher. An engine that only generates is not simulated, nor is a door that refuses."""
    heard = {name for name in vars(Metrics) if name.startswith("on_")} - {"on_answer", "on_rejected"}
    assert heard <= vars(Recorder).keys()


# The command line


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Any]:
    cli = typer.Typer()
    add_commands(cli, lambda name, **options: Engine(tiny_model()))
    COSTS.save(tmp_path / "costs.json")

    def call(*words: object) -> Any:
        return CliRunner().invoke(cli, [*map(str, words)])

    return call


def test_the_command_simulates_and_writes(command: Callable[..., Any], tmp_path: Path) -> None:
    files = ["--costs", tmp_path / "costs.json", "--plot", tmp_path / "p.svg", "--json", tmp_path / "r.json"]
    load = [
        "--rate",
        5,
        "--requests",
        40,
        "--prompt",
        "4-60",
        "--answer",
        9,
        "--loops",
        "1-4",
        "--policy",
        "continuous,row_budget=64",
    ]
    done = command("simulate", *files, *load)
    assert done.exit_code == 0, done.output
    assert "| goodput | 100.0% |" in done.output
    assert json.loads((tmp_path / "r.json").read_text())["done"] == 40
    assert (tmp_path / "p.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    "words",
    [
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--rate", "1", "--replicas", "0"],
        ["--rate", "1", "--loops", "9"],
        ["--rate", "1", "--policy", "fastest"],
        ["--rate", "1", "--policy", "continuous,row_budget=x"],
        ["--rate", "1", "--policy", "continuous,aging=0"],
        ["--rate", "1", "--policy", "continuous,speed=1"],
        ["--rate", "1", "--prompt", "0"],
        [],
    ],
)
def test_a_wrong_option_is_named(command: Callable[..., Any], tmp_path: Path, words: list[str]) -> None:
    error = command("simulate", "--costs", tmp_path / "costs.json", *words).exception
    assert isinstance(error, TinyLoopError)
    assert (words[-2] if words else "--rate") in str(error)


def test_policies_are_parsed() -> None:
    policy = parse_policy("interleaved,row_budget=7,aging=2.5,max_running=none")
    assert (policy.mode, policy.row_budget, policy.aging, policy.max_running) == ("interleaved", 7, 2.5, None)
    assert parse_policy("continuous", max_running=3).limit == 3


def test_the_simulator_does_not_load_torch() -> None:
    names = [f"server.simulation.{path.stem}" for path in (ROOT / "server" / "simulation").glob("[a-z]*.py")]
    code = f"import sys, server.cli_capacity, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
