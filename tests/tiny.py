"""Builders of tiny checkpoints for tests: real files in the real formats, small enough to write in a millisecond."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: ids 0..255 are single bytes (in alphabet order), 256..258 are `SPECIAL`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def write_checkpoint(
    directory: Path,
    raw_config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    tokenizer: Tokenizer | None = None,
) -> Path:
    """A directory in the Hugging Face layout, with `byte_tokenizer` unless another is given. Returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw_config))
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (tokenizer or byte_tokenizer()).save(str(directory / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[2], "bos_token": SPECIAL[0], "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": False}))
    return directory
