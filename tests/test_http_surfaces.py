"""What holds for every API that generates: one end for each request, the depth it was granted, errors in its shape."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.http_support import ScriptedEngine, listening, served, until
from tests.test_replays_http import PACE_S, counts, full, serving


@dataclass(frozen=True)
class Surface:
    """An endpoint, how a request to it is written, and where its errors show their message, type and field."""

    url: str
    prompt: dict[str, Any]
    limit: str
    error: Callable[[dict[str, Any]], tuple[str, str]] = lambda body: (body["error"]["message"], body["error"]["type"])
    invalid: str = "invalid_request_error"
    full: str = "rate_limit_error"
    loops: Callable[[dict[str, Any]], int] = lambda body: int(body["tinyloop"]["loops_granted"])

    def body(self, model: str = "tiny", tokens: int = 4, **fields: Any) -> dict[str, Any]:
        return {"model": model, self.limit: tokens, **self.prompt, **fields}


MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}
SURFACES = [
    pytest.param(Surface("/v1/chat/completions", MESSAGES, "max_tokens"), id="openai chat"),
    pytest.param(Surface("/v1/completions", {"prompt": "Hi"}, "max_tokens"), id="openai completions"),
    pytest.param(Surface("/api/v0/chat/completions", MESSAGES, "max_tokens"), id="lmstudio v0 chat"),
    pytest.param(Surface("/api/v0/completions", {"prompt": "Hi"}, "max_tokens"), id="lmstudio v0 completions"),
    pytest.param(
        Surface("/api/v1/chat", {"input": "Hi"}, "max_output_tokens", invalid="invalid_request", full="unknown"),
        id="lmstudio v1 chat",
    ),
    pytest.param(Surface("/v1/responses", {"input": "Hi"}, "max_output_tokens"), id="responses"),
    pytest.param(Surface("/v1/messages", MESSAGES, "max_tokens", full="overloaded_error"), id="anthropic"),
    pytest.param(
        Surface("/tinyloop/v1/generate", {"prompt": "Hi"}, "max_new_tokens", loops=lambda body: body["loops_granted"]),
        id="native",
    ),
]
every_surface = pytest.mark.parametrize("surface", SURFACES)
whole_and_streamed = pytest.mark.parametrize("stream", [False, True])


def complaint(response: httpx.Response, surface: Surface, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    message, kind = surface.error(response.json())
    assert kind == {400: surface.invalid, 503: surface.full}[status]
    return message


@every_surface
async def test_the_loops_that_were_granted_come_back_in_body_and_header(surface: Surface) -> None:
    async with serving() as (client, _):
        for loops in (1, 3):
            response = await client.post(surface.url, json=surface.body(loops=loops))
            assert surface.loops(response.json()) == loops, response.text
            streamed = await client.post(surface.url, json=surface.body(loops=loops, stream=True))
            assert response.headers["x-tinyloop-loops"] == streamed.headers["x-tinyloop-loops"] == str(loops)
        named = await client.post(surface.url, json=surface.body(model="tiny@loops=2"))
        assert surface.loops(named.json()) == 2


@every_surface
@whole_and_streamed
async def test_a_depth_out_of_bounds_is_400_and_tells_the_bounds(surface: Surface, stream: bool) -> None:
    async with served() as (client, engine):
        response = await client.post(surface.url, json=surface.body("tiny/loop", loops=9, stream=stream))
    assert complaint(response, surface, 400) == "loops must be between 1 and 8, got 9"
    assert not engine.seen


@every_surface
@pytest.mark.parametrize("raw", [b"", b'{"a":', b"[]", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b"{}"])
async def test_a_body_that_cannot_be_read_is_400(surface: Surface, raw: bytes) -> None:
    async with served() as (client, _):
        response = await client.post(surface.url, content=raw, headers={"content-type": "application/json"})
    assert len(complaint(response, surface, 400)) < 200


@every_surface
@whole_and_streamed
async def test_an_unknown_model_is_404_and_its_name_is_not_taken_up(surface: Surface, stream: bool) -> None:
    async with served() as (client, _):
        response = await client.post(surface.url, json=surface.body("other", stream=stream))
    assert response.status_code == 404
    assert "tiny/loop" in surface.error(response.json())[0]


@every_surface
@whole_and_streamed
async def test_a_full_queue_is_503_and_says_when_to_come_again(surface: Surface, stream: bool) -> None:
    async with serving(max_running=1, max_queue_depth=1) as (client, engine), full(client, engine, 1, 1):
        response = await client.post(surface.url, json=surface.body(stream=stream))
        complaint(response, surface, 503)
        assert int(response.headers["retry-after"]) >= 1


@every_surface
@whole_and_streamed
async def test_whoever_leaves_has_cancelled(surface: Surface, stream: bool) -> None:
    async with serving(PACE_S, max_running=1) as (client, _):
        task = asyncio.create_task(client.post(surface.url, json=surface.body(tokens=200, stream=stream)))
        await until(lambda: counts(client) == (0, 1))
        await asyncio.sleep(10 * PACE_S)
        task.cancel()
        await until(lambda: counts(client) == (0, 0), 1.0)
        again = await client.post(surface.url, json=surface.body(stream=stream))
        assert again.status_code == 200


@every_surface
@whole_and_streamed
async def test_an_engine_error_before_the_first_token_is_500_and_tells_nothing(surface: Surface, stream: bool) -> None:
    async with served(ScriptedEngine(fail_after=0)) as (client, _):
        response = await client.post(surface.url, json=surface.body("tiny/loop", stream=stream))
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in surface.error(response.json())[0]


@every_surface
async def test_an_engine_error_in_the_middle_is_an_event_and_tells_nothing(surface: Surface) -> None:
    async with served(ScriptedEngine(fail_after=2)) as (client, _):
        response = await client.post(surface.url, json=surface.body("tiny/loop", stream=True))
    assert response.status_code == 200
    assert "internal error" in response.text
    assert "secret" not in response.text


@every_surface
async def test_a_drain_in_the_middle_is_an_event(surface: Surface) -> None:
    async with listening(ScriptedEngine("x" * 300, delay_s=0.01)) as (client, _):
        body = surface.body("tiny/loop", tokens=300, stream=True)
        async with client.stream("POST", surface.url, json=body) as response:
            pieces = response.aiter_text()
            text = await anext(pieces)
            scheduler = client.server.scheduler  # type: ignore[attr-defined]
            await scheduler.shutdown(drain_timeout_s=0.0)
            text += "".join([piece async for piece in pieces])
    assert "shutting down" in text


@every_surface
async def test_a_request_cancelled_by_its_name_says_so(surface: Surface) -> None:
    async with serving(PACE_S) as (client, _):
        task = asyncio.create_task(client.post(surface.url, json=surface.body(tokens=200, request_id="mine")))
        await until(lambda: counts(client) == (0, 1))
        assert client.server.scheduler.cancel_named("mine", "someone else") == 0  # type: ignore[attr-defined]
        assert client.server.scheduler.cancel_named("mine", "") == 1  # type: ignore[attr-defined]
        response = await task
    assert response.status_code == 409
    assert surface.error(response.json())[0] == "the request was cancelled by its id"
    assert response.headers["x-should-retry"] == "false"


@every_surface
async def test_a_stream_cancelled_by_its_name_says_so(surface: Surface) -> None:
    async with listening(ScriptedEngine("x" * 300, delay_s=0.01)) as (client, _):
        body = surface.body("tiny/loop", tokens=300, stream=True, request_id="mine")
        async with client.stream("POST", surface.url, json=body) as response:
            pieces = response.aiter_text()
            text = await anext(pieces)
            assert client.server.scheduler.cancel_named("mine", "") == 1  # type: ignore[attr-defined]
            text += "".join([piece async for piece in pieces])
    assert "cancelled" in text
    assert text.count("x") < 290
