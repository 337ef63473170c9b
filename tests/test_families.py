"""Every family against its reference on tiny random weights: transformers, or an independent implementation."""

import importlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import tinyloop as tl
from server.policy import Policy
from tests import agreement, huginn_reference, ouro_reference
from tests.agreement import Case, Reference
from tinyloop.plan import make_plan

SHAPE = {
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
NINE_HEADS = {"hidden_size": 90, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 10}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def by_transformers(kind: str, dial: str | None = None) -> Callable[[dict[str, Any], dict[str, Tensor]], Reference]:
    """A reference out of `transformers`: the config and model classes named after `kind`. `dial` is the config's field
    for the depth."""

    def make(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Reference:
        model = transformer(kind, raw, tensors)

        @torch.no_grad()
        def logits(tokens: Sequence[int], prompt: int, loops: int) -> Tensor:
            assert dial or loops == 1
            if dial:
                setattr(model.config, dial, loops)
            if raw.get("recurrent_kv_cache_mode") == "last_loop":
                return token_by_token(model, tokens, prompt)
            is_prompt = (torch.arange(len(tokens)) < prompt).long()[None]
            both_ways = {"token_type_ids": is_prompt} if raw.get("prefix_lm") else {}
            return model(torch.tensor([tokens]), use_cache=False, **both_ways).logits[0]

        return logits

    return make


def transformer(kind: str, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """A model of `transformers` with these weights and no others."""
    config = getattr(transformers, f"{kind}Config")(**raw)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing, unknown = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= tied
    assert not unknown
    return model


def llama(kind: str = "Llama", **changes: Any) -> Case:
    raw = {**SHAPE, "model_type": kind.lower(), **changes}
    return Case(raw, by_transformers(kind), (1,))


def retrofit(kind: str, **changes: Any) -> Case:
    """Layers 2 and 3 of 6 loop, each time by half of the way before."""
    declared = {"prelude": 2, "core": 2, "decay": 2.0, "default_loops": 2, "max_loops": 8}
    raw = {**SHAPE, "model_type": kind.lower(), "num_hidden_layers": 6, "tinyloop": {"retrofit": declared}, **changes}
    return Case(raw, partial(looped_by_hand, kind), (2, 1, 5))


def looped_by_hand(kind: str, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Reference:
    """Layers out of `transformers`: `h <- h + decay**-r * (core(h) - h)` in loop r, from 0."""
    model = transformer(kind, raw, tensors)
    facts, layers = raw["tinyloop"]["retrofit"], list(model.model.layers)
    first, last = facts["prelude"], facts["prelude"] + facts["core"]

    @torch.no_grad()
    def logits(tokens: Sequence[int], prompt: int, loops: int) -> Tensor:
        h = model.model.embed_tokens(torch.tensor([tokens]))
        turns = model.model.rotary_emb(h, torch.arange(len(tokens))[None])
        mask = torch.full((1, 1, len(tokens), len(tokens)), -torch.inf).triu(1)

        def run(h: Tensor, some: Sequence[torch.nn.Module]) -> Tensor:
            for layer in some:
                h = layer(h, attention_mask=mask, position_embeddings=turns)
            return h

        h = run(h, layers[:first])
        for loop in range(loops):
            h = h + facts["decay"] ** -loop * (run(h, layers[first:last]) - h)
        return model.lm_head(model.model.norm(run(h, layers[last:])))[0]

    return logits


def token_by_token(model: torch.nn.Module, tokens: Sequence[int], prompt: int) -> Tensor:
    """For a model whose answers depend on where its forwards are cut: the prompt at once, then every token alone."""
    found, cache = [], None
    for part in (tokens[:prompt], *([token] for token in tokens[prompt:])):
        out = model(torch.tensor([part]), use_cache=True, cache=cache)
        found.append(out.logits[0])
        cache = out.cache
    return torch.cat(found)


def by_mlx(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Reference:
    """A reference out of `mlx-lm`, the implementation named after the model type."""
    mx = importlib.import_module("mlx.core")
    module = importlib.import_module(f"mlx_lm.models.{raw['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(raw))
    model.load_weights([(name, mx.array(tensor.numpy())) for name, tensor in tensors.items()])

    def logits(tokens: Sequence[int], prompt: int, loops: int) -> Tensor:
        model.model.num_loops = loops
        return torch.from_numpy(np.array(model(mx.array([list(tokens)]))[0]))

    return logits


def ouro(**changes: Any) -> Case:
    raw = {**SHAPE, "model_type": "ouro", "total_ut_steps": 4, "rope_theta": 1e4,
           "tie_word_embeddings": False, **changes}  # fmt: skip
    return Case(raw, ouro_reference.make, (4, 1, 6))


def nanbeige(**changes: Any) -> Case:
    raw = {**SHAPE, "model_type": "nanbeige", "num_loops": 2, "loop_loss_weights": [], "kv_channels": None, **changes}
    return Case(raw, by_mlx, (2, 1, 4))


def iquest(**changes: Any) -> Case:
    raw = {**SHAPE, "model_type": "iquestloopcoder", "loop_num": 2, "loop_window_size": 5, **changes}
    return Case(raw, loop_coder, (2, 1))


def loop_coder(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Reference:
    """Two loops by `mlx-lm`; with one loop the model is an ordinary Llama."""
    without_gates = {name: tensor for name, tensor in tensors.items() if "gate_projections" not in name}
    two = by_mlx(raw, tensors)
    one = by_transformers("Llama")({**raw, "model_type": "llama", "rope_theta": 5e5}, without_gates)
    return lambda tokens, prompt, loops: (one if loops == 1 else two)(tokens, prompt, loops)


def dory(mode: str = "per_loop", sliding: int = 3, **changes: Any) -> Case:
    """Two layers before, three in and one after the core; those but the third see `sliding` tokens."""
    kinds = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(6)]
    raw = {**SHAPE, "model_type": "dory", "num_hidden_layers": 6, "n_input_layers": 2, "n_recurrent_layers": 3,
           "n_output_layers": 1, "layer_types": kinds, "sliding_window": sliding, "recurrent_kv_cache_mode": mode,
           "n_recurrent_loops": 2, "initializer_range": 0.3, "ngpt_alpha_init": 0.3, **changes}  # fmt: skip
    del raw["rms_norm_eps"]
    return Case(raw, by_transformers("Dory", "n_recurrent_loops"), (2, 1, 5), scale=2.0)


def hrm_text(**changes: Any) -> Case:
    raw = {**SHAPE, "model_type": "hrm_text", "num_hidden_layers": 2, "num_key_value_heads": None, "prefix_lm": False,
           "H_cycles": 2, "L_cycles": 3, "embedding_scale": 7.0, **changes}  # fmt: skip
    return Case(raw, by_transformers("HrmText", "H_cycles"), (2, 1, 4))


def huginn(**changes: Any) -> Case:
    """Two layers before, two in and one after the core."""
    raw = {"model_type": "huginn_raven", "vocab_size": 259, "n_embd": 48, "n_heads": 4, "n_layers": 5, "qk_bias": True,
           "intermediate_size": 80, "n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 2, "n_layers_in_coda": 1,
           "mean_recurrence": 4, "block_size": 256, "tie_embeddings": True, "rope_base": 50000, **changes}  # fmt: skip
    has = ("transformer.core_block.0.norm_3.weight",) if raw["qk_bias"] else ()
    return Case(raw, huginn_reference.make, (4, 1, 7), has=has)


CASES: dict[str, Callable[[], Case]] = {
    "llama": llama,
    "llama 9/3 heads, tied": lambda: llama(**NINE_HEADS, tie_word_embeddings=True),
    "llama 3": lambda: llama(rope_parameters=LLAMA3),
    "qwen2": lambda: llama("Qwen2", vocab_size=261),
    "qwen2 9/3 heads, tied": lambda: llama("Qwen2", **NINE_HEADS, tie_word_embeddings=True),
    "qwen3": lambda: llama("Qwen3"),
    "qwen3 9/3 heads, tied": lambda: llama("Qwen3", **NINE_HEADS, tie_word_embeddings=True),
    "retrofit of llama": lambda: retrofit("Llama"),
    "retrofit of llama 9/3 heads, tied": lambda: retrofit("Llama", **NINE_HEADS, tie_word_embeddings=True),
    "retrofit of qwen2": lambda: retrofit("Qwen2", vocab_size=261),
    "retrofit of qwen3": lambda: retrofit("Qwen3", tie_word_embeddings=True),
    "ouro": ouro,
    "ouro 9/3 heads, tied": lambda: ouro(**NINE_HEADS, vocab_size=261, tie_word_embeddings=True),
    "nanbeige": nanbeige,
    "nanbeige 9/3 heads, tied": lambda: nanbeige(**NINE_HEADS, tie_word_embeddings=True, vocab_size=261),
    "nanbeige without norms between": lambda: nanbeige(skip_loop_final_norm=True),
    "iquest loop": iquest,
    "iquest loop 9/3 heads, tied": lambda: iquest(**NINE_HEADS, tie_word_embeddings=True, vocab_size=261),
    "iquest loop, window of one": lambda: iquest(loop_window_size=1),
    "dory": dory,
    "dory 9/3 heads, tied": lambda: dory(**NINE_HEADS, sliding=7, tie_word_embeddings=True, vocab_size=261),
    "dory last_loop": lambda: dory("last_loop"),
    "dory last_loop 9/3 heads, tied": lambda: dory("last_loop", sliding=9, **NINE_HEADS, tie_word_embeddings=True),
    "huginn": huginn,
    "huginn 9 heads, untied": lambda: huginn(n_embd=90, n_heads=9, tie_embeddings=False, vocab_size=261),
    "huginn without a coda": lambda: huginn(n_layers_in_coda=0),
    "huginn retrofit of llama": lambda: huginn(
        qk_bias=False, num_key_value_heads=2, rope_theta=10000.0, init_values={"embed_scale": 1.0}, tie_embeddings=False
    ),
    "huginn retrofit of llama, 9/3 heads, tied": lambda: huginn(
        qk_bias=False, n_embd=90, n_heads=9, num_key_value_heads=3, rope_theta=10000.0, vocab_size=261
    ),
    "huginn from a seed": lambda: huginn(tinyloop={"start_seed": 7}),
    "hrm_text": hrm_text,
    "hrm_text 9 heads, tied": lambda: hrm_text(
        num_attention_heads=9, hidden_size=90, head_dim=10, tie_word_embeddings=True, vocab_size=261
    ),
    "hrm_text prefix_lm": lambda: hrm_text(prefix_lm=True),
    "hrm_text prefix_lm 9 heads, tied": lambda: hrm_text(
        prefix_lm=True, num_attention_heads=9, hidden_size=90, head_dim=10, tie_word_embeddings=True, vocab_size=261
    ),
}


@cache
def case_of(name: str) -> Case:
    return CASES[name]()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_reference(name: str) -> None:
    agreement.logits_agree(case_of(name))


@pytest.mark.parametrize("name", [name for name in CASES if "prefix_lm" not in name])
def test_every_token_of_a_prompt_gets_the_logits_of_the_reference_however_it_is_cut(name: str) -> None:
    agreement.prompts_agree(case_of(name))


@pytest.mark.parametrize("name", CASES)
def test_answers_equal_the_reference_however_the_prompt_is_cut(name: str) -> None:
    agreement.answers_agree(case_of(name))


@pytest.mark.parametrize("name", CASES)
def test_answers_packed_among_other_depths_equal_the_reference(name: str) -> None:
    agreement.packed_answers_agree(case_of(name))


@pytest.mark.parametrize("name", CASES)
def test_answers_from_a_prefix_equal_the_reference(name: str) -> None:
    case = case_of(name)
    if case.stack.config.whole_prompt:
        agreement.nothing_is_shared(case)
    else:
        agreement.answers_from_a_prefix_agree(case)


LOOPED = [name for name in CASES if not name.startswith(("llama", "qwen"))]
WHOLE = ["dory last_loop", "hrm_text prefix_lm"]


@pytest.mark.parametrize("name", LOOPED)
def test_prompt_and_answer_may_run_different_depths(name: str) -> None:
    agreement.different_depths_agree(case_of(name))


@pytest.mark.parametrize("name", CASES)
def test_a_cache_window_bounds_what_is_seen(name: str) -> None:
    agreement.windows_agree(case_of(name))


@pytest.mark.parametrize("name", LOOPED)
def test_a_yield_at_any_moment_changes_nothing(name: str) -> None:
    agreement.a_yield_changes_nothing(case_of(name))


@pytest.mark.parametrize("name", WHOLE)
def test_where_the_prompt_ends_matters_to_those_who_run_it_whole(name: str) -> None:
    case, tokens = case_of(name), agreement.PROMPT
    whole, cut = case.expected(tokens, len(tokens), 2), case.expected(tokens, 9, 2)
    assert not torch.allclose(whole[-1], cut[-1], atol=10 * agreement.TOLERANCE)
    assert torch.allclose(case.model().oracle(tokens, 2, prompt_tokens=9), cut, atol=agreement.TOLERANCE)


@pytest.mark.parametrize("name", WHOLE)
def test_a_prompt_that_runs_whole_is_never_cut(name: str) -> None:
    runner = case_of(name).model(max_chunk=4).runner
    plan = make_plan(runner.config)
    lease = runner.admit(agreement.PROMPT, plan, max_new_tokens=1, sampling=agreement.LOGGED)
    assert lease is not None
    (chosen,) = Policy(row_budget=2).choose_segments(runner.ready())
    assert chosen.rows == len(agreement.PROMPT)


@pytest.mark.parametrize("name", WHOLE)
def test_no_prefix_is_kept_of_a_prompt_that_runs_whole(name: str) -> None:
    model = case_of(name).model()
    with pytest.raises(tl.RequestError, match="no prefix of it can be kept"):
        model.register_prefix(tl.PrefixPool(), agreement.PROMPT)


def test_a_prompt_that_is_read_both_ways_has_no_scores() -> None:
    with pytest.raises(tl.RequestError, match="prompt_logprobs: hrm_text reads a prompt both ways"):
        case_of("hrm_text prefix_lm").model().score(agreement.PROMPT)
    causal = case_of("hrm_text")
    expected = causal.expected(agreement.PROMPT, 0, 2).log_softmax(-1)[range(22), agreement.PROMPT[1:]]
    assert causal.model(max_chunk=6).score(agreement.PROMPT) == pytest.approx(expected.tolist(), abs=1e-4)


def test_loops_that_share_a_plane_take_the_pages_of_one() -> None:
    for name, more in (("dory last_loop", 0), ("dory", 3)):
        runner = case_of(name).model().runner
        one, two = (runner.pages_needed(make_plan(runner.config, loops=loops), 4) for loops in (1, 2))
        assert two - one == more
