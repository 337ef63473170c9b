"""Order of waiting, who may run together, and which segments a step takes."""

import gc
from types import SimpleNamespace

import pytest

from server.policy import PROMOTED, DispatchMode, Policy
from server.types import GenerationRequest
from tests.fakes import Plan
from tinyloop.sequence import Lease, Segment

# Who may run together


def candidate(loops=2, mode="generate", window=0, prefill=None, threshold=None):
    return SimpleNamespace(
        req=GenerationRequest("x", mode=mode),
        prepared=SimpleNamespace(plan=Plan(loops, prefill or loops, window, threshold)),
    )


@pytest.mark.parametrize("mode", list(DispatchMode))
def test_an_empty_server_takes_anyone(mode):
    assert Policy(mode).has_place(0, backlog=10**6)
    assert Policy(mode).may_join(candidate(mode="score"), [])


def test_sequential_runs_one_at_a_time():
    assert not Policy(DispatchMode.SEQUENTIAL).has_place(1, backlog=0)


@pytest.mark.parametrize("mode", [DispatchMode.INTERLEAVED, DispatchMode.CONTINUOUS])
def test_mixed_modes_take_any_plan_up_to_max_running(mode):
    policy = Policy(mode, max_running=2)
    assert policy.may_join(candidate(4, mode="adaptive"), [candidate()])
    assert policy.has_place(1, backlog=0)
    assert not policy.has_place(2, backlog=0)


def test_a_prompt_that_could_not_step_yet_stays_in_the_queue():
    policy = Policy(row_budget=64)
    assert policy.has_place(1, backlog=63)
    assert not policy.has_place(1, backlog=64)


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (candidate(), True),
        (candidate(loops=4), False),
        (candidate(window=8), False),
        (candidate(prefill=1), False),
        (candidate(threshold=0.5), False),
        (candidate(mode="score"), False),
    ],
)
def test_homogeneous_shares_only_equal_plans(other, shared):
    policy = Policy(DispatchMode.HOMOGENEOUS)
    assert policy.may_join(candidate(), [other]) is shared
    assert policy.may_join(other, [candidate()]) is shared


def test_homogeneous_shares_only_generate():
    assert not Policy(DispatchMode.HOMOGENEOUS).may_join(candidate(mode="score"), [candidate(mode="score")])


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="row_budget must be at least 1"):
        Policy(row_budget=0)
    with pytest.raises(ValueError, match="nonsense"):
        Policy("nonsense")


# Which segments step


def lease(prompt=4, answer=0):
    return Lease(Plan(4, 4), list(range(prompt + answer)), prompt, 100, None, None, None, known=prompt)


def in_flight(owner, start, rows, loop, loops=4):
    segment = Segment(owner, start, rows, loops, loop, state="hidden")
    owner.segments.append(segment)
    return segment


def decode(loop=1):
    return in_flight(lease(answer=1), 4, 1, loop)


def prompt(rows, loop=1):
    return in_flight(lease(rows), 0, rows, loop)


def fresh(rows):
    return Segment(lease(rows), 0, rows, 4)


def test_nothing_ready_is_an_empty_step():
    for mode in DispatchMode:
        assert Policy(mode).choose_segments([]) == []


def test_answers_go_first_then_prompts_under_way_then_new_prompts():
    new, answer, old = fresh(4), decode(), prompt(4)
    assert Policy().choose_segments([new, old, answer]) == [answer, old, new]


def test_new_prompts_are_trimmed_to_the_budget():
    answer, new, later = decode(), fresh(8), fresh(8)
    assert Policy(row_budget=5).choose_segments([answer, new, later]) == [answer, new]
    assert (new.rows, later.rows) == (4, 8)


def test_what_has_started_always_goes_on():
    started = [prompt(8), prompt(8), *(decode() for _ in range(9))]
    assert set(Policy(row_budget=4).choose_segments([*started, fresh(1)])) == set(started)


def test_the_budget_never_prevents_progress():
    new = fresh(100)
    assert Policy(row_budget=1).choose_segments([new]) == [new]
    assert new.rows == 1


def test_a_finished_answer_token_counts_for_the_one_that_follows():
    finished_prompt, new = prompt(8, loop=4), fresh(8)
    assert Policy(row_budget=5).choose_segments([finished_prompt, new]) == [finished_prompt, new]
    assert new.rows == 4


def test_a_chunk_behind_a_trimmed_one_waits():
    owner = lease(16)
    first, second = Segment(owner, 0, 8, 4), Segment(owner, 8, 8, 4)
    assert Policy(row_budget=6).choose_segments([first, second]) == [first]
    assert first.rows == 6


@pytest.mark.parametrize(
    ("ahead", "behind", "may"), [(2, 1, True), (1, 1, True), (4, 1, True), (4, 4, True), (1, 2, False)]
)
def test_a_segment_never_runs_ahead_of_what_came_before(ahead, behind, may):
    owner = lease(8)
    first, second = in_flight(owner, 0, 4, ahead), in_flight(owner, 4, 4, behind)
    assert (second in Policy().choose_segments([first, second])) is may


def test_a_segment_waits_for_one_at_its_depth_that_does_not_step():
    owner = lease(8)
    in_flight(owner, 0, 4, loop=1)
    second, other = in_flight(owner, 4, 4, loop=1), decode()
    assert Policy().choose_segments([second, other]) == [other]


# The boundary


def test_with_a_minimum_of_one_nobody_waits_at_the_boundary():
    done, running = decode(loop=4), decode(loop=1)
    assert set(Policy(min_boundary_rows=1).choose_segments([done, running])) == {done, running}


def test_a_finished_answer_token_waits_for_company_on_its_way():
    done, running = decode(loop=4), decode(loop=1)
    assert Policy(min_boundary_rows=2).choose_segments([done, running]) == [running]


def test_it_waits_no_longer_than_for_enough_rows():
    done, also = decode(loop=4), decode(loop=4)
    assert len(Policy(min_boundary_rows=2).choose_segments([done, also, decode()])) == 3


def measured(boundary_in_steps):
    policy = Policy()
    policy.boundary_in_steps = boundary_in_steps
    return policy


def test_unmeasured_nobody_waits_at_the_boundary():
    ready = [decode(loop=4), decode()]
    assert set(Policy().choose_segments(ready)) == set(ready)


def test_one_waits_until_the_steps_it_wasted_cost_as_much_as_a_boundary():
    policy, done, others = measured(1.0), decode(loop=4), [decode(loop=0), decode(loop=0), decode(loop=0)]
    held = 0
    while done not in policy.choose_segments([done, *others]):
        policy.stepped(others)
        held += 1
    assert held == 3, "of four streams, one that waits wastes a quarter of a step"


def test_a_choice_that_is_made_again_is_no_wait():
    policy, ready = measured(1.0), [decode(loop=4), decode(), decode()]
    assert all(len(policy.choose_segments(ready)) == 2 for _ in range(9))


def test_the_end_of_a_prompt_waits_for_company_too():
    first, done, running = prompt(4, loop=4), decode(loop=4), decode()
    assert measured(99.0).choose_segments([first, done, running]) == [running]


def test_it_does_not_wait_when_nothing_is_on_its_way():
    done = decode(loop=4)
    chunk = in_flight(lease(100), 0, 8, loop=1)  # not the last of its prompt: brings no row to the head
    new = fresh(8)
    assert set(Policy(min_boundary_rows=2).choose_segments([done, chunk, new])) == {done, chunk, new}


# Interleaving


def stepped(policy, ready):
    chosen = policy.choose_segments(ready)
    policy.stepped(chosen)
    return chosen


def test_interleaved_steps_take_one_request_each_in_turn():
    policy, ready = Policy(DispatchMode.INTERLEAVED), [decode(), decode(), decode()]
    turns = [stepped(policy, ready) for _ in range(6)]
    assert turns == [[segment] for segment in [*ready, *ready]]


def test_a_choice_that_was_not_stepped_is_no_turn():
    policy, ready = Policy(DispatchMode.INTERLEAVED), [decode(), decode()]
    assert policy.choose_segments(ready) == policy.choose_segments(ready) == [ready[0]]


def test_interleaved_newcomers_join_at_the_end_of_the_round():
    policy, old = Policy(DispatchMode.INTERLEAVED), [decode(), decode()]
    assert stepped(policy, old) == [old[0]]
    served = []
    for _ in range(4):  # somebody new in every step
        old.append(decode())
        served += stepped(policy, old)
    assert served == [old[1], old[0], old[2], old[1]]


def test_interleaved_forgets_who_has_left():
    policy = Policy(DispatchMode.INTERLEAVED)
    policy.choose_segments([decode()])
    gc.collect()
    assert len(policy._turns) == 0


# Age


def waiter(level, waited, service):
    return SimpleNamespace(level=level, queued_at=100.0 - waited, service=service)


def aged(policy, *heads):
    return policy.aged(heads, 100.0, lambda one: one.service)


def test_a_waiter_whose_response_ratio_reaches_the_bound_is_promoted():
    policy, high = Policy(aging=10, promotion_every=1), waiter(5, waited=500, service=1)
    young, old, older = (
        waiter(0, waited=8.9, service=1),
        waiter(0, waited=9, service=1),
        waiter(-1, waited=19, service=2),
    )
    assert aged(policy, high, young) is None
    assert aged(policy, high, old) is old
    assert aged(policy, high, old, older) is older
    assert aged(policy, high) is None, "the first needs no promotion"


def test_nobody_ages_before_anything_was_measured():
    assert aged(Policy(promotion_every=1), waiter(5, 0, None), waiter(0, 1e9, None)) is None


def test_only_every_fourth_admission_is_a_promotion():
    policy, heads = Policy(promotion_every=4), [waiter(5, 0, 1), waiter(0, 1e9, 1)]
    assert aged(policy, *heads) is None
    for _ in range(3):
        policy.admitted(heads[0])
    assert aged(policy, *heads) is heads[1]
    assert aged(policy, waiter(PROMOTED, 0, 1), *heads) is None, "one at a time"
    policy.admitted(waiter(PROMOTED, 0, 1))
    assert aged(policy, *heads) is None
