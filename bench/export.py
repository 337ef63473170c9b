"""Directories in the Hugging Face layout, for peers that read nothing else: the same weights, in bfloat16.

They are made once, in the user's cache. Needs transformers for the tokenizer's files.
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from random_model import RandomTensors
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from tinyloop.checkpoint import open_checkpoint
from tinyloop.checkpoint.builtin import cache_dir
from tinyloop.models.family import Weights
from tinyloop.models.registry import family_of
from tinyloop.stack import LoopedStack
from tinyloop.tokenizer import Tokenizer

Tensors = dict[str, torch.Tensor]


class Taken:
    """A source that keeps what a model takes from another one: every tensor it needs, in bfloat16."""

    def __init__(self, source: Any) -> None:
        self.source, self.tensors = source, Tensors()

    def has(self, name: str) -> bool:
        return bool(self.source.has(name))

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self.tensors:  # one may hold several parts
            self.tensors[name] = self.source.take(name, shape).to(torch.bfloat16).contiguous()
        return self.tensors[name]


class ReleasedTensors(RandomTensors):
    """Random tensors under the names of a release, where a family knows two sets of names: peers know only those."""

    def has(self, name: str) -> bool:
        return name.endswith(".gqkv_proj.weight")  # HRM-Text's


def tensors_of(source: Any, config: dict[str, Any]) -> Tensors:
    """All tensors of a model, whatever its family calls them."""
    torch.manual_seed(0)
    taken, family = Taken(source), family_of(config)
    LoopedStack(family, family.config(config), Weights(taken, torch.bfloat16, torch.device("cpu")))
    return taken.tensors


def exported(name: str) -> Path:
    """The directory of a checkpoint's weights, dequantised. Loops are not declared in it."""
    checkpoint = open_checkpoint(name)
    config = {key: value for key, value in checkpoint.config.items() if key != "tinyloop"}
    return _once(name, config, checkpoint.tokenizer, lambda: tensors_of(checkpoint, config))


def random_model(name: str, config: dict[str, Any]) -> Path:
    """The directory of a model of this shape with random weights, and the built-in model's tokenizer."""
    tokenizer = open_checkpoint("smollm2").tokenizer
    return _once(name, config, tokenizer, lambda: tensors_of(ReleasedTensors(), config))


def _once(name: str, config: dict[str, Any], tokenizer: Tokenizer, tensors: Callable[[], Tensors]) -> Path:
    """Made beside its place and moved there whole; made again if the config is another one."""
    place, config = cache_dir() / "bench" / name, config | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    made = place / "config.json"
    if made.is_file() and json.loads(made.read_text()) == config:
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as work:
        fresh = Path(work) / name
        _files_of(tokenizer).save_pretrained(fresh)
        save_file(tensors(), fresh / "model.safetensors", metadata={"format": "pt"})
        (fresh / "config.json").write_text(json.dumps(config))
        shutil.rmtree(place, ignore_errors=True)
        fresh.rename(place)
    return place


def _files_of(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._core, chat_template=tokenizer.chat_template, **tokenizer.special_tokens
    )
