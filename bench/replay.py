"""Replay a Mooncake trace through the prefix pool of a tiny random model, and compare with what a cache could reach.

    python bench/replay.py mooncake_synthetic_trace.jsonl [--pages 80000] [--requests 3993] [--sample 50]

Each hash id of the trace becomes a fixed block of 16 tokens, so that sharing survives; output lengths are divided by
64. Two ideals of the same size stand beside it: a cache of nothing but whole prompt blocks that drops the least
recently used, and a clairvoyant one that drops the block whose next use is furthest away. A sample of the answers is
compared with cold ones.
"""

import argparse
import heapq
import itertools
import json
import random
import time
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from random_model import random_stack
from tokenizers import Tokenizer as Core
from tokenizers.models import BPE

from tinyloop.kv.cache import PagedKV
from tinyloop.kv.prefix import PrefixPool
from tinyloop.model import Model
from tinyloop.sampling import SamplingParams
from tinyloop.tokenizer import Tokenizer

BLOCK, SCALE, LOOPS, VOCAB = 16, 64, 2, 512
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
CONFIG = {
    "model_type": "ouro", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "rope_theta": 1e5, "total_ut_steps": 2,
}  # fmt: skip


def tiny_model(pages: int) -> Model:
    stack = random_stack(CONFIG, torch.float32)
    memory = pages * PagedKV.page_bytes(stack.config, BLOCK, stack.dtype)
    return Model("tiny", stack, Tokenizer(Core(BPE())), kv_memory=memory, page_size=BLOCK)


def block_of(hash_id: int) -> list[int]:
    rng = random.Random(hash_id)
    return [rng.randrange(VOCAB) for _ in range(BLOCK)]


def recent_hits(requests: Sequence[Sequence[int]], capacity: int) -> int:
    """Blocks that an ideal least-recently-used cache of `capacity` blocks would find."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for ids in requests:
        hits += sum(1 for _ in itertools.takewhile(cached.__contains__, ids[:-1]))
        for one in reversed(ids):  # a prefix is more recent than what follows it
            cached[one] = None
            cached.move_to_end(one)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hits


def clairvoyant_hits(requests: Sequence[Sequence[int]], capacity: int) -> int:
    """Blocks that a clairvoyant cache of `capacity` blocks would find. An id stands for a block and all before it."""
    uses: dict[int, list[int]] = defaultdict(list)
    for now, ids in enumerate(requests):
        for one in ids:
            uses[one].append(now)
    position = dict.fromkeys(uses, 0)
    cached: dict[int, int] = {}  # id -> next use
    furthest: list[tuple[int, int, int]] = []
    hits = 0
    for ids in requests:
        hits += sum(1 for _ in itertools.takewhile(cached.__contains__, ids[:-1]))  # the last block makes the logits
        for depth, one in enumerate(ids):
            position[one] += 1
            left = uses[one]
            cached[one] = left[position[one]] if position[one] < len(left) else len(requests)
            heapq.heappush(furthest, (-cached[one], -depth, one))
        while len(cached) > capacity:
            when, _, one = heapq.heappop(furthest)
            if cached.get(one) == -when:
                del cached[one]
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--pages", type=int, default=80_000)
    parser.add_argument("--requests", type=int, default=10**9)
    parser.add_argument("--sample", type=int, default=50)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.trace.read_text().splitlines()[: args.requests]]
    model, pool = tiny_model(args.pages), PrefixPool()
    sample = set(random.Random(1).sample(range(len(rows)), min(args.sample, len(rows))))
    asked = found = mismatches = 0
    began = time.perf_counter()
    for number, row in enumerate(rows):
        prompt = [token for hash_id in row["hash_ids"] for token in block_of(hash_id)]
        tokens = max(1, row["output_length"] // SCALE)
        warm = model.generate_with_pool(pool, prompt, max_new_tokens=tokens, loops=LOOPS, sampling=GREEDY)
        asked, found = asked + len(prompt), found + warm.cached_tokens
        if number in sample:
            cold = model.generate(prompt, max_new_tokens=tokens, loops=LOOPS, sampling=GREEDY)
            mismatches += cold.token_ids != warm.token_ids
    model.runner.check()
    blocks, ids = args.pages // LOOPS, [row["hash_ids"] for row in rows]
    recent, best = (count(ids, blocks) * BLOCK for count in (recent_hits, clairvoyant_hits))
    print(f"{len(rows)} requests, {asked} prompt tokens, {time.perf_counter() - began:.0f} s, {blocks} blocks of cache")
    print("| cache | token hit rate | share reached |\n|---|---|---|")
    print(f"| TinyLoop | {found / asked:.1%} | |")
    print(f"| ideal, least recently used | {recent / asked:.1%} | {found / recent:.1%} |")
    print(f"| ideal, clairvoyant | {best / asked:.1%} | {found / best:.1%} |")
    print(f"{mismatches} mismatches in {len(sample)} answers compared with cold ones")
    rates = {"hit_rate": found / asked, "recent": recent / asked, "clairvoyant": best / asked}
    print(json.dumps({**rates, "mismatches": mismatches}))


if __name__ == "__main__":
    main()
