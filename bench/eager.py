"""The Ouro shape as a model file usually writes it: plain modules of torch, one sequence of calls per token and loop.

    python bench/eager.py DIRECTORY

Nothing fused or reordered; keys and values grow by `torch.cat`, one pair for each loop and layer. All prompts of a
question have the same length and run as one batch. `peers.py` talks to it (`pipe.py`).
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pipe import answer_lines
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

Cache = dict[tuple[int, int], tuple[Tensor, Tensor]]  # by loop and layer: keys, values [batch, heads, tokens, head_dim]


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.head_dim = config["head_dim"]
        inner = config["num_attention_heads"] * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(config["hidden_size"], inner, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(inner, config["hidden_size"], bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache, at: tuple[int, int]) -> Tensor:
        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projected)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        if at in cache:
            k, v = torch.cat((cache[at][0], k), dim=2), torch.cat((cache[at][1], v), dim=2)
        cache[at] = k, v
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions. `cos`, `sin`: [tokens, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class MLP(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        outer, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = (nn.Linear(outer, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        for name in ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"):
            setattr(self, name, nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"]))

    def forward(self, h: Tensor, *where: Any) -> Tensor:
        h = h + self.input_layernorm_2(self.self_attn(self.input_layernorm(h), *where))
        return h + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(h)))


class Ouro(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        self.loops, half = config["total_ut_steps"], torch.arange(0, config["head_dim"], 2)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab, hidden)
        self.model.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.model.norm = nn.RMSNorm(hidden, config["rms_norm_eps"])
        self.model.early_exit_gate = nn.Linear(hidden, 1)  # never asked: no threshold is set
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.frequencies = config["rope_theta"] ** (-half / config["head_dim"])

    def forward(self, tokens: Tensor, start: int, cache: Cache) -> Tensor:
        """Logits [batch, vocab] of the last of `tokens` [batch, tokens], which begin at position `start`."""
        h = self.model.embed_tokens(tokens)
        angles = torch.arange(start, start + tokens.shape[1])[:, None] * self.frequencies.repeat(2)
        cos, sin = angles.cos().to(h.dtype), angles.sin().to(h.dtype)
        for loop in range(self.loops):
            for index, layer in enumerate(self.model.layers):
                h = layer(h, cos, sin, cache, (loop, index))
            h = self.model.norm(h)
        return self.lm_head(h[:, -1])

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], count: int) -> Iterator[Tensor]:
        """The likeliest tokens [batch], one step after the other."""
        tokens, cache, start = torch.tensor(prompts), Cache(), 0
        for _ in range(count):
            chosen = self(tokens, start, cache).argmax(-1)
            start, tokens = start + tokens.shape[1], chosen[:, None]
            yield chosen


def load(directory: Path, dtype: torch.dtype = torch.bfloat16) -> Ouro:
    """The model of a directory with config.json and model.safetensors."""
    model = Ouro(json.loads((directory / "config.json").read_text()))
    model.load_state_dict(load_file(directory / "model.safetensors"))
    return model.to(dtype)


def main() -> None:
    model = load(Path(sys.argv[1]))
    answer_lines(lambda prompts, tokens: map(len, model.generate(prompts, tokens)))


if __name__ == "__main__":
    main()
