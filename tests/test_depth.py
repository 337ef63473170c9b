"""Depth under pressure: who may be granted less, how much less, and that it is always said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.depth import HOLD_S, RELIEVED, DepthCeilings
from server.policy import Policy
from server.scheduler import AdmissionRejected
from tests.fakes import Clock, SteppingEngine
from tests.test_metrics import value
from tests.test_scheduler_stepping import Running, request
from tests.test_serving import serving
from tests.tiny_models import tiny_model
from tinyloop.errors import NeverFits, RequestError
from tinyloop.plan import make_plan

PROMPT = range(400)


def busy(**more):
    """A server that has measured its steps and has a long prompt of one loop to read."""
    return Running(SteppingEngine(num_pages=10_000, chunk=64), policy=Policy(row_budget=64), **more)


def judged_alone(**more):
    """The same, without ceilings: only a request's own SLO counts."""
    return busy(saturation_ms=None, **more)


async def loaded(scheduler):
    await scheduler.submit(request(*range(100), new=9, loops=8))
    return scheduler.submit_stream(request(*PROMPT, new=500, loops=1))


async def first_token_ms(scheduler, loops):
    """What the scheduler foretells for a prompt of so many loops."""
    stream = scheduler.submit_stream(request(*PROMPT, new=1, loops=loops))
    await stream.aclose()
    return stream.request.predicted_ms


async def test_the_deepest_that_meets_the_slo_is_granted():
    async with judged_alone() as (_, scheduler):
        other = await loaded(scheduler)
        waits = {loops: await first_token_ms(scheduler, loops) for loops in range(1, 9)}
        assert list(waits.values()) == sorted(waits.values())
        for loops in (1, 3, 8):
            stream = scheduler.submit_stream(request(*PROMPT, new=1, loops=8, min_loops=1), slo_ms=waits[loops] * 1.001)
            assert stream.request.prepared.plan.loops == loops
            assert stream.request.downgraded_by == ("" if loops == 8 else "slo")
            await stream.aclose()
        await other.aclose()


async def test_nobody_gets_less_than_their_least():
    async with busy() as (_, scheduler):
        other = await loaded(scheduler)
        wait = await first_token_ms(scheduler, 3)
        with pytest.raises(AdmissionRejected):
            scheduler.submit_stream(request(*PROMPT, new=1, loops=8, min_loops=4), slo_ms=wait)
        await other.aclose()


async def test_a_depth_without_a_least_is_never_changed():
    async with busy(saturation_ms=0.001, default_min_loops=1) as (_, scheduler):
        other = await loaded(scheduler)
        wait = await first_token_ms(scheduler, 4)
        with pytest.raises(AdmissionRejected):
            scheduler.submit_stream(request(*PROMPT, new=1, loops=8), slo_ms=wait)
        stream = scheduler.submit_stream(request(*PROMPT, new=1, loops=8))
        assert stream.request.prepared.plan.loops == 8
        await stream.aclose()
        await other.aclose()


async def test_the_servers_least_holds_for_requests_that_name_no_depth():
    async with busy(default_min_loops=1) as (_, scheduler):
        other = await loaded(scheduler)
        wait = await first_token_ms(scheduler, 1) * 1.001
        stream = scheduler.submit_stream(request(*PROMPT, new=1), slo_ms=wait)
        assert stream.request.prepared.plan.loops == 1
        await stream.aclose()
        await other.aclose()


async def test_what_was_granted_is_said_in_the_result_and_counted():
    async with judged_alone() as (_, scheduler):
        other = await loaded(scheduler)
        wait = await first_token_ms(scheduler, 2) * 1.001
        stream = scheduler.submit_stream(request(*PROMPT, new=2, loops=8, min_loops=1), slo_ms=wait)
        await other.aclose()
        assert [chunk.loops async for chunk in stream] == [2, 2]
        result = stream.result
        assert (result.loops_requested, result.loops_granted, result.degraded) == (8, 2, True)
        assert value(scheduler.metrics_text(), "loop_downgrades_total", reason="slo") == 1


async def test_a_downgraded_answer_is_that_of_the_granted_depth():
    model = tiny_model("ouro", pages=64)
    async with serving(model) as scheduler:
        whole = await scheduler.submit(request(1, 2, 3, loops=4, min_loops=1))
        assert (whole.loops_granted, whole.degraded) == (4, False)


async def test_what_would_never_fit_gets_the_depth_that_does():
    model = tiny_model("ouro")
    rows = make_plan(model.config, loops=2).rows
    small = tiny_model("ouro", pages=rows * 2)
    prompt = [1] * (small.runner.page_size * 2 - 2)
    async with serving(small) as scheduler:
        with pytest.raises(NeverFits):
            await scheduler.submit(request(*prompt, new=2, loops=4))
        with pytest.raises(NeverFits):
            await scheduler.submit(request(*prompt, new=2, loops=4, min_loops=3))
        result = await scheduler.submit(request(*prompt, new=2, loops=4, min_loops=1))
        assert (result.loops_requested, result.loops_granted, result.degraded) == (4, 2, True)
        assert value(scheduler.metrics_text(), "loop_downgrades_total", reason="memory") == 1


async def test_a_least_beyond_the_default_is_refused():
    async with serving(tiny_model("ouro")) as scheduler:
        with pytest.raises(RequestError, match="min_loops must be between 1 and"):
            await scheduler.submit(request(1, min_loops=99))


# The ceilings


def ceilings(saturation_ms=5000):
    clock = Clock()
    return DepthCeilings(saturation_ms, clock), clock


def test_the_ceiling_falls_at_once_as_the_wait_nears_the_limit():
    for wait, most in [(0, 9), (100, 9), (101, 7), (201, 5), (301, 3), (451, 1), (5000, 1)]:
        ceiling, _ = ceilings()
        assert ceiling.allowed(0, wait, 1000, 9, 1) == most


def test_it_rises_one_share_at_a_time_and_only_well_below_the_mark():
    ceiling, clock = ceilings()
    assert ceiling.allowed(0, 350, 1000, 9, 1) == 3
    clock.advance(HOLD_S)
    assert ceiling.allowed(0, RELIEVED * 300 + 1, 1000, 9, 1) == 3, "between the two marks it stays"
    clock.advance(HOLD_S)
    seen = []
    for _ in range(4):
        seen.append(ceiling.allowed(0, 0, 1000, 9, 1))
        seen.append(ceiling.allowed(0, 0, 1000, 9, 1))
        clock.advance(HOLD_S)
    assert seen == [5, 5, 7, 7, 9, 9, 9, 9]
    assert not ceiling._ceilings, "nothing is kept of a ceiling that is up again"


def test_a_short_relief_does_not_raise_it():
    ceiling, clock = ceilings()
    ceiling.allowed(0, 350, 1000, 9, 1)
    for _ in range(5):
        clock.advance(HOLD_S * 0.9)
        assert ceiling.allowed(0, 0, 1000, 9, 1) == 3
        assert ceiling.allowed(0, 350, 1000, 9, 1) == 3


def test_each_priority_has_a_ceiling_of_its_own():
    ceiling, _ = ceilings()
    assert ceiling.allowed(0, 150, 1000, 9, 1) == 7
    assert ceiling.allowed(5, 50, 1000, 9, 1) == 9


def test_without_a_deadline_the_servers_saturation_counts():
    ceiling, _ = ceilings(1000)
    assert ceiling.allowed(0, 450, None, 9, 1) == 3
    never, _ = ceilings(None)
    assert never.allowed(0, 1e9, None, 8, 1) == 8


@given(st.lists(st.tuples(st.floats(0, 5000), st.floats(0, 3)), max_size=30), st.integers(1, 8), st.integers(0, 8))
def test_a_ceiling_is_always_between_the_least_and_what_was_asked(waits, least, more):
    ceiling, clock = ceilings(1000)
    for wait, seconds in waits:
        clock.advance(seconds)
        assert least <= ceiling.allowed(0, wait, None, least + more, least) <= least + more


async def test_a_growing_wait_lowers_newcomers_step_by_step():
    async with busy() as (_, scheduler):
        other, granted, streams = await loaded(scheduler), [], []
        for _ in range(12):
            streams.append(scheduler.submit_stream(request(*PROMPT, new=1, loops=8, min_loops=1), slo_ms=8000))
            granted.append(streams[-1].request.prepared.plan.loops)
        assert granted == sorted(granted, reverse=True)
        assert granted[0] > 4 > granted[-1]
        assert {s.request.downgraded_by for s in streams} <= {"", "pressure", "slo"}
        for stream in (other, *streams):
            await stream.aclose()


async def test_the_deepest_that_keeps_the_pace_is_granted_and_a_pace_out_of_reach_is_refused():
    async with judged_alone() as (_, scheduler):
        other = await loaded(scheduler)
        paces = {loops: scheduler.admission.work.token_ms(loops, 0) for loops in range(1, 9)}
        assert list(paces.values()) == sorted(set(paces.values()))
        for loops in (1, 3, 8):
            asked = request(*PROMPT, new=1, loops=8, min_loops=1, token_ms=paces[loops] * 1.001)
            stream = scheduler.submit_stream(asked)
            assert stream.request.prepared.plan.loops == loops
            assert stream.request.downgraded_by == ("" if loops == 8 else "slo")
            await stream.aclose()
        with pytest.raises(AdmissionRejected, match="between tokens exceed the SLO"):
            scheduler.submit_stream(request(*PROMPT, new=1, loops=8, min_loops=2, token_ms=paces[1]))
        with pytest.raises(AdmissionRejected):
            scheduler.submit_stream(request(*PROMPT, new=1, loops=3, token_ms=paces[1]))
        await other.aclose()


async def test_an_idle_server_that_has_measured_nothing_refuses_no_pace():
    async with judged_alone() as (_, scheduler):
        stream = scheduler.submit_stream(request(1, 2, new=1, loops=8, token_ms=0.001))
        assert stream.request.prepared.plan.loops == 8
        await stream.aclose()
