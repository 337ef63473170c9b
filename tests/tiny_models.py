"""Tiny models with random weights: everything a real checkpoint has, small enough for thousands of steps."""

import hashlib
from typing import Any

import torch

from tests.tiny import CHAT_TEMPLATE, SPECIAL, byte_tokenizer
from tinyloop.kv.cache import PagedKV
from tinyloop.model import Model
from tinyloop.models.family import Weights
from tinyloop.models.registry import family_of
from tinyloop.sampling import SamplingParams
from tinyloop.stack import LoopedStack
from tinyloop.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
RETROFIT = {"retrofit": {"prelude": 2, "core": 2, "default_loops": 2, "max_loops": 8}}


class RandomTensors:
    """A checkpoint in which every tensor exists, drawn from its name. Who asks is told only of those in `has`.

    At `scale` 2 answers are lively, but a looped model then amplifies rounding; a small scale keeps logits comparable.
    """

    def __init__(self, scale: float = 2.0, has: tuple[str, ...] = ()) -> None:
        self.scale, self._has = scale, has
        self.taken: dict[str, torch.Tensor] = {}

    def has(self, name: str) -> bool:
        return name in self._has

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        scaled = 1 + 0.1 * drawn if "norm" in name else self.scale * drawn / shape[-1] ** 0.5
        self.taken[name] = scaled
        return scaled


def raw_config(model_type: str = "ouro", **changes: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": 259,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3 if model_type == "ouro" else 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "total_ut_steps": 4,
        "tie_word_embeddings": False,
        **changes,
    }


def tiny_stack(model_type: str = "ouro", *, scale: float = 2.0, **changes: Any) -> LoopedStack:
    raw = raw_config(model_type, **changes)
    family = family_of(raw)
    return LoopedStack(family, family.config(raw), Weights(RandomTensors(scale), torch.float32, torch.device("cpu")))


def tiny_model(
    model_type: str = "ouro",
    *,
    pages: int = 400,
    page_size: int = 4,
    max_chunk: int = 512,
    scale: float = 2.0,
    **changes: Any,
) -> Model:
    stack = tiny_stack(model_type, scale=scale, **changes)
    memory = pages * PagedKV.page_bytes(stack.config, page_size, stack.dtype)
    return Model("tiny", stack, tiny_tokenizer(), kv_memory=memory, page_size=page_size, max_chunk=max_chunk)


def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer(), special_tokens={"eos_token": SPECIAL[2]}, chat_template=CHAT_TEMPLATE)


def greedy_by_oracle(model: Model, prompt: list[int], count: int, loops: int, window: int = 0) -> list[int]:
    """The answer that the slow oracle gives: the whole sequence again for every token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.oracle(tokens, loops, window, len(prompt))[-1].argmax()))
    return tokens[len(prompt) :]
