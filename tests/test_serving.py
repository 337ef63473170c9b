"""The scheduler over the real engine and a tiny model: every mode answers the same, and nothing is left behind."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.engine import Engine
from server.scheduler import DispatchMode, Policy, Scheduler
from server.types import GenerationRequest
from tests.tiny_models import GREEDY, RETROFIT, greedy_by_oracle, tiny_model
from tinyloop.errors import ContextOverflow, NeverFits, RequestError
from tinyloop.model import Model

pytestmark = pytest.mark.filterwarnings("error")


@asynccontextmanager
async def serving(model: Model, **options: object) -> AsyncIterator[Scheduler]:
    """A running scheduler; afterwards the accounts must balance."""
    engine = Engine(model)
    scheduler = Scheduler(engine, **options)
    await scheduler.start()
    try:
        yield scheduler
        await idle(scheduler)
    finally:
        await scheduler.shutdown()
        await engine.close()
    scheduler.pool.clear()
    engine.check()
    assert engine.usage().available == engine.usage().num_pages
    assert not model.runner.leases


async def idle(scheduler: Scheduler) -> None:
    while scheduler.snapshot()["queue_depth"] or scheduler.snapshot()["in_flight"]:  # noqa: ASYNC110 - nobody rings
        await asyncio.sleep(0.001)


def request(prompt: list[int], tokens: int = 6, **options: object) -> GenerationRequest:
    return GenerationRequest(prompt, max_new_tokens=tokens, sampling=GREEDY, **options)


def metric(scheduler: Scheduler, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(scheduler.metrics_text())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@pytest.mark.parametrize("mode", DispatchMode)
async def test_every_mode_gives_the_same_answers(mode: DispatchMode) -> None:
    model = tiny_model("ouro")
    jobs = [([i, i + 7, 3], loops) for i, loops in enumerate([1, 2, 4, 2, 2, 8, 1])]
    async with serving(model, dispatch=mode) as scheduler:
        got = await asyncio.gather(*(scheduler.submit(request(prompt, loops=loops)) for prompt, loops in jobs))
    for (prompt, loops), result in zip(jobs, got, strict=True):
        assert list(result.token_ids) == greedy_by_oracle(model, prompt, 6, loops)
        assert (result.loops_granted, result.finish_reason, result.degraded) == (loops, "length", False)


@pytest.mark.parametrize("policy", [{"row_budget": 3}, {"min_boundary_rows": 3}, {"max_running": 2}])
async def test_no_policy_changes_an_answer(policy: dict[str, int]) -> None:
    model = tiny_model("llama", tinyloop=RETROFIT)
    jobs = [([i] * (3 + 2 * i), 1 + i % 3) for i in range(7)]
    async with serving(model, policy=Policy(**policy)) as scheduler:
        got = await asyncio.gather(*(scheduler.submit(request(prompt, loops=loops)) for prompt, loops in jobs))
    assert [list(r.token_ids) for r in got] == [greedy_by_oracle(model, p, 6, loops) for p, loops in jobs]


WHOLE = {
    "dory": {"recurrent_kv_cache_mode": "last_loop", "n_input_layers": 2, "n_output_layers": 1,
             "initializer_range": 0.3, "ngpt_alpha_init": 0.3, "sliding_window": 5},
    "hrm_text": {"num_hidden_layers": 2, "num_key_value_heads": 4, "L_cycles": 2},
}  # fmt: skip


@pytest.mark.parametrize("kind", WHOLE)
async def test_prompts_that_run_whole_are_served_beside_others_in_little_room(kind: str) -> None:
    model = tiny_model(kind, pages=100 if kind == "dory" else 33, **WHOLE[kind])
    jobs = [([i, *range(2 * i)], 1 + i % 3) for i in range(6)]
    alone = [model.generate(prompt, max_new_tokens=30, loops=loops, sampling=GREEDY) for prompt, loops in jobs]
    yields = 0.0
    for mode in DispatchMode:
        async with serving(model, policy=Policy(mode, row_budget=3)) as scheduler:
            got = await asyncio.gather(*(scheduler.submit(request(prompt, 30, loops=loops)) for prompt, loops in jobs))
            yields += metric(scheduler, "tinyloop_preemptions_total")
        assert [result.token_ids for result in got] == [answer.token_ids for answer in alone]
        assert {result.cached_tokens for result in got} == {0}
    assert yields, "the test needs requests that are read again"


async def test_a_stream_gives_the_tokens_of_the_whole_answer() -> None:
    model = tiny_model("ouro")
    async with serving(model) as scheduler:
        stream = scheduler.submit_stream(request([1, 2, 3], 9, loops=2))
        chunks = [chunk async for chunk in stream]
    assert [chunk.token_id for chunk in chunks] == greedy_by_oracle(model, [1, 2, 3], 9, 2)
    assert stream.result is not None
    assert stream.result.text == "".join(chunk.text for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks] == [None] * 8 + ["length"]


async def test_scores_come_back_without_new_tokens() -> None:
    model = tiny_model("ouro")
    async with serving(model) as scheduler:
        result = await scheduler.submit(GenerationRequest([5, 6, 7, 8], mode="score", loops=2))
    assert [value.chosen for value in result.prompt_logprobs] == pytest.approx(model.score([5, 6, 7, 8], 2))
    assert result.token_ids == ()


async def test_adaptive_depth_reports_the_loops_of_each_token() -> None:
    model = tiny_model("ouro")
    async with serving(model) as scheduler:
        req = request([4, 5, 6], 16, loops=4, mode="adaptive", exit_threshold=0.05)
        chunks = [chunk async for chunk in scheduler.submit_stream(req)]
    expected = model.generate([4, 5, 6], max_new_tokens=16, loops=4, exit_threshold=0.05, sampling=GREEDY)
    assert tuple(chunk.loops for chunk in chunks) == expected.loops
    assert len(set(expected.loops)) > 1


async def test_two_hundred_cancels_at_random_moments_leave_nothing_behind() -> None:
    model, rng = tiny_model("llama", tinyloop=RETROFIT, pages=300, max_chunk=4), random.Random(11)

    async def visit(scheduler: Scheduler, number: int) -> None:
        await asyncio.sleep(rng.random() * 0.5)
        req = request([number % 250] * rng.randint(1, 20), rng.randint(1, 12), loops=rng.randint(1, 8))
        if number % 2:
            task = asyncio.ensure_future(scheduler.submit(req, priority=rng.randint(0, 2)))
            await asyncio.wait({task}, timeout=rng.random() * 0.1)
            task.cancel()
            await asyncio.wait({task})
        else:
            stream = scheduler.submit_stream(req)
            for _ in range(rng.randint(0, 4)):
                await anext(stream, None)
            await stream.aclose()

    async with serving(model, max_queue_depth=1000) as scheduler:
        await asyncio.gather(*(visit(scheduler, number) for number in range(200)))
        await idle(scheduler)
        for gauge in ("tinyloop_queue_depth", "tinyloop_in_flight", "tinyloop_kv_usage_ratio"):
            assert metric(scheduler, gauge) == 0
        assert metric(scheduler, "tinyloop_requests_total") == 200
        assert metric(scheduler, "tinyloop_requests_total", outcome="cancelled", reason="client") > 50
        result = await scheduler.submit(request([1, 2], loops=3))
        assert list(result.token_ids) == greedy_by_oracle(model, [1, 2], 6, 3)


async def test_a_registered_prefix_is_reused_and_answers_stay_the_same() -> None:
    model = tiny_model("ouro")
    async with serving(model) as scheduler:
        assert scheduler.register_prefix(list(range(20)), loops=4) == 20
        assert await scheduler.aregister_prefix(list(range(30, 35)), loops=4) == 5
        assert scheduler.prefix_pool_stats() == {"entries": 2, "total_cached_tokens": 25}
        result = await scheduler.submit(request([*range(20), 99], loops=4))
        assert result.cached_tokens == 20
        assert list(result.token_ids) == greedy_by_oracle(model, [*range(20), 99], 6, 4)


async def test_prefixes_may_be_registered_while_others_stream() -> None:
    model = tiny_model("ouro")
    async with serving(model) as scheduler:
        stream = scheduler.submit_stream(request([1, 2, 3], 40, loops=2))
        tokens = [(await anext(stream)).token_id for _ in range(3)]
        assert scheduler.register_prefix([7, 8, 9], loops=2) == 3
        assert await scheduler.aregister_prefix([9, 8, 7], loops=2) == 3
        tokens += [chunk.token_id async for chunk in stream]
    assert tokens == greedy_by_oracle(model, [1, 2, 3], 40, 2)


async def test_what_can_never_run_is_refused_at_the_door() -> None:
    async with serving(tiny_model("ouro", pages=20)) as scheduler:
        for error, req in (
            (ContextOverflow, request([1] * 250, 7)),
            (NeverFits, request([1] * 90, 100, loops=8)),
            (RequestError, request([1], loops=99)),
            (RequestError, request([999])),
            (RequestError, request([1], mode="speculative")),
            (RequestError, request([1], mode="adaptive")),
            (RequestError, request([1], exit_threshold=0.5)),
            (RequestError, request([1], exit_signal="distance")),
            (RequestError, request([1], mode="adaptive", exit_threshold=0.5, exit_signal="kl")),
        ):
            with pytest.raises(error):
                await scheduler.submit(req)
        assert metric(scheduler, "tinyloop_requests_total", outcome="rejected", reason="invalid") == 9


async def test_default_loops_of_the_server_replace_the_models_own() -> None:
    model = tiny_model("ouro")
    engine = Engine(model, default_loops=2)
    assert (engine.info.default_loops, engine.info.max_loops, engine.info.family) == (2, 8, "ouro")
    assert engine.prepare(request([1])).plan.loops == 2
    with pytest.raises(RequestError, match="loops must be between 1 and 8, got 20"):
        Engine(model, default_loops=20)
    await engine.close()
