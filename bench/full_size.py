"""Published configurations at full size with random weights: do they load and step, in the memory that was predicted?

    python bench/full_size.py Ouro-1.4B
    python bench/full_size.py Nanbeige4.2-3B --weights int8

`tinyloop inspect` predicts from the configuration; here the process's resident memory says what it came to.
"""

import argparse
import ctypes
import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from machine import machine
from tokenizers import models

from tinyloop.inspection import inspect
from tinyloop.model import Model, pick_int8
from tinyloop.models.family import Weights
from tinyloop.models.registry import family_of
from tinyloop.sampling import SamplingParams
from tinyloop.stack import LoopedStack
from tinyloop.tokenizer import Tokenizer

KV_MEMORY = 1 << 30
PROMPT, ANSWER = 64, 8  # tokens
SHARED = {"torch_dtype": "bfloat16", "tie_word_embeddings": False, "hidden_act": "silu"}
CONFIGS: dict[str, dict[str, Any]] = {
    "Ouro-1.4B": SHARED | {
        "model_type": "ouro", "vocab_size": 49152, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128,
        "max_position_embeddings": 65536, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "total_ut_steps": 4,
    },
    "Nanbeige4.2-3B": SHARED | {
        "model_type": "nanbeige", "vocab_size": 166144, "hidden_size": 3072, "intermediate_size": 10752,
        "num_hidden_layers": 22, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_theta": 7e7, "num_loops": 2,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """Memory in bytes. `off` is how far the measured growth lies from the prediction, as a share of it."""

    model: str
    weights: str
    predicted_weights: int
    predicted: int
    grown: int
    off: float
    load_s: float
    prompt_s: float
    token_s: float
    loops: int


class RandomTensors:
    """A checkpoint in which every tensor exists, made when it is asked for and in the type it is kept in."""

    def has(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shape, dtype=torch.bfloat16)
        return torch.empty(shape, dtype=torch.bfloat16).uniform_(-1, 1).mul_((3 / shape[-1]) ** 0.5)


def measure(name: str, raw: dict[str, Any], weights: str = "auto", kv_memory: int = KV_MEMORY) -> Figures:
    """Predict, load, and answer a prompt at the default loops."""
    dtype, int8 = torch.bfloat16, pick_int8(weights)
    predicted = inspect(raw, dtype, int8=int8, kv_memory=kv_memory)
    tokenizer = numbered(raw["vocab_size"])  # before: its memory is not the model's
    run(build("warm", small(raw), tokenizer, int8, 1 << 20))  # what torch and the kernels take once
    before, began = resident(), time.perf_counter()
    model = build(name, raw, tokenizer, int8, kv_memory)
    loaded_s, grown = time.perf_counter() - began, resident() - before
    prompt_s, token_s = run(model)
    return Figures(
        name, weights, predicted.weight_bytes, predicted.memory, grown,
        grown / predicted.memory - 1, loaded_s, prompt_s, token_s, model.config.default_loops,
    )  # fmt: skip


def build(name: str, raw: dict[str, Any], tokenizer: Tokenizer, int8: bool, kv_memory: int) -> Model:
    family = family_of(raw)
    stack = LoopedStack(family, family.config(raw), Weights(RandomTensors(), torch.bfloat16, torch.device("cpu"), int8))
    return Model(name, stack, tokenizer, kv_memory=kv_memory)


def numbered(vocab_size: int) -> Tokenizer:
    """Tokens that are called after their ids."""
    return Tokenizer(tokenizers.Tokenizer(models.WordLevel({f"<{i}>": i for i in range(vocab_size)}, "<0>")))


def small(raw: dict[str, Any]) -> dict[str, Any]:
    return raw | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
                  "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}  # fmt: skip


def run(model: Model) -> tuple[float, float]:
    """Seconds to the first token and for each later one."""
    sampling = SamplingParams(temperature=0, ignore_eos=True)
    began = time.perf_counter()
    events = model.stream(range(PROMPT), max_new_tokens=ANSWER, sampling=sampling)
    next(events)
    first = time.perf_counter()
    count = sum(1 for _ in events)
    assert count == ANSWER - 1
    return first - began, (time.perf_counter() - first) / count


def resident() -> int:
    """Bytes of this process in memory, after what is free has gone back."""
    ctypes.CDLL(None).malloc_trim(0)
    told = Path("/proc/self/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB", told, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("model", choices=CONFIGS)
    arguments.add_argument("--weights", choices=("auto", "int8"), default="auto")
    chosen = arguments.parse_args()
    figures = measure(chosen.model, CONFIGS[chosen.model], chosen.weights)
    print(json.dumps({**asdict(figures), "machine": machine()}, indent=1))


if __name__ == "__main__":
    main()
