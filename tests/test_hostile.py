"""Checkpoints made to hurt: one clear error each, nothing executed, no hang, no memory taken on a number's word."""

import json
import math
import os
import pickle
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.test_family_configs import PUBLISHED
from tests.test_model import saved_checkpoint
from tests.tiny import SPECIAL, byte_tokenizer
from tests.tiny_models import raw_config
from tinyloop import chat, template, tokenizer
from tinyloop.checkpoint import Checkpoint, source
from tinyloop.checkpoint.safetensors import SafetensorsSource
from tinyloop.config import MOST_LAYERS
from tinyloop.errors import CheckpointError, RequestError
from tinyloop.inspection import inspect
from tinyloop.model import Model
from tinyloop.models.family import LARGEST
from tinyloop.models.registry import family_of
from tinyloop.tokenizer import Tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LONG_S = 20.0  # far beyond what an error takes, far below a hang, on a machine that is busy


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint that loads."""
    return saved_checkpoint(tmp_path / "tiny", num_hidden_layers=1)


def refusal(path: Path) -> str:
    """The one error of loading it: short, and soon."""
    began = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        Model.load(path, dtype="float32", kv_memory=1 << 20)
    assert time.monotonic() - began < LONG_S
    assert len(str(caught.value)) < 600
    return str(caught.value)


def test_the_checkpoint_that_is_spoilt_here_loads(directory: Path) -> None:
    assert Model.load(directory, kv_memory=1 << 20).config.family == "ouro"


# Weights


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", WEIGHTS, "tokenizer.json", "config.json", INDEX])
def test_a_pickle_is_never_read_whatever_it_is_called(directory: Path, tmp_path: Path, name: str) -> None:
    mark, bomb = tmp_path / "executed", pickle.dumps(Bomb(tmp_path / "executed"))
    pickle.loads(bomb)
    assert mark.exists(), "the bomb does not work"
    mark.unlink()
    if name.endswith((".bin", ".pt")):
        (directory / WEIGHTS).unlink()
    (directory / name).write_bytes(bomb)
    assert name in refusal(directory)
    assert not mark.exists()


def test_code_beside_the_weights_is_not_run(directory: Path, tmp_path: Path) -> None:
    raw = json.loads((directory / "config.json").read_text())
    raw |= {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}, "trust_remote_code": True}
    (directory / "config.json").write_text(json.dumps(raw))
    (directory / "modeling_x.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    Model.load(directory, kv_memory=1 << 20)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_shard_is_named(directory: Path, share: float) -> None:
    names = list(load_file(directory / WEIGHTS).items())
    (directory / WEIGHTS).unlink()
    for number, part in enumerate((names[:3], names[3:])):
        save_file(dict(part), directory / f"part-{number}.safetensors")
    where = {name: f"part-{int(i >= 3)}.safetensors" for i, (name, _) in enumerate(names)}
    (directory / INDEX).write_text(json.dumps({"weight_map": where}))
    Model.load(directory, kv_memory=1 << 20)
    spoilt = directory / "part-1.safetensors"
    spoilt.write_bytes(spoilt.read_bytes()[: int(share * spoilt.stat().st_size)])
    assert "part-1.safetensors: truncated" in refusal(directory)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.bool, torch.float8_e4m3fn, torch.uint8])
def test_a_tensor_of_a_wrong_type_is_named(directory: Path, dtype: torch.dtype) -> None:
    tensors = load_file(directory / WEIGHTS)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, directory / WEIGHTS)
    assert f"tensor model.norm.weight is {dtype}" in refusal(directory)


def test_a_missing_tensor_and_one_too_many_are_named(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    save_file(tensors | {"model.backdoor": torch.ones(1)}, directory / WEIGHTS)
    assert refusal(directory).endswith("does not use: model.backdoor")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, directory / WEIGHTS)
    assert "tensor model.layers.0.mlp.up_proj.weight is missing" in refusal(directory)


def header(**tensors: Any) -> bytes:
    told = json.dumps(tensors).encode()
    return struct.pack("<Q", len(told)) + told


TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 1 << 62),
        struct.pack("<Q", 200_000_000) + b" " * 1000,
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        struct.pack("<Q", 0),
        header(a=TENSOR),
        header(a=TENSOR | {"shape": [1 << 62]}) + bytes(4),
        header(a=TENSOR | {"shape": [1 << 40, 1 << 40]}) + bytes(4),
        header(a=TENSOR | {"shape": [-1]}) + bytes(4),
        header(a=TENSOR | {"data_offsets": [0, 1 << 40]}) + bytes(4),
        header(a=TENSOR | {"data_offsets": [4, 0]}) + bytes(4),
        header(a=TENSOR, b=TENSOR) + bytes(4),
        header(a=TENSOR | {"dtype": "PICKLE"}) + bytes(4),
    ],
)
def test_a_header_that_promises_what_is_not_there_is_named(directory: Path, content: bytes) -> None:
    (directory / WEIGHTS).write_bytes(content)
    assert WEIGHTS in refusal(directory)


def test_a_tensor_that_cannot_be_read_is_named(directory: Path) -> None:
    (directory / WEIGHTS).write_bytes(header(a=TENSOR | {"dtype": "F8_E8M0", "shape": [4]}) + bytes(4))
    with pytest.raises(CheckpointError, match=r"tensor a (is torch\.float8_e8m0fnu|cannot be read)"):
        Checkpoint("x", {}, Tokenizer(byte_tokenizer()), SafetensorsSource([directory / WEIGHTS])).take("a", (4,))


@pytest.mark.parametrize(
    "outside", ["../x.safetensors", "/etc/passwd", "/x.safetensors", "a/../../x.safetensors", "..\\x.safetensors",
                "x.safetensors\0", "", ".", "file:///x.safetensors", "x" * 5000 + ".safetensors"],
)  # fmt: skip
def test_an_index_cannot_reach_outside_of_its_directory(directory: Path, outside: str) -> None:
    save_file({"a": torch.ones(1)}, directory.parent / "x.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": outside}}))
    assert "model.safetensors.index.json" in refusal(directory) or "shard is missing" in refusal(directory)


@pytest.mark.parametrize("name", ["config.json", INDEX, WEIGHTS, "tokenizer.json"])
def test_what_is_no_file_is_not_waited_for(directory: Path, name: str) -> None:
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    assert name in refusal(directory)


# Configurations


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize("text", ['{"a":' * 100_000, "[" * 1_000_000, '{"a": ' + "9" * 10_000 + "}", "{} {}", "\0"])
def test_json_that_is_too_deep_or_none_is_named(directory: Path, name: str, text: str) -> None:
    (directory / name).write_text(text)
    assert name in refusal(directory)


@pytest.mark.parametrize("name", ["config.json", INDEX, "tokenizer.json", "tokenizer_config.json",
                                  "chat_template.jinja"])  # fmt: skip
def test_a_file_that_is_too_large_is_not_read(directory: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_JSON", 1 << 16)
    monkeypatch.setattr(tokenizer, "MAX_FILE", 1 << 16)
    with (directory / name).open("r+b" if (directory / name).exists() else "wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    assert f"{name}: larger than {1 << 16} bytes" in refusal(directory)


HOSTILE = [None, True, -1, 0, 1, 2, 3, 10**7, 10**9, 10**30, -(10**30), 0.5, math.nan, math.inf, -math.inf, 1e300, "",
           "x" * 10_000, [], [[]], [None], [0] * 1000, {}, {"a": {}}, "full_attention"]  # fmt: skip


def read(raw: dict[str, Any]) -> tuple[int, str]:
    """Layers of what is read, or the refusal."""
    try:
        return family_of(raw).config(raw).layout.layers, ""
    except CheckpointError as error:
        return 0, str(error)


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_value_of_a_config_does_more_than_a_refusal(name: str) -> None:
    """Each key of each family in turn: it is read, or refused in a sentence, without delay."""
    began = time.monotonic()
    for key in PUBLISHED[name].raw:
        for value in HOSTILE:
            layers, complaint = read(PUBLISHED[name].raw | {key: value})
            assert layers <= MOST_LAYERS
            assert len(complaint) < 400, key
    assert time.monotonic() - began < 2 * LONG_S


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "ouro", "nanbeige", "iquestloopcoder"])
def test_a_number_of_layers_takes_no_memory(model_type: str) -> None:
    for layers in (MOST_LAYERS + 1, LARGEST, LARGEST + 1, 10**12):
        with pytest.raises(CheckpointError, match="layers"):
            inspect(raw_config(model_type, num_hidden_layers=layers, loop_num=2), torch.float32)


# Tokenizers


def changed(**parts: Any) -> str:
    return json.dumps(json.loads(byte_tokenizer().to_str()) | parts)


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{}", b"[]", b"null", b"\xff\xfe", os.urandom(1000), b"[" * 100_000, b'{"model":' * 5000,
        changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}).encode(),
        changed(pre_tokenizer=split("((")).encode(),
        changed(model={"type": "BPE", "vocab": {"a": -1}, "merges": []}).encode(),
        changed(model={"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}).encode(),
        changed(model={"type": "BPE", "vocab": {"a": 0}, "merges": ["a b c"]}).encode(),
        changed(model={"type": "Unigram", "vocab": [], "unk_id": 0}).encode(),
        changed(model={"type": "Unknown"}).encode(),
    ],
)  # fmt: skip
def test_a_tokenizer_that_is_none_is_named(directory: Path, content: bytes) -> None:
    (directory / "tokenizer.json").write_bytes(content)
    assert "token" in refusal(directory)


@pytest.mark.parametrize("length", [40, 4000])
def test_a_tokenizer_that_gives_up_on_a_text_refuses_it(directory: Path, length: int) -> None:
    (directory / "tokenizer.json").write_text(changed(pre_tokenizer=split("(a+)+$")))
    found = Tokenizer.from_file(directory)
    assert found.decode(found.encode("ab")) == "ab"
    for special in (True, False):
        with pytest.raises(RequestError, match="cannot read this text"):
            found.encode("a" * length + "!", special=special)


@pytest.mark.parametrize("value", [[], 3, {"a": 1}, [{}], [{"name": "default", "template": 5}], "x" * 10**6])
def test_settings_of_any_kind_give_a_model_or_an_error(directory: Path, value: object) -> None:
    keys = ("chat_template", "eos_token", "bos_token", "add_bos_token", "model_max_length", "added_tokens_decoder")
    (directory / "tokenizer_config.json").write_text(json.dumps(dict.fromkeys(keys, value)))
    model = Model.load(directory, kv_memory=1 << 20)
    with pytest.raises(RequestError, match="chat template"):
        model.chat([{"role": "user", "content": "x"}])


# Chat templates


def answer(text: str) -> str:
    """What a template does to one message, or the error that its caller gets."""
    core = Tokenizer(byte_tokenizer(), special_tokens={"eos_token": SPECIAL[2]}, chat_template=text)
    began, refused = time.monotonic(), ""
    try:
        return core.decode(chat.render(core, [{"role": "user", "content": "hi"}]), skip_special=False)
    except RequestError as error:
        refused = f"{error.field} refused: {error}"
    finally:
        assert time.monotonic() - began < LONG_S
    assert len(refused) < 300
    return refused


def nest(depth: int, inner: str) -> str:
    return "{% for i in range(99999) %}" * depth + inner + "{% endfor %}" * depth


DOUBLED = "{% set a = 'abcdefgh' %}" + "{% set a = a ~ a %}" * 60 + "{{ a | length }}"
ENDLESS: dict[str, str] = {
    "loops that write nothing": nest(3, ""),
    "loops that sum": nest(3, "{% set x = i + 1 %}"),
    "a loop without calls": "{% set r = range(99999) %}" + "{% for i in r %}" * 3 + "{% endfor %}" * 3,
    "a loop whose condition never holds": "{% set r = range(99999) %}{% for a in r if r | sum == 1 %}{% endfor %}",
    "nested loops whose condition never holds":
        "{% set r = range(99999) %}{% for a in r %}{% for b in r if b < 0 %}{% endfor %}{% endfor %}",
    "filters over lists of lists": "{{ ([range(99999)] * 99999) | map('sum') | list | length }}",
    "a filter that is never read to its end": "{{ range(99999) | map('string') | map('length') | list | sum }}" * 900,
    "a recursive loop": "{% for x in [[1]] recursive %}{{ loop([x, x]) }}{% endfor %}",
    "a recursive macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "text that is doubled": DOUBLED,
    "text that is doubled by plus": DOUBLED.replace("~", "+"),
    "text that is repeated": "{{ 'abcdefgh' * 10000000000 }}",
    "a list that is repeated": "{{ ([1] * 9999999999) | length }}",
    "a power": "{{ 9 ** 99999999999 }}",
    "a square of squares": "{% set a = 9 %}" + "{% set a = a * a %}" * 60 + "{{ a }}",
    "a wide field": "{{ 'x'.center(9999999999) }}",
    "a wide filter": "{{ 'x' | center(9999999999) }}",
    "an indent": "{{ {'a': 1} | tojson(indent=9999999999) }}",
    "a wide format": "{{ '%9999999999d' % 1 }}",
    "a wide format by filter": "{{ '%9999999999d' | format(1) }}",
    "a wide format by method": "{{ '{:9999999999}'.format(1) }}",
    "a width that is handed over": "{{ '{:{w}}'.format(1, w=9999999999) }}",
    "a starred width": "{{ '%*d' % (9999999999, 1) }}",
    "replacements": "{% set a = 'a' * 9999 %}{{ a | replace('a', a) | replace('a', a) | length }}",
    "replacements by method": "{% set a = 'a' * 9999 %}{{ a.replace('a', a).replace('a', a) | length }}",
    "joined text": "{% set a = 'a' * 999999 %}{{ ([a] * 99999) | join | length }}",
    "joined text by method": "{% set a = 'a' * 999999 %}{{ ''.join([a] * 99999) | length }}",
    "a list in itself many times": "{% set a = [1] %}" + "{% set a = [a, a] %}" * 60 + "{{ a | tojson }}",
    "the same, written": "{% set a = [1] %}" + "{% set a = [a, a] %}" * 60 + "{{ a }}",
    "the same, compared": "{% set a = [1] %}{% set b = [1] %}" + "{% set a = [a, a] %}{% set b = [b, b] %}" * 60
        + "{{ a == b }}",
    "the same, glued": "{% set a = [1] %}" + "{% set a = [a, a] %}" * 60 + "{% set b = a ~ '' %}",
    "latin without end": "{{ lipsum(n=99999999) }}",
    "a template of great length": "{{ 1 }}" * 100_000,
    "deep brackets": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "deep blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_ends_in_time_and_room(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_SECONDS", 0.3)
    assert answer(ENDLESS[name]).startswith("messages refused: the")


def test_a_template_may_take_its_time_within_bounds() -> None:
    assert answer("{% for i in range(20000) %}{% if i % 1000 == 0 %}x{% endif %}{% endfor %}") == "x" * 20
    assert answer("{{ 'ab' * 3 }}{{ '%05.1f' % 2 }}{{ '{:>4}'.format(7) }}{{ 2 ** 10 }}") == "ababab002.0   71024"
    assert (
        answer("{{ [1, [2, 3]] }}{{ 'a-b' | replace('-', '+') }}{{ ['x', 'y'] | join(', ') }}") == "[1, [2, 3]]a+bx, y"
    )
    assert answer("{% for i in range(9) if i % 2 %}{{ i ~ ';' ~ loop.last }} {% endfor %}").split()[-1] == "7;True"


def test_a_long_conversation_is_no_endless_template() -> None:
    counted = "{% for m in messages[::-1] %}{% set i = (messages | length - 1) - loop.index0 %}{{ i % 2 }}{% endfor %}"
    core = Tokenizer(byte_tokenizer(), chat_template=counted)
    said = [{"role": "user", "content": "x", "parts": [{"type": "text", "text": "x"}]}] * 5000
    assert len(chat.render(core, said)) == 5000


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.popen('touch x') }}",
    "{{ self.__init__.__globals__ }}", "{{ raise_exception.__globals__ }}", "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}", "{{ ''['__class__'] }}{{ (''|attr('__class__')).x }}",
    "{{ strftime_now.__globals__['json'] }}", "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '%s'.format_map({}).__class__.x }}",
]  # fmt: skip


@pytest.mark.parametrize("text", ESCAPES)
def test_a_template_gets_out_of_nothing(text: str) -> None:
    found = answer(text)
    assert not found or found.startswith("messages refused: the model's chat template cannot render")


def test_two_renderings_at_once_have_each_their_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_SECONDS", 2.0)  # a collection of garbage counts too
    with ThreadPoolExecutor(2) as pool:
        endless = pool.submit(answer, nest(3, ""))
        others = [pool.submit(answer, "{{ messages[0].content }}") for _ in range(20)]
        assert {other.result() for other in others} == {"hi"}
        assert "does not end within 2 seconds" in endless.result()
