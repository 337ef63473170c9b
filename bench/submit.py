"""What one submission costs while many wait, without any engine work.

    python bench/submit.py [--waiting 100000] [--submissions 2000]

Medians of single submissions, in microseconds, into an empty queue and into a long one.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator

from server.scheduler import Scheduler
from server.types import GenerationChunk, GenerationRequest, GenerationResult


class SilentEngine:
    """An engine that never answers: everything behind its first request stays in the queue."""

    async def generate(self, req: GenerationRequest) -> GenerationResult:
        await asyncio.Event().wait()
        raise AssertionError

    async def generate_stream(self, req: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        await asyncio.Event().wait()
        yield GenerationChunk(0, "")


async def measure(waiting: int, submissions: int) -> float:
    scheduler = Scheduler(SilentEngine(), max_queue_depth=waiting + submissions + 1)
    await scheduler.start()
    request = GenerationRequest([1, 2, 3])
    held = [scheduler.submit_stream(request, priority=i % 10) for i in range(waiting)]
    spent = []
    for i in range(submissions):
        began = time.perf_counter()
        held.append(scheduler.submit_stream(request, priority=i % 10))
        spent.append(time.perf_counter() - began)
    await scheduler.shutdown(drain_timeout_s=0)
    return statistics.median(spent) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--submissions", type=int, default=2000)
    args = parser.parse_args()
    costs = {depth: asyncio.run(measure(depth, args.submissions)) for depth in (0, args.waiting)}
    for depth, cost in costs.items():
        print(f"{depth:>7} waiting: {cost:.1f} us per submission")
    print(json.dumps({str(depth): cost for depth, cost in costs.items()}))


if __name__ == "__main__":
    main()
