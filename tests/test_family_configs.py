"""Configurations as they are published: what is read from them, and what is refused, by name."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.tiny import byte_tokenizer, write_checkpoint
from tests.tiny_models import RandomTensors, raw_config
from tinyloop.config import Layout, ModelConfig, Rotary, prefix_serves_every_depth
from tinyloop.errors import CheckpointError, RequestError
from tinyloop.model import Model
from tinyloop.models.family import Weights
from tinyloop.models.registry import family_of
from tinyloop.plan import make_plan
from tinyloop.stack import LoopedStack


def decoder(
    hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, context: int, **more: Any
) -> dict[str, Any]:
    return {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads, "vocab_size": vocab,
            "num_key_value_heads": kv_heads, "max_position_embeddings": context, "hidden_act": "silu",
            "rms_norm_eps": 1e-5, "attention_dropout": 0.0, "use_cache": True, "torch_dtype": "bfloat16",
            "tie_word_embeddings": False, **more}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A config.json, and the facts that follow from it. `billions`: weights in matrices and embeddings."""

    raw: dict[str, Any]
    layout: Layout
    loops: tuple[int, int] = (1, 1)  # default and trained, most
    billions: float = 0.0
    shares: bool = True
    facts: dict[str, Any] = field(default_factory=dict)


PUBLISHED = {
    "SmolLM2-135M": Published(
        decoder(576, 1536, 9, 3, 49152, 8192, model_type="llama", num_hidden_layers=30, rope_theta=100000,
                attention_bias=False, mlp_bias=False, pretraining_tp=1, rope_scaling=None, rope_interleaved=False,
                tie_word_embeddings=True),
        Layout(0, 30, 0), billions=0.1345, facts={"rotary": (Rotary(100000.0),)},
    ),
    "Llama-3.2-1B": Published(
        decoder(2048, 8192, 32, 8, 128256, 131072, model_type="llama", num_hidden_layers=16, head_dim=64,
                rope_theta=500000.0, tie_word_embeddings=True, rope_scaling={
                    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 8192, "rope_type": "llama3"}),
        Layout(0, 16, 0), billions=1.236, facts={"rotary": (Rotary(500000.0, 32.0, 1.0, 4.0, 8192),)},
    ),
    "Qwen2.5-0.5B": Published(
        decoder(896, 4864, 14, 2, 151936, 32768, model_type="qwen2", num_hidden_layers=24, rope_theta=1000000.0,
                max_window_layers=24, sliding_window=32768, use_sliding_window=False, use_mrope=False,
                tie_word_embeddings=True),
        Layout(0, 24, 0), billions=0.494, facts={"exit_signals": ()},
    ),
    "Qwen3-0.6B": Published(
        decoder(1024, 3072, 16, 8, 151936, 40960, model_type="qwen3", num_hidden_layers=28, rope_theta=1000000,
                head_dim=128, max_window_layers=28, sliding_window=None, use_sliding_window=False,
                attention_bias=False, rope_scaling=None, tie_word_embeddings=True),
        Layout(0, 28, 0), billions=0.596, facts={"head_dim": 128},
    ),
    "Ouro-1.4B": Published(
        decoder(2048, 5632, 16, 16, 49152, 65536, model_type="ouro", num_hidden_layers=24, head_dim=128,
                rope_theta=1000000.0, rope_scaling=None, sliding_window=None, use_sliding_window=False,
                max_window_layers=24, total_ut_steps=4, early_exit_threshold=1.0,
                layer_types=["full_attention"] * 24),
        Layout(0, 24, 0), (4, 8), 1.434, facts={"exit_signals": ("gate", "distance")},
    ),
    "Nanbeige4.2-3B": Published(
        decoder(3072, 10752, 48, 8, 166144, 262144, model_type="nanbeige", num_hidden_layers=22, head_dim=128,
                kv_channels=128, loop_loss_weights=[], num_loops=2, rope_theta=70000000, skip_loop_final_norm=False,
                initializer_range=0.02),
        Layout(0, 22, 0), (2, 4), 4.17,
        facts={"norm_each_loop": True, "exit_signals": ("distance",)},
    ),
    "Dory-4B": Published(
        transformers.DoryConfig().to_dict(),
        Layout(8, 20, 8), (2, 8), 3.97,
        facts={"rotary": (Rotary(1e4), Rotary(1e7)), "windows": (1024, 1024, 1024, 0) * 9, "max_context": 8192},
    ),
    "Dory-4B last_loop": Published(
        transformers.DoryConfig(recurrent_kv_cache_mode="last_loop").to_dict(),
        Layout(8, 20, 8, one_plane=True), (2, 8), 3.97, shares=False, facts={"whole_prompt": True},
    ),
    "HRM-Text-1B": Published(
        transformers.HrmTextConfig().to_dict(),
        Layout(0, 64, 0), (2, 4), 1.448, shares=False,
        facts={"embedding_scale": 50.0, "whole_prompt": True, "own_layers": 32, "state_size": 3072},
    ),
    "HRM-Text-1B causal": Published(
        transformers.HrmTextConfig(prefix_lm=False).to_dict(), Layout(0, 64, 0), (2, 4), 1.448
    ),
    "IQuest-Coder-V1-40B-Loop": Published(
        decoder(5120, 27648, 40, 8, 76800, 131072, model_type="iquestloopcoder", num_hidden_layers=80, head_dim=128,
                attention_bias=False, mlp_bias=False, rope_theta=500000.0, rope_scaling=None, loop_num=2,
                loop_window_size=64),
        Layout(0, 80, 0), (2, 2), 39.8, facts={"loop_window": 64},
    ),
    "Huginn-0125": Published(
        {"model_type": "huginn_raven", "architecture_class_name": "RecurrentGPT", "bias": False, "block_size": 4096,
         "block_class_name": "SandwichBlock", "effective_expected_depth": 132, "head_dim": 96,
         "init_values": {"embed_scale": 72.6636084983398}, "injection_type": "linear", "intermediate_size": 17920,
         "mean_recurrence": 32, "mlp_class_name": "GatedMLP", "n_embd": 5280, "n_heads": 55, "n_layers": 8,
         "n_layers_in_coda": 2, "n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 4, "nonlin_name": "SiLU",
         "norm_class_name": "RMSNorm_llama", "norm_eps": 1e-6, "num_key_value_heads": 55, "padded_vocab_size": 65536,
         "qk_bias": True, "rope_base": 50000, "state_init": "like-init", "test_time_noise": 0,
         "test_time_noise_type": "fixed", "tie_embeddings": True, "vocab_size": 65536},
        Layout(2, 4, 2), (32, 64), 3.565, facts={"rotary": (Rotary(50000.0),), "state_size": 10560, "head_dim": 96},
    ),
}  # fmt: skip


def config_of(raw: dict[str, Any]) -> ModelConfig:
    return family_of(raw).config(raw)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(name: str) -> None:
    published = PUBLISHED[name]
    config = config_of(published.raw)
    assert config.layout == published.layout
    assert (config.default_loops, config.max_loops) == published.loops
    assert config.trained_loops == config.default_loops
    assert config.parameters / 1e9 == pytest.approx(published.billions, rel=0.005)
    assert prefix_serves_every_depth(config) is published.shares
    for fact, value in published.facts.items():
        assert getattr(config, fact) == value, fact


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_dial_is_refused_outside_of_its_bounds(name: str) -> None:
    config = config_of(PUBLISHED[name].raw)
    for loops in (0, config.max_loops + 1):
        with pytest.raises(RequestError, match=f"loops must be between 1 and {config.max_loops}, got {loops}"):
            make_plan(config, loops=loops)


REFUSED: list[tuple[str, str, Any]] = [
    ("SmolLM2-135M", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
    ("SmolLM2-135M", "attention_bias", True),
    ("Llama-3.2-1B", "high_freq_factor", None),
    ("Qwen2.5-0.5B", "use_sliding_window", True),
    ("Qwen3-0.6B", "layer_types", ["sliding_attention"] * 28),
    ("Qwen3-0.6B", "attention_bias", True),
    *(("Nanbeige4.2-3B", switch, True) for switch in (
        "enable_double_loop_split", "enable_mhc", "enable_hyper_connection", "enable_depth_attention", "loop_share_kv",
        "qk_layernorm", "ngram_insert_all_layers", "enable_something_new")),
    ("Nanbeige4.2-3B", "emb_neighbor_num", 3),
    ("Nanbeige4.2-3B", "loop_middle_layers", 11),
    ("Nanbeige4.2-3B", "num_loops", 0),
    ("Dory-4B", "recurrent_kv_cache_mode", "first_loop"),
    ("Dory-4B", "mlp_bias", True),
    ("Dory-4B", "layer_types", ["chunked_attention", "mlp"] * 36),
    ("Dory-4B", "num_hidden_layers", 74),
    ("Dory-4B", "num_hidden_layers", 10**12),
    ("Dory-4B", "layer_types", 5),
    ("Dory-4B", "layer_types", [["mlp"]] * 72),
    ("Ouro-1.4B", "layer_types", ["sliding_attention"] * 24),
    ("Nanbeige4.2-3B", "num_loops", 10**9),
    ("HRM-Text-1B", "L_cycles", 10**9),
    ("Dory-4B", "n_recurrent_loops", 0),
    ("HRM-Text-1B", "num_key_value_heads", 4),
    ("HRM-Text-1B", "L_cycles", 0),
    ("HRM-Text-1B", "prefix_lm", "yes"),
    ("IQuest-Coder-V1-40B-Loop", "loop_num", 3),
    ("IQuest-Coder-V1-40B-Loop", "loop_window_size", 0),
    ("IQuest-Coder-V1-40B-Loop", "mlp_bias", True),
    ("Huginn-0125", "injection_type", "add"),
    ("Huginn-0125", "norm_class_name", "LayerNorm"),
    ("Huginn-0125", "block_class_name", "OtherBlock"),
    ("Huginn-0125", "nonlin_name", "GELU"),
    ("Huginn-0125", "test_time_noise", 0.1),
    ("Huginn-0125", "bias", True),
    ("Huginn-0125", "num_key_value_heads", 5),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key", "value"), REFUSED)
def test_what_would_change_the_computation_is_refused_by_name(name: str, key: str, value: Any) -> None:
    raw = {**PUBLISHED[name].raw, key: value}
    if key == "high_freq_factor":
        raw["rope_scaling"] = {**PUBLISHED[name].raw["rope_scaling"], key: 1.0}
    named = "rope type 'yarn'" if key == "rope_scaling" else key
    with pytest.raises(CheckpointError, match=named):
        config_of(raw)


@pytest.mark.parametrize(
    ("kind", "section", "message"),
    [
        (
            "ouro",
            {"retrofit": {"prelude": 1, "core": 1}},
            "tinyloop: 'retrofit' is not for model_type ouro; known is nothing",
        ),
        ("llama", {"start_seed": 1}, "tinyloop: 'start_seed' is not for model_type llama; known is retrofit"),
        (
            "huginn_raven",
            {"seed": 1},
            "tinyloop: 'seed' is not for model_type huginn_raven; known is start_seed, start_",
        ),
    ],
)
def test_what_a_family_would_not_heed_is_refused(kind: str, section: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_of(raw_config(kind, tinyloop=section))


@pytest.mark.parametrize("kind", ["inkling2_loop", "inkling2_loop_text"])
def test_a_looped_model_that_does_not_fit_is_refused_with_the_reason(kind: str) -> None:
    with pytest.raises(CheckpointError, match=f"model_type {kind} is not supported: its short convolutions"):
        family_of(raw_config(kind))


@pytest.mark.parametrize("kind", ["HrmText", "Dory"])
def test_a_folder_that_transformers_wrote_is_read(kind: str, tmp_path: Path) -> None:
    reference = saved(kind, tmp_path)
    model = Model.load(tmp_path, dtype="float32")
    assert_same(model, reference)


def test_a_released_dory_folder_is_read(tmp_path: Path) -> None:
    """Halves of a layer are blocks of their own, with numbers of their own."""
    reference = saved("Dory", tmp_path)
    names = {"embed_tokens": "embeddings", "self_attn.gate_proj": "self_attn.g_proj"}
    tensors = {}
    for name, tensor in reference.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        parts = name.replace("model.", "backbone.").split(".")
        if parts[1] == "layers":
            half = int(parts[3] in ("mlp", "lambda_2"))
            alpha = {"lambda_1": "attn_alpha", "lambda_2": "mlp_alpha"}.get(parts[3], "mixer")
            parts[2:4] = [str(2 * int(parts[2]) + half), alpha]
        tensors[".".join(parts)] = tensor
    directory = write_checkpoint(tmp_path / "released", reference.config.to_dict(), tensors)
    assert_same(Model.load(directory, dtype="float32"), transformers.DoryForCausalLM.from_pretrained(directory).eval())


def saved(kind: str, directory: Path) -> torch.nn.Module:
    """A tiny model with random weights, as transformers saves it."""
    shape = {"vocab_size": 259, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
             "num_attention_heads": 4, "head_dim": 12, "max_position_embeddings": 64}  # fmt: skip
    more = {"n_input_layers": 1, "n_output_layers": 1, "num_key_value_heads": 2} if kind == "Dory" else {}
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**shape, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(1 + 0.5 * torch.rand_like(parameter))
    model.save_pretrained(directory)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return model


def assert_same(model: Model, reference: torch.nn.Module) -> None:
    tokens = [3, 141, 59, 26, 53, 58, 97, 93, 238]
    both_ways = {"token_type_ids": torch.ones(1, len(tokens), dtype=torch.long)} if model.config.whole_prompt else {}
    with torch.no_grad():
        expected = reference(torch.tensor([tokens]), use_cache=False, **both_ways).logits[0]
    assert expected.std() > 0.01
    assert torch.allclose(model.oracle(tokens), expected, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["Dory-4B", "HRM-Text-1B", "Huginn-0125", "Nanbeige4.2-3B", "Qwen3-0.6B"])
def test_the_count_of_weights_is_that_of_the_matrices(name: str, tied: bool) -> None:
    small = {"hidden_size": 48, "n_embd": 48, "intermediate_size": 80, "num_attention_heads": 4, "n_heads": 4,
             "head_dim": 12, "kv_channels": 12, "vocab_size": 259, "num_key_value_heads": 4,
             "tie_word_embeddings": tied, "tie_embeddings": tied}  # fmt: skip
    raw = {**PUBLISHED[name].raw, **small}
    config, source = config_of(raw), RandomTensors(has=("transformer.core_block.0.norm_3.weight",))
    LoopedStack(family_of(raw), config, Weights(source, torch.float32, torch.device("cpu")))
    assert config.parameters == sum(tensor.numel() for tensor in source.taken.values() if tensor.ndim == 2)
