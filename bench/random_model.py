"""A model of Ouro's shape with random weights: for what depends on the shape and not on what the weights say."""

import torch

from tinyloop.model import Model
from tinyloop.models.family import Weights
from tinyloop.models.registry import family_of
from tinyloop.stack import LoopedStack

OURO = {
    "model_type": "ouro", "vocab_size": 49152, "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "total_ut_steps": 4,
}  # fmt: skip


HRM = {
    "model_type": "hrm_text", "architectures": ["HrmTextForCausalLM"], "vocab_size": 49152, "hidden_size": 768,
    "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 12,
    "head_dim": 64, "H_cycles": 2, "L_cycles": 3, "prefix_lm": False, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class RandomTensors:
    """A checkpoint in which every tensor exists."""

    def has(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.ones(shape) if "norm" in name else torch.randn(shape) / shape[-1] ** 0.5


def random_stack(config: dict[str, object], dtype: torch.dtype) -> LoopedStack:
    torch.manual_seed(0)
    family = family_of(config)
    return LoopedStack(family, family.config(config), Weights(RandomTensors(), dtype, torch.device("cpu")))


def ouro_shaped(like: Model) -> Model:
    """24 layers and up to 8 loops at a small width, with another model's tokenizer and dtype."""
    return Model("ouro-shaped", random_stack(OURO, like.stack.dtype), like.tokenizer, kv_memory=2**31)
