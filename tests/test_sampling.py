"""One row of logits to one token."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyloop.errors import RequestError
from tinyloop.sampling import Sampler, SamplingParams, drawn_of, logprobs_of

rows = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40).map(lambda row: np.array(row, np.float32))


def draws(logits: list[float], count: int, **params: object) -> list[int]:
    sampler = Sampler(SamplingParams(seed=1, **params))
    return [sampler.choose(np.array(logits, np.float32))[0] for _ in range(count)]


@given(rows)
def test_greedy_takes_the_largest(logits: np.ndarray) -> None:
    assert Sampler(SamplingParams(temperature=0)).choose(logits)[0] == int(logits.argmax())


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.5},
        {"logit_bias": {1: 3.0}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"min_tokens": 1},
        {"logprobs": 0},
    ],
)
def test_only_a_sampler_that_looks_at_nothing_else_is_plain(more: dict[str, Any]) -> None:
    assert SamplingParams(temperature=0).plain
    assert not SamplingParams(**{"temperature": 0, **more}).plain


@given(st.integers(1, 1500), st.floats(0, 1, exclude_max=True), st.floats(0, 1), st.integers(0, 99))
def test_a_draw_falls_where_the_running_sum_passes_it(size: int, uniform: float, empty: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = np.where(rng.random(size) < empty, 0, rng.exponential(size=size)).astype(np.float32)
    weights[rng.integers(size)] = 1
    token = drawn_of(weights, uniform)
    ends = weights.cumsum(dtype=np.float64)
    slack = 1e-12 * ends[-1]
    assert weights[token] > 0
    assert ends[token] - weights[token] - slack <= uniform * ends[-1] <= ends[token] + slack


@given(rows, st.floats(0.05, 5), st.floats(0.01, 1), st.integers(0, 5), st.floats(0, 1), st.integers())
def test_a_drawn_token_is_one_that_the_filters_keep(
    logits: np.ndarray, temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    token = Sampler(params).choose(logits)[0]
    probabilities = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    above = int((probabilities > probabilities[token]).sum())
    assert above < (top_k or len(logits))
    assert probabilities[token] >= min_p * 0.999
    assert probabilities[probabilities > probabilities[token]].sum() <= top_p * probabilities.sum() * 1.001
    assert Sampler(params).choose(logits)[0] == token


def test_draws_follow_the_distribution() -> None:
    counts = np.bincount(draws([0.0, math.log(3), -30], 4000, temperature=1.0), minlength=3)
    assert counts[2] == 0
    assert counts[1] / 4000 == pytest.approx(0.75, abs=0.03)


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    assert draws([1e4, 9e3, -1e4], 5, temperature=1e-6) == [0] * 5


def test_top_p_zero_and_top_k_one_are_greedy() -> None:
    assert draws([1, 3, 2], 5, top_p=0.0) == draws([1, 3, 2], 5, top_k=1) == [1] * 5


def test_top_p_sorts_the_whole_vocabulary_when_the_guess_is_too_small() -> None:
    flat = [0.0] * 5000
    assert max(draws(flat, 200, top_p=0.9)) > 3000


def test_penalties_lower_what_was_said() -> None:
    sampler = Sampler(SamplingParams(temperature=0, presence_penalty=2))
    assert [sampler.choose(np.array([1, 0], np.float32))[0] for _ in range(2)] == [0, 1]
    sampler = Sampler(SamplingParams(temperature=0, frequency_penalty=0.3))
    assert [sampler.choose(np.array([1, 0.5], np.float32))[0] for _ in range(4)] == [0, 0, 1, 0]
    sampler = Sampler(SamplingParams(temperature=0, repetition_penalty=4), prompt=[0])
    assert [sampler.choose(np.array([1, 0.5], np.float32))[0] for _ in range(2)] == [1, 0]
    sampler = Sampler(SamplingParams(temperature=0, repetition_penalty=2), prompt=[0])
    assert sampler.choose(np.array([-1, -1.5], np.float32))[0] == 1


def test_bias_forces_and_bans() -> None:
    assert draws([5, 0, 0], 3, logit_bias={1: 100}) == [1] * 3
    assert 0 not in draws([5, 0, 0], 50, logit_bias={0: -100})


def test_stop_tokens_are_banned_until_min_tokens() -> None:
    sampler = Sampler(SamplingParams(temperature=0, min_tokens=2), stop_ids=[0])
    assert [sampler.choose(np.array([9, 1], np.float32))[0] for _ in range(3)] == [1, 1, 0]


@given(rows, st.integers(0, 60))
def test_logprobs_are_the_models_own_and_sorted(logits: np.ndarray, top: int) -> None:
    got = logprobs_of(logits, 0, top)
    exact = logits - logits.max() - math.log(np.exp(logits.astype(np.float64) - logits.max()).sum())
    assert got.chosen == pytest.approx(exact[0], abs=1e-4)
    assert [value for _, value in got.top] == sorted((value for _, value in got.top), reverse=True)
    assert len(got.top) == min(top, len(logits))
    assert all(value == pytest.approx(exact[token], abs=1e-4) for token, value in got.top)


def test_logprobs_ignore_temperature_and_bias_and_the_logits_stay_unchanged() -> None:
    logits = np.array([1, 2, 3], np.float32)
    sampler = Sampler(SamplingParams(temperature=0, logit_bias={0: 100}, logprobs=1))
    token, logprobs = sampler.choose(logits)
    assert token == 0
    assert logprobs is not None
    assert logprobs.top[0][0] == 2
    assert logits.tolist() == [1, 2, 3]


def test_logits_that_are_not_numbers_are_an_error() -> None:
    with pytest.raises(FloatingPointError, match="not numbers"):
        Sampler(SamplingParams(temperature=0)).choose(np.array([1, math.nan], np.float32))
    with pytest.raises(FloatingPointError):
        Sampler(SamplingParams(temperature=0)).take(1, math.nan)
    with pytest.raises(FloatingPointError):
        Sampler(SamplingParams()).choose(np.array([1, math.nan], np.float32))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", math.nan), ("temperature", math.inf), ("top_p", 1.1), ("top_p", -1),
        ("top_k", -1), ("min_p", 2), ("repetition_penalty", 0), ("presence_penalty", 3), ("frequency_penalty", -3),
        ("logprobs", 100_000), ("min_tokens", -1), ("logit_bias", {1: 101}), ("logit_bias", {1: math.nan}),
        ("stop", ("",)), ("stop", ("x",) * 65),
    ],
)  # fmt: skip
def test_values_out_of_bounds_name_their_field(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "x"), ("temperature", None), ("temperature", True), ("temperature", 10**400), ("top_p", "1"),
        ("top_k", 10**400), ("top_k", 10**4000), ("top_k", 1.5), ("top_k", "x" * 10**6), ("min_tokens", 1.0),
        ("logprobs", True), ("seed", "x"), ("seed", 1.5), ("seed", True), ("stop", 5), ("stop", None), ("stop", [1]),
        ("stop", b"x"), ("stop_token_ids", 5), ("stop_token_ids", ["a"]), ("logit_bias", [1]), ("logit_bias", None),
        ("logit_bias", {"1": 1}), ("logit_bias", {1: "x"}), ("logit_bias", {1: 10**4000}),
    ],
)  # fmt: skip
def test_values_of_another_type_name_their_field_in_a_short_message(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert len(str(caught.value)) < 200


def test_a_number_that_python_refuses_to_print_is_refused_all_the_same() -> None:
    vast: Any = 10**5000
    for field, value in (("top_k", vast), ("top_p", vast), ("stop", [vast]), ("logit_bias", {1: vast}),
                         ("logit_bias", {vast: 1}), ("stop_token_ids", (vast,))):  # fmt: skip
        with pytest.raises(RequestError, match="an integer of 16610 bits") as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), seed=np.int64(7), logit_bias={np.int64(1): 1}
    )
    assert Sampler(params).choose(np.zeros(4, np.float32))[0] in range(4)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6])
def test_the_coldest_temperatures_are_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).greedy
    assert draws([1, 3, 2], 3, temperature=temperature) == [1] * 3


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 + 3, 1715852364])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    assert Sampler(SamplingParams(seed=seed)).choose(np.zeros(50, np.float32))[0] in range(50)


def test_one_stop_string_may_be_given_bare() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
