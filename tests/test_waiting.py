"""The queue: levels, first come first served, and equal shares of the work between tenants."""

import random

from hypothesis import given
from hypothesis import strategies as st

from server.waiting import MOST_IDLE_TENANTS, WaitingQueue


class Waiter:
    def __init__(self, level=0, tenant=""):
        self.level, self.tenant = level, tenant


def drain(queue):
    out = []
    while (waiter := queue.peek()) is not None:
        queue.remove(waiter)
        out.append(waiter)
    return out


def filled(*levels):
    queue, waiters = WaitingQueue(), [Waiter(level) for level in levels]
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
    assert list(queue.heads()) == [high, middle, low]
    assert drain(queue) == [high, high2, middle, low]


def test_removal_from_the_middle_shows_at_once():
    queue, (first, second, third) = filled(0, 3, 0)
    assert queue.remove(second)
    assert len(queue) == 2
    assert not queue.remove(second)
    assert drain(queue) == [first, third]


def test_nothing_is_kept_of_those_who_left():
    queue, waiters = filled(0, 3, 0)
    for waiter in waiters:
        queue.remove(waiter)
        queue.leave(waiter)
    assert not queue._levels
    assert not queue._order


def test_a_promoted_waiter_stands_in_its_new_level():
    queue, (first, second, low) = filled(5, 5, 0)
    queue.promote(low, 9)
    assert (low.level, len(queue)) == (9, 3)
    assert drain(queue) == [low, first, second]


# Tenants


def crowd(queue, *names):
    waiters = [Waiter(tenant=name) for name in names]
    for waiter in waiters:
        queue.push(waiter)
    return waiters


def test_the_tenant_that_was_served_least_goes_first():
    queue = WaitingQueue()
    a1, a2, b1, b2 = crowd(queue, *"aabb")
    assert queue.peek() is a1
    queue.remove(a1)
    queue.serve(a1, 10)
    assert queue.peek() is b1
    queue.remove(b1)
    queue.serve(b1, 30)
    assert drain(queue) == [a2, b2]


def test_in_line_tenants_take_turns():
    queue = WaitingQueue()
    a1, a2, b1 = crowd(queue, *"aab")
    assert list(queue) == [a1, b1, a2]


def test_having_been_away_is_no_credit():
    queue = WaitingQueue()
    a1, a2 = crowd(queue, *"aa")
    queue.serve(a1, 1000)
    b1, b2 = crowd(queue, *"bb")  # as much served as the least of those present
    queue.serve(b1, 1)
    assert drain(queue) == [a1, a2, b1, b2]


def test_leaving_and_coming_back_forgives_nothing():
    queue = WaitingQueue()
    (a,), (b1, b2) = crowd(queue, "a"), crowd(queue, *"bb")
    queue.remove(a)
    queue.serve(a, 50)
    queue.leave(a)
    (again,) = crowd(queue, "a")
    assert drain(queue) == [b1, b2, again]


def test_shares_are_kept_inside_a_level_only():
    queue = WaitingQueue()
    high, low, other = Waiter(5, "a"), Waiter(0, "a"), Waiter(0, "b")
    for waiter in (high, low, other):
        queue.push(waiter)
    queue.serve(high, 100)
    assert drain(queue) == [high, low, other]


def test_counters_of_tenants_that_went_are_bounded():
    queue, (anchor,) = WaitingQueue(), crowd(WaitingQueue(), "anchor")
    queue.push(anchor)
    for number in range(3 * MOST_IDLE_TENANTS):
        (one,) = crowd(queue, f"tenant {number}")
        queue.serve(one, number)
        queue.remove(one)
        queue.leave(one)
    (level,) = queue._levels.values()
    assert len(level.served) == MOST_IDLE_TENANTS + 1
    assert len(level._order) <= MOST_IDLE_TENANTS + 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=30, max_size=90))
def test_backlogged_tenants_get_equal_work_whatever_the_sizes(jobs):
    """Shares differ by no more than the largest request, as long as both still wait."""
    queue, size = WaitingQueue(), {}
    for tenant, work in jobs:
        (waiter,) = crowd(queue, tenant)
        size[waiter] = work
    served, waiting = dict.fromkeys("abc", 0), {t: sum(1 for name, _ in jobs if name == t) for t in "abc"}
    while all(waiting.values()):
        waiter = queue.peek()
        queue.remove(waiter)
        queue.serve(waiter, size[waiter])
        served[waiter.tenant] += size[waiter]
        waiting[waiter.tenant] -= 1
        assert max(served.values()) - min(served.values()) <= max(size.values())


def test_random_comings_and_goings_leave_nothing_behind():
    dice, queue, here = random.Random(1), WaitingQueue(), []
    for _ in range(3000):
        if here and dice.random() < 0.5:
            waiter = here.pop(dice.randrange(len(here)))
            queue.serve(waiter, dice.randrange(9))
            queue.remove(waiter)
            queue.leave(waiter)
        else:
            here.append(Waiter(dice.randrange(3), dice.choice("abcd")))
            queue.push(here[-1])
        assert len(queue) == len(list(queue)) == len(here)
        assert (queue.peek() is None) == (not here)
    for waiter in here:
        queue.remove(waiter)
        queue.leave(waiter)
    assert not queue._levels
