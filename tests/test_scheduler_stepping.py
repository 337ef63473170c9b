"""The scheduler over an engine that steps: sharing, cancelling at boundaries, faults, and accounts that balance."""

import asyncio
import random

import pytest

from server.errors import EngineError
from server.policy import DispatchMode, Policy
from server.scheduler import AdmissionRejected, QueueFullError, RequestState, Scheduler, SchedulerShutdown
from server.types import GenerationChunk, GenerationRequest
from tests.fakes import SteppingEngine, settle
from tests.test_metrics import outcomes, value
from tinyloop.errors import NeverFits, RequestError

ALL_MODES = pytest.mark.parametrize("mode", list(DispatchMode))


def request(*prompt, new=3, **more):
    return GenerationRequest(list(prompt) or [1, 2], max_new_tokens=new, **more)


class Running:
    """Started on entry; on exit every account must balance before the shutdown could tidy anything up."""

    def __init__(self, engine=None, **more):
        self.engine = engine or SteppingEngine()
        self.scheduler = Scheduler(self.engine, clock=self.engine.clock, **more)

    async def __aenter__(self):
        await self.scheduler.start()
        return self.engine, self.scheduler

    async def __aexit__(self, kind, *error):
        if kind is None:
            await idle(self.engine, self.scheduler)
        self.engine.gate.set()
        await self.scheduler.shutdown(1)


async def idle(engine, scheduler):
    await settle()
    assert scheduler.snapshot()["queue_depth"] == scheduler.snapshot()["in_flight"] == 0
    assert len(list(scheduler.dispatcher.waiting)) == len(scheduler.dispatcher.running) == 0
    assert scheduler.admission.work.ahead == 0
    assert value(scheduler.metrics_text(), "kv_usage_ratio") == 0
    engine.check()


def answer(*prompt, new=3):
    return tuple(range(prompt[-1] + 1, prompt[-1] + 1 + new))


@ALL_MODES
async def test_everybody_gets_their_own_answer(mode):
    async with Running(dispatch=mode) as (_, scheduler):
        prompts = [tuple(range(i, i + 1 + 5 * i)) for i in range(1, 7)]
        results = await asyncio.gather(*(scheduler.submit(request(*p, loops=1 + p[0] % 3)) for p in prompts))
        assert [r.token_ids for r in results] == [answer(*p) for p in prompts]
        assert outcomes(scheduler.metrics_text()) == {("done", "length"): 6}


async def test_a_result_says_all_there_is_to_say():
    async with Running() as (_, scheduler):
        result = await scheduler.submit(request(5, 6, loops=3))
        assert (result.token_ids, result.text, result.finish_reason) == ((7, 8, 9), "xxx", "length")
        assert (result.prompt_tokens, result.cached_tokens) == (2, 0)
        assert (result.loops_requested, result.loops_granted, result.degraded) == (3, 3, False)
        assert 0 < result.timings.first_token_s < result.timings.total_s
        assert (await scheduler.submit(request())).loops_requested == 2, "the default, where none was asked for"
        assert value(scheduler.metrics_text(), "generated_tokens_total") == 6
        assert value(scheduler.metrics_text(), "prompt_tokens_total") == 4
        assert value(scheduler.metrics_text(), "steps_total") > 0


async def test_a_stream_gives_the_tokens_and_then_the_result():
    async with Running() as (_, scheduler):
        stream = scheduler.submit_stream(request(5))
        chunks = [chunk async for chunk in stream]
        assert chunks[0] == GenerationChunk(6, "x", loops=2)
        assert [chunk.token_id for chunk in chunks] == [6, 7, 8]
        assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]
        assert stream.result.token_ids == (6, 7, 8)


async def test_an_answer_of_no_tokens_is_an_answer():
    async with Running() as (_, scheduler):
        result = await scheduler.submit(request(new=0))
        assert (result.token_ids, result.finish_reason) == ((), "length")


async def test_requests_of_different_depths_share_steps():
    async with Running() as (engine, scheduler):
        await asyncio.gather(scheduler.submit(request(1, loops=2)), scheduler.submit(request(2, loops=5)))
        assert max(len({s.lease for s in step}) for step in engine.steps) == 2


async def test_sequential_is_one_request_at_a_time_and_in_order():
    async with Running(dispatch="sequential") as (engine, scheduler):
        await asyncio.gather(*(scheduler.submit(request(n), priority=n) for n in (1, 5, 3)))
        order = list(dict.fromkeys(step[0].lease.tokens[0] for step in engine.steps))
        assert order == [5, 3, 1]
        assert all(len({s.lease for s in step}) == 1 for step in engine.steps)


async def test_homogeneous_never_mixes_depths():
    async with Running(dispatch="homogeneous") as (engine, scheduler):
        await asyncio.gather(*(scheduler.submit(request(n, loops=1 + n // 2)) for n in range(4)))
        steps = [{s.lease.plan for s in step} for step in engine.steps]
        assert all(len(plans) == 1 for plans in steps)
        assert max(len({s.lease for s in step}) for step in engine.steps) == 2


async def test_interleaved_alternates():
    async with Running(dispatch="interleaved") as (engine, scheduler):
        await asyncio.gather(*(scheduler.submit(request(n, loops=4)) for n in (10, 20)))
        turns = [step[0].lease.tokens[0] for step in engine.steps]
        assert turns[:8] == [10, 20] * 4


async def test_max_running_is_kept():
    async with Running(max_running=2) as (engine, scheduler):
        await asyncio.gather(*(scheduler.submit(request(n)) for n in range(5)))
        assert max(len({s.lease for s in step}) for step in engine.steps) == 2


async def test_who_does_not_fit_yet_waits_in_order():
    async with Running(SteppingEngine(num_pages=4)) as (engine, scheduler):
        results = await asyncio.gather(*(scheduler.submit(request(n, new=12)) for n in range(3)))
        assert [r.token_ids for r in results] == [answer(n, new=12) for n in range(3)]
        assert max(len({s.lease for s in step}) for step in engine.steps) == 1


async def test_a_running_stream_keeps_its_cadence_while_prompts_arrive():
    async with Running(policy=Policy(row_budget=8)) as (engine, scheduler):
        stream = scheduler.submit_stream(request(1, new=20))
        await anext(stream)
        engine.steps.clear()
        others = [scheduler.submit_stream(request(*range(100), new=1)) for _ in range(5)]
        for _ in range(19):
            await anext(stream)
        assert len(engine.steps) <= 19 * 2 + 1, "a token takes two loops, whatever else there is to do"
        for other in others:
            assert len([chunk async for chunk in other]) == 1


# Refusals


@pytest.mark.parametrize("bad", [request(new=1000), GenerationRequest([])])
async def test_what_can_never_run_is_refused_at_submit(bad):
    async with Running() as (engine, scheduler):
        with pytest.raises(RequestError):
            await scheduler.submit(bad)
        with pytest.raises(RequestError):
            scheduler.submit_stream(bad)
        assert outcomes(scheduler.metrics_text()) == {("rejected", "invalid"): 2}
        assert engine.steps == []


async def test_a_full_queue_refuses_before_the_expensive_part():
    async with Running(max_queue_depth=0) as (engine, scheduler):
        engine.prepare = lambda req: pytest.fail("prepared for nothing")
        with pytest.raises(QueueFullError):
            await scheduler.submit(request())


async def test_a_fault_in_prepare_is_hidden_from_the_caller():
    async with Running() as (engine, scheduler):
        engine.prepare = lambda req: 1 / 0
        with pytest.raises(EngineError, match="internal error, id") as caught:
            await scheduler.submit(request())
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert outcomes(scheduler.metrics_text()) == {("rejected", "internal"): 1}


@pytest.mark.parametrize("error", [ZeroDivisionError(), NeverFits("prompt", "big"), None])
async def test_what_an_idle_engine_does_not_admit_is_answered(error):
    async with Running() as (engine, scheduler):
        admit = engine.admit

        def refuse(prepared, pool):
            engine.admit = admit
            if error:
                raise error

        engine.admit = refuse
        first = asyncio.create_task(scheduler.submit(request()))
        with pytest.raises(NeverFits if isinstance(error, NeverFits) else EngineError):
            await first
        assert (await scheduler.submit(request())).token_ids


async def test_the_predicted_wait_is_what_a_first_token_then_takes():
    async with Running(dispatch="continuous") as (engine, scheduler):
        await scheduler.submit(request(1, new=9))
        assert (await scheduler.submit(request(), slo_ms=0.001)).text, "idle: always let one through"
        engine.gate.clear()
        running = asyncio.create_task(scheduler.submit(request(1, new=100)))
        await settle()
        with pytest.raises(AdmissionRejected) as caught:
            await scheduler.submit(request(), slo_ms=1)
        engine.gate.set()
        result = await scheduler.submit(request())
        assert caught.value.predicted_wait_ms == pytest.approx(1000 * result.timings.first_token_s, rel=0.5)
        await running


# Cancellation


@pytest.mark.parametrize("streaming", [False, True])
async def test_cancelling_what_runs_frees_it_at_the_next_boundary(streaming):
    async with Running() as (engine, scheduler):
        engine.gate.clear()
        if streaming:
            stream = scheduler.submit_stream(request(new=100))
        else:
            task = asyncio.create_task(scheduler.submit(request(new=100)))
        await engine.entered.wait()
        (running,) = scheduler.dispatcher.running.values()
        if streaming:
            await stream.aclose()
        else:
            task.cancel()
        await settle()
        assert len(engine.leases) == 1, "not while the step runs"
        engine.gate.set()
        await settle()
        assert engine.leases == {}
        assert len(engine.steps) == 1
        assert (running.state, running.result) == (RequestState.CANCELLED, None)


async def test_cancelled_while_queued_never_reaches_the_engine():
    async with Running(max_running=1) as (engine, scheduler):
        running = scheduler.submit_stream(request(1))
        await anext(running)
        waiting = asyncio.create_task(scheduler.submit(request(99)))
        await asyncio.sleep(0)
        waiting.cancel()
        assert len([chunk async for chunk in running]) == 2
        assert waiting.cancelled()
        assert {s.lease.tokens[0] for step in engine.steps for s in step} == {1}


async def test_two_slots_two_disconnects_and_a_third_runs():
    async with Running(max_running=2) as (_, scheduler):
        streams = [scheduler.submit_stream(request(new=100)) for _ in range(2)]
        for stream in streams:
            await anext(stream)
            await stream.aclose()
        assert (await scheduler.submit(request(7))).token_ids == (8, 9, 10)


async def test_cleanup_needs_no_new_work():
    async with Running() as (engine, scheduler):
        streams = [scheduler.submit_stream(request(new=100)) for _ in range(4)]
        await anext(streams[0])
        del streams
        await idle(engine, scheduler)


@pytest.mark.parametrize("seed", range(200))
async def test_cancelling_at_random_moments_leaves_nothing_behind(seed):
    dice = random.Random(seed)
    more = {"dispatch": dice.choice(list(DispatchMode)), "max_running": dice.choice([None, 1, 3]), "max_queue_depth": 6}
    async with Running(SteppingEngine(num_pages=12), **more) as (engine, scheduler):
        arrivals = count_calls(scheduler, "_enter")
        clients = [asyncio.create_task(client(scheduler, dice)) for _ in range(10)]
        for _ in range(dice.randrange(60)):
            await asyncio.sleep(0)
            if dice.random() < 0.1:
                dice.choice(clients).cancel()
            if dice.random() < 0.03:
                engine.errors.append(ZeroDivisionError())
            if dice.random() < 0.2:
                (engine.gate.set if dice.random() < 0.7 else engine.gate.clear)()
            if dice.random() < 0.05:
                scheduler.policy.min_boundary_rows = dice.choice([None, 1, 2, 3])
            if dice.random() < 0.05:
                engine.shortages.append(1)
            if dice.random() < 0.05:
                engine.clock.advance(dice.random())  # until waiters age, and interrupt
        engine.gate.set()
        await asyncio.wait(clients)
        await idle(engine, scheduler)
        assert all(client.cancelled() or client.exception() is None for client in clients)
        assert sum(outcomes(scheduler.metrics_text()).values()) == len(arrivals)
        engine.errors.clear()
        assert (await scheduler.submit(request(7))).token_ids == (8, 9, 10), "the capacity is intact"


def count_calls(owner, name):
    calls, method = [], getattr(owner, name)
    setattr(owner, name, lambda *args, **more: (calls.append(args), method(*args, **more))[1])
    return calls


async def client(scheduler, dice):
    """One caller of some kind, who may also leave in the middle."""
    prompt = range(1, 2 + dice.randrange(20))
    least, most = sorted((dice.randrange(1, 4), dice.randrange(1, 4)))
    req = request(
        *prompt,
        new=dice.randrange(12),
        loops=most,
        min_loops=dice.choice([None, least]),
        tenant=dice.choice("ab"),
        request_id="same",
    )
    for _ in range(dice.randrange(20)):
        await asyncio.sleep(0)
    try:
        if dice.random() < 0.5:
            assert (await scheduler.submit(req, priority=dice.randrange(3))).token_ids == answer(
                *prompt, new=req.max_new_tokens
            )
            return
        stream, patience = scheduler.submit_stream(req), dice.randrange(15)
        seen = 0
        async for chunk in stream:
            assert chunk.token_id == prompt[-1] + 1 + seen
            seen += 1
            if seen > patience:
                break
        if dice.random() < 0.5:
            await stream.aclose()
    except (EngineError, QueueFullError):
        pass


@pytest.mark.parametrize("streaming", [False, True])
@ALL_MODES
async def test_a_cancel_at_any_await_point_leaves_nothing_behind(mode, streaming):
    for moment in range(60):
        async with Running(SteppingEngine(num_pages=12), dispatch=mode, max_running=2) as (_, scheduler):
            others = [asyncio.create_task(scheduler.submit(request(n))) for n in (10, 20, 30)]
            victim = asyncio.create_task(read(scheduler, request(40), streaming))
            for _ in range(moment):
                await asyncio.sleep(0)
            victim.cancel()
            assert [result.token_ids for result in await asyncio.gather(*others)] == [answer(n) for n in (10, 20, 30)]
            await asyncio.wait({victim})


async def read(scheduler, req, streaming):
    if not streaming:
        return await scheduler.submit(req)
    return [chunk async for chunk in scheduler.submit_stream(req)]


async def test_every_arrival_has_exactly_one_outcome():
    async with Running(max_queue_depth=4, max_running=1) as (engine, scheduler):
        engine.errors.extend([None, None, ZeroDivisionError()])
        tasks = [asyncio.create_task(scheduler.submit(request(n))) for n in range(6)]
        tasks.append(asyncio.create_task(scheduler.submit(GenerationRequest([]))))
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        with pytest.raises(RequestError):
            await scheduler.submit(GenerationRequest([]))
        assert outcomes(scheduler.metrics_text()) == {
            ("error", "engine"): 1,
            ("cancelled", "client"): 1,
            ("done", "length"): 2,
            ("rejected", "queue_full"): 3,
            ("rejected", "invalid"): 1,
        }


# Faults


async def test_a_failed_step_ends_only_its_own_requests():
    async with Running(dispatch="interleaved") as (engine, scheduler):
        engine.errors.extend([None, ZeroDivisionError("secret")])
        first, second = (asyncio.create_task(scheduler.submit(request(n))) for n in (1, 5))
        with pytest.raises(EngineError, match="internal error, id") as caught:
            await second
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert "secret" not in str(caught.value)
        assert (await first).token_ids == (2, 3, 4)
        assert outcomes(scheduler.metrics_text()) == {("error", "engine"): 1, ("done", "length"): 1}


async def test_callers_of_one_fault_get_errors_of_their_own_with_one_id():
    async with Running() as (engine, scheduler):
        engine.errors.append(ZeroDivisionError())
        errors = await asyncio.gather(*(scheduler.submit(request(n)) for n in range(3)), return_exceptions=True)
        assert len({id(error) for error in errors}) == 3
        assert len({error.error_id for error in errors}) == 1


async def test_two_failed_steps_in_a_row_are_ill_health_until_one_succeeds():
    async with Running() as (engine, scheduler):
        engine.errors.extend([ZeroDivisionError(), ZeroDivisionError()])
        for healthy in (True, False):
            with pytest.raises(EngineError):
                await scheduler.submit(request())
            assert scheduler.healthy is healthy
        await scheduler.submit(request())
        assert scheduler.healthy


async def test_an_engine_with_nothing_to_step_is_a_fault_not_a_hang():
    async with Running() as (engine, scheduler):
        engine.ready = list
        with pytest.raises(EngineError) as caught:
            await scheduler.submit(request())
        assert "nothing can step" in str(caught.value.__cause__)


@pytest.mark.parametrize("fault", ["policy", "release"])
async def test_when_the_dispatcher_dies_nobody_hangs(fault):
    engine = SteppingEngine()
    scheduler = Scheduler(engine, clock=engine.clock, max_running=1)
    await scheduler.start()
    if fault == "policy":
        scheduler.policy.choose_segments = lambda ready: 1 / 0
    else:
        engine.release = lambda lease: 1 / 0
    tasks = [asyncio.create_task(scheduler.submit(request(n))) for n in range(3)]
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(error, EngineError) for error in answers) >= 2
    assert not scheduler.healthy
    with pytest.raises(SchedulerShutdown):
        await scheduler.submit(request())
    await scheduler.shutdown()


async def test_a_fault_in_the_bookkeeping_costs_nobody_an_answer():
    async with Running() as (_, scheduler):
        scheduler.metrics.on_move = lambda request, previous: 1 / 0
        assert (await scheduler.submit(request(1))).token_ids == (2, 3, 4)


# Shutdown


async def test_shutdown_finishes_what_runs_and_cancels_what_waits():
    engine = SteppingEngine()
    scheduler = Scheduler(engine, clock=engine.clock, max_running=3)
    await scheduler.start()
    streams = [scheduler.submit_stream(request(n, new=5)) for n in range(6)]
    await anext(streams[0])
    await scheduler.shutdown(5)
    counts = [len([chunk async for chunk in stream]) for stream in streams]
    assert counts == [4, 5, 5, 0, 0, 0]
    assert [stream.request.outcome_reason for stream in streams] == ["length"] * 3 + ["shutdown"] * 3
    engine.check()


async def test_shutdown_does_not_release_under_a_running_step():
    engine = SteppingEngine()
    scheduler = Scheduler(engine, clock=engine.clock)
    await scheduler.start()
    engine.gate.clear()
    stream = scheduler.submit_stream(request())
    await engine.entered.wait()
    await scheduler.shutdown(0.01)
    assert [chunk async for chunk in stream] == [], "its reader hears at once"
    assert stream.request.outcome_reason == "shutdown"
    assert len(engine.leases) == 1
    engine.gate.set()
    await settle()
    engine.check()


async def test_a_reader_has_its_token_before_the_next_step_begins():
    async with Running() as (engine, scheduler):
        stream = scheduler.submit_stream(request(1, 2, new=5))
        begun = [bool(engine.stepping) async for _ in stream]
    assert begun == [False] * 5


# Prefixes


async def test_prefixes_are_registered_between_steps():
    async with Running() as (engine, scheduler):
        engine.gate.clear()
        running = asyncio.create_task(scheduler.submit(request()))
        await engine.entered.wait()
        registering = asyncio.create_task(scheduler.aregister_prefix([1, 2, 3]))
        await settle()
        assert not registering.done()
        engine.gate.set()
        assert await registering == 3
        await running
        assert scheduler.register_prefix([1, 2, 3, 4], loops=2) == 4
        assert scheduler.prefix_pool_stats() == {"entries": 2, "total_cached_tokens": 7}


async def test_others_get_their_tokens_while_a_long_prefix_is_registered():
    async with Running() as (engine, scheduler):
        stream = scheduler.submit_stream(request(1, new=100))
        first = await anext(stream)
        registering = asyncio.create_task(scheduler.aregister_prefix(list(range(80)), loops=4))
        during = [chunk.token_id async for chunk in stream if not registering.done()]
        assert await registering == 80
        assert scheduler.prefix_pool_stats() == {"entries": 1, "total_cached_tokens": 80}
        prompt_steps = [step for step in engine.steps if any(s.lease.max_new_tokens == 0 for s in step)]
        alone = [step for step in prompt_steps if all(s.lease.max_new_tokens == 0 for s in step)]
    assert first.token_id == 2
    assert len(during) > 4
    assert len(prompt_steps) > 4
    assert not alone, "the stream is in every step of the registration"


async def test_a_registration_whose_caller_leaves_keeps_nothing():
    async with Running() as (engine, scheduler):
        engine.gate.clear()
        registering = asyncio.create_task(scheduler.aregister_prefix([1, 2, 3]))
        await engine.entered.wait()
        registering.cancel()
        await settle()
        engine.gate.set()
        await settle()
        assert scheduler.prefix_pool_stats()["entries"] == 0
        engine.check()


async def test_what_a_prefix_saved_is_counted_once_and_is_no_work_ahead():
    async with Running() as (engine, scheduler):
        admit = engine.admit

        def admit_cached(prepared, pool):
            assert pool is scheduler.pool
            lease = admit(prepared, pool)
            lease.cached = lease.todo[0].start = 2
            return lease

        engine.admit = admit_cached
        assert (await scheduler.submit(request(1, 2, 3))).cached_tokens == 2
        await scheduler.submit(request(1, 2, 3, mode="score"))
        assert value(scheduler.metrics_text(), "prefix_lookup_tokens_total") == 3
        assert value(scheduler.metrics_text(), "prefix_hit_tokens_total", depth="exact") == 2


# Memory pressure


async def test_the_newest_of_the_lowest_priority_yields():
    async with Running() as (engine, scheduler):
        yielded, suspend = [], engine.suspend
        engine.suspend = lambda lease: (yielded.append(lease.tokens[0]), suspend(lease))
        engine.shortages.extend([0, 0, 1, 1])
        jobs = [(10, 0), (20, 0), (30, 1)]
        results = await asyncio.gather(*(scheduler.submit(request(p, new=6), priority=level) for p, level in jobs))
        assert [result.token_ids for result in results] == [answer(p, new=6) for p, _ in jobs]
        assert yielded == [20, 10]
        assert value(scheduler.metrics_text(), "preemptions_total") == 2


async def test_who_yielded_resumes_before_those_who_wait_in_its_level():
    async with Running(max_running=2) as (engine, scheduler):
        dispatched, admit = [], engine.admit
        engine.admit = lambda prepared, pool: (dispatched.append(prepared.prompt[0]), admit(prepared, pool))[1]
        resume = engine.resume
        engine.resume = lambda lease: (dispatched.append(-lease.tokens[0]), resume(lease))[1]
        engine.shortages.extend([0, 1])
        await asyncio.gather(*(scheduler.submit(request(p)) for p in (10, 20, 30)))
        assert dispatched == [10, 20, -20, 30]


async def test_a_yielded_request_is_in_flight_and_can_be_cancelled():
    async with Running() as (engine, scheduler):
        first, second = (scheduler.submit_stream(request(p, new=40)) for p in (10, 20))
        await anext(first)
        await anext(second)
        engine.resume = lambda lease: False
        engine.shortages.append(1)
        while not engine.suspended:
            await anext(first)
        assert scheduler.snapshot()["in_flight"] == 2
        await second.aclose()
        assert scheduler.snapshot()["in_flight"] == 1
        assert [chunk async for chunk in second] == []
        assert len([chunk async for chunk in first]) > 0
        assert outcomes(scheduler.metrics_text()) == {("done", "length"): 1, ("cancelled", "client"): 1}


async def test_a_yielded_request_finishes_within_a_drain():
    engine = SteppingEngine()
    scheduler = Scheduler(engine, clock=engine.clock)
    await scheduler.start()
    first, second = (scheduler.submit_stream(request(p, new=40)) for p in (10, 20))
    await anext(first)
    await anext(second)
    resume, engine.resume = engine.resume, lambda lease: False
    engine.shortages.append(1)
    while not engine.suspended:
        await anext(first)
    engine.resume = resume
    await scheduler.shutdown(5)
    assert second.result is not None
    assert second.result.token_ids == answer(20, new=40)


async def test_a_yield_that_can_never_be_taken_back_is_an_error_not_a_hang():
    async with Running() as (engine, scheduler):
        engine.resume = lambda lease: False
        engine.shortages.append(1)
        calm, lost = await asyncio.gather(*(scheduler.submit(request(p)) for p in (10, 20)), return_exceptions=True)
        assert calm.token_ids == answer(10)
        assert isinstance(lost, EngineError)


async def test_others_pass_those_who_wait_for_a_prefix():
    async with Running() as (engine, scheduler):
        engine.awaited.add((7, 7))
        filling = scheduler.submit_stream(request(1, new=40))
        await anext(filling)
        waiting = asyncio.create_task(scheduler.submit(request(7, 7)))
        assert (await scheduler.submit(request(2))).token_ids == answer(2)
        assert scheduler.snapshot()["queue_depth"] == 1
        engine.awaited.clear()
        assert (await waiting).token_ids == answer(7, 7)
        await filling.aclose()


# The watchdog


async def test_work_without_a_step_is_ill_health_and_a_step_heals_it():
    async with Running(stall_after_s=5) as (engine, scheduler):
        assert scheduler.healthy
        engine.clock.advance(1000)
        assert scheduler.healthy, "idle for long is no stall"
        engine.gate.clear()
        running = asyncio.create_task(scheduler.submit(request()))
        waiting = asyncio.create_task(scheduler.submit(request(2)))
        await engine.entered.wait()
        engine.clock.advance(4.9)
        assert scheduler.healthy
        engine.clock.advance(0.1)
        assert scheduler.unhealthy_reason == "no step for 5 s while 0 requests wait and 2 run"
        engine.gate.set()
        await asyncio.gather(running, waiting)
        assert scheduler.healthy


async def test_a_turn_that_hangs_outside_of_the_engine_is_seen_too():
    async with Running(stall_after_s=5) as (engine, scheduler):
        async with scheduler._turn_lock:
            task = asyncio.create_task(scheduler.submit(request()))
            await settle()
            engine.clock.advance(6)
            assert scheduler.unhealthy_reason == "no step for 6 s while 1 requests wait and 0 run"
        await task
