"""Order of waiting, who may run together, and which segments a step takes."""

import gc
from types import SimpleNamespace

import pytest

from server.policy import DispatchMode, Policy, WaitingQueue
from server.types import GenerationRequest
from tests.fakes import Plan
from tinyloop.sequence import Lease, Segment


class Waiter:
    def __init__(self, priority=0):
        self.priority = priority


def drain(queue):
    out = []
    while (waiter := queue.peek()) is not None:
        queue.remove(waiter)
        out.append(waiter)
    return out


def filled(*priorities):
    queue, waiters = WaitingQueue(), [Waiter(p) for p in priorities]
    for waiter in waiters:
        queue.push(waiter)
    return queue, waiters


def test_first_come_first_served_inside_a_level():
    queue, waiters = filled(5, 5, 5)
    assert list(queue) == waiters
    assert drain(queue) == waiters


def test_higher_priority_goes_first():
    queue, (low, high, middle, high2) = filled(-1, 10, 5, 10)
    assert list(queue) == [high, high2, middle, low]
    assert drain(queue) == [high, high2, middle, low]


def test_removal_from_the_middle_shows_at_once():
    queue, (first, second, third) = filled(0, 3, 0)
    assert queue.remove(second)
    assert len(queue) == 2
    assert not queue.remove(second)
    assert drain(queue) == [first, third]
    assert not queue._levels
    assert not queue._order


# Who may run together


def candidate(loops=2, mode="generate", window=0, prefill=None, threshold=None):
    return SimpleNamespace(
        req=GenerationRequest("x", mode=mode),
        prepared=SimpleNamespace(plan=Plan(loops, prefill or loops, window, threshold)),
    )


@pytest.mark.parametrize("mode", list(DispatchMode))
def test_an_empty_server_takes_anyone(mode):
    assert Policy(mode).may_admit(candidate(mode="score"), [])


def test_sequential_runs_one_at_a_time():
    assert not Policy(DispatchMode.SEQUENTIAL).may_admit(candidate(), [candidate()])


@pytest.mark.parametrize("mode", [DispatchMode.INTERLEAVED, DispatchMode.CONTINUOUS])
def test_mixed_modes_take_any_plan_up_to_max_running(mode):
    policy = Policy(mode, max_running=2)
    assert policy.may_admit(candidate(4, mode="adaptive"), [candidate()])
    assert not policy.may_admit(candidate(), [candidate(), candidate()])


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
    assert policy.may_admit(candidate(), [other]) is shared
    assert policy.may_admit(other, [candidate()]) is shared


def test_homogeneous_shares_only_generate():
    assert not Policy(DispatchMode.HOMOGENEOUS).may_admit(candidate(mode="score"), [candidate(mode="score")])


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


def test_without_a_minimum_nobody_waits_at_the_boundary():
    done, running = decode(loop=4), decode(loop=1)
    assert set(Policy().choose_segments([done, running])) == {done, running}


def test_a_finished_answer_token_waits_for_company_on_its_way():
    done, running = decode(loop=4), decode(loop=1)
    assert Policy(min_boundary_rows=2).choose_segments([done, running]) == [running]


def test_it_waits_no_longer_than_for_enough_rows():
    done, also = decode(loop=4), decode(loop=4)
    assert len(Policy(min_boundary_rows=2).choose_segments([done, also, decode()])) == 3


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
