"""Checkpoints of the Hugging Face Hub, `owner/name`, kept in the hub library's own cache. Knows no file format."""

import re
from collections.abc import Sequence
from pathlib import Path

from tinyloop.errors import CheckpointError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_UNWANTED = ["*/*", "consolidated*"]  # second copies of the weights in other layouts


def is_hub_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def download(name: str, only: Sequence[str] = _WANTED) -> Path:
    """A local directory with the newest snapshot, or the cached one when offline. Never fetches pickled weights."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(only), ignore_patterns=_UNWANTED))
    except Exception as error:  # the library raises a dozen unrelated types: network, access, names, disk
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{name}: cannot be had from the hub ({type(error).__name__}: {reason})") from error
