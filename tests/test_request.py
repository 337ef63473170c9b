"""A request moves only along the table, is stamped on every move, and answers its caller exactly once."""

import asyncio
import gc
import itertools

import pytest

from server.request import MOVES, TERMINAL, ChunkStream, IllegalMove, RequestState, ScheduledRequest
from server.types import GenerationChunk, GenerationRequest, GenerationResult
from tests.fakes import Clock, settle
from tinyloop.sampling import Logprobs

PATHS = {
    RequestState.QUEUED: [],
    RequestState.DISPATCHED: [RequestState.DISPATCHED],
    RequestState.DECODING: [RequestState.DISPATCHED, RequestState.DECODING],
    RequestState.DONE: [RequestState.DISPATCHED, RequestState.DONE],
    RequestState.CANCELLED: [RequestState.CANCELLED],
    RequestState.ERROR: [RequestState.ERROR],
}


def make(streaming=True, **more):
    return ScheduledRequest(req=GenerationRequest("hello", request_id="mine"), streaming=streaming, **more)


def drive(request, states):
    for state in states:
        outcome = {"result": GenerationResult()} if state is RequestState.DONE else {}
        request.move(state, **outcome)


@pytest.mark.parametrize(("start", "target"), list(itertools.product(RequestState, RequestState)))
async def test_only_the_moves_of_the_table_are_possible(start, target):
    request = make()
    drive(request, PATHS[start])
    if target in MOVES[start]:
        drive(request, [target])
        assert request.state is target
    else:
        with pytest.raises(IllegalMove, match=f"is {start}: expected .*, got {target}"):
            drive(request, [target])
        assert request.state is start


def test_terminal_states_have_no_way_out():
    assert {state for state, targets in MOVES.items() if not targets} == TERMINAL


async def test_every_move_stamps_its_time_and_tells_the_hook_once():
    clock, moves = Clock(), []
    request = make(clock=clock, on_move=lambda r, previous: moves.append((previous, r.state)))
    start = clock.now
    for state in (RequestState.DISPATCHED, RequestState.DECODING):
        clock.advance(1)
        request.move(state)
    clock.advance(1)
    request.move(RequestState.DONE, reason="stop", result=GenerationResult())
    stamps = (request.queued_at, request.dispatched_at, request.first_token_at, request.completed_at)
    assert stamps == (start, start + 1, start + 2, start + 3)
    assert moves == [("queued", "dispatched"), ("dispatched", "decoding"), ("decoding", "done")]
    assert request.outcome_reason == "stop"
    assert request.unix_time(request.completed_at) - request.unix_time(request.queued_at) == pytest.approx(3)
    assert (request.timings().queued_s, request.timings().first_token_s, request.timings().total_s) == (1, 2, 3)


async def test_ids_are_fresh_whatever_the_caller_calls_it():
    ids = {make().request_id for _ in range(100)}
    assert len(ids) == 100
    assert all(len(i) == 24 and int(i, 16) >= 0 for i in ids)
    assert make().req.request_id == "mine"


async def test_done_gives_the_future_its_result():
    request, result = make(streaming=False), GenerationResult((1,), "a")
    request.move(RequestState.DISPATCHED)
    request.move(RequestState.DONE, result=result)
    assert await request.future is result
    assert request.result is result


async def test_cancelled_cancels_the_future_and_says_why():
    request = make(streaming=False)
    request.move(RequestState.CANCELLED, reason="shutdown")
    with pytest.raises(asyncio.CancelledError, match="shutdown"):
        await request.future


async def test_error_raises_from_the_future():
    request, error = make(streaming=False), ValueError("broken")
    request.move(RequestState.ERROR, error=error)
    with pytest.raises(ValueError, match="broken"):
        await request.future
    assert request.error is error


async def test_a_future_that_its_caller_cancelled_is_left_alone():
    request = make(streaming=False)
    request.future.cancel()
    assert request.abandoned
    request.move(RequestState.ERROR, error=ValueError("nobody hears this"))
    assert request.future.cancelled()


async def test_the_first_chunk_starts_decoding():
    clock = Clock()
    request = make(clock=clock)
    request.move(RequestState.DISPATCHED)
    clock.advance(2)
    request.emit(GenerationChunk(7, "a", logprobs=Logprobs(-1.0)))
    clock.advance(2)
    request.emit(GenerationChunk(8, "b"))
    assert request.state is RequestState.DECODING
    assert (request.first_token_at, request.last_token_at) == (clock.now - 2, clock.now)
    assert request.answer_tokens == 2
    assert request.logprobs == [Logprobs(-1.0)]


def started(cancelled=None):
    request = make()
    request.move(RequestState.DISPATCHED)
    request.emit(GenerationChunk(1, "a"))
    return request, ChunkStream(request, (cancelled if cancelled is not None else []).append)


async def test_a_stream_ends_after_its_last_chunk():
    request, stream = started()
    request.move(RequestState.DONE, result=GenerationResult((1,), "a"))
    assert [tuple(chunk) async for chunk in stream] == [(1, "a")]
    assert [chunk async for chunk in stream] == []
    assert stream.result.text == "a"


async def test_a_cancelled_stream_ends_without_raising():
    request, stream = started()
    request.move(RequestState.CANCELLED, reason="client")
    assert [tuple(chunk) async for chunk in stream] == [(1, "a")]
    assert stream.result is None


async def test_a_failed_stream_raises_after_its_last_chunk():
    request, stream = started()
    request.move(RequestState.ERROR, error=ValueError("broken"))
    assert tuple(await anext(stream)) == (1, "a")
    with pytest.raises(ValueError, match="broken"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_closing_a_stream_cancels_and_ends_it():
    cancelled = []
    request, stream = started(cancelled)
    await stream.aclose()
    assert cancelled == [request]
    assert [chunk async for chunk in stream] == []


async def test_a_dropped_stream_is_cancelled():
    cancelled = []
    request, stream = started(cancelled)
    del stream
    gc.collect()
    await settle()
    assert cancelled == [request]


async def test_a_finished_stream_may_be_dropped_in_peace():
    cancelled = []
    request, stream = started(cancelled)
    request.move(RequestState.CANCELLED)
    del stream
    await settle()
    assert cancelled == []


async def test_a_reader_that_is_cancelled_while_it_waits_cancels_the_request():
    cancelled = []
    request, stream = started(cancelled)
    await anext(stream)
    task = asyncio.ensure_future(anext(stream))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == [request]


def test_a_stream_that_outlives_its_loop_is_dropped_silently():
    async def make_one():
        return started()[1]

    stream = asyncio.run(make_one())
    del stream
    gc.collect()
