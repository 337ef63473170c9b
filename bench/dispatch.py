"""Tokens per second of 8 equal requests in each of the four dispatch modes, in one run.

    python bench/dispatch.py [--model smollm2] [--requests 8] [--tokens 64] [--loops 2] [--repeats 3]

The modes take turns, so that a slow moment of the machine hits them all; medians over the repeats, after a warm-up.
"""

import argparse
import asyncio
import json
import statistics
import time

from server.engine import Engine
from server.scheduler import DispatchMode, Scheduler
from server.types import GenerationRequest
from tinyloop.sampling import SamplingParams

PROMPT = "A short story about a lighthouse keeper who finds a message in a bottle:"


async def run_once(engine: Engine, mode: DispatchMode, args: argparse.Namespace) -> float:
    """Tokens per second from the first submission to the last answer."""
    scheduler = Scheduler(engine, dispatch=mode)
    await scheduler.start()
    sampling = SamplingParams(temperature=0, ignore_eos=True)
    request = GenerationRequest(PROMPT, max_new_tokens=args.tokens, loops=args.loops, sampling=sampling)
    began = time.perf_counter()
    results = await asyncio.gather(*(scheduler.submit(request) for _ in range(args.requests)))
    seconds = time.perf_counter() - began
    assert len({result.token_ids for result in results}) == 1, "equal requests must get equal answers"
    await scheduler.shutdown()
    engine.check()
    return args.requests * args.tokens / seconds


async def measure(engine: Engine, args: argparse.Namespace) -> dict[str, float]:
    await run_once(engine, DispatchMode.CONTINUOUS, args)
    rates: dict[str, list[float]] = {mode.value: [] for mode in DispatchMode}
    for _ in range(args.repeats):
        for mode in DispatchMode:
            rates[mode.value].append(await run_once(engine, mode, args))
    return {mode: statistics.median(values) for mode, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--loops", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    engine = Engine.load(args.model, dtype=args.dtype)
    medians = asyncio.run(measure(engine, args))
    base = medians["sequential"]
    loops = args.loops or engine.info.default_loops
    print(f"{engine.info.id} {engine.info.weights}, {args.requests} requests x {args.tokens} tokens, {loops} loops\n")
    print("| dispatch | tokens/s | against sequential |\n|---|---|---|")
    for mode, rate in medians.items():
        print(f"| {mode} | {rate:.1f} | {rate / base:.2f}x |")
    print(json.dumps({"tokens_per_s": medians, "ratio": {mode: rate / base for mode, rate in medians.items()}}))


if __name__ == "__main__":
    main()
