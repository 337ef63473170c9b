"""GGUF keys and tensor names in the words of Hugging Face. Knows the architectures, not the file format.

llama.cpp stores the query and key rows of `llama` so that rope turns adjacent pairs; Hugging Face names promise halves
that turn together, so those rows are put back. The qwen architectures are stored as they are.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinyloop.checkpoint.gguf import GGUFFile
from tinyloop.checkpoint.source import Checkpoint
from tinyloop.errors import CheckpointError
from tinyloop.tokenizer import Tokenizer

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_STRETCH = "rope_freqs.weight"  # Llama 3's, as what each pair of channels is slowed down by
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def open_gguf(path: Path, name: str | None = None) -> Checkpoint:
    """Open one GGUF file. `name` defaults to the file's name without its ending."""
    file = GGUFFile(path)
    try:
        config = translate_config(file.fields, file.tensors.keys())
        config["vocab_size"] = _vocab_size(file)
        if _STRETCH in file.tensors:
            config["rope_scaling"] = {"rope_type": "stretch", "stretch": file.read(_STRETCH).tolist()}
        tokenizer = Tokenizer.from_gguf(file.fields)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return Checkpoint(name or path.stem, config, tokenizer, GGUFSource(file, config))


class GGUFSource:
    """The tensors of a GGUF file under their Hugging Face names."""

    def __init__(self, file: GGUFFile, config: Mapping[str, Any]) -> None:
        self._file = file
        self._stored = {translate_name(name): name for name in file.names()}
        self._heads: dict[str, int] = {}
        if config["model_type"] == "llama":
            self._heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def names(self) -> Collection[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(self._stored[name])

    def read(self, name: str) -> torch.Tensor:
        tensor = self._file.read(self._stored[name])
        heads = self._heads.get(name.split(".")[-2]) if "." in name else None
        return tensor if heads is None else pairs_to_halves(tensor, heads)


def pairs_to_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Per head, rows 0, 2, 4.. then 1, 3, 5..: the order in which rope turns halves. `rows`: [heads * head_dim, ...]"""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def translate_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Unknown names stay, for `finish` to list."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    block, _, part = stem.rpartition(".")
    prefix, _, number = block.partition(".")
    return f"model.layers.{number}.{_LAYER[part]}.{kind}" if prefix == "blk" and part in _LAYER else name


def translate_config(fields: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """A config.json for these GGUF fields. Raises CheckpointError for what the config could not say."""
    arch = fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise CheckpointError(f"GGUF architecture {arch!r} is not supported, only {', '.join(ARCHITECTURES)}")
    facts = _Facts(fields, arch)
    facts.refuse_unsupported()
    return {
        "model_type": arch,
        "architectures": [ARCHITECTURES[arch]],
        **facts.sizes(),
        "rope_theta": facts.number("rope.freq_base", 10000.0),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": arch == "llama" and "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }


class _Facts:
    """Typed look-ups of `<architecture>.<key>`."""

    def __init__(self, fields: Mapping[str, Any], arch: str) -> None:
        self._fields, self._arch = fields, arch

    def size(self, key: str, default: int | None = None) -> int:
        value = self._fields.get(f"{self._arch}.{key}", default)
        if not isinstance(value, int) or value <= 0:
            raise CheckpointError(f"field {self._arch}.{key} is {value!r}, expected a positive number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._fields.get(f"{self._arch}.{key}", default)
        if not isinstance(value, int | float):
            raise CheckpointError(f"field {self._arch}.{key} is {value!r}, expected a number")
        return float(str(np.float32(value)))  # stored as float32: 1e-05, not 9.999999747378752e-06

    def sizes(self) -> dict[str, int]:
        hidden, heads = self.size("embedding_length"), self.size("attention.head_count")
        return {
            "hidden_size": hidden,
            "intermediate_size": self.size("feed_forward_length"),
            "num_hidden_layers": self.size("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.size("attention.head_count_kv", heads),
            "head_dim": self.head_dim(hidden, heads),
            "max_position_embeddings": self.size("context_length"),
        }

    def head_dim(self, hidden: int, heads: int) -> int:
        """Stated, or an equal share of the state. Rows are stored as pairs, so it is even."""
        key = "attention.key_length"
        if f"{self._arch}.{key}" not in self._fields and hidden % heads:
            raise CheckpointError(f"field {self._arch}.embedding_length {hidden} is not a multiple of {heads} heads")
        size = self.size(key, hidden // heads)
        if size % 2:
            raise CheckpointError(f"field {self._arch}.{key}: heads of {size} elements, expected an even number")
        return size

    def refuse_unsupported(self) -> None:
        """Name what would make the model compute something else than its config says."""
        scaling = self._fields.get(f"{self._arch}.rope.scaling.type", "none")
        head_dim = self.sizes()["head_dim"]
        if scaling != "none":
            raise CheckpointError(f"field {self._arch}.rope.scaling.type: rope scaling {scaling!r} is not supported")
        if self.size("rope.dimension_count", head_dim) != head_dim:
            raise CheckpointError(f"field {self._arch}.rope.dimension_count: rope over a part of a head")
        if self._fields.get(f"{self._arch}.expert_count", 0):
            raise CheckpointError(f"field {self._arch}.expert_count: mixtures of experts are not supported")
        if self._fields.get("split.count", 0) > 1:
            raise CheckpointError("field split.count: split GGUF files are not supported, merge them first")


def _vocab_size(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError("tensor token_embd.weight is missing")
    return file.shape("token_embd.weight")[0]
