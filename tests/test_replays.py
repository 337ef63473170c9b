"""Faults that users met in other servers, replayed on engines without a model and on virtual time: scheduling,
cancellation and leaks. Each test names the public report. Those that need HTTP are in test_replays_http."""

import asyncio
import random

import pytest

from server.errors import EngineError
from server.policy import Policy, core_rows
from server.scheduler import QueueFullError, RequestState, Scheduler
from server.types import GenerationRequest
from tests.fakes import SteppingEngine, settle
from tests.test_metrics import outcomes, value
from tests.test_scheduler_stepping import Running, answer, idle, request
from tests.test_serving import serving
from tests.tiny_models import tiny_model
from tinyloop.errors import NeverFits
from tinyloop.sampling import SamplingParams

STEP_S = 0.01  # of the counting engine


class Arrivals:
    """Submits on the engine's own clock, and remembers in which order requests started and ended."""

    def __init__(self, engine, scheduler):
        self.engine, self.scheduler = engine, scheduler
        self.streams, self.refused = [], 0

    def submit(self, *prompt, priority=0, **more):
        try:
            stream = self.scheduler.submit_stream(request(*prompt, **more), priority=priority)
        except QueueFullError:
            self.refused += 1
            return None
        self.streams.append(stream)
        return stream.request

    async def every(self, seconds, until, submit):
        """Open loop: one call of `submit` each so many virtual seconds, until `until` says so."""
        due = self.engine.clock.now
        while not until():
            if self.engine.clock.now >= due:
                due += seconds
                submit()
            elif not self.scheduler.dispatcher.busy:
                self.engine.clock.now = due
            await asyncio.sleep(0)

    async def end(self):
        for stream in self.streams:
            await stream.aclose()


async def reached(condition):
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("never reached")


# Scheduling


async def test_a_high_priority_gets_ahead_of_a_full_running_set():
    """vllm #40004."""
    policy = Policy(max_running=1, yield_after_s=0.5)
    async with Running(SteppingEngine(num_pages=200), policy=policy) as (engine, scheduler):
        arrivals = Arrivals(engine, scheduler)
        low = arrivals.submit(1, new=400, priority=0)
        await anext(arrivals.streams[0])
        high = arrivals.submit(2, new=3, priority=1)
        assert [chunk.token_id async for chunk in arrivals.streams[1]] == [3, 4, 5]
        assert high.dispatched_at - high.queued_at <= policy.yield_after_s + 2 * STEP_S
        assert not low.ended
        tokens = [chunk.token_id async for chunk in arrivals.streams[0]]
        assert tokens == list(range(3, 402)), "who gave way goes on where it was"
        assert value(scheduler.metrics_text(), "preemptions_total") == 1


async def test_an_equal_priority_interrupts_nobody():
    async with Running(policy=Policy(max_running=1, yield_after_s=0)) as (engine, scheduler):
        arrivals = Arrivals(engine, scheduler)
        for prompt in (1, 2):
            arrivals.submit(prompt, new=50)
        for stream in arrivals.streams:
            assert len([chunk async for chunk in stream]) == 50
        assert value(scheduler.metrics_text(), "preemptions_total") == 0


@pytest.mark.parametrize("seed", range(3))
async def test_a_low_priority_is_served_under_endless_high_load(seed):
    """vllm PR 20608. The bound of docs/scheduling.md: (aging - 1) times its own service, the admissions between two
    promotions, the interrupt, and the requests that are already running."""
    dice = random.Random(seed)
    policy = Policy(max_running=2, aging=10)
    async with Running(policy=policy, max_queue_depth=40) as (engine, scheduler):
        arrivals = Arrivals(engine, scheduler)
        one_s = 2 * 10 * STEP_S  # loops x tokens
        capacity = policy.max_running / one_s
        for _ in range(20):
            arrivals.submit(1, new=10, priority=5)
        low = arrivals.submit(2, new=10, priority=0)
        await arrivals.every(
            1 / (1.2 * capacity), lambda: low.ended, lambda: arrivals.submit(dice.randrange(9), new=10, priority=5)
        )
        service_s = (1 + 10) * 2 / (policy.max_running / STEP_S)
        bound = (policy.aging - 1) * service_s + (policy.promotion_every + 2) * one_s + policy.yield_after_s
        assert low.state is RequestState.DONE
        assert low.completed_at - low.queued_at <= bound
        assert value(scheduler.metrics_text(), "aging_promotions_total") >= 1
        waited = sum(1 for s in arrivals.streams if s.request is not low and not s.request.ended)
        assert waited > 0, "the load was above the capacity all the time"
        await arrivals.end()


async def test_a_cache_cold_prompt_is_not_overtaken_by_cache_hot_ones():
    """sglang #31954."""
    hot = list(range(24))
    async with serving(tiny_model("ouro"), max_running=1) as scheduler:
        greedy = SamplingParams(temperature=0, ignore_eos=True)

        def submit(prompt):
            return asyncio.ensure_future(scheduler.submit(GenerationRequest(prompt, max_new_tokens=4, sampling=greedy)))

        await submit([*hot, 1])
        jobs = [submit([*hot, 2]), submit([9] * 24), *(submit([*hot, 3 + n]) for n in range(4))]
        ended = []
        for number, job in enumerate(jobs):
            job.add_done_callback(lambda _, number=number: ended.append(number))
        results = await asyncio.gather(*jobs)
        assert ended == list(range(6))
        assert results[1].cached_tokens == 0
        assert results[2].cached_tokens > 0


async def test_a_running_stream_is_not_stalled_by_arriving_prompts():
    """vllm #11067: one new prompt in every step."""
    async with Running(SteppingEngine(num_pages=4000), policy=Policy(row_budget=16)) as (engine, scheduler):
        arrivals = Arrivals(engine, scheduler)
        arrivals.submit(1, new=50)
        last, gaps = engine.clock.now, []
        async for _ in arrivals.streams[0]:
            gaps.append(engine.clock.now - last)
            last = engine.clock.now
            arrivals.submit(*range(60), new=1)
        assert max(gaps[1:]) <= 2 * STEP_S + 1e-9, "a token is two loops"
        assert max(sum(s.rows for s in step) for step in engine.steps) <= 2 * 16
        await arrivals.end()


async def test_a_tenant_with_long_prompts_does_not_take_the_machine():
    """llm-d-router #1182: ten prompts of 2,000 tokens against ten of 50."""
    policy = Policy(max_running=1)
    async with Running(SteppingEngine(num_pages=4000, chunk=512), policy=policy) as (engine, scheduler):
        arrivals = Arrivals(engine, scheduler)
        long = [arrivals.submit(*[1] * 2000, new=1, tenant="A") for _ in range(10)]
        short = [arrivals.submit(*[1] * 50, new=1, tenant="B") for _ in range(10)]
        await reached(lambda: all(one.ended for one in short))
        assert sum(one.ended for one in long) == 1, "one was running already"
        await arrivals.end()


async def test_two_tenants_get_equal_work_while_both_wait():
    """Jain's index over the work that each was served, long prompts against short ones."""
    async with Running(SteppingEngine(num_pages=4000, chunk=64), policy=Policy(max_running=4)) as (engine, scheduler):
        arrivals, work = Arrivals(engine, scheduler), {"A": 0, "B": 0}
        step = engine.step

        async def counted(segments):
            for segment in segments:
                work[scheduler.dispatcher.running[segment.lease].tenant] += core_rows(segment)
            return await step(segments)

        engine.step = counted
        for _ in range(40):
            arrivals.submit(*[1] * 400, new=4, tenant="A")
        for _ in range(80):
            arrivals.submit(*[1] * 10, new=30, tenant="B")
        await reached(lambda: len({one.tenant for one in scheduler.dispatcher.waiting}) < 2)
        a, b = work.values()
        assert (a + b) ** 2 / (2 * (a * a + b * b)) >= 0.95
        await arrivals.end()


async def test_a_big_head_does_not_block_what_fits_and_is_not_starved():
    """vllm #31731: the head needs 90 % of the pages, its followers 5 %."""
    policy = Policy(most_passes=6)
    async with Running(SteppingEngine(num_pages=40), policy=policy) as (engine, scheduler):
        arrivals = Arrivals(engine, scheduler)
        filling = arrivals.submit(1, new=31)
        await anext(arrivals.streams[0])
        big = arrivals.submit(2, new=143)
        small = [arrivals.submit(3, new=7) for _ in range(12)]
        await reached(lambda: big.dispatched_at is not None)
        early = [one for one in small if one.dispatched_at and one.dispatched_at < big.dispatched_at]
        assert len(early) == policy.most_passes == big.passed
        for stream in arrivals.streams[1:]:
            assert len([chunk async for chunk in stream])
        assert filling.ended


async def test_a_request_that_yielded_resumes_first_in_its_level():
    """vllm #41951."""
    async with Running(policy=Policy(max_running=2)) as (engine, scheduler):
        order, admit, resume = [], engine.admit, engine.resume
        engine.admit = lambda prepared, pool: (order.append(prepared.prompt[0]), admit(prepared, pool))[1]
        engine.resume = lambda lease: (order.append(-lease.tokens[0]), resume(lease))[1]
        engine.shortages.extend([0, 1])
        await asyncio.gather(*(scheduler.submit(request(p)) for p in (10, 20, 30, 40)))
        assert order == [10, 20, -20, 30, 40]


# Cancellation and leaks


@pytest.mark.parametrize("seed", range(20))
async def test_an_abort_is_never_lost_between_steps(seed):
    """sglang #36876: 200 aborts at random moments, also in the hand-over from queue to engine."""
    dice = random.Random(seed)
    async with Running(SteppingEngine(num_pages=16), max_running=dice.choice([None, 2])) as (_, scheduler):
        tasks = [asyncio.create_task(scheduler.submit(request(n, new=20))) for n in range(10)]
        for task in tasks:
            for _ in range(dice.randrange(12)):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait(tasks)
        assert set(outcomes(scheduler.metrics_text())) <= {("cancelled", "client"), ("done", "length")}


async def test_two_thousand_requests_leak_no_page():
    """imp #1115."""
    async with Running(SteppingEngine(num_pages=32), max_queue_depth=2000) as (engine, scheduler):
        dice = random.Random(5)
        prompts = [tuple(dice.randrange(50) for _ in range(dice.randrange(1, 30))) for _ in range(2000)]
        results = await asyncio.gather(*(scheduler.submit(request(*prompt)) for prompt in prompts))
        assert [result.token_ids for result in results] == [answer(*prompt) for prompt in prompts]
        assert engine.usage().available == 32


async def test_cleaning_up_needs_no_new_work():
    """TensorRT-LLM PR 12313: fill by cancelling, idle, then one request."""
    async with Running(SteppingEngine(num_pages=8)) as (engine, scheduler):
        streams = [scheduler.submit_stream(request(n, new=28)) for n in range(4)]
        await anext(streams[0])
        for stream in streams:
            await stream.aclose()
        await idle(engine, scheduler)
        assert engine.usage().available == 8
        assert (await scheduler.submit(request(5))).token_ids == answer(5)


async def test_a_cancelled_prompt_never_serves_anybody():
    """sglang PR 28374: cancelled in the middle of its prompt, sent again, and compared with a cold answer."""
    model = tiny_model("ouro", max_chunk=8)
    prompt = [(7 * n) % 200 for n in range(64)]
    req = GenerationRequest(prompt, max_new_tokens=6, sampling=SamplingParams(temperature=0, ignore_eos=True))
    cold = model.generate(prompt, max_new_tokens=6, sampling=req.sampling).token_ids
    async with serving(model, policy=Policy(row_budget=8)) as scheduler:
        for turns in range(1, 12):
            task = asyncio.ensure_future(scheduler.submit(req))
            steps = value(scheduler.metrics_text(), "steps_total")
            await reached(lambda: task.done() or value(scheduler.metrics_text(), "steps_total") >= steps + turns)  # noqa: B023
            task.cancel()
            await asyncio.wait({task})
            again = await scheduler.submit(req)
            assert again.token_ids == cold
            scheduler.pool.clear()


# Admission


async def test_a_prompt_larger_than_all_pages_is_refused_and_blocks_nobody():
    """vllm #39734."""
    async with Running(SteppingEngine(num_pages=4)) as (_, scheduler):
        with pytest.raises(NeverFits):
            await scheduler.submit(request(*range(17)))
        assert (await scheduler.submit(request(1))).token_ids == answer(1)


async def test_a_refused_request_gives_its_place_back():
    """TGI #1877: overloaded while idle. 200 mixed disconnects and errors, then the whole capacity again."""
    dice = random.Random(9)
    async with Running(SteppingEngine(num_pages=16), max_queue_depth=8, max_running=2) as (engine, scheduler):
        for _ in range(200):
            task = asyncio.create_task(scheduler.submit(request(*range(dice.randrange(1, 80)), new=5)))
            for _ in range(dice.randrange(6)):
                await asyncio.sleep(0)
            if dice.random() < 0.5:
                task.cancel()
            if dice.random() < 0.1:
                engine.errors.append(ZeroDivisionError())
            await asyncio.wait({task})
            assert task.cancelled() or isinstance(task.exception(), NeverFits | EngineError | None)
        engine.errors.clear()
        await idle(engine, scheduler)
        results = await asyncio.gather(*(scheduler.submit(request(n)) for n in range(8)))
        assert [result.token_ids for result in results] == [answer(n) for n in range(8)]


async def test_an_admitted_request_is_not_refused_after_a_yield():
    """sglang PR 37260: a forced yield while the queue is full."""
    async with Running(max_queue_depth=2, policy=Policy(max_running=2)) as (engine, scheduler):
        first, second = (asyncio.create_task(scheduler.submit(request(p, new=8))) for p in (10, 20))
        await reached(lambda: len(scheduler.dispatcher.running) == 2)
        waiting = [asyncio.create_task(scheduler.submit(request(p))) for p in (30, 40)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await scheduler.submit(request(50))
        engine.shortages.append(1)
        assert (await first).token_ids == answer(10, new=8)
        assert (await second).token_ids == answer(20, new=8)
        await asyncio.gather(*waiting)
        assert value(scheduler.metrics_text(), "preemptions_total") == 1


async def test_aborted_requests_are_counted():
    """vllm #31503."""
    async with Running(max_running=1) as (_, scheduler):
        tasks = [asyncio.create_task(scheduler.submit(request(n, new=50))) for n in range(5)]
        await settle()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await settle()
        assert outcomes(scheduler.metrics_text())[("cancelled", "client")] == 5


async def test_prefix_hits_are_not_counted_again_on_retries():
    """vllm #43736: random prompts that wait for room again and again have a hit rate of 0."""
    dice = random.Random(3)
    model = tiny_model("ouro", pages=40)
    async with serving(model, max_queue_depth=64) as scheduler:
        prompts = [[dice.randrange(200) for _ in range(20)] for _ in range(24)]
        sampling = SamplingParams(temperature=0, ignore_eos=True)
        await asyncio.gather(
            *(scheduler.submit(GenerationRequest(p, max_new_tokens=4, sampling=sampling)) for p in prompts)
        )
        text = scheduler.metrics_text()
        assert value(text, "prefix_lookup_tokens_total") == 24 * 20
        assert sum(value(text, "prefix_hit_tokens_total", depth=d) for d in ("exact", "shallower", "deepened")) == 0


async def test_a_dead_dispatcher_is_ill_health():
    """sglang #6624."""
    engine = SteppingEngine()
    scheduler = Scheduler(engine, clock=engine.clock)
    await scheduler.start()
    scheduler._task.cancel()
    await settle()
    assert not scheduler.healthy
    await scheduler.shutdown()
