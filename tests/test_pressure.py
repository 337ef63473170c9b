"""Two thousand requests in the room of one and a half: nothing leaks, nothing hangs, every answer is the calm one."""

import asyncio
import random

from server.engine import Engine
from server.scheduler import Scheduler
from server.types import GenerationRequest
from tests.test_serving import idle, metric
from tests.tiny_models import RETROFIT, tiny_model
from tinyloop.plan import make_plan
from tinyloop.sampling import SamplingParams

LONGEST, NEW = 24, 20


async def test_two_thousand_requests_with_random_cancels_under_memory_pressure() -> None:
    rng = random.Random(17)
    shape = {
        "num_hidden_layers": 3,
        "hidden_size": 24,
        "tinyloop": {"retrofit": RETROFIT["retrofit"] | {"prelude": 1, "core": 1}},
    }
    roomy = tiny_model("llama", **shape)
    one = roomy.runner.pages_needed(make_plan(roomy.config, loops=2), LONGEST + NEW)
    model = tiny_model("llama", pages=one * 3 // 2, max_chunk=8, **shape)
    trunk = [rng.randrange(250) for _ in range(LONGEST)]
    asked = [
        (trunk[: rng.randrange(16)] + [rng.randrange(250)] * rng.randint(1, 8), rng.randint(1, 2)) for _ in range(40)
    ]
    sampling = SamplingParams(temperature=1, seed=3, ignore_eos=True)
    calm = {
        (tuple(prompt), loops): roomy.generate(prompt, max_new_tokens=NEW, loops=loops, sampling=sampling).token_ids
        for prompt, loops in asked
    }
    scheduler = Scheduler(Engine(model), max_queue_depth=2000)
    await scheduler.start()
    answered = 0

    async def visit(number: int) -> None:
        nonlocal answered
        prompt, loops = rng.choice(asked)
        req = GenerationRequest(prompt, max_new_tokens=NEW, loops=loops, sampling=sampling, cache_salt=str(number % 3))
        task = asyncio.ensure_future(scheduler.submit(req, priority=rng.randint(0, 2)))
        if rng.random() < 0.6:
            await asyncio.wait({task}, timeout=rng.random() * 0.2)
            task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            assert task.result().token_ids == calm[tuple(prompt), loops]
            answered += 1

    for wave in range(20):
        await asyncio.gather(*(visit(100 * wave + i) for i in range(100)))
        async with scheduler._turn_lock:  # those who were cancelled may still be in a step
            model.runner.check()
    await idle(scheduler)
    assert metric(scheduler, "tinyloop_requests_total") == 2000
    assert metric(scheduler, "tinyloop_requests_total", outcome="done") >= answered > 700
    assert metric(scheduler, "tinyloop_preemptions_total") > 0
    assert metric(scheduler, "tinyloop_prefix_hit_tokens_total") > 0
    assert not model.runner.leases
    await scheduler.shutdown()
    scheduler.pool.clear()
    model.runner.check()
    assert model.runner.pool.free == model.runner.pool.num_pages
