"""The seed's scheduler, point by point, over an engine that only generates."""

import asyncio
import gc
import inspect
import subprocess
import sys

import pytest

import server.scheduler
from server.errors import HTTP_ERRORS, EngineError, SchedulerNotRunning, http_error
from server.scheduler import (
    AdmissionRejected,
    QueueFullError,
    RequestState,
    Scheduler,
    SchedulerShutdown,
    get_scheduler,
    set_scheduler,
)
from server.types import GenerationChunk, GenerationRequest, GenerationResult
from tests.fakes import GeneratingEngine, settle
from tests.test_metrics import outcomes, value
from tinyloop.errors import ContextOverflow, NeverFits, RequestError


def request(name="x", **more):
    return GenerationRequest(name, **more)


def make(**more):
    engine = GeneratingEngine()
    return engine, Scheduler(engine, clock=engine.clock, **more)


class Running:
    """`async with Running(...) as (engine, scheduler)`: started, and afterwards shut down with empty hands."""

    def __init__(self, **more):
        self.engine, self.scheduler = make(**more)

    async def __aenter__(self):
        await self.scheduler.start()
        return self.engine, self.scheduler

    async def __aexit__(self, *error):
        self.engine.gate.set()
        await self.scheduler.shutdown(1)
        assert self.scheduler.snapshot()["queue_depth"] == self.scheduler.snapshot()["in_flight"] == 0
        assert self.scheduler.admission.work.ahead == 0


async def submitted(scheduler, *names, **more):
    """Tasks that wait for answers, in order, with the requests already in the queue."""
    tasks = []
    for name in names:
        tasks.append(asyncio.create_task(scheduler.submit(request(name), **more)))
        await asyncio.sleep(0)
    return tasks


def prompts(engine):
    return [req.prompt for req in engine.calls]


# Names and signatures


def test_the_public_names_and_defaults():
    parameters = inspect.signature(Scheduler).parameters
    defaults = {name: parameters[name].default for name in list(parameters)[:5]}
    assert defaults == {
        "engine": inspect.Parameter.empty,
        "max_queue_depth": 128,
        "default_slo_ms": None,
        "prefix_pool_capacity": 16,
        "ema_alpha": 0.2,
    }
    assert str(inspect.signature(Scheduler.register_prefix)).startswith(
        "(self, tokens: 'Sequence[int]', loops: 'int' = 8"
    )
    assert inspect.signature(Scheduler.shutdown).parameters["drain_timeout_s"].default == 30.0
    assert set(server.scheduler.__all__) >= {"Scheduler", "AdmissionRejected", "QueueFullError", "SchedulerShutdown"}
    assert {state.value for state in RequestState} == {"queued", "dispatched", "decoding", "done", "cancelled", "error"}


def test_the_process_has_one_scheduler():
    _, scheduler = make()
    with pytest.raises(SchedulerShutdown):
        get_scheduler()
    set_scheduler(scheduler)
    assert get_scheduler() is scheduler
    set_scheduler(None)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFullError("full"), 503, "queue_full"),
        (AdmissionRejected("slow", 2500), 503, "slo_unattainable"),
        (SchedulerShutdown("bye"), 503, "draining"),
        (SchedulerNotRunning("no"), 503, "not_running"),
        (EngineError("abc"), 500, "internal_error"),
        (ContextOverflow("prompt", "long"), 400, "context_length_exceeded"),
        (NeverFits("prompt", "big"), 400, "kv_budget_exceeded"),
        (RequestError("loops", "bad"), 400, "invalid_request"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
def test_every_error_has_its_status_and_code(error, status, code):
    answer = http_error(error)
    assert (answer.status, answer.code) == (status, code)
    assert answer.field == getattr(error, "field", None)
    assert answer.retry_after_s == (3 if isinstance(error, AdmissionRejected) else None)
    assert "secret" not in answer.message


def test_the_table_puts_special_cases_first():
    kinds = [row[0] for row in HTTP_ERRORS]
    assert not any(issubclass(late, early) for i, early in enumerate(kinds) for late in kinds[i + 1 :])


# Life of a request


async def test_submit_answers_with_the_engines_own_result():
    async with Running() as (engine, scheduler):
        result = await scheduler.submit(request())
        assert result == GenerationResult((0, 1, 2), "xxx", prompt_tokens=1)
        assert prompts(engine) == ["x"]
        assert outcomes(scheduler.metrics_text()) == {("done", "stop"): 1}
        assert value(scheduler.metrics_text(), "generated_tokens_total") == 3


async def test_a_streamed_request_passes_through_every_state_and_is_stamped():
    async with Running() as (engine, scheduler):
        engine.gate.clear()
        stream = scheduler.submit_stream(request())
        req, start = stream.request, engine.clock.now
        assert (req.state, req.queued_at, req.streaming) == (RequestState.QUEUED, start, True)
        engine.clock.advance(5)
        await settle()
        assert (req.state, req.dispatched_at) == (RequestState.DISPATCHED, start + 5)
        engine.gate.set()
        chunk = await anext(stream)
        assert chunk == GenerationChunk(0, "x")
        assert (req.state, req.first_token_at) == (RequestState.DECODING, start + 6)
        assert [tuple(chunk) async for chunk in stream] == [(1, "x"), (2, "x")]
        assert (req.state, req.completed_at) == (RequestState.DONE, start + 8)
        assert (stream.result.token_ids, stream.result.text) == ((0, 1, 2), "xxx")
        assert stream.result.timings.first_token_s == 6


async def test_the_engines_exception_reaches_the_caller():
    async with Running() as (engine, scheduler):
        engine.errors.append(error := ZeroDivisionError("engine"))
        with pytest.raises(ZeroDivisionError) as caught:
            await scheduler.submit(request())
        assert caught.value is error
        assert outcomes(scheduler.metrics_text()) == {("error", "engine"): 1}
        assert (await scheduler.submit(request())).text == "xxx", "the server goes on"


async def test_a_stream_raises_after_its_last_chunk():
    async with Running() as (engine, scheduler):
        engine.errors.append(ZeroDivisionError("engine"))
        stream = scheduler.submit_stream(request())
        assert [(await anext(stream)).token_id for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ZeroDivisionError):
            await anext(stream)
        assert stream.request.state is RequestState.ERROR


async def test_an_engine_that_cancels_its_own_call_does_not_stop_the_dispatcher():
    async with Running() as (engine, scheduler):
        engine.errors.append(asyncio.CancelledError())
        with pytest.raises(RuntimeError, match="cancelled its own call"):
            await scheduler.submit(request())
        assert (await scheduler.submit(request())).text == "xxx"


async def test_two_engine_errors_in_a_row_are_ill_health_until_one_succeeds():
    async with Running() as (engine, scheduler):
        for healthy in (True, False):
            engine.errors.append(ZeroDivisionError())
            with pytest.raises(ZeroDivisionError):
                await scheduler.submit(request())
            assert scheduler.healthy is healthy
        assert scheduler.unhealthy_reason == "the last 2 engine calls failed"
        assert value(scheduler.metrics_text(), "engine_healthy") == 0
        await scheduler.submit(request())
        assert scheduler.healthy


async def test_what_the_caller_did_wrong_is_no_ill_health():
    async with Running() as (engine, scheduler):
        for _ in range(3):
            engine.errors.append(RequestError("loops", "too many"))
            with pytest.raises(RequestError):
                await scheduler.submit(request())
        assert scheduler.healthy
        assert outcomes(scheduler.metrics_text()) == {("error", "invalid"): 3}


# Order


async def test_one_at_a_time_higher_first_and_fifo_inside_a_level():
    async with Running() as (engine, scheduler):
        engine.gate.clear()
        tasks = await submitted(scheduler, "running")
        await settle()
        tasks += await submitted(scheduler, "low 1", "low 2", priority=5)
        tasks += await submitted(scheduler, "high 1", "high 2", priority=10)
        assert scheduler.snapshot()["in_flight"] == 1
        assert scheduler.snapshot()["queue_depth"] == 4
        engine.gate.set()
        await asyncio.gather(*tasks)
        assert prompts(engine) == ["running", "high 1", "high 2", "low 1", "low 2"]


async def test_ids_that_callers_repeat_do_not_collide():
    async with Running() as (_, scheduler):
        streams = [scheduler.submit_stream(request(request_id="same")) for _ in range(2)]
        assert streams[0].request.request_id != streams[1].request.request_id
        for stream in streams:
            assert len([chunk async for chunk in stream]) == 3


# Admission


async def test_a_full_queue_refuses_before_anything_else():
    async with Running(max_queue_depth=2, default_slo_ms=1) as (engine, scheduler):
        await scheduler.submit(request())  # an average of 1000 ms
        engine.gate.clear()
        tasks = await submitted(scheduler, "running")
        await settle()
        tasks += await submitted(scheduler, "1", "2", slo_ms=1e9)
        with pytest.raises(QueueFullError):
            await scheduler.submit(request())
        with pytest.raises(QueueFullError):
            scheduler.submit_stream(request())
        engine.gate.set()
        await asyncio.gather(*tasks)
        assert outcomes(scheduler.metrics_text()) == {("done", "stop"): 4, ("rejected", "queue_full"): 2}


async def test_of_200_at_once_no_more_than_the_cap_are_taken():
    async with Running(max_queue_depth=8) as (_, scheduler):
        answers = await asyncio.gather(*(scheduler.submit(request()) for _ in range(200)), return_exceptions=True)
        assert sum(isinstance(answer, GenerationResult) for answer in answers) == 8
        assert sum(isinstance(answer, QueueFullError) for answer in answers) == 192


async def test_the_slo_gate_uses_the_seeds_formula():
    async with Running() as (engine, scheduler):
        await scheduler.submit(request())
        assert scheduler.snapshot()["ema_dispatch_ms"] == pytest.approx(1000)
        assert (await scheduler.submit(request(), slo_ms=1)).text, "nothing in flight: no prediction"
        engine.gate.clear()
        tasks = await submitted(scheduler, "running", "waiting")
        await settle()
        with pytest.raises(AdmissionRejected) as caught:
            scheduler.submit_stream(request(), slo_ms=1999)
        assert caught.value.predicted_wait_ms == pytest.approx(2000)
        tasks += await submitted(scheduler, "patient", slo_ms=2001)
        engine.gate.set()
        await asyncio.gather(*tasks)
        counts = outcomes(scheduler.metrics_text())
        assert counts == {("done", "stop"): 5, ("rejected", "slo"): 1}
        assert value(scheduler.metrics_text(), "predicted_wait_seconds_count") == 3
        assert value(scheduler.metrics_text(), "prediction_error_ratio_count") == 2


async def test_the_servers_slo_holds_unless_the_call_has_its_own():
    async with Running(default_slo_ms=10) as (engine, scheduler):
        await scheduler.submit(request())
        engine.gate.clear()
        tasks = await submitted(scheduler, "running")
        await settle()
        with pytest.raises(AdmissionRejected):
            await scheduler.submit(request())
        tasks += await submitted(scheduler, "patient", slo_ms=5000)
        engine.gate.set()
        await asyncio.gather(*tasks)


# Cancellation


async def test_cancelled_while_queued_is_never_dispatched():
    async with Running() as (engine, scheduler):
        engine.gate.clear()
        running, waiting = await submitted(scheduler, "running", "waiting")
        stream = scheduler.submit_stream(request("stream"))
        await settle()
        waiting.cancel()
        stream.cancel()
        engine.gate.set()
        assert (await running).text
        assert [chunk async for chunk in stream] == []
        assert waiting.cancelled() or not await asyncio.wait({waiting})
        assert prompts(engine) == ["running"]
        assert outcomes(scheduler.metrics_text()) == {("done", "stop"): 1, ("cancelled", "client"): 2}


async def test_a_cancel_in_the_hand_over_is_not_lost():
    async with Running() as (engine, scheduler):
        (task,) = await submitted(scheduler, "x")
        task.cancel()  # the dispatcher runs before the task does
        await settle()
        assert task.cancelled()
        assert engine.calls == []


async def test_gauges_fall_at_once_when_queued_clients_vanish():
    async with Running() as (engine, scheduler):
        engine.gate.clear()
        tasks = await submitted(scheduler, "running", *"12345")
        await settle()
        assert value(scheduler.metrics_text(), "queue_depth") == 5
        for task in tasks[1:]:
            task.cancel()
        await settle()
        assert value(scheduler.metrics_text(), "queue_depth") == 0
        assert outcomes(scheduler.metrics_text()) == {("cancelled", "client"): 5}
        engine.gate.set()
        await tasks[0]


async def test_cancel_after_dispatch_runs_to_the_end_and_discards_the_result():
    async with Running() as (engine, scheduler):
        engine.gate.clear()
        (task,) = await submitted(scheduler, "x")
        await settle()
        (running,) = scheduler.dispatcher.running.values()
        task.cancel()
        await settle()
        assert task.cancelled()
        assert (running.state, scheduler.snapshot()["in_flight"]) == (RequestState.DISPATCHED, 1)
        engine.gate.set()
        await settle()
        assert (running.state, running.result, running.cancelled) == (RequestState.CANCELLED, None, True)
        assert scheduler.snapshot()["ema_dispatch_ms"] is None, "discarded work is no measure"
        assert outcomes(scheduler.metrics_text()) == {("cancelled", "client"): 1}


async def test_a_stream_stops_soon_after_its_reader_leaves():
    async with Running() as (engine, scheduler):
        engine.tokens = 1000
        stream = scheduler.submit_stream(request(max_new_tokens=1000))
        await anext(stream)
        await stream.aclose()
        await settle()
        assert stream.request.state is RequestState.CANCELLED
        assert stream.request.answer_tokens < 20


async def test_a_dropped_stream_is_cancelled():
    async with Running() as (engine, scheduler):
        engine.gate.clear()
        tasks = await submitted(scheduler, "running")
        await settle()
        scheduler.submit_stream(request())
        gc.collect()
        await settle()
        assert scheduler.snapshot()["queue_depth"] == 0
        engine.gate.set()
        await asyncio.gather(*tasks)


async def test_a_slow_reader_does_not_hold_up_others():
    async with Running() as (_, scheduler):
        slow = scheduler.submit_stream(request("slow"))
        assert (await scheduler.submit(request("other"))).text == "xxx"
        assert len([chunk async for chunk in slow]) == 3


# Start and shutdown


async def test_submit_before_start_is_refused():
    _, scheduler = make()
    with pytest.raises(SchedulerShutdown, match="not running"):
        await scheduler.submit(request())
    assert not scheduler.healthy
    assert outcomes(scheduler.metrics_text()) == {("rejected", "not_running"): 1}
    await scheduler.shutdown()


async def test_start_is_idempotent():
    async with Running() as (_, scheduler):
        task = scheduler._task
        await scheduler.start()
        assert scheduler._task is task


async def test_shutdown_cancels_what_waits_and_waits_for_what_runs():
    engine, scheduler = make()
    await scheduler.start()
    engine.gate.clear()
    running, waiting = await submitted(scheduler, "running", "waiting")
    stream = scheduler.submit_stream(request())
    await settle()
    ending = asyncio.create_task(scheduler.shutdown(5))
    await settle()
    assert scheduler.draining
    with pytest.raises(asyncio.CancelledError, match="shutdown"):
        await waiting
    assert [chunk async for chunk in stream] == []
    assert (stream.request.state, stream.request.outcome_reason) == (RequestState.CANCELLED, "shutdown")
    assert not stream.request.cancelled, "its caller did not cancel it"
    with pytest.raises(SchedulerShutdown, match="shutting down"):
        await scheduler.submit(request())
    assert not ending.done()
    engine.gate.set()
    assert (await running).text == "xxx"
    await ending
    assert prompts(engine) == ["running"]
    assert not scheduler.healthy
    expected = {("done", "stop"): 1, ("cancelled", "shutdown"): 2, ("rejected", "draining"): 1}
    assert outcomes(scheduler.metrics_text()) == expected


@pytest.mark.parametrize("streaming", [False, True])
async def test_shutdown_cancels_what_runs_too_long(streaming):
    engine, scheduler = make()
    await scheduler.start()
    engine.gate.clear()
    if streaming:
        stream = scheduler.submit_stream(request())
    else:
        (task,) = await submitted(scheduler, "x")
    await settle()
    await scheduler.shutdown(0.01)
    if streaming:
        assert [chunk async for chunk in stream] == []
    else:
        with pytest.raises(asyncio.CancelledError, match="shutdown"):
            await task
    assert outcomes(scheduler.metrics_text()) == {("cancelled", "shutdown"): 1}
    assert scheduler.snapshot()["in_flight"] == 0
    await scheduler.shutdown()


async def test_begin_drain_only_closes_the_door():
    async with Running() as (engine, scheduler):
        engine.gate.clear()
        tasks = await submitted(scheduler, "running", "waiting")
        await settle()
        scheduler.begin_drain()
        with pytest.raises(SchedulerShutdown):
            scheduler.submit_stream(request())
        engine.gate.set()
        assert [result.text for result in await asyncio.gather(*tasks)] == ["xxx", "xxx"]
        assert scheduler.healthy


@pytest.mark.parametrize("kill", ["bug", "cancel"])
async def test_when_the_dispatcher_dies_everybody_hears_and_health_is_red(kill):
    engine, scheduler = make()
    await scheduler.start()
    engine.gate.clear()
    tasks = await submitted(scheduler, "running", "waiting")
    stream = scheduler.submit_stream(request())
    await settle()
    if kill == "bug":
        scheduler.dispatcher.finish = lambda *args: 1 / 0
        engine.gate.set()
    else:
        scheduler._task.cancel()
    for task in tasks:
        with pytest.raises(EngineError, match="internal error, id") as caught:
            await task
        assert type(caught.value.__cause__) is (ZeroDivisionError if kill == "bug" else RuntimeError)
    with pytest.raises(EngineError):
        await anext(stream)
    assert "died" in scheduler.unhealthy_reason
    with pytest.raises(SchedulerShutdown, match="died"):
        await scheduler.submit(request())
    await scheduler.shutdown()
    expected = {("error", "internal"): 3, ("rejected", "not_running"): 1}
    assert outcomes(scheduler.metrics_text()) == expected


# Prefixes


async def test_a_prompt_that_starts_with_a_registered_prefix_goes_through_the_pool():
    async with Running() as (engine, scheduler):
        assert scheduler.register_prefix([1, 2, 3]) == 3
        assert await scheduler.aregister_prefix([4, 5], loops=2) == 2
        assert scheduler.prefix_pool_stats() == {"entries": 2, "total_cached_tokens": 5}
        assert scheduler.snapshot()["prefix_pool"] == {"entries": 2, "total_cached_tokens": 5}
        hits = [request([1, 2, 3, 4]), request([4, 5, 6], loops=2)]
        others = [request([1, 2]), request([1, 2, 3, 4], mode="score"), request("text"), request([4, 5, 6])]
        for req in hits + others:
            await scheduler.submit(req)
        assert engine.pooled == hits
        assert value(scheduler.metrics_text(), "prefix_hit_tokens_total", depth="exact") == 5
        assert value(scheduler.metrics_text(), "prefix_pool_tokens") == 5


async def test_the_pool_has_the_capacity_it_was_given():
    _, scheduler = make(prefix_pool_capacity=1)
    scheduler.register_prefix([1])
    scheduler.register_prefix([1, 2])
    assert scheduler.prefix_pool_stats() == {"entries": 1, "total_cached_tokens": 2}


def test_the_snapshot_begins_with_the_seeds_keys():
    _, scheduler = make()
    assert list(scheduler.snapshot())[:4] == ["queue_depth", "in_flight", "ema_dispatch_ms", "prefix_pool"]
    assert scheduler.snapshot()["ema_dispatch_ms"] is None


async def test_extra_lines_are_prepended():
    _, scheduler = make()
    assert scheduler.metrics_text(extra_lines=["up 1"]).startswith("up 1\n# HELP tinyloop_")


def test_the_scheduler_and_what_it_imports_know_no_torch():
    code = "import sys, server.scheduler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
