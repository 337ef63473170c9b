"""Tokenizers: equal to the reference, exact to the byte, and control tokens only where they are meant."""

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from tests.tiny import CHAT_TEMPLATE, SPECIAL, byte_tokenizer, write_checkpoint
from tinyloop.checkpoint import open_checkpoint
from tinyloop.errors import CheckpointError, RequestError
from tinyloop.tokenizer import Tokenizer

CORPUS = [
    "",
    "Hello world",
    " leading and trailing ",
    "It's we'll they've I'M YOU'RE",
    "1234567890 3.14 ١٢٣ 四五六 Ⅷ ½ x2y3",
    "tabs\tand\n\nnewlines\r\n   \n  spaces      end   ",
    "naïve café Ωμέγα Привет 你好，世界 こんにちは 안녕 مرحبا नमस्ते",
    "👍🏽 👨‍👩‍👧‍👦 🇨🇭 e\u0301 \u200b \ufeff \u00a0 \u2028",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # comment\n\n\tif x != 0: pass",
    '<html><body class="a">&amp;</body></html>',
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "!!! ??? ... --- *** ((())) \\n \\ \x00 \x7f",
    "supercalifragilisticexpialidocious" * 3,
]


def gguf_fields(**changes: object) -> dict[str, object]:
    vocab = byte_tokenizer().get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    fields: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 258,
    }
    return fields | {key.replace("__", "."): value for key, value in changes.items()}


BYTES = Tokenizer.from_gguf(gguf_fields())


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return open_checkpoint(smollm2_path).tokenizer


# The real model


def test_real_gguf_equals_the_reference(smollm2: Tokenizer, smollm2_path: Path) -> None:
    reference = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    # It reads no `tokenizer.ggml.pre`. The published tokenizer.json splits numerals of every script before bytes.
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    for text in [*CORPUS, "\n".join(CORPUS)]:
        ids = smollm2.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False)
        assert smollm2.decode(ids, skip_special=False) == text
        assert smollm2.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_real_gguf_says_what_its_fields_say(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.add_bos) == (49152, 1, False)
    assert smollm2.eos_ids == (2, 0)
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert "im_start" in (smollm2.chat_template or "")


@given(st.text(max_size=40))
def test_any_text_comes_back(text: str) -> None:
    ids = BYTES.encode(text)
    assert BYTES.decode(ids, skip_special=False) == text
    assert b"".join(map(BYTES.token_bytes, ids)) == text.encode()


# Control tokens


def test_control_strings_are_tokens_or_text_as_asked() -> None:
    text = "a<|im_end|>b<|im_start|>"
    assert set(BYTES.encode(text)) >= {257, 258}
    plain = BYTES.encode(text, special=False)
    assert not any(map(BYTES.is_special, plain))
    assert BYTES.decode(plain) == text
    assert BYTES.encode(text) == BYTES.encode(text)  # asking for plain text changed nothing


def test_plain_and_special_encoding_do_not_disturb_each_other() -> None:
    text, wrong = "x<|im_end|>" * 50, []

    def work(special: bool) -> None:
        for _ in range(50):
            if (258 in BYTES.encode(text, special=special)) is not special:
                wrong.append(special)

    threads = [threading.Thread(target=work, args=(special,)) for special in (True, False) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_decode_skips_special_tokens_only_when_asked() -> None:
    ids = BYTES.encode("a<|im_end|>b")
    assert BYTES.decode(ids) == "ab"
    assert BYTES.decode(ids, skip_special=False) == "a<|im_end|>b"
    assert (BYTES.token_text(258), BYTES.token_bytes(258)) == ("<|im_end|>", b"<|im_end|>")


def test_user_defined_tokens_are_whole_but_not_special() -> None:
    fields = gguf_fields()
    tokens, types = [*fields["tokenizer.ggml.tokens"], "<tool>"], [*fields["tokenizer.ggml.token_type"], 4]  # type: ignore[misc]
    tokenizer = Tokenizer.from_gguf(gguf_fields(tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=types))
    assert tokenizer.encode("<tool>") == [259]
    assert tokenizer.decode([259]) == "<tool>"


# Bad input


@pytest.mark.parametrize("bad", [-1, 259, 2**40, -(2**40)])
def test_ids_outside_of_the_vocabulary_are_refused(bad: int) -> None:
    for use in (lambda i: BYTES.decode([65, i]), BYTES.token_text, BYTES.token_bytes):
        with pytest.raises(RequestError, match="between 0 and 258"):
            use(bad)


@pytest.mark.parametrize("special", [True, False])
def test_half_a_surrogate_pair_is_refused(special: bool) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        BYTES.encode("a\ud83d", special=special)


# GGUF fields


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "llama"),
        ("model", None),
        ("pre", "tekken"),
        ("tokens", []),
        ("tokens", "abc"),
        ("token_type", ["x"]),
        ("merges", ["a zz"]),
    ],
)
def test_what_a_gguf_tokenizer_cannot_be_is_named(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"tokenizer.ggml.{key}"):
        Tokenizer.from_gguf(gguf_fields(**{f"tokenizer__ggml__{key}": value}))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["I", "'m", " ", "1", "2", "3", "4", " ok", "  ", " !!", "\n"]),
        ("gpt-2", ["I", "'m", " 1234", " ok", "  ", " !!", "\n"]),
        ("default", ["I", "'", "m", " ", "123", "4", " ok", "   ", "!!", "\n"]),
        ("llama-bpe", ["I", "'m", " ", "123", "4", " ok", "  ", " !!\n"]),
        ("qwen2", ["I", "'m", " ", "1", "2", "3", "4", " ok", "  ", " !!\n"]),
    ],
)
def test_text_is_split_as_the_pre_tokenizer_says(pre: str, pieces: list[str]) -> None:
    core = Tokenizer.from_gguf(gguf_fields(tokenizer__ggml__pre=pre))._core
    spans = [span for _, span in core.pre_tokenizer.pre_tokenize_str("I'm 1234 ok   !!\n")]
    assert ["I'm 1234 ok   !!\n"[start:end] for start, end in spans] == pieces


def test_qwen2_composes_characters_first() -> None:
    tokenizer = Tokenizer.from_gguf(gguf_fields(tokenizer__ggml__pre="qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "é"


def test_every_declared_end_ends() -> None:
    tokenizer = Tokenizer.from_gguf(gguf_fields(tokenizer__ggml__eot_token_id=5))
    assert tokenizer.eos_ids == (258, 5, 256)


# Directories


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", {"eos_token_id": 7}, {})


def test_directory_gives_specials_template_and_ends(directory: Path) -> None:
    tokenizer = Tokenizer.from_file(directory)
    assert tokenizer.special_tokens == {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2]}
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (256, (7, 258), False)
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 258]}')
    assert Tokenizer.from_file(directory).eos_ids == (5, 258)


def test_template_file_wins_and_a_list_gives_its_default(directory: Path) -> None:
    settings = {"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer.from_file(directory).chat_template == "d"
    (directory / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_file(directory).chat_template == "file"


def test_added_bos_is_read_from_the_post_processor(directory: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    core = byte_tokenizer()
    core.post_processor = TemplateProcessing(f"{SPECIAL[0]} $A", None, [(SPECIAL[0], 256)])
    core.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": SPECIAL[0]}}))
    tokenizer = Tokenizer.from_file(directory)
    assert tokenizer.add_bos
    assert tokenizer.encode("a") == byte_tokenizer().encode("a").ids


def test_truncation_in_the_file_is_ignored(directory: Path) -> None:
    core = byte_tokenizer()
    core.enable_truncation(2)
    core.enable_padding(length=9)
    core.save(str(directory / "tokenizer.json"))
    assert len(Tokenizer.from_file(directory).encode("abcd")) == 4


def test_a_token_named_special_becomes_special(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "!"}))
    tokenizer = Tokenizer.from_file(directory)
    assert tokenizer.is_special(tokenizer.eos_ids[-1])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_broken_file_is_named(directory: Path, name: str, text: str) -> None:
    (directory / name).write_text(text)
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.from_file(directory)


def test_bytes_of_other_vocabularies() -> None:
    vocab = {"<unk>": 0, "<0xE2>": 1, "▁the": 2}
    core = Core(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(core)
    assert [tokenizer.token_bytes(i) for i in range(3)] == [b"<unk>", b"\xe2", b" the"]
