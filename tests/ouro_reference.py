"""Ouro written straight from its description (arXiv 2510.25741), one sequence, one head at a time.

Shares no code with the library; it reads the checkpoint's own tensor names.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def make(config: dict, tensors: dict[str, Tensor]) -> Callable[[Sequence[int], int, int], Tensor]:
    return lambda tokens, prompt, loops: forward(tensors, config, list(tokens), loops)[0]


def forward(tensors: dict[str, Tensor], config: dict, tokens: list[int], loops: int) -> tuple[Tensor, Tensor]:
    """Logits [tokens, vocab_size] at `loops`, and the exit gate's probability after each loop [loops, tokens]."""
    h = tensors["model.embed_tokens.weight"][tokens]
    gates = []
    for _ in range(loops):
        for index in range(config["num_hidden_layers"]):
            layer = {
                name.removeprefix(f"model.layers.{index}."): tensor
                for name, tensor in tensors.items()
                if name.startswith(f"model.layers.{index}.")
            }
            h = _layer(layer, config, h)
        h = _norm(h, tensors["model.norm.weight"], config)
        score = h @ tensors["model.early_exit_gate.weight"][0] + tensors["model.early_exit_gate.bias"][0]
        gates.append(1 / (1 + torch.exp(-score)))
    head = tensors["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return h @ head.T, torch.stack(gates)


def _layer(w: dict[str, Tensor], config: dict, h: Tensor) -> Tensor:
    x = _norm(h, w["input_layernorm.weight"], config)
    h = h + _norm(_attention(w, config, x), w["input_layernorm_2.weight"], config)
    x = _norm(h, w["post_attention_layernorm.weight"], config)
    gate, up = x @ w["mlp.gate_proj.weight"].T, x @ w["mlp.up_proj.weight"].T
    x = (gate / (1 + torch.exp(-gate)) * up) @ w["mlp.down_proj.weight"].T
    return h + _norm(x, w["post_attention_layernorm_2.weight"], config)


def _attention(w: dict[str, Tensor], config: dict, x: Tensor) -> Tensor:
    size, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    q, k, v = (x @ w[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    outputs = []
    for head in range(heads):
        source = head // (heads // kv_heads)
        q_head = _rotate(q[:, head * size : (head + 1) * size], config["rope_theta"])
        k_head = _rotate(k[:, source * size : (source + 1) * size], config["rope_theta"])
        rows = []
        for i in range(len(x)):
            scores = k_head[: i + 1] @ q_head[i] / math.sqrt(size)
            weights = torch.exp(scores - scores.max())
            rows.append(weights / weights.sum() @ v[: i + 1, source * size : (source + 1) * size])
        outputs.append(torch.stack(rows))
    return torch.cat(outputs, dim=1) @ w["self_attn.o_proj.weight"].T


def _rotate(x: Tensor, theta: float) -> Tensor:
    out = x.clone()
    half = x.shape[1] // 2
    for i in range(half):
        angle = torch.arange(len(x)) * theta ** (-2 * i / x.shape[1])
        a, b = x[:, i], x[:, i + half]
        out[:, i] = a * angle.cos() - b * angle.sin()
        out[:, i + half] = b * angle.cos() + a * angle.sin()
    return out


def _norm(x: Tensor, weight: Tensor, config: dict) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weight
