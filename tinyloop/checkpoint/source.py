"""A checkpoint as the model code sees it: a name, a config, a tokenizer and tensors to take. Knows no file format.

Formats are `TensorSource`s. Whatever they are, config keys and tensor names are those of Hugging Face.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch

from tinyloop.errors import CheckpointError
from tinyloop.tokenizer import Tokenizer

MAX_JSON = 1 << 26  # bytes of a config.json or an index; large ones have a thousandth of it
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Buffers that some checkpoints store although every model derives them from its config.
_DERIVED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", "freqs_cis",
            "rope_freqs.weight")  # fmt: skip


class TensorSource(Protocol):
    """Named tensors in files. Nothing is read before `read`, so memory stays at one tensor at a time."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the weight files on disk."""

    def names(self) -> Collection[str]:
        """Every tensor there is."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor of `names()`, from the header alone."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor itself, memory-mapped where the format allows it. Treat it as read-only."""


class Checkpoint:
    """An opened checkpoint. `take` every tensor the model needs, then `finish` to learn of those nobody took."""

    def __init__(self, name: str, config: dict[str, Any], tokenizer: Tokenizer, source: TensorSource) -> None:
        self.name = name
        self.config = config
        self.tokenizer = tokenizer
        self._source = source
        self._names = frozenset(source.names())
        self._taken: set[str] = set()

    @property
    def size_bytes(self) -> int:
        return self._source.size_bytes

    def has(self, name: str) -> bool:
        return name in self._names

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`. Raises CheckpointError if it is missing, not of `shape`, or not f32, f16 or bf16."""
        if name not in self._names:
            raise CheckpointError(f"{self.name}: tensor {name} is missing")
        found = self._source.shape(name)
        if found != tuple(shape):
            raise CheckpointError(f"{self.name}: tensor {name} has shape {found}, expected {tuple(shape)}")
        tensor = self._source.read(name)
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{self.name}: tensor {name} is {tensor.dtype}, expected float32, float16 or bfloat16"
            )
        self._taken.add(name)
        return tensor

    def finish(self) -> None:
        """Raise CheckpointError naming the tensors nobody took: the model would not be the one that was trained."""
        left = sorted(name for name in self._names - self._taken if not self._is_derived(name))
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise CheckpointError(f"{self.name}: tensors the model does not use: {', '.join(left[:5])}{more}")

    def _is_derived(self, name: str) -> bool:
        tied = self.config.get("tie_word_embeddings") or self.config.get("tie_embeddings")
        tied_copy = name == "lm_head.weight" and bool(tied)
        return tied_copy or name.endswith(_DERIVED)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint. Raises CheckpointError naming the file."""
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path}: is not a file")
        if path.stat().st_size > MAX_JSON:
            raise CheckpointError(f"{path}: larger than {MAX_JSON} bytes")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no JSON object")
    return value
