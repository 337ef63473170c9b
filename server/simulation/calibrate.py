"""Calibrate: drive a real engine over a grid of prompts, streams, depths and contexts, and fit what its steps cost.

The steps are planned and accounted for by the server's own dispatcher, in an event loop, so that a turn is measured as
it is in service: policy, metrics and the hand-over to the engine thread count. HTTP does not, nor does sampling at a
temperature. Imports no torch: the engine that it is handed has it.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from server.admission import Admission
from server.depth import DepthCeilings
from server.dispatcher import Dispatcher
from server.door import Door
from server.metrics import Metrics
from server.policy import Policy
from server.simulation.costs import ModelFacts, StepCosts, shape_of
from server.simulation.fitting import Measured, fit
from server.types import GenerationRequest
from tinyloop.kv.prefix import PrefixPool
from tinyloop.sampling import SamplingParams

if TYPE_CHECKING:
    from server.engine import Engine

MOST_STREAMS = 64
_GREEDY = SamplingParams(temperature=0, ignore_eos=True)


class Entry(NamedTuple):
    """A request of a wave: after how many steps it comes, tokens, loops."""

    after: int
    prompt: int
    answer: int
    loops: int


Wave = list[Entry]


def calibrate(
    engine: Engine, *, seconds: float = 90.0, seed: int = 0, say: Callable[[str], None] = lambda line: None
) -> StepCosts:
    """The costs of this engine's steps on this machine, measured for about `seconds` (the grid is run at least once).

    `say` hears how well the fit describes what was measured. Not from a running event loop.
    """
    steps = measure(engine, seconds=seconds, seed=seed)
    costs = fit(facts_of(engine), steps)
    say(f"{len(steps)} steps measured, mean relative error of the fit {costs.error:.1%}")
    return costs


def measure(engine: Engine, *, seconds: float, seed: int = 0) -> list[Measured]:
    """The steps that `calibrate` fits its costs to."""
    facts, rng = facts_of(engine), random.Random(seed)
    steps: list[Measured] = []
    until = time.monotonic() + seconds
    waves = _grid(facts)
    rng.shuffle(waves)
    driver = _Driver(engine)
    with asyncio.Runner() as runner:
        runner.run(driver.run(_fitting(waves[0], facts)))  # not counted: the first steps fill caches
        for wave in waves:
            steps += runner.run(driver.run(_fitting(wave, facts)))
        while time.monotonic() < until:
            steps += runner.run(driver.run(_fitting(_mixed(facts, rng), facts)))
    return steps


def facts_of(engine: Engine) -> ModelFacts:
    info, usage, config = engine.info, engine.usage(), engine.model.config
    return ModelFacts(
        name=info.id,
        prelude=config.layout.prelude,
        core=config.layout.core,
        coda=config.layout.coda,
        page_size=usage.page_size,
        num_pages=usage.num_pages,
        max_context=info.max_context,
        default_loops=info.default_loops,
        max_loops=info.max_loops,
        max_chunk=engine.runner.max_chunk,
        page_bytes=engine.runner.stats()["page_bytes"],
        head_loops=config.head_loops,
        one_plane=config.layout.one_plane,
        whole_prompt=config.whole_prompt,
    )


# What is measured


def _grid(facts: ModelFacts) -> list[Wave]:
    """Every cost by itself: prompts and histories of many lengths, streams of many numbers; then prompts of different
    lengths at once, and coming one by one."""
    usual, longest = facts.default_loops, facts.max_context // 2
    prompts = [[Entry(0, length, 3, depth)] for length in (4, 16, 48, 128, 300, 512) for depth in sorted({1, usual})]
    streams = [[Entry(0, 12, 6, usual)] * count for count in (1, 2, 4, 8, 16, 32, 64)]
    histories = [
        [Entry(0, min(length, longest), 5, usual)] * count
        for length, count in ((256, 1), (256, 4), (1024, 1), (1024, 3), (2048, 1))
        if length < 2 * longest
    ]
    crowds = [
        [Entry(spread * number, 5 + 13 * number % 90, 4 + number % 5, usual) for number in range(count)]
        for count in (4, 8, 16, 32)
        for spread in (0, 1, 2)
    ]
    return [*streams, *prompts, *histories, *crowds]


def _mixed(facts: ModelFacts, rng: random.Random) -> Wave:
    """As in service: requests of all kinds come while others run."""
    count, spread = _log_uniform(rng, 4, MOST_STREAMS // 2), _log_uniform(rng, 1, 8) - 1
    depths = [facts.default_loops] * 4 + [rng.randint(1, facts.max_loops)]
    return [
        Entry(spread * number, _log_uniform(rng, 4, 300), _log_uniform(rng, 1, 24), rng.choice(depths))
        for number in range(count)
    ]


def _fitting(wave: Wave, facts: ModelFacts) -> Wave:
    """Within the model's context and half of its pages: running out is another matter."""
    fitting: Wave = []
    budget = facts.num_pages // 2
    for entry in wave:
        prompt = max(1, min(entry.prompt, facts.max_context // 2))
        answer = min(entry.answer, facts.max_context - prompt)
        pages = (-(-(prompt + answer) // facts.page_size) + 1) * facts.layout.rows(entry.loops)
        if pages <= budget:
            budget -= pages
            fitting.append(Entry(entry.after, prompt, answer, entry.loops))
    return fitting


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


class _Driver:
    """The scheduler's turn, with a stop-watch."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.layout, self._rng = engine, engine.model.config.layout, random.Random(time.time_ns())
        self.page_size = engine.usage().page_size
        policy = Policy()
        metrics = Metrics(cast("Callable[[], Any]", lambda: None))  # nobody scrapes
        admission = Admission(
            max_queue_depth=1 << 30, default_slo_ms=None, ema_alpha=0.2, sequential=False, clock=time.monotonic
        )
        self.dispatcher = Dispatcher(engine, policy, admission, metrics, PrefixPool(0), time.monotonic)
        self.door = Door(self.dispatcher, DepthCeilings(None, time.monotonic), time.monotonic)

    async def run(self, wave: Sequence[Entry]) -> list[Measured]:
        """Every entry to its end."""
        pending = sorted(wave, key=lambda entry: entry.after, reverse=True)
        measured: list[Measured] = []
        while pending or self.dispatcher.busy:
            while pending and (pending[-1].after <= len(measured) or not self.dispatcher.busy):
                self._enter(pending.pop())
            measured.append(await self._turn())
        return measured

    def _enter(self, entry: Entry) -> None:
        prompt = self._rng.choices(range(self.engine.info.vocab_size), k=entry.prompt)  # shares no prefix
        req = GenerationRequest(prompt, max_new_tokens=entry.answer, loops=entry.loops, sampling=_GREEDY)
        self.door.enter(req, 0, None, streaming=True)

    async def _turn(self) -> Measured:
        began = time.perf_counter()
        segments = self.dispatcher.plan()
        watched = time.perf_counter()
        shape = shape_of(segments, self.layout, self.page_size)
        began += time.perf_counter() - watched
        step = asyncio.ensure_future(self.engine.step(segments))
        await asyncio.wait({step})
        report = step.result()
        self.dispatcher.complete(segments, report, time.perf_counter() - began)
        return Measured(shape, time.perf_counter() - began, report.seconds, report.boundary_seconds)
