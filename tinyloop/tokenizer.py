"""Text to token ids and back, with the facts about special tokens. Knows no tensors, no chat format beyond its source.

A thin hull around `tokenizers.Tokenizer`, which is thread-safe as long as nobody changes its settings: that is why the
encoder that treats control tokens as plain text is a second object and not a switch.
"""

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from tinyloop.errors import CheckpointError, RequestError

_T = TypeVar("_T")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LONG_TEXT = 2_000  # characters; a longer text is encoded as a batch of one, which lets other threads run meanwhile
MAX_FILE = 1 << 28  # bytes of a tokenizer.json; the largest in use have an eighth of it
_SHOWN = 200  # characters of the library's own message
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """`encode` and `decode`, and what a server asks about tokens.

    `special_tokens` maps template names (`bos_token`, ..) to their text. `eos_ids` end an answer. `add_bos` says that
    a plain prompt starts with `bos_id`; `encode` never adds it.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        self._core = core
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        vocab = core.get_vocab(with_added_tokens=True)
        core.add_special_tokens([text for text in self.special_tokens.values() if text in vocab])
        core.no_truncation()
        core.no_padding()
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.bos_id = core.token_to_id(self.special_tokens.get("bos_token", ""))
        eos = core.token_to_id(self.special_tokens.get("eos_token", ""))
        self.eos_ids = tuple(dict.fromkeys([*eos_ids, *([] if eos is None else [eos])]))
        self.add_bos = add_bos and self.bos_id is not None
        added = core.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        self._lock = threading.Lock()
        self._plain: tokenizers.Tokenizer | None = None

    @classmethod
    def from_file(cls, directory: str | Path) -> "Tokenizer":
        """From tokenizer.json and the small JSON files beside it. Raises CheckpointError naming the file at fault."""
        return _from_directory(Path(directory))

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> "Tokenizer":
        """From the `tokenizer.*` fields of a GGUF file. Raises CheckpointError for what it does not know."""
        return _from_gguf(fields)

    @property
    def control_strings(self) -> tuple[str, ...]:
        """Texts of the special tokens, longest first."""
        return tuple(sorted(self._special.values(), key=len, reverse=True))

    @cached_property
    def is_byte_level(self) -> bool:
        """True if the text is the tokens' bytes joined, whatever stands beside what."""
        return isinstance(self._core.decoder, decoders.ByteLevel)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`. With `special=False`, text that spells a control token stays text."""
        core = self._core if special else self._plain_core()
        try:
            if len(text) > LONG_TEXT:
                return core.encode_batch([text], add_special_tokens=False)[0].ids
            return core.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError("prompt", "the text is not valid Unicode: it holds half of a surrogate pair") from error
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise RequestError("prompt", "the model's tokenizer cannot read this text") from error

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`. Raises RequestError for an id outside of the vocabulary."""
        for token in ids:
            self._check(token)
        kept = [token for token in ids if not (skip_special and token in self._special)]
        return self._core.decode(kept, skip_special_tokens=False)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it, "" for an unused id."""
        self._check(token_id)
        return self._core.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a byte-level token stands for. For other kinds of vocabulary: bytes and spaces of the token."""
        text = self.token_text(token_id)
        if self.is_byte_level:
            return _unmap(text)
        if byte := _BYTE_TOKEN.fullmatch(text):
            return bytes.fromhex(byte[1])
        return text.replace("▁", " ").encode()

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise RequestError("tokens", f"token ids must be between 0 and {self.vocab_size - 1}, got {token_id}")

    def _plain_core(self) -> tokenizers.Tokenizer:
        """The second encoder, made when it is first needed."""
        with self._lock:
            if self._plain is None:
                self._plain = _sibling(self._core)
                self._plain.encode_special_tokens = True
            return self._plain


def _sibling(core: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Another encoder over the same model: a copy of that would take 40 MB and 0.1 s for 49k tokens."""
    sibling = tokenizers.Tokenizer(core.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (found := getattr(core, part)) is not None:
            setattr(sibling, part, found)
    added = core.get_added_tokens_decoder()
    for _, token in sorted(added.items()):
        (sibling.add_special_tokens if token.special else sibling.add_tokens)([token])
    if sibling.get_added_tokens_decoder().keys() != added.keys():  # numbered in another way
        return tokenizers.Tokenizer.from_str(core.to_str())
    return sibling


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the other 68 bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


def _unmap(text: str) -> bytes:
    """Bytes of a token; one with characters outside of the alphabet was added as ordinary text."""
    if all(char in _BYTES for char in text):
        return bytes(_BYTES[char] for char in text)
    return text.encode()


# From a directory in the Hugging Face layout.


def _from_directory(directory: Path) -> Tokenizer:
    core = _read_core(directory)
    settings = _read_optional(directory / "tokenizer_config.json")
    special = _special_texts(_read_optional(directory / "special_tokens_map.json") | settings)
    eos = _token_ids(_read_optional(directory / "generation_config.json").get("eos_token_id"))
    return Tokenizer(
        core,
        special_tokens=special,
        eos_ids=eos or _token_ids(_read_optional(directory / "config.json").get("eos_token_id")),
        add_bos=_adds_bos(core, settings, special.get("bos_token")),
        chat_template=_template(directory, settings),
    )


def _read_core(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        only = "; tokenizer.model alone (SentencePiece) is not supported" if _has_sentencepiece(directory) else ""
        raise CheckpointError(f"{path}: missing{only}")
    _check_size(path)
    try:
        return tokenizers.Tokenizer.from_str(path.read_text("utf-8"))
    except BaseException as error:  # the library raises bare Exception, or panics
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise CheckpointError(f"{path}: is not a tokenizer.json ({str(error)[:_SHOWN]})") from error


def _is_panic(error: BaseException) -> bool:
    """Where the library's own code gives up it raises this, which is no Exception and has no importable name."""
    return type(error).__name__ == "PanicException"


def _check_size(path: Path) -> None:
    if path.stat().st_size > MAX_FILE:
        raise CheckpointError(f"{path}: larger than {MAX_FILE} bytes")


def _has_sentencepiece(directory: Path) -> bool:
    return (directory / "tokenizer.model").exists()


def _read_optional(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        _check_size(path)
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no JSON object")
    return value


def _special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like; a value is the text or {"content": text}."""
    found = {name: settings.get(name) for name in _NAMED}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def _token_ids(value: Any) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]


def _adds_bos(core: tokenizers.Tokenizer, settings: Mapping[str, Any], bos: str | None) -> bool:
    if isinstance(settings.get("add_bos_token"), bool):
        return bool(settings["add_bos_token"])
    return bos is not None and bos in core.encode("", add_special_tokens=True).tokens[:1]


def _template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        _check_size(path)
        return path.read_text("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return _text_or_none(template)


# From the fields of a GGUF file.

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# `tokenizer.ggml.pre` -> the patterns that split the text, one after the other, before bytes are merged.
_PRE = {
    "smollm": (r"\p{N}", _GPT2),
    "gpt-2": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "llama-bpe": (_TIKTOKEN % "{1,3}",),
    "qwen2": (_TIKTOKEN % "",),
}
_CONTROL, _USER_DEFINED = 3, 4
# Tokens that end a turn whatever the one declared end is: a GGUF file has room for one, models use several.
_ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>")


def _from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    _check_kind(fields)
    tokens = _array(fields, "tokens", str)
    types = _array(fields, "token_type", int)
    core = _byte_level_core(tokens, _array(fields, "merges", str), _pre(fields))
    control = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    defined = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    core.add_tokens([AddedToken(token, normalized=False) for token in defined])
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends += [core.token_to_id(token) for token in _ENDS if token in control]
    return Tokenizer(
        core,
        special_tokens=_gguf_specials(fields, tokens),
        eos_ids=[i for i in ends if isinstance(i, int)],
        add_bos=fields.get("tokenizer.ggml.add_bos_token") is True,
        chat_template=_text_or_none(fields.get("tokenizer.chat_template")),
    )


def _check_kind(fields: Mapping[str, Any]) -> None:
    model = fields.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise CheckpointError(f"tokenizer.ggml.model {model!r} is not supported, only 'gpt2' (byte-level BPE)")
    if _pre(fields) not in _PRE:
        raise CheckpointError(f"tokenizer.ggml.pre {_pre(fields)!r} is not supported, only {', '.join(_PRE)}")


def _array(fields: Mapping[str, Any], key: str, kind: type[_T]) -> list[_T]:
    value = fields.get(f"tokenizer.ggml.{key}", [])
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise CheckpointError(f"field tokenizer.ggml.{key} is not a list of {kind.__name__}")
    if key == "tokens" and not value:
        raise CheckpointError("field tokenizer.ggml.tokens is missing")
    return value


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _pre(fields: Mapping[str, Any]) -> str:
    return str(fields.get("tokenizer.ggml.pre", "default"))


def _byte_level_core(tokens: list[str], merges: list[str], pre: str) -> tokenizers.Tokenizer:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        # Llama 3 looks whole words up before it merges; its merges alone would not reach all of them.
        bpe = models.BPE({token: i for i, token in enumerate(tokens)}, pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"tokenizer.ggml.merges: {error}") from error
    core = tokenizers.Tokenizer(bpe)
    core.pre_tokenizer = _splitter(pre)
    core.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        core.normalizer = normalizers.NFC()
    return core


def _splitter(pre: str) -> Any:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PRE[pre]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gguf_specials(fields: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    return {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}
