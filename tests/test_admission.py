"""The gates, the seed's formula, the work predictor, and what they learn from."""

from types import SimpleNamespace

import pytest

from server.admission import Admission, Ask, Ema
from server.cost import HALF_LIFE_S, Line, StepCost
from server.errors import AdmissionRejected, QueueFullError
from server.request import RequestState, ScheduledRequest
from server.types import GenerationRequest, GenerationResult
from tests.fakes import Clock
from tinyloop.sequence import StepReport


def gates(sequential=True, **more):
    settings = {"max_queue_depth": 2, "default_slo_ms": None, "ema_alpha": 0.2, "clock": Clock()} | more
    return Admission(sequential=sequential, **settings)


ASK = Ask(0, 1)


def request_of(admission, clock, work=0, answer=0, priority=0):
    plan = SimpleNamespace(prefill_loops=1)
    prepared = SimpleNamespace(prompt=(1,), plan=plan, prompt_work=work, answer_work=answer, boundary=0)
    request = ScheduledRequest(
        req=GenerationRequest("x"), streaming=True, clock=clock, on_move=admission.on_move, prepared=prepared,
        priority=priority,
    )  # fmt: skip
    admission.enter(request)
    return request


def run(admission, clock, seconds, end=RequestState.DONE):
    request = request_of(admission, clock)
    request.move(RequestState.DISPATCHED)
    clock.advance(seconds)
    request.move(end, **({"result": GenerationResult()} if end is RequestState.DONE else {}))


def test_the_first_sample_sets_the_average_and_later_ones_pull_at_it():
    ema = Ema(0.2)
    assert ema.value is None
    ema.add(100)
    assert ema.value == 100
    ema.add(200)
    assert ema.value == pytest.approx(120)


@pytest.mark.parametrize("alpha", [0, -1, 1.1, float("nan")])
def test_alpha_is_checked(alpha):
    with pytest.raises(ValueError, match="ema_alpha"):
        Ema(alpha)


def test_the_queue_gate_closes_at_the_cap():
    admission = gates(max_queue_depth=2)
    admission.check_depth(1)
    with pytest.raises(QueueFullError):
        admission.check_depth(2)


@pytest.mark.parametrize("depth", [0, 1, 7])
def test_the_seeds_formula_exactly(depth):
    admission = gates()
    admission.ema_dispatch_ms.add(250.0)
    predicted = (depth + 1) * 250.0
    assert admission.check_wait(predicted, depth, 1, ASK) == predicted  # equal is not beyond
    with pytest.raises(AdmissionRejected) as caught:
        admission.check_wait(predicted - 1, depth, 1, ASK)
    assert caught.value.predicted_wait_ms == predicted
    assert caught.value.reason == str(caught.value)


def test_nothing_in_flight_or_nothing_measured_predicts_nothing():
    admission = gates()
    assert admission.check_wait(1, 5, 1, ASK) is None
    admission.ema_dispatch_ms.add(250.0)
    assert admission.check_wait(1, 5, 0, ASK) is None


def test_the_calls_slo_beats_the_servers():
    admission = gates(default_slo_ms=100)
    admission.ema_dispatch_ms.add(250.0)
    with pytest.raises(AdmissionRejected):
        admission.check_wait(None, 0, 1, ASK)
    assert admission.check_wait(1000, 0, 1, ASK) == 250


async def test_only_finished_requests_feed_the_average():
    clock = Clock()
    admission = gates(clock=clock)
    run(admission, clock, 9, RequestState.CANCELLED)
    run(admission, clock, 9, RequestState.ERROR)
    assert admission.ema_dispatch_ms.value is None
    run(admission, clock, 1)
    run(admission, clock, 2)
    assert admission.ema_dispatch_ms.value == pytest.approx(1200)


async def test_the_queue_is_not_part_of_the_dispatch_latency():
    clock = Clock()
    admission = gates(clock=clock)
    request = request_of(admission, clock)
    clock.advance(100)
    request.move(RequestState.DISPATCHED)
    clock.advance(1)
    request.move(RequestState.DONE, result=GenerationResult())
    assert admission.ema_dispatch_ms.value == 1000


# What steps cost


def step(rows, boundary_rows=0.0, boundary_seconds=0.0, leaving=1):
    return StepReport(rows=rows, boundary_rows=boundary_rows, boundary_seconds=boundary_seconds, leaving=leaving)


def test_the_fixed_part_and_the_part_per_row_are_told_apart():
    line = Line()
    for rows in (1, 8, 64, 512):
        line.add(rows, 0.01 + 0.002 * rows)
    assert (line.fixed, line.per_row) == (pytest.approx(0.01), pytest.approx(0.002))


def test_with_one_size_of_step_all_of_it_is_per_row():
    line = Line()
    for _ in range(5):
        line.add(10, 0.5)
    assert (line.fixed, line.per_row) == (pytest.approx(0), pytest.approx(0.05))


def test_neither_part_is_negative():
    line = Line()
    line.add(1, 1.0)
    line.add(100, 0.1)
    assert line.fixed >= 0
    assert line.per_row >= 0
    assert Line().seconds(9) == 0


def test_old_steps_fade():
    clock = Clock()
    cost = StepCost(clock)
    assert cost.rate is None
    cost.add(step(100), 1.0)
    assert cost.rate == 100
    clock.advance(HALF_LIFE_S)
    cost.add(step(100), 0.5)
    assert cost.rate == pytest.approx(150 / 1.0)
    clock.advance(100 * HALF_LIFE_S)
    cost.add(step(10), 1.0)
    assert cost.rate == pytest.approx(10)


def test_the_boundary_is_measured_apart_from_the_core():
    cost = StepCost(Clock())
    for rows in (1, 2, 3):
        cost.add(step(rows, boundary_rows=rows, boundary_seconds=0.4 + 0.1 * rows), 0.5 + 0.3 * rows)
    assert cost.boundary.fixed == pytest.approx(0.4)
    assert cost.core.seconds(10) == pytest.approx(0.1 + 0.2 * 10)
    assert cost.boundary_in_steps == pytest.approx(0.4 / 0.1)
    cost.add(step(2, boundary_rows=50, boundary_seconds=0.01, leaving=0), 0.51)
    assert cost.boundary_in_steps == pytest.approx(0.4 / 0.1, rel=1e-3), "who only enters does not count"


# The work predictor


def measured(admission, fixed=0.0, per_row=0.01):
    for rows in (1, 100):
        admission.work.cost.add(step(rows), fixed + per_row * rows)


async def test_prompts_ahead_and_ones_own_are_the_wait():
    clock = Clock()
    admission = gates(sequential=False, clock=clock)
    first = request_of(admission, clock, work=300)
    assert admission.check_wait(1, 1, 0, ASK) is None, "no step was measured yet"
    measured(admission)
    assert admission.check_wait(None, 1, 0, ASK) == pytest.approx(3000, rel=0.01)
    assert admission.check_wait(None, 1, 0, Ask(100, 1)) == pytest.approx(4000, rel=0.01)
    first.move(RequestState.DISPATCHED)
    admission.progress(first, 200, prompt=True)
    assert admission.check_wait(None, 0, 1, ASK) == pytest.approx(1000, rel=0.05)
    second = request_of(admission, clock, work=50)
    assert admission.check_wait(None, 1, 1, ASK) == pytest.approx(1500, rel=0.05)
    with pytest.raises(AdmissionRejected):
        admission.check_wait(1400, 1, 1, ASK)
    for request in (first, second):
        request.move(RequestState.CANCELLED)
    assert admission.work.ahead == 0


async def test_answers_under_way_slow_a_prompt_but_are_not_waited_for():
    clock = Clock()
    admission = gates(sequential=False, clock=clock)
    measured(admission, fixed=0.01, per_row=0.001)
    request_of(admission, clock, answer=10_000).move(RequestState.DISPATCHED)
    assert admission.check_wait(None, 0, 1, Ask(100, 1)) == pytest.approx(10 + 100, rel=0.1)


async def test_a_deeper_request_waits_longer_for_itself():
    clock = Clock()
    admission = gates(sequential=False, clock=clock)
    measured(admission, fixed=0.01)
    request_of(admission, clock, answer=10).move(RequestState.DISPATCHED)
    waits = [admission.check_wait(None, 0, 1, Ask(100 * loops, loops)) for loops in (1, 2, 4)]
    assert waits == sorted(waits)
    assert waits[2] > 3 * waits[0]
    assert admission.meets(waits[0], 0, 1, Ask(100, 1))
    assert not admission.meets(waits[0], 0, 1, Ask(200, 2))


async def test_a_higher_priority_does_not_wait_for_a_lower_one():
    clock = Clock()
    admission = gates(sequential=False, clock=clock)
    measured(admission)
    request_of(admission, clock, work=500, priority=0)
    assert admission.check_wait(None, 1, 1, Ask(0, 1, level=1)) < 100
    assert admission.check_wait(None, 1, 1, Ask(0, 1, level=0)) > 4000


async def test_where_no_more_may_run_the_ends_of_others_are_waited_for():
    clock = Clock()
    admission = gates(sequential=False, clock=clock)
    measured(admission, fixed=0.01, per_row=0.0)
    admission.work.limit = 2
    for _ in range(2):
        request_of(admission, clock, answer=100).move(RequestState.DISPATCHED)
    assert admission.check_wait(None, 0, 2, ASK) == pytest.approx(1000 * 0.01 * 100 / 2)
    request_of(admission, clock, answer=100)
    assert admission.check_wait(None, 1, 2, ASK) == pytest.approx(1000 * 0.01 * 100)


async def test_an_idle_server_lets_one_through_whatever_was_measured():
    admission = gates(sequential=False, default_slo_ms=0.001)
    measured(admission, fixed=1000.0)
    assert admission.check_wait(None, 0, 0, ASK) is None


async def test_more_progress_than_work_does_not_make_the_wait_negative():
    clock = Clock()
    admission = gates(sequential=False, clock=clock)
    request = request_of(admission, clock, work=5)
    request.move(RequestState.DISPATCHED)
    admission.progress(request, 9, prompt=True)
    assert admission.work.ahead == 0


async def test_predictions_that_are_always_wrong_the_same_way_are_corrected_and_then_forgotten():
    clock = Clock()
    admission = gates(sequential=False, clock=clock)
    measured(admission)
    request_of(admission, clock, work=100)
    before = admission.check_wait(None, 1, 0, ASK)
    for _ in range(100):
        predicted = admission.check_wait(None, 1, 0, ASK)
        admission.work.judge(waited_ms=2 * before, predicted_ms=predicted)
    assert admission.check_wait(None, 1, 0, ASK) == pytest.approx(2 * before, rel=0.01)
    for _ in range(1000):
        admission.work.judge(waited_ms=1e9, predicted_ms=1)
    assert admission.check_wait(None, 1, 0, ASK) <= 4 * before * 1.001
    clock.advance(1000 * HALF_LIFE_S)
    assert admission.check_wait(None, 1, 0, ASK) == pytest.approx(before)


@pytest.mark.parametrize("sequential", [True, False])
async def test_the_error_of_a_prediction_is_measured_when_its_wait_ends(sequential):
    clock, errors, predictions = Clock(), [], []
    admission = gates(sequential, clock=clock, on_error=errors.append, on_prediction=predictions.append)
    admission.ema_dispatch_ms.add(1000.0)
    measured(admission, per_row=0.1)
    request_of(admission, clock, work=10)
    request = request_of(admission, clock)
    request.predicted_ms = admission.check_wait(None, 0, 1, Ask(0, 0))
    clock.advance(1 if sequential else 0)
    request.move(RequestState.DISPATCHED)
    clock.advance(1.5)
    request.move(RequestState.DECODING)
    assert predictions == [pytest.approx(1000.0, rel=0.01)]
    assert errors == [pytest.approx(0 if sequential else 0.5, rel=0.01)]
