"""Exit signals: an answer token leaves the core at the loop where its signal says so, whoever shares the step."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

import tinyloop as tl
from tests import huginn_reference
from tests.agreement import PROMPT, Case, finish
from tests.test_families import LOOPED, WHOLE, case_of
from tests.tiny_models import GREEDY, tiny_model
from tinyloop.model import Model
from tinyloop.plan import LoopPlan, make_plan
from tinyloop.sequence import Lease

CUT = [name for name in LOOPED if "last_loop" not in name and "prefix_lm" not in name]
HUGINN = [name for name in LOOPED if name.startswith("huginn")]
DEEP = 8
Exits = tuple[list[int], list[int]]  # answer tokens, and the loops that each but the last ran


def by_the_reference(case: Case, prompt: Sequence[int], count: int, threshold: float) -> Exits:
    """Greedy tokens of Huginn by its reference, which goes over the whole sequence again for every loop's state."""
    tokens, depths = list(prompt), [DEEP] * len(prompt)
    for _ in range(count):
        logits, _ = huginn_reference.forward(case.tensors, case.raw, tokens, depths)
        tokens.append(int(logits[-1].argmax()))
        _, states = huginn_reference.forward(case.tensors, case.raw, tokens, [*depths, DEEP])
        moved = [(b[-1] - a[-1]).norm() / b[-1].norm() for a, b in pairwise(states)]
        depths.append(next((loop for loop, far in enumerate(moved, 1) if far < threshold), DEEP))
    return tokens[len(prompt) :], depths[len(prompt) : -1]


@pytest.mark.parametrize("name", HUGINN)
def test_huginn_leaves_where_its_reference_does(name: str) -> None:
    case, found = case_of(name), set[int]()
    for threshold in (0.5, 0.7, 0.85):
        expected = by_the_reference(case, PROMPT[:9], 6, threshold)
        got = case.model().generate(
            PROMPT[:9], max_new_tokens=6, loops=DEEP, exit_threshold=threshold, exit_signal="distance", sampling=GREEDY
        )
        assert (list(got.token_ids), list(got.loops[1:])) == expected
        found |= {*expected[1]}
    assert len(found) > 2, "the test needs exits at different loops"


@pytest.mark.parametrize("name", CUT)
def test_every_looped_family_leaves_where_its_trace_moves_by_less(name: str) -> None:
    """And the answer is the slow oracle's at the loops that were run."""
    model = case_of(name).model(max_chunk=5)
    most = model.config.max_loops
    first = model.generate(PROMPT, max_new_tokens=1, loops=most, sampling=GREEDY).token_ids[0]
    moved = [view.distance for view in model.trace([*PROMPT, first], loops=most).tokens[-1].loops]
    for threshold in {min(far * 1.001, 1.0) for far in moved}:
        got = model.generate(
            PROMPT, max_new_tokens=5, loops=most, exit_threshold=threshold, exit_signal="distance", sampling=GREEDY
        )
        assert got.loops[1] == next((loop for loop, far in enumerate(moved, 1) if far < threshold), most)
        check_by_oracle(model, PROMPT, got.token_ids, got.loops, most)


@pytest.mark.parametrize("name", WHOLE)
def test_an_answer_after_a_prompt_that_runs_whole_may_leave_early(name: str) -> None:
    model, depths = case_of(name).model(), set[int]()
    for threshold in (0.33, 0.45, 0.9):
        got = model.generate(
            PROMPT, max_new_tokens=8, loops=4, exit_threshold=threshold, exit_signal="distance", sampling=GREEDY
        )
        check_by_oracle(model, PROMPT, got.token_ids, got.loops, 4)
        depths |= {*got.loops[1:]}
    assert len(depths) > 1, "the test needs exits at different loops"


def check_by_oracle(
    model: Model, prompt: Sequence[int], answer: Sequence[int], loops: Sequence[int], prompt_loops: int
) -> None:
    tokens, depths = [*prompt, *answer[:-1]], [prompt_loops] * len(prompt) + list(loops[1:])
    expected = model.oracle(tokens, depths, prompt_tokens=len(prompt))[len(prompt) - 1 :]
    assert list(answer) == expected.argmax(-1).tolist()


def run(model: Model, jobs: Sequence[tuple[list[int], LoopPlan]], pool: tl.PrefixPool | None = None) -> list[Lease]:
    """All of these in the same steps, 8 tokens each."""
    runner, leases = model.runner, list[Lease]()
    for prompt, plan in jobs:
        lease = runner.admit(prompt, plan, max_new_tokens=8, sampling=GREEDY, pool=pool)
        assert lease is not None
        leases.append(lease)
    while any(not lease.finish_reason for lease in leases):
        for done in runner.step(runner.ready()).finished:
            runner.release(done)
    runner.check()
    return leases


@pytest.mark.parametrize("name", ["ouro", "huginn", "dory", "iquest loop", "nanbeige"])
def test_exits_are_the_same_alone_and_among_others(name: str) -> None:
    """Others that leave by another signal, at another threshold, or not at all."""
    model = case_of(name).model(max_chunk=6)
    most = model.config.max_loops
    plans = [
        make_plan(model.config, loops=most, exit_threshold=threshold, exit_signal=signal)
        for signal in model.config.exit_signals
        for threshold in (0.3, 0.6, 0.9)
    ]
    plans += [make_plan(model.config, loops=loops) for loops in (1, most)]
    jobs = [(PROMPT[number : number + 3 + number % 5], plan) for number, plan in enumerate(plans)]
    packed, alone = run(model, jobs), [run(model, [job])[0] for job in jobs]
    assert [(lease.tokens, lease.depths) for lease in packed] == [(lease.tokens, lease.depths) for lease in alone]
    assert len({depth for lease in packed for depth in lease.depths}) > 1
    assert model.runner.pool.free == model.runner.pool.num_pages


@pytest.mark.parametrize("name", LOOPED)
def test_a_distance_below_zero_is_never_reached(name: str) -> None:
    model = case_of(name).model()
    most = model.config.max_loops
    never = model.generate(
        PROMPT[:5], max_new_tokens=4, loops=most, exit_threshold=0, exit_signal="distance", sampling=GREEDY
    )
    plain = model.generate(PROMPT[:5], max_new_tokens=4, loops=most, sampling=GREEDY)
    assert (never.token_ids, never.loops) == (plain.token_ids, (most,) * 4)


def test_the_distance_is_that_of_the_state_whatever_its_size() -> None:
    stack = case_of("ouro").stack
    before, after = (
        torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]]),
        torch.tensor([[0.0, 5.0], [0.0, 0.0], [2e6, 0.0]]),
    )
    assert stack.distance(before, after).tolist() == pytest.approx([10**0.5 / 5, 0.0, 1.0])


def test_an_exit_by_distance_survives_a_yield() -> None:
    for name, moment in ((name, moment) for name in ("huginn", "dory") for moment in range(2, 40, 6)):
        model = case_of(name).model()
        plan = make_plan(model.config, loops=DEEP, exit_threshold=0.75 if name == "huginn" else 0.25)
        (calm,) = run(model, [(PROMPT, plan)])
        lease = model.runner.admit(PROMPT, plan, max_new_tokens=8, sampling=GREEDY)
        assert lease is not None
        finish(model, lease, moment)
        assert (lease.tokens, lease.depths) == (calm.tokens, calm.depths)
        assert len({*calm.depths}) > 1
        model.runner.release(lease)


@pytest.mark.parametrize("name", ["ouro", "huginn"])
def test_tokens_of_a_depth_of_their_own_are_not_shared(name: str) -> None:
    """A later request may look deeper than they ran."""
    model, pool = case_of(name).model(), tl.PrefixPool()
    plan = make_plan(model.config, loops=4, exit_threshold=0.9, exit_signal="distance")
    (lease,) = run(model, [(PROMPT, plan)], pool)
    assert min(lease.depths) < 4
    fixed = make_plan(model.config, loops=4)
    assert model.runner.cached_tokens(lease.tokens, fixed, pool) == 0
    run(model, [(PROMPT, fixed)], pool)
    assert model.runner.cached_tokens(lease.tokens, fixed, pool) >= len(PROMPT)
    again = model.runner.admit(PROMPT, plan, max_new_tokens=8, sampling=GREEDY, pool=pool)
    assert again is not None
    assert again.cached == 0
    model.runner.release(again)


def test_a_gate_comes_first_where_there_is_one() -> None:
    ouro, llama = case_of("ouro").stack.config, tiny_model("llama").config
    assert ouro.exit_signals == ("gate", "distance")
    assert llama.exit_signals == ()
    assert make_plan(ouro, exit_threshold=0.5).exit_signal == "gate"
    assert make_plan(ouro, exit_threshold=0.5, exit_signal="distance").exit_signal == "distance"
    assert make_plan(ouro).exit_signal is None
    for name in LOOPED:
        assert case_of(name).stack.config.exit_signals[-1] == "distance"


@pytest.mark.parametrize(
    ("name", "options", "field", "message"),
    [
        (
            "huginn",
            {"exit_signal": "gate", "exit_threshold": 0.5},
            "exit_signal",
            "must be one of distance, got 'gate'",
        ),
        ("ouro", {"exit_signal": "kl", "exit_threshold": 0.5}, "exit_signal", "one of gate, distance, got 'kl'"),
        ("ouro", {"exit_signal": 3, "exit_threshold": 0.5}, "exit_signal", "must be one of gate, distance, got 3"),
        ("ouro", {"exit_signal": "distance"}, "exit_signal", "exit_signal needs exit_threshold"),
        ("ouro", {"exit_threshold": 0}, "exit_threshold", "must be above 0 and at most 1, got 0"),
        ("huginn", {"exit_threshold": -0.1}, "exit_threshold", "must be between 0 and 1, got -0.1"),
        ("huginn", {"exit_threshold": float("nan")}, "exit_threshold", "must be between 0 and 1, got nan"),
        ("llama", {"exit_threshold": 0.5}, "exit_threshold", "family llama offers no exit signal"),
        ("llama", {"exit_threshold": 0.5, "exit_signal": "distance"}, "exit_threshold", "offers no exit signal"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(
    name: str, options: dict[str, object], field: str, message: str
) -> None:
    with pytest.raises(tl.RequestError, match=message) as caught:
        make_plan(case_of(name).stack.config, **options)
    assert caught.value.field == field
