"""Huginn written straight from its description (arXiv 2502.05171), one sequence, one head at a time.

Shares no code with the library; it reads the checkpoint's own tensor names. A retrofit of Llama has two norms instead
of four and turns the halves of a head instead of adjacent channels. The core starts from zeros or, with a seed, from
what is drawn for each position.
"""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor


def make(config: dict, tensors: dict[str, Tensor]) -> Callable[[Sequence[int], int, int], Tensor]:
    return lambda tokens, prompt, loops: forward(tensors, config, list(tokens), [loops] * len(tokens))[0]


def forward(
    tensors: dict[str, Tensor], config: dict, tokens: list[int], depths: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Logits [tokens, vocab_size] where each token runs its own depth, and the latent states [tokens, n_embd] that the
    core started from and left after each loop. A token that has stopped shows its last keys and values."""
    width = config["n_embd"]
    embedding, scale = tensors["transformer.wte.weight"], config.get("init_values", {}).get("embed_scale")
    scale = math.sqrt(width) if scale is None else scale
    x = embedding[tokens] * scale
    for index in range(config["n_layers_in_prelude"]):
        x = _block(tensors, f"transformer.prelude.{index}.", config, x)
    h = torch.zeros(len(tokens), width)
    if "tinyloop" in config:
        std = math.sqrt(2 / (5 * width)) * scale * config["tinyloop"].get("start_scale", 1)
        h = torch.stack([drawn(config["tinyloop"]["start_seed"], std, position, width) for position in range(len(h))])
    states, seen = [h], {}
    for loop in range(max(depths)):
        goes_on = torch.tensor([[loop < depth] for depth in depths])
        new = torch.cat([h, x], dim=1) @ tensors["transformer.adapter.weight"].T
        for index in range(config["n_layers_in_recurrent_block"]):
            new = _block(tensors, f"transformer.core_block.{index}.", config, new, goes_on, seen)
        h = torch.where(goes_on, new, h)
        states.append(h)
    h = _norm(h, tensors["transformer.ln_f.weight"])
    for index in range(config["n_layers_in_coda"]):
        h = _block(tensors, f"transformer.coda.{index}.", config, h)
    h = _norm(h, tensors["transformer.ln_f.weight"])
    return h @ (embedding if config["tie_embeddings"] else tensors["lm_head.weight"]).T, states


def drawn(seed: int, std: float, position: int, width: int) -> Tensor:
    """A normal distribution without its ends, by turning its cumulative distribution round."""
    even = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, position, 0])).random(width)
    normal = NormalDist(0, std)
    low, high = normal.cdf(-3 * std), normal.cdf(3 * std)
    return torch.tensor([normal.inv_cdf(low + u * (high - low)) for u in even.tolist()])


def _block(
    tensors: dict[str, Tensor],
    prefix: str,
    config: dict,
    x: Tensor,
    goes_on: Tensor | None = None,
    seen: dict | None = None,
) -> Tensor:
    """`seen` holds what the core's blocks showed of each token in the loop before."""
    w = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    kv_size = w["attn.Wqkv.weight"].shape[0] - w["attn.proj.weight"].shape[1]
    shown = _norm(x, w["norm_1.weight"]) @ w["attn.Wqkv.weight"][-kv_size:].T
    if seen is not None:
        shown = seen[prefix] = torch.where(goes_on, shown, seen.get(prefix, shown))
    if "norm_3.weight" in w:
        x = _norm(_attention(w, config, _norm(x, w["norm_1.weight"]), shown) + x, w["norm_2.weight"])
        return _norm(_mlp(w, _norm(x, w["norm_3.weight"])) + x, w["norm_4.weight"])
    x = _attention(w, config, _norm(x, w["norm_1.weight"]), shown) + x
    return _mlp(w, _norm(x, w["norm_2.weight"])) + x


def _mlp(w: dict[str, Tensor], x: Tensor) -> Tensor:
    inner = w["mlp.proj.weight"].shape[1]
    both = x @ w["mlp.fc.weight"].T
    gate = both[:, :inner]
    return (gate / (1 + torch.exp(-gate)) * both[:, inner:]) @ w["mlp.proj.weight"].T


def _attention(w: dict[str, Tensor], config: dict, x: Tensor, shown: Tensor) -> Tensor:
    heads = config["n_heads"]
    kv_heads, size = config.get("num_key_value_heads", heads), config["n_embd"] // heads
    q = x @ w["attn.Wqkv.weight"][: heads * size].T
    k, v = shown.split([kv_heads * size, kv_heads * size], dim=1)
    outputs = []
    for head in range(heads):
        own, source = (slice(i * size, (i + 1) * size) for i in (head, head // (heads // kv_heads)))
        q_head, k_head = q[:, own], k[:, source]
        if config["qk_bias"]:
            q_head, k_head = q_head + w["attn.qk_bias"][0, 0, head], k_head + w["attn.qk_bias"][1, 0, head]
        q_head, k_head = _rotate(q_head, config), _rotate(k_head, config)
        rows = []
        for i in range(len(x)):
            scores = k_head[: i + 1] @ q_head[i] / math.sqrt(size)
            weights = torch.exp(scores - scores.max())
            rows.append(weights / weights.sum() @ v[: i + 1, source])
        outputs.append(torch.stack(rows))
    return torch.cat(outputs, dim=1) @ w["attn.proj.weight"].T


def _rotate(x: Tensor, config: dict) -> Tensor:
    """Channel pairs turn by position * theta ** (-2 i / size): neighbours, or halves in a retrofit."""
    theta, out, half = config.get("rope_theta", config["rope_base"]), x.clone(), x.shape[1] // 2
    for i in range(half):
        first, second = (i, i + half) if "rope_theta" in config else (2 * i, 2 * i + 1)
        angle = torch.arange(len(x)) * theta ** (-2 * i / x.shape[1])
        a, b = x[:, first], x[:, second]
        out[:, first], out[:, second] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return out


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight
