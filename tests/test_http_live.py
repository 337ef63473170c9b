"""On a real port: clients that leave, signals, and the published OpenAI client."""

import asyncio
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from server.settings import Settings
from tests.http_support import INFO, ScriptedEngine, chat, completion, events, listening, python_process, until

CHAT = "/v1/chat/completions"
ROOT = Path(__file__).parent.parent


def counts(client: httpx.AsyncClient) -> tuple[int, int]:
    state = client.server.scheduler.snapshot()  # type: ignore[attr-defined]
    return state["queue_depth"], state["in_flight"]


async def test_closing_a_stream_frees_its_slot_within_a_second() -> None:
    engine = ScriptedEngine("x" * 300, delay_s=0.02)
    async with listening(engine) as (client, _):
        async with client.stream("POST", CHAT, json=chat(stream=True)) as response:
            await anext(response.aiter_bytes())
        await until(lambda: not engine.running and counts(client) == (0, 0), 1.0)
        assert engine.made < 100
        assert (await client.post(CHAT, json=chat(max_tokens=1))).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_whoever_leaves_while_waiting_is_never_computed(stream: bool) -> None:
    engine = ScriptedEngine()
    engine.gate.clear()
    async with listening(engine) as (client, _):
        first = asyncio.create_task(client.post(CHAT, json=chat()))
        await until(lambda: engine.running)
        gone = [asyncio.create_task(client.post(CHAT, json=chat(stream=stream))) for _ in range(5)]
        await until(lambda: counts(client) == (5, 1))
        for task in gone:
            task.cancel()
        await until(lambda: counts(client) == (0, 1), 1.0)
        engine.gate.set()
        assert (await first).status_code == 200
    assert len(engine.seen) == 1


async def test_leaving_an_answer_that_is_not_streamed_cancels_it() -> None:
    engine = ScriptedEngine("x" * 50, delay_s=0.01)
    async with listening(engine) as (client, _):
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, json=chat(n=2), timeout=0.1)
        await until(lambda: counts(client) == (0, 0), 2.0)
        metrics = (await client.get("/metrics")).text
    assert 'outcome="cancelled",reason="client"} 2.0' in metrics
    assert len(engine.seen) == 1  # the second choice was still waiting


async def test_many_that_leave_at_any_moment_leave_the_server_whole() -> None:
    engine = ScriptedEngine("x" * 5, delay_s=0.001)
    async with listening(engine, max_queue_depth=200) as (client, _):
        for at in range(60):
            task = asyncio.create_task(client.post(CHAT, json=chat(stream=at % 2 == 0, n=1 + at % 3)))
            await asyncio.sleep(0.0005 * (at % 20))
            task.cancel()
        await until(lambda: counts(client) == (0, 0) and not engine.running)
        assert (await client.post(CHAT, json=chat())).status_code == 200


async def test_a_stream_comes_piece_by_piece() -> None:
    engine = ScriptedEngine("ab", delay_s=0.1)
    async with listening(engine) as (client, _), client.stream("POST", CHAT, json=chat(stream=True)) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-tinyloop-loops"] == "4"
        times = [time.monotonic() async for _ in response.aiter_bytes()]
    assert times[-1] - times[0] > 0.05


async def test_a_large_body_is_refused_and_the_connection_closed() -> None:
    async with listening(settings=Settings(max_body_bytes=1000)) as (client, _):
        response = await client.post("/v1/completions", json=completion(prompt="x" * 100_000))
    assert response.status_code == 413


@pytest.fixture
async def sdk() -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        listening() as (client, _),
        openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="any", max_retries=0) as sdk,
    ):
        yield sdk


async def test_the_openai_client_lists_models_and_chats(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == [INFO.id]
    assert (await sdk.models.retrieve(INFO.id)).id == INFO.id
    answer = await sdk.chat.completions.create(
        model=INFO.id, messages=[{"role": "user", "content": "Hi"}], logprobs=True, extra_body={"loops": 2}
    )
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].logprobs.content[0].token == "H"  # type: ignore[union-attr, index]
    assert answer.model_extra["tinyloop"]["loops_granted"] == 2  # type: ignore[index]
    assert answer._request_id


async def test_the_openai_client_streams_chats_and_completions(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model=INFO.id,
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello world"
    assert chunks[-1].usage.completion_tokens == 11  # type: ignore[union-attr]
    pieces = await sdk.completions.create(model=INFO.id, prompt="Hi", stream=True, logprobs=1)
    assert "".join([piece.choices[0].text async for piece in pieces]) == "Hello world"
    whole = await sdk.completions.create(model=INFO.id, prompt=["a", "b"], echo=True, max_tokens=0, logprobs=1)
    assert [choice.text for choice in whole.choices] == ["a", "b"]


async def test_the_openai_client_sees_the_right_errors(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="Served models"):
        await sdk.completions.create(model="x", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.completions.create(model=INFO.id, prompt="a", max_tokens=1000, stream=True)
    assert caught.value.code == "context_length_exceeded"


async def test_the_openai_client_raises_on_an_error_in_the_middle() -> None:
    async with (
        listening(ScriptedEngine(fail_after=2)) as (client, _),
        openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="any", max_retries=0) as sdk,
    ):
        stream = await sdk.completions.create(model=INFO.id, prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="internal error"):
            async for _ in stream:
                pass


SERVER = """
from server.cli import bind, run_server
from server.scheduler import Scheduler
from server.settings import Settings
from tests.http_support import ScriptedEngine
run_server(Scheduler(ScriptedEngine("x" * 60, delay_s=0.02)), Settings(drain_timeout_s=20), bind("127.0.0.1", 0))
"""


@contextmanager
def server_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with python_process(SERVER) as serving:
        yield serving


@asynccontextmanager
async def started_stream(url: str) -> AsyncIterator[tuple[httpx.AsyncClient, AsyncIterator[str]]]:
    async with (
        httpx.AsyncClient(base_url=url, timeout=10) as client,
        client.stream("POST", CHAT, json=chat(stream=True)) as response,
    ):
        yield client, response.aiter_text()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_running_answers_finish_and_refuses_new_ones(sig: signal.Signals) -> None:
    with server_process() as (process, url):
        async with started_stream(url) as (client, pieces):
            text = await anext(pieces)
            process.send_signal(sig)
            await asyncio.sleep(0.3)
            assert (await client.get("/ready")).status_code == 503
            assert (await client.post(CHAT, json=chat())).json()["error"]["code"] == "draining"
            text += "".join([piece async for piece in pieces])
        assert sum(c["choices"][0]["delta"].get("content") == "x" for c in events(text)[:-1]) == 60
        assert events(text)[-1] == "[DONE]"
        assert await asyncio.to_thread(process.wait, 10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


async def test_a_second_signal_ends_at_once() -> None:
    with server_process() as (process, url):
        async with started_stream(url) as (_, pieces):
            await anext(pieces)
            process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.2)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(process.wait, 5) == -signal.SIGINT  # its answer would take far longer
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


async def test_an_idle_server_ends_at_the_first_signal() -> None:
    with server_process() as (process, _):
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 5) == 0
