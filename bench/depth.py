"""What mixed depths cost: streams of many depths in one packed step, against the same streams at the deepest.

    python bench/depth.py [--model ouro-shaped|smollm2] [--streams 32] [--tokens 16] [--repeats 3]

Closed loop of `streams` at a time, counted while all places are taken. A token at depth L costs F0 + L * Fr; both are
measured with every stream at depth 1 and at the deepest. Depths drawn evenly from 1 to the deepest then allow at most
(F0 + Lmax * Fr) / (F0 + Lmean * Fr) times the throughput of the deepest. The cases take turns; medians.
"""

import argparse
import asyncio
import json
import random
import statistics
import time

from random_model import ouro_shaped

from server.engine import Engine
from server.scheduler import DispatchMode, Policy, Scheduler
from server.types import GenerationRequest
from tinyloop.model import Model
from tinyloop.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
ROUNDS = 4  # requests per place


async def tokens_per_second(engine: Engine, mode: DispatchMode, depths: list[int], args: argparse.Namespace) -> float:
    """Answer tokens per second from when every place was taken until nobody waits any more."""
    policy = Policy(mode, max_running=args.streams)
    scheduler = Scheduler(engine, policy=policy, max_queue_depth=len(depths), saturation_ms=None)
    await scheduler.start()
    stamps: list[float] = []
    edges: list[float] = []

    async def read(number: int, loops: int) -> None:
        prompt = [1000 + (7 * number + i) % 9000 for i in range(4)]
        request = GenerationRequest(prompt, max_new_tokens=args.tokens, loops=loops, sampling=GREEDY)
        async for _ in scheduler.submit_stream(request):
            stamps.append(time.perf_counter())
            if not scheduler.dispatcher.waiting and len(edges) == 1:
                edges.append(stamps[-1])
            if len(stamps) == args.streams:  # about when the last place was taken
                edges.append(stamps[-1])

    await asyncio.gather(*(read(number, loops) for number, loops in enumerate(depths)))
    await scheduler.shutdown()
    engine.check()
    begin, end = edges
    return sum(begin < stamp <= end for stamp in stamps) / (end - begin)


def drawn(deepest: int, count: int) -> list[int]:
    """Every depth equally often, in random order."""
    depths = [1 + i % deepest for i in range(count)]
    random.Random(0).shuffle(depths)
    return depths


async def measure(engine: Engine, args: argparse.Namespace) -> dict[str, list[float]]:
    count, middle = ROUNDS * args.streams, (1 + args.deepest) // 2
    one = DispatchMode.CONTINUOUS
    cases = {
        "all at 1": (one, [1] * count),
        "all at the deepest": (one, [args.deepest] * count),
        "mixed": (one, drawn(args.deepest, count)),
        "equal, continuous": (one, [middle] * count),
        "equal, homogeneous": (DispatchMode.HOMOGENEOUS, [middle] * count),
    }
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(args.repeats + 1):  # the first is a warm-up
        for name in list(cases)[:: -1 if repeat % 2 else 1]:  # neighbours in time differ least: each goes first in turn
            rate = await tokens_per_second(engine, *cases[name], args)
            rates[name] += [rate] if repeat else []
    return rates


def report(rates: dict[str, float], equal: float, deepest: int) -> dict[str, float]:
    shallow_s, deep_s = 1 / rates["all at 1"], 1 / rates["all at the deepest"]
    per_loop = (deep_s - shallow_s) / (deepest - 1)
    fixed = shallow_s - per_loop
    bound = (fixed + deepest * per_loop) / (fixed + (1 + deepest) / 2 * per_loop)
    gain = rates["mixed"] / rates["all at the deepest"]
    print(f"F0 {1e3 * fixed:.2f} ms, Fr {1e3 * per_loop:.2f} ms per token and loop")
    print(f"mixed against the deepest: {gain:.2f}x, the bound is {bound:.2f}x, {gain / bound:.0%} of it")
    print(f"at equal depth, continuous against homogeneous: {equal:.3f}x")
    return {"gain": gain, "bound": bound, "share": gain / bound, "equal": equal, "f0_s": fixed, "fr_s": per_loop}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ouro-shaped")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--deepest", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    like = Model.load("smollm2" if args.model == "ouro-shaped" else args.model)
    engine = Engine(ouro_shaped(like) if args.model == "ouro-shaped" else like)
    measured = asyncio.run(measure(engine, args))
    rates = {name: statistics.median(values) for name, values in measured.items()}
    pairs = zip(measured["equal, continuous"], measured["equal, homogeneous"], strict=True)
    equal = statistics.median(one / other for one, other in pairs)
    print(f"{args.model}, {args.streams} streams, {args.tokens} tokens each, depths 1 to {args.deepest}\n")
    print("| case | tokens/s |\n|---|---|")
    for name, rate in rates.items():
        print(f"| {name} | {rate:.1f} |")
    print()
    print(json.dumps({"tokens_per_s": rates, **report(rates, equal, args.deepest)}))


if __name__ == "__main__":
    main()
