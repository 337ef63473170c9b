"""A directory in the Hugging Face layout: config.json, tokenizer.json, one or many safetensors files.

Pickled weights are refused: reading them can run code. Knows nothing of where the directory came from.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tinyloop.arguments import shown
from tinyloop.checkpoint.source import Checkpoint, read_json
from tinyloop.errors import CheckpointError
from tinyloop.tokenizer import Tokenizer

_INDEX = "model.safetensors.index.json"
_LONGEST = 200  # characters of a file's name
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def open_directory(directory: Path, name: str | None = None) -> Checkpoint:
    """Open a directory with config.json. `name` defaults to the directory's own."""
    config = read_json(directory / "config.json")
    source = SafetensorsSource(_weight_files(directory))
    try:
        tokenizer = Tokenizer.from_file(directory)
    except UnicodeDecodeError as error:  # the one file that is read as plain text
        raise CheckpointError(f"{directory / 'chat_template.jinja'}: is not valid UTF-8") from error
    return Checkpoint(name or directory.resolve().name, config, tokenizer, source)


class SafetensorsSource:
    """Tensors of one or more memory-mapped safetensors files."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = list(files)
        self._home: dict[str, Any] = {}
        for path in self._files:
            handle = _open(path)
            self._home.update(dict.fromkeys(handle.keys(), handle))

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._files)

    def names(self) -> Collection[str]:
        return self._home.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._home[name].get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._home[name].get_tensor(name)
        except (SafetensorError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"tensor {name} cannot be read ({error})") from error
        return tensor


def _open(path: Path) -> Any:
    """Map one file. The library checks header size, JSON, offsets and file length before anything is read."""
    if not path.is_file():
        raise CheckpointError(f"{path}: is not a file")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: truncated or not a safetensors file ({error})") from error


def _weight_files(directory: Path) -> list[Path]:
    """The weight files of a directory: what the index names, or model.safetensors, or the only one there is."""
    if (directory / _INDEX).exists():
        return _indexed(directory)
    found = sorted(directory.glob("*.safetensors"))
    if len(found) > 1:
        found = [path for path in found if path.name == "model.safetensors"]
    if len(found) == 1:
        return found
    raise CheckpointError(f"{directory}: {_why_none(directory)}")


def _indexed(directory: Path) -> list[Path]:
    index = directory / _INDEX
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(name, str) for name in weights.values()):
        raise CheckpointError(f"{index}: has no weight_map from tensor names to files")
    return [_shard(index, name) for name in sorted(set(weights.values()))]


def _shard(index: Path, name: str) -> Path:
    """The shard `name` beside its index. An index may come from anyone: it must not point at other files."""
    outside = Path(name).name != name or "\\" in name or "\0" in name or len(name) > _LONGEST
    if not name.endswith(".safetensors") or outside:
        raise CheckpointError(f"{index}: names {shown(name)}, which is not a safetensors file of the same directory")
    path = index.parent / name
    if not path.is_file():
        raise CheckpointError(f"{path}: shard is missing")
    return path


def _why_none(directory: Path) -> str:
    if list(directory.glob("*.safetensors")):
        return f"several safetensors files but neither model.safetensors nor {_INDEX}"
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        return f"only pickled weights ({pickles[0]}), which can run code when read; convert them to safetensors"
    return "no safetensors file"
