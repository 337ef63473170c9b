"""What the machine can do at most, and how much of it one loop of the core reaches.

    python bench/ceilings.py [--rows 1 64] [--repeats 5] [--out FILE]

Two ceilings: reading a buffer that no cache holds, and a large product of bfloat16 matrices. Between them, one loop of
24 layers of Ouro-1.4B's shape with random weights, through the runner that serves: `rows` streams with a row each,
attention and bookkeeping included, head and sampling not. A loop must read all weights (that bounds few rows) and
multiply them with every row (that bounds many); its roof is the larger of the two times. Everything takes turns;
best of the repeats for the ceilings, medians for the loop.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine
from random_model import OURO, RandomTensors

from tinyloop.checkpoint import open_checkpoint
from tinyloop.drive import Job
from tinyloop.models.family import Weights
from tinyloop.models.registry import family_of
from tinyloop.plan import make_plan
from tinyloop.runner import Runner
from tinyloop.sampling import SamplingParams
from tinyloop.stack import LoopedStack

OURO_1_4B = OURO | {
    "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
    "head_dim": 128, "vocab_size": 256,  # the head is not measured
}  # fmt: skip
BUFFER_BYTES = 3 << 29
SIDE = 4096  # of the matrices
PROMPT, LOOPS = 16, 8  # tokens before the measured ones; loops measured at a time
PAGES_PER_STREAM = 3


class Repeated(RandomTensors):
    """Random values, the same ones for every tensor of a shape: each still gets memory of its own."""

    @cache  # noqa: B019 - one source, used once
    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return super().take("norm" if "norm" in name else "", shape)


# The ceilings


def readers() -> dict[str, Callable[[], Any]]:
    """Ways to read the whole buffer once; the fastest counts."""
    threads = torch.get_num_threads()
    integers = np.ones(BUFFER_BYTES // 8, np.int64)
    floats = torch.from_numpy(integers).view(torch.float32)
    parts, pool = np.array_split(integers, threads), ThreadPoolExecutor(threads)
    return {
        "integers, numpy": lambda: list(pool.map(np.sum, parts)),
        "float32, torch": floats.sum,
        "float32 product, torch": lambda: torch.dot(floats, floats),
    }


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def product() -> Callable[[], Any]:
    left, right = (torch.randn(SIDE, SIDE).bfloat16() for _ in range(2))
    return lambda: left @ right


# The loop


def ouro_runner(rows: int) -> Runner:
    family = family_of(OURO_1_4B)
    stack = LoopedStack(family, family.config(OURO_1_4B), Weights(Repeated(), torch.bfloat16, torch.device("cpu")))
    return Runner(stack, open_checkpoint("smollm2").tokenizer, num_pages=rows * PAGES_PER_STREAM)


def loop_seconds(runner: Runner, rows: int) -> list[float]:
    """Seconds of the core in steps of `rows` streams with one row each."""
    plan = make_plan(runner.stack.config, loops=1)
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    for row in range(rows):
        job = Job([1 + row % 200] * PROMPT, plan, LOOPS + 1, greedy)
        assert runner.admit(**vars(job)) is not None, "the pages were counted for this"
    seconds = []
    while runner.leases:
        report = runner.step(runner.ready())
        if report.rows == rows:
            seconds.append(report.seconds - report.boundary_seconds)
        for lease in report.finished:
            runner.release(lease)
    return seconds[1:]


def shares(config: Any, rows: int, seconds: float, read: float, multiplied: float) -> dict[str, float]:
    """Rates and parts of the ceilings, given in bytes and operations per second."""
    weights = config.layer_parameters * config.layout.core
    needed_read, needed_product = 2 * weights / read, 2 * weights * rows / multiplied
    return {
        "rows": rows,
        "ms": 1e3 * seconds,
        "gb_per_s": 2e-9 * weights / seconds,
        "gflop_per_s": 2e-9 * weights * rows / seconds,
        "of_reading": needed_read / seconds,
        "of_product": needed_product / seconds,
        "of_roof": max(needed_read, needed_product) / seconds,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    runner, reads, multiply = ouro_runner(max(args.rows)), readers(), product()
    read_s: dict[str, list[float]] = {name: [] for name in reads}
    product_s: list[float] = []
    loop_s: dict[int, list[float]] = {rows: [] for rows in args.rows}
    for repeat in range(args.repeats + 1):  # the first is a warm-up
        for name, read in reads.items():
            read_s[name].append(timed(read))
        product_s.append(timed(multiply))
        for rows in args.rows:
            seconds = loop_seconds(runner, rows)
            loop_s[rows] += seconds if repeat else []
    by_reader = {name: BUFFER_BYTES / min(seconds) for name, seconds in read_s.items()}
    read, multiplied = max(by_reader.values()), 2 * SIDE**3 / min(product_s)
    config = runner.stack.config
    return {
        **machine(),
        "threads": torch.get_num_threads(),
        "reading_gb_per_s": {name: 1e-9 * rate for name, rate in by_reader.items()},
        "product_gflop_per_s": 1e-9 * multiplied,
        "loops": [shares(config, rows, statistics.median(all_), read, multiplied) for rows, all_ in loop_s.items()],
    }


def table(figures: dict[str, Any]) -> str:
    read, multiplied = max(figures["reading_gb_per_s"].values()), figures["product_gflop_per_s"]
    lines = [
        f"Reading: {read:.1f} GB/s. bfloat16 product: {multiplied:.0f} GFLOP/s. {figures['threads']} threads.\n",
        "| rows | ms per loop | GB/s of weights | of reading | GFLOP/s | of the product | of the roof |",
        "|---|---|---|---|---|---|---|",
    ]
    cells = (
        "{rows}",
        "{ms:.0f}",
        "{gb_per_s:.1f}",
        "{of_reading:.0%}",
        "{gflop_per_s:.0f}",
        "{of_product:.0%}",
        "{of_roof:.0%}",
    )
    row = f"| {' | '.join(cells)} |"
    return "\n".join([*lines, *(row.format_map(loop) for loop in figures["loops"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ceilings.json")
    args = parser.parse_args()
    figures = measure(args)
    print(table(figures))
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
