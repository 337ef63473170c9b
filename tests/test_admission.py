"""The gates, the seed's formula, the work predictor, and what they learn from."""

from types import SimpleNamespace

import pytest

from server.admission import HALF_LIFE_S, Admission, Ema, WorkRate
from server.errors import AdmissionRejected, QueueFullError
from server.request import RequestState, ScheduledRequest
from server.types import GenerationRequest, GenerationResult
from tests.fakes import Clock


def gates(sequential=True, **more):
    settings = {"max_queue_depth": 2, "default_slo_ms": None, "ema_alpha": 0.2, "clock": Clock()} | more
    return Admission(sequential=sequential, **settings)


def request_of(admission, clock, work=0):
    prepared = SimpleNamespace(prompt=(1,), plan=None, work=work)
    request = ScheduledRequest(
        req=GenerationRequest("x"), streaming=True, clock=clock, on_move=admission.on_move, prepared=prepared
    )
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
    assert admission.check_wait(predicted, depth, in_flight=1) == predicted  # equal is not beyond
    with pytest.raises(AdmissionRejected) as caught:
        admission.check_wait(predicted - 1, depth, in_flight=1)
    assert caught.value.predicted_wait_ms == predicted
    assert caught.value.reason == str(caught.value)


def test_nothing_in_flight_or_nothing_measured_predicts_nothing():
    admission = gates()
    assert admission.check_wait(1, 5, in_flight=1) is None
    admission.ema_dispatch_ms.add(250.0)
    assert admission.check_wait(1, 5, in_flight=0) is None


def test_the_calls_slo_beats_the_servers():
    admission = gates(default_slo_ms=100)
    admission.ema_dispatch_ms.add(250.0)
    with pytest.raises(AdmissionRejected):
        admission.check_wait(None, 0, in_flight=1)
    assert admission.check_wait(1000, 0, in_flight=1) == 250


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


def test_the_work_rate_is_rows_per_second_and_forgets():
    clock = Clock()
    rate = WorkRate(clock)
    assert rate.value is None
    rate.add(100, 1.0)
    assert rate.value == 100
    clock.advance(HALF_LIFE_S)
    rate.add(100, 0.5)
    assert rate.value == pytest.approx(150 / 1.0)
    clock.advance(100 * HALF_LIFE_S)
    rate.add(10, 1.0)
    assert rate.value == pytest.approx(10)


async def test_work_ahead_over_the_rate_is_the_wait():
    clock, errors = Clock(), []
    admission = gates(sequential=False, clock=clock, on_error=errors.append)
    first = request_of(admission, clock, work=300)
    assert admission.check_wait(1, 1, 0) is None, "no step was measured yet"
    admission.work.rate.add(100, 1.0)
    assert admission.check_wait(None, 1, 0) == 3000
    admission.progress(first, 200)
    second = request_of(admission, clock, work=50)
    assert admission.check_wait(None, 2, 0) == 1500
    with pytest.raises(AdmissionRejected):
        admission.check_wait(1499, 2, 0)
    for request in (first, second):
        request.move(RequestState.CANCELLED)
    assert admission.work.ahead == 0


async def test_an_idle_server_lets_one_through_whatever_was_measured():
    admission = gates(sequential=False, default_slo_ms=0.001)
    admission.work.rate.add(1, 1000.0)
    assert admission.check_wait(None, 0, 0) is None


async def test_more_progress_than_work_does_not_make_the_wait_negative():
    clock = Clock()
    admission = gates(sequential=False, clock=clock)
    admission.progress(request_of(admission, clock, work=5), 9)
    assert admission.work.ahead == 0


@pytest.mark.parametrize("sequential", [True, False])
async def test_the_error_of_a_prediction_is_measured_when_its_wait_ends(sequential):
    clock, errors, predictions = Clock(), [], []
    admission = gates(sequential, clock=clock, on_error=errors.append, on_prediction=predictions.append)
    admission.ema_dispatch_ms.add(1000.0)
    admission.work.rate.add(10, 1.0)
    request_of(admission, clock, work=10)
    request = request_of(admission, clock)
    request.predicted_ms = admission.check_wait(None, 0, 1)
    clock.advance(1 if sequential else 0)
    request.move(RequestState.DISPATCHED)
    clock.advance(1.5)
    request.move(RequestState.DECODING)
    assert predictions == [1000.0]
    assert errors == [pytest.approx(0 if sequential else 0.5)]
