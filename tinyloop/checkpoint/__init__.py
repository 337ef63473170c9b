"""Where models come from. `open_checkpoint` takes a path, a built-in name or a hub name and finds the right reader."""

import copy
from pathlib import Path
from typing import Any

from tinyloop.checkpoint import builtin, hub
from tinyloop.checkpoint.safetensors import open_directory
from tinyloop.checkpoint.source import Checkpoint, TensorSource, read_json
from tinyloop.checkpoint.translate import open_gguf
from tinyloop.errors import CheckpointError

_SHOWN = 200  # characters of a name that an error repeats

__all__ = ["Checkpoint", "TensorSource", "open_checkpoint", "read_config"]


def open_checkpoint(path_or_name: str | Path) -> Checkpoint:
    """Open a directory, a .gguf file, a built-in model or a hub repository, in this order.

    Raises CheckpointError if there is none, or if its files are missing, damaged or of an unknown kind.
    """
    name, path = str(path_or_name), _existing(path_or_name)
    if path is not None:
        return _open_path(path)
    if name in builtin.BUILTINS:
        return _open_builtin(builtin.BUILTINS[name])
    if isinstance(path_or_name, str) and hub.is_hub_name(name):
        return open_directory(hub.download(name), name)
    known = ", ".join(builtin.BUILTINS)
    raise CheckpointError(
        f"{name[:_SHOWN]}: no such file or directory, not a built-in model ({known}), not a hub owner/name"
    )


def read_config(path_or_name: str | Path) -> dict[str, Any]:
    """The config.json of what `open_checkpoint` would open; no weight is fetched where there is such a file alone."""
    name, path = str(path_or_name), _existing(path_or_name)
    if path is not None and (path / "config.json").exists():
        return read_json(path / "config.json")
    if path is None and name not in builtin.BUILTINS and isinstance(path_or_name, str) and hub.is_hub_name(name):
        return read_json(hub.download(name, only=["config.json"]) / "config.json")
    return open_checkpoint(path_or_name).config


def _existing(path_or_name: str | Path) -> Path | None:
    """The path, if there is something; None also for what no file could be called."""
    try:
        path = Path(path_or_name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, the home of an unknown user
        return None


def _open_path(path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_directory(path)
    if path.suffix == ".gguf":
        return open_gguf(path)
    raise CheckpointError(f"{path}: neither a directory nor a .gguf file")


def _open_directory(directory: Path) -> Checkpoint:
    ggufs = sorted(directory.glob("*.gguf"))
    if (directory / "config.json").exists() or not ggufs:
        return open_directory(directory)
    if len(ggufs) > 1:
        raise CheckpointError(f"{directory}: several .gguf files; name one of them, such as {ggufs[0].name}")
    return open_gguf(ggufs[0], directory.resolve().name)


def _open_builtin(model: builtin.Builtin) -> Checkpoint:
    checkpoint = open_gguf(builtin.fetch(model), model.name)
    checkpoint.config.update(copy.deepcopy(model.config))
    return checkpoint
