"""A drawn first state is a function of seed and position, with the distribution that Huginn's authors draw from."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.agreement import LOGGED, PROMPT, Case
from tests.test_families import case_of, huginn
from tinyloop.errors import CheckpointError
from tinyloop.models.huginn import HuginnConfig
from tinyloop.models.start import CUT, SeededStart


def seeded(seed: int, **more: float) -> Case:
    return huginn(tinyloop={"start_seed": seed, **more})


def test_the_ends_are_cut_at_three_standard_deviations_and_the_rest_is_normal() -> None:
    std = 0.632
    states = SeededStart(5, std)(torch.arange(500), torch.empty(500, 1000)).double()
    kept = torch.special.ndtr(torch.tensor([-CUT, CUT], dtype=torch.float64)).diff()
    assert states.abs().max() <= CUT * std
    assert abs(states.mean()) < 0.005 * std
    for bound in (-2.5, -1.0, 0.0, 0.5, 2.0, 2.9):
        below = (torch.special.ndtr(torch.tensor([-CUT, bound], dtype=torch.float64)).diff() / kept).item()
        assert (states < bound * std).double().mean().item() == pytest.approx(below, abs=0.003)
    neighbours = torch.corrcoef(states[:20])
    assert (neighbours - torch.eye(20)).abs().max() < 0.15


@given(st.integers(0, 2**24), st.lists(st.integers(0, 2**20), min_size=1, max_size=5))
def test_a_start_depends_on_seed_and_position_alone(seed: int, positions: list[int]) -> None:
    start, like = SeededStart(seed, 1.0), torch.empty(len(positions), 6)
    torch.manual_seed(random.randrange(1000))
    np.random.seed(random.randrange(1000))
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    states = start(torch.tensor(positions), like)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    for position, state in zip(positions, states, strict=True):
        assert torch.equal(start(torch.tensor([position]), like[:1])[0], state)
        assert not torch.equal(start(torch.tensor([position + 1]), like[:1])[0], state)
        assert not torch.equal(SeededStart(seed + 1, 1.0)(torch.tensor([position]), like[:1])[0], state)


def test_the_published_size_is_that_of_the_embedding() -> None:
    """sqrt(2 / 5d), times the embedding's scale of sqrt(d)."""
    config = seeded(1).stack.config
    assert isinstance(config, HuginnConfig)
    assert config.start == SeededStart(1, pytest.approx((2 / 5) ** 0.5))
    doubled = seeded(1, start_scale=2.0).stack.config
    assert isinstance(doubled, HuginnConfig)
    assert doubled.start == SeededStart(1, pytest.approx(2 * (2 / 5) ** 0.5))
    zeros = case_of("huginn").stack.config
    assert isinstance(zeros, HuginnConfig)
    assert zeros.start is None


def test_another_seed_is_another_model_and_the_same_one_is_the_same() -> None:
    answers = [
        case.model().generate(PROMPT, max_new_tokens=24, sampling=LOGGED)
        for case in (seeded(1), seeded(1), seeded(2), case_of("huginn"))
    ]
    assert answers[0] == answers[1]
    assert len({answer.logprobs for answer in answers}) == 3


def test_a_seed_that_is_none_is_refused_by_name() -> None:
    for wrong in ({"start_seed": -1}, {"start_seed": 1.5}, {"start_seed": True}, {"start_seed": 1, "start_scale": 0}):
        with pytest.raises(CheckpointError, match=list(wrong)[-1]):
            huginn(tinyloop=wrong)
