"""One trace both ways: a real model under the real scheduler, then the simulator with costs measured just before.

    python bench/simulate.py AzureLLMInferenceTrace_conv.csv [--model smollm2] [--scale 32] [--load 0.7] [--seconds 90]

The rate is `--load` of what the simulator says the machine can do. Prompts are random tokens, so that no prefix is
shared, as in the simulator. The machine should be idle: "speed" says how much slower or faster the steps of the real
run were than the calibration had it, which no simulator can know. On a machine that others use too, `--cpu-time` runs
everything with one thread and counts seconds of this process's processor time instead of the wall's, skipping those in
which nobody is being served. Three simulations: with costs measured before the run, before and after it, and fitted to
the steps of the run itself. What the last is off by is the simulator's own error, not the machine's.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from server.engine import Engine
from server.request import ChunkStream
from server.scheduler import Scheduler
from server.simulation.calibrate import facts_of, measure
from server.simulation.costs import StepCosts, shape_of
from server.simulation.fitting import Measured, fit
from server.simulation.fleet import simulate
from server.simulation.replica import Server
from server.simulation.report import Quantiles
from server.simulation.trace import Arrival, Trace
from server.types import GenerationRequest
from tinyloop.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
FLOOD = 400  # requests at once that show what the machine can do
POLL_S = 0.002  # of the wall, in which processor time is looked at


class Watched:
    """An engine whose steps are written down."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self.engine, self.steps, self.clock = engine, list[Measured](), clock
        self.began = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def step(self, segments: list[Any]) -> Any:
        shape = shape_of(segments, self.engine.model.config.layout, self.engine.runner.page_size)
        now = self.clock()
        if self.steps:
            self.steps[-1] = self.steps[-1]._replace(turn_s=now - self.began)
        self.began = now
        report = await self.engine.step(segments)
        self.steps.append(Measured(shape, report.seconds, report.seconds, report.boundary_seconds))
        return report


class Stopwatch:
    """Seconds of the wall, or of this process's processor time; then idle time can be skipped."""

    def __init__(self, *, cpu: bool) -> None:
        self.cpu, self._skipped = cpu, 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self._skipped

    async def wait(self, until: float, busy: Callable[[], bool]) -> None:
        while (left := until - self()) > 0:
            if not self.cpu:
                await asyncio.sleep(left)
            elif busy():
                await asyncio.sleep(POLL_S)
            else:
                self._skipped += left


async def serve(engine: Watched, arrivals: list[Arrival], clock: Stopwatch) -> tuple[Quantiles, Quantiles]:
    """First token and whole answer, of requests that come when the trace says."""
    rng = random.Random(0)
    vocabulary = range(engine.info.vocab_size)
    prompts = [rng.choices(vocabulary, k=arrival.prompt) for arrival in arrivals]
    scheduler = Scheduler(engine, max_queue_depth=1 << 20, clock=clock)
    await scheduler.start()
    reading, began = [], clock()
    for arrival, prompt in zip(arrivals, prompts, strict=True):
        await clock.wait(began + arrival.at, lambda: scheduler.dispatcher.busy)
        request = GenerationRequest(prompt, max_new_tokens=arrival.answer, loops=arrival.loops, sampling=GREEDY)
        reading.append(asyncio.create_task(read(scheduler.submit_stream(request), clock, clock())))
    firsts, totals = zip(*await asyncio.gather(*reading), strict=True)
    await scheduler.shutdown()
    return Quantiles.of(np.array(firsts)), Quantiles.of(np.array(totals))


async def read(stream: ChunkStream, clock: Stopwatch, came: float) -> tuple[float, float]:
    first = 0.0
    async for _ in stream:
        first = first or clock() - came
    return first, clock() - came


def from_the_run(costs: StepCosts, watched: Watched) -> StepCosts:
    """Costs fitted to the real run's own steps, with the turn's as calibrated."""
    steps = [m._replace(turn_s=m.step_s + costs.turn.seconds(m.shape)) for m in watched.steps]
    return fit(costs.model, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--scale", type=float, default=32)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--calibrate", type=float, default=90)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    engine, trace = Engine.load(args.model), Trace.read(args.trace)
    if args.cpu_time:
        torch.set_num_threads(1)
        time.perf_counter = time.process_time
    facts, steps = facts_of(engine), measure(engine, seconds=args.calibrate)
    costs = fit(facts, steps)
    print(f"{len(steps)} steps measured, mean relative error of the fit {costs.error:.1%}")
    if args.save:
        costs.save(args.save)
    server = Server(max_queue_depth=1 << 20)
    most = simulate(costs, trace.arrivals(FLOOD, scale=args.scale, rate=1000.0), server).requests_per_s
    rate = args.load * most
    arrivals = list(trace.arrivals(max(1, round(rate * args.seconds)), scale=args.scale, rate=rate))
    clock = Stopwatch(cpu=args.cpu_time)
    watched = Watched(engine, clock)
    real = asyncio.run(serve(watched, arrivals, clock))
    before = simulate(costs, arrivals, server)
    around = simulate(fit(facts, steps + measure(engine, seconds=args.calibrate, seed=1)), arrivals, server)
    own = simulate(from_the_run(costs, watched), arrivals, server)
    print(f"{len(arrivals)} requests at {rate:.2f}/s, {args.load:.0%} of {most:.2f}/s\n")
    print("| ms | real | costs from before | from before and after | from the run itself |\n|---|---|---|---|---|")
    ratios: dict[str, list[float]] = {}
    rows = (("first token", real[0], [one.first_token for one in (before, around, own)]),
            ("whole answer", real[1], [one.total for one in (before, around, own)]))  # fmt: skip
    for name, was, simulated in rows:
        for share in ("p50", "p90", "p99"):
            ms = 1000 * getattr(was, share)
            found = [1000 * getattr(one, share) for one in simulated]
            ratios[f"{name} {share}"] = [one / ms for one in found]
            cells = " | ".join(f"{one:.0f} ({one / ms:.2f})" for one in found)
            print(f"| {name} {share} | {ms:.0f} | {cells} |")
    measured = sum(m.step_s for m in watched.steps)
    speed = sum(costs.seconds(m.shape) - costs.turn.seconds(m.shape) for m in watched.steps) / measured
    print(f"\n{len(watched.steps)} steps in the real run, {before.steps} simulated; speed {speed:.2f}")
    print(json.dumps({"ratios": ratios, "fit_error": costs.error, "speed": speed}))


if __name__ == "__main__":
    main()
