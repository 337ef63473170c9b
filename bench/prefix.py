"""Time to first token of a prompt whose prefix is held: at the same depth, at a deeper one, and at a shallower one.

    python bench/prefix.py [--repeats 5] [--prompt 512] [--shared 480]

Two models in one run: smollm2 (its coda belongs to one depth and is rebuilt at another) and a random model of Ouro's
shape, 24 layers and up to 8 loops at a small width. Each case starts from a fresh pool; the prefix is registered
before the clock starts. Medians; the cases take turns.
"""

import argparse
import json
import random
import statistics
import time

from random_model import ouro_shaped

from tinyloop.kv.prefix import PrefixPool
from tinyloop.model import Model
from tinyloop.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
Case = tuple[str, int | None, int, str]  # name, depth held, depth asked, the case it is compared with


def first_token_seconds(model: Model, prompt: list[int], shared: int, held: int | None, asked: int) -> float:
    pool = PrefixPool()
    if held is not None:
        model.register_prefix(pool, prompt[:shared], loops=held)
    began = time.perf_counter()
    answer = model.generate_with_pool(pool, prompt, max_new_tokens=1, loops=asked, sampling=GREEDY)
    seconds = time.perf_counter() - began
    assert answer.cached_tokens == (0 if held is None else shared)
    pool.clear()
    return seconds


def measure(model: Model, cases: list[Case], args: argparse.Namespace) -> dict[str, float]:
    rng = random.Random(0)
    prompt = [rng.randrange(1000, 40000) for _ in range(args.prompt)]
    times: dict[str, list[float]] = {case[0]: [] for case in cases}
    for repeat in range(args.repeats + 1):  # the first is a warm-up
        for name, held, asked, _ in cases:
            seconds = first_token_seconds(model, prompt, args.shared, held, asked)
            times[name] += [seconds] if repeat else []
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--shared", type=int, default=480)
    args = parser.parse_args()
    smollm2 = Model.load("smollm2")
    plans: list[tuple[Model, list[Case]]] = [
        (smollm2, [("cold at 4", None, 4, "cold at 4"), ("held at 4, asked 4", 4, 4, "cold at 4"),
                   ("cold at 2", None, 2, "cold at 2"), ("held at 4, asked 2", 4, 2, "cold at 2")]),
        (ouro_shaped(smollm2), [("cold at 4", None, 4, "cold at 4"), ("held at 8, asked 4", 8, 4, "cold at 4"),
                         ("cold at 8", None, 8, "cold at 8"), ("held at 8, asked 8", 8, 8, "cold at 8"),
                         ("held at 4, asked 8", 4, 8, "cold at 8")]),
    ]  # fmt: skip
    results: dict[str, dict[str, float]] = {}
    print("| model | prefix | first token, ms | against cold |\n|---|---|---|---|")
    for model, cases in plans:
        medians = results[model.name] = measure(model, cases, args)
        for name, _, _, cold in cases:
            print(f"| {model.name} | {name} | {1000 * medians[name]:.0f} | {medians[name] / medians[cold]:.2f}x |")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
