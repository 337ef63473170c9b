"""Faults that users of other servers reported, replayed over HTTP: each docstring names the report.

Every test that uses the stepping engine also checks the accounts at its end: nothing runs, waits or holds a page.
"""

import asyncio
import json
import random
import re
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.engine import Engine, Prepared
from server.routers import shared
from server.security import LOOPBACK
from server.settings import Settings
from server.types import GenerationRequest
from tests.http_support import ScriptedEngine, events, listening, python_process, until
from tests.tiny_models import tiny_model
from tinyloop.sequence import Segment, StepReport

COMPLETIONS = "/v1/completions"
ROOT = Path(__file__).parent.parent
LONG = 200  # answer tokens; several seconds at the pace below
PACE_S = 0.005


class PacedEngine(Engine):
    """The real engine over a tiny model. A step waits for `gate` and takes at least `pace_s`; `stepped` are the prompts
    that have been in one."""

    def __init__(self, pace_s: float = 0.0, **model: Any) -> None:
        super().__init__(tiny_model("ouro", **model))
        self.pace_s, self.gate = pace_s, asyncio.Event()
        self.gate.set()
        self.stepped: set[tuple[int, ...]] = set()
        self.prepared = 0

    def one_step(self) -> None:
        """Let the step pass that stands at the closed gate."""
        self.gate.set()
        self.gate.clear()

    def prepare(self, req: GenerationRequest) -> Prepared:
        self.prepared += 1
        return super().prepare(req)

    async def step(self, segments: Sequence[Segment]) -> StepReport:
        self.stepped |= {tuple(s.lease.tokens[: s.lease.prompt_tokens]) for s in segments}
        await self.gate.wait()
        await asyncio.sleep(self.pace_s)
        return await super().step(segments)


@asynccontextmanager
async def serving(
    pace_s: float = 0.0, settings: Settings | None = None, pages: int = 400, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, PacedEngine]]:
    """A client and the engine of a server on a real port; afterwards nothing may be left behind."""
    engine = PacedEngine(pace_s, pages=pages)
    try:
        async with listening(engine, settings, **options) as (client, _):
            try:
                yield client, engine
            finally:
                engine.gate.set()
            await until(lambda: counts(client) == (0, 0))
    finally:
        await engine.close()
    engine.check()
    assert not engine.runner.leases
    assert engine.usage().available == engine.usage().num_pages


class Caller:
    """A client down to the socket: its whole request is one write, and it can vanish."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def calling(cls, client: httpx.AsyncClient, request_id: str = "", **fields: Any) -> "Caller":
        self = await cls.connected(client)
        self.writer.write(b"".join(message(request_id, **fields)))
        return self

    @classmethod
    async def connected(cls, client: httpx.AsyncClient) -> "Caller":
        return cls(*await asyncio.open_connection("127.0.0.1", client.base_url.port))

    async def first_piece(self) -> str:
        """The answer up to its first event."""
        return (await self.reader.readuntil(b"data: ")).decode()

    async def rest(self) -> str:
        """All that still comes."""
        try:
            return (await self.reader.read()).decode()
        finally:
            self.vanish()

    def vanish(self) -> None:
        self.writer.transport.abort()


def message(request_id: str = "", **fields: Any) -> tuple[bytes, bytes]:
    """Head and body of a request for a completion."""
    raw = json.dumps(body(**fields)).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(raw)}\r\nconnection: close\r\n"
    return f"{head}x-request-id: {request_id or 'one'}\r\n\r\n".encode(), raw


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [5, 6, 7], "ignore_eos": True, "max_tokens": 4, **fields}


def counts(client: httpx.AsyncClient) -> tuple[int, int]:
    """Requests that wait, and that run."""
    state = client.server.scheduler.snapshot()  # type: ignore[attr-defined]
    return state["queue_depth"], state["in_flight"]


async def small_answer(client: httpx.AsyncClient, **fields: Any) -> list[str]:
    """How the choices of an ordinary request ended, which must run."""
    response = await client.post(COMPLETIONS, json=body(**fields))
    assert response.status_code == 200, response.text
    return [choice["finish_reason"] for choice in response.json()["choices"]]


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """One series' value, as a scraper sees it."""
    text = (await client.get("/metrics")).text
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


async def reach(client: httpx.AsyncClient, value: float, name: str) -> None:
    """Wait until a series has come that far."""
    async with asyncio.timeout(5):
        while await metric(client, name) < value:  # noqa: ASYNC110 - what is waited for may be in another process
            await asyncio.sleep(0.01)


# Cancellation


async def test_a_closed_stream_frees_its_slot_within_a_second() -> None:
    """sglang #37833"""
    async with serving(PACE_S, max_running=1) as (client, _):
        caller = await Caller.calling(client, stream=True, max_tokens=LONG)
        await caller.first_piece()
        caller.vanish()
        await until(lambda: counts(client) == (0, 0), 1.0)
        assert await small_answer(client) == ["length"]


async def test_slots_of_readers_who_left_serve_the_next() -> None:
    """sglang #36333"""
    async with serving(PACE_S, max_running=2) as (client, engine):
        callers = [await Caller.calling(client, stream=True, max_tokens=LONG) for _ in range(2)]
        for caller in callers:
            await caller.first_piece()
        third = asyncio.create_task(small_answer(client, prompt=[9, 9, 9]))
        await until(lambda: counts(client) == (1, 2))
        for caller in callers:
            caller.vanish()
        assert await asyncio.wait_for(third, 1.0) == ["length"]
        assert (9, 9, 9) in engine.stepped


def layers(app: Any) -> Iterator[Any]:
    """The middleware of an application from the outside in."""
    while app is not None:
        yield app
        app = getattr(app, "app", None)


@pytest.mark.parametrize("settings", [Settings(), Settings(allowed_hosts=LOOPBACK)])
@pytest.mark.parametrize("stream", [True, False])
async def test_every_middleware_is_pure_asgi_and_lets_a_disconnect_through(settings: Settings, stream: bool) -> None:
    """vllm #10087"""
    async with serving(PACE_S, settings, max_running=1) as (client, _):
        caller = await Caller.calling(client, stream=stream, max_tokens=LONG)
        await until(lambda: counts(client) == (0, 1))
        caller.vanish()
        await until(lambda: counts(client) == (0, 0), 1.0)
        app = client.server.config.app  # type: ignore[attr-defined]
    stack = list(layers(app.middleware_stack))
    assert len(stack) > 3
    assert not [layer for layer in stack if isinstance(layer, BaseHTTPMiddleware)]
    assert not [layer for layer in app.user_middleware if issubclass(layer.cls, BaseHTTPMiddleware)]


async def test_leaving_an_answer_that_is_not_streamed_ends_its_generation() -> None:
    """vllm-mlx PR 457"""
    async with serving(PACE_S, max_running=1) as (client, _):
        caller = await Caller.calling(client, max_tokens=LONG)
        await reach(client, 3, "tinyloop_generated_tokens_total")
        caller.vanish()
        await until(lambda: counts(client) == (0, 0), 1.0)
        assert await metric(client, "tinyloop_generated_tokens_total") < LONG / 2


@pytest.mark.parametrize("stream", [True, False])
async def test_a_waiting_request_of_a_gone_client_is_never_in_a_forward(stream: bool) -> None:
    """llama.cpp #13262"""
    async with serving(max_running=1) as (client, engine):
        engine.gate.clear()
        first = asyncio.create_task(small_answer(client))
        await until(lambda: counts(client) == (0, 1))
        gone = await Caller.calling(client, stream=stream, prompt=[8, 8, 8])
        await until(lambda: counts(client) == (1, 1))
        gone.vanish()
        await until(lambda: counts(client) == (0, 1), 1.0)
        engine.gate.set()
        assert await first == ["length"]
        assert await small_answer(client, prompt=[9, 9, 9]) == ["length"]
    assert engine.stepped == {(5, 6, 7), (9, 9, 9)}


async def test_one_request_id_at_once_is_two_requests_and_one_may_leave() -> None:
    """vllm #15041"""
    async with serving(PACE_S, max_running=2) as (client, _):
        twins = [await Caller.calling(client, "same", stream=True, max_tokens=20) for _ in range(2)]
        heads = [await twin.first_piece() for twin in twins]
        assert counts(client) == (0, 2)
        twins[0].vanish()
        text = "data: " + await twins[1].rest()
        assert all("x-request-id: same" in head for head in heads)
        assert sum('"finish_reason": "length"' in json.dumps(event) for event in events(text)) == 1
        assert events(text)[-1] == "[DONE]"
        assert await metric(client, 'tinyloop_requests_total{outcome="cancelled",reason="client"}') == 1
        assert await metric(client, 'tinyloop_requests_total{outcome="done",reason="length"}') == 1


# Admission


@asynccontextmanager
async def full(client: httpx.AsyncClient, engine: PacedEngine, running: int, queued: int) -> AsyncIterator[None]:
    """Every slot taken and every place in the queue, by requests that are answered at the end."""
    engine.gate.clear()
    tasks = [asyncio.create_task(small_answer(client)) for _ in range(running)]
    await until(lambda: sum(counts(client)) == running)
    if running > 1:  # those who came during a step enter after it
        engine.one_step()
    await until(lambda: counts(client) == (0, running))
    tasks += [asyncio.create_task(small_answer(client)) for _ in range(queued)]
    await until(lambda: counts(client) == (queued, running))
    yield
    engine.gate.set()
    assert await asyncio.gather(*tasks) == [["length"]] * len(tasks)


async def test_a_refused_stream_is_a_real_503() -> None:
    """oh-my-pi #9812"""
    async with serving(max_running=1, max_queue_depth=1) as (client, engine), full(client, engine, 1, 1):
        response = await client.post(COMPLETIONS, json=body(stream=True))
        assert response.status_code == 503
        assert response.headers["content-type"] == "application/json"
        assert response.json()["error"]["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1


def timing(app: ASGIApp, seconds: list[float]) -> ASGIApp:
    """Adds up the processor time from a request's arrival in the application to its status line."""

    async def timed(scope: Scope, receive: Receive, send: Send) -> None:
        began = time.thread_time()

        async def timed_send(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 503:
                seconds.append(time.thread_time() - began)
            await send(message)

        await app(scope, receive, timed_send)

    return timed


@pytest.mark.parametrize(
    ("stream", "split", "long_text"),
    [
        pytest.param(True, False, 2000, id="streams"),
        pytest.param(False, False, 2000, id="answers"),
        pytest.param(True, True, 2000, id="late bodies"),
        pytest.param(True, False, 5, id="long prompts"),
    ],
)
async def test_of_two_hundred_at_once_the_cap_is_taken_and_the_rest_refused_before_any_work(
    stream: bool, split: bool, long_text: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm #58192, also with bodies that come after all the heads, and prompts that are tokenised in a thread"""
    monkeypatch.setattr(shared, "LONG_TEXT", long_text)
    seconds: list[float] = []
    async with serving(max_running=1, max_queue_depth=8) as (client, engine):
        config = client.server.config  # type: ignore[attr-defined]
        config.loaded_app = timing(config.loaded_app, seconds)
        encoded = counting(engine.tokenizer, "encode")
        engine.gate.clear()  # nobody who was accepted can have finished before the gate opens
        callers = [await Caller.connected(client) for _ in range(200)]
        await send_all(callers, message(prompt="some text", stream=stream), split=split)
        answers = [asyncio.create_task(caller.rest()) for caller in callers]
        await until(lambda: sum(task.done() for task in answers) >= 191, 10)
        refused = [task.result() for task in answers if task.done()]
        assert all(text.startswith("HTTP/1.1 503") and "queue_full" in text for text in refused)
        engine.gate.set()
        texts = await asyncio.gather(*answers)
        assert sum(text.startswith("HTTP/1.1 200") for text in texts) == 200 - len(refused) > 7
    assert engine.prepared <= 9
    assert len(encoded) <= 9
    if not split:  # else the time of each holds the waiting for its body
        assert statistics.median(seconds) < 0.05


async def send_all(callers: Sequence[Caller], parts: tuple[bytes, bytes], *, split: bool) -> None:
    """The same request from all; when it is split, the server has seen every head before any body."""
    head, raw = parts
    for caller in callers:
        caller.writer.write(head if split else head + raw)
    if split:
        await asyncio.sleep(0.3)
        for caller in callers:
            caller.writer.write(raw)


def counting(owner: Any, name: str) -> list[Any]:
    """What a method is called with from now on."""
    calls, method = [], getattr(owner, name)

    def counted(argument: Any) -> Any:
        calls.append(argument)
        return method(argument)

    setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_larger_than_all_pages_is_400_at_once_and_blocks_nobody(stream: bool) -> None:
    """vllm #39734"""
    async with serving(pages=16, max_running=1) as (client, engine), full(client, engine, 1, 1):
        response = await client.post(COMPLETIONS, json=body(prompt=[7] * 100, stream=stream))  # the engine stands still
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "kv_budget_exceeded"
        assert counts(client) == (1, 1)


async def visit(client: httpx.AsyncClient, rng: random.Random) -> None:
    """One that leaves at some moment, or one that asks for what it cannot get."""
    wrong: tuple[dict[str, Any], ...] = ({"loops": 99}, {"prompt": []}, {"max_tokens": 10**6}, {"prompt": [7] * 200})
    fields: dict[str, Any] = {"stream": rng.random() < 0.5, "n": rng.randint(1, 3), "max_tokens": rng.randint(1, 50)}
    fields |= rng.choice(wrong) if rng.random() < 0.5 else {}
    delay_s, leave_s = rng.random(), rng.random() * 0.05
    await asyncio.sleep(delay_s)
    caller = await Caller.calling(client, **fields)
    await asyncio.sleep(leave_s)
    caller.vanish()


async def test_two_hundred_who_leave_or_fail_cost_no_capacity() -> None:
    """TGI #1877"""
    rng = random.Random(1877)
    async with serving(max_running=2, max_queue_depth=8) as (client, engine):
        await asyncio.gather(*(visit(client, rng) for _ in range(200)))
        await until(lambda: counts(client) == (0, 0))
        for reason in ('cancelled",reason="client', 'rejected",reason="invalid', 'rejected",reason="queue_full'):
            assert await metric(client, f'tinyloop_requests_total{{outcome="{reason}"}}') > 5
        async with full(client, engine, 2, 8):
            assert (await client.post(COMPLETIONS, json=body())).status_code == 503
        assert await metric(client, "tinyloop_kv_usage_ratio") == 0


# Metrics and probes


async def test_the_queue_gauge_falls_with_its_clients() -> None:
    """ray #37943"""
    async with serving(max_running=1) as (client, engine):
        async with full(client, engine, 1, 0):
            callers = [await Caller.calling(client, stream=at % 2 == 0) for at in range(5)]
            await until(lambda: counts(client) == (5, 1))
            assert await metric(client, "tinyloop_queue_depth") == 5
            for caller in callers:
                caller.vanish()
            await until(lambda: counts(client) == (0, 1), 1.0)
            assert await metric(client, "tinyloop_queue_depth") == 0
        assert await metric(client, "tinyloop_in_flight") == 0


async def test_five_aborts_count_five() -> None:
    """vllm #31503"""
    name = 'tinyloop_requests_total{outcome="cancelled",reason="client"}'
    async with serving(PACE_S, max_running=3) as (client, _):
        before = await metric(client, name)
        callers = [await Caller.calling(client, stream=at % 2 == 0, max_tokens=LONG) for at in range(5)]
        await until(lambda: counts(client) == (2, 3))
        for caller in callers:
            caller.vanish()
        await until(lambda: counts(client) == (0, 0), 1.0)
        assert await metric(client, name) == before + 5


async def test_health_answers_while_a_megabyte_is_being_tokenised() -> None:
    """vllm #24910: a probe comes and goes between the beginning and the end of the tokeniser's work"""
    engine, spans = ScriptedEngine(), []
    encode = engine.tokenizer.encode

    def spanned(text: str) -> Any:
        began = time.monotonic()
        tokens = encode(text)
        spans.append((began, time.monotonic()))
        return tokens

    engine.tokenizer.encode = spanned  # type: ignore[method-assign, assignment]
    probes = []
    async with listening(engine) as (client, _):
        fields = {"model": "tiny/loop", "prompt": "x" * 1_000_000}
        task = asyncio.create_task(client.post(COMPLETIONS, json=fields))
        while not task.done():
            began = time.monotonic()
            assert (await client.get("/health")).status_code == 200
            probes.append((began, time.monotonic()))
        assert (await task).json()["error"]["code"] == "context_length_exceeded"
    [(start, end)] = spans
    assert any(start < began and ended < end for began, ended in probes)


async def test_health_is_red_once_the_dispatcher_is_dead() -> None:
    """sglang #6624"""
    async with listening() as (client, _):
        assert (await client.get("/health")).status_code == 200
        client.server.scheduler._task.cancel()  # type: ignore[attr-defined]
        await until(lambda: client.server.scheduler._task.done())  # type: ignore[attr-defined]
        response = await client.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, "unhealthy")
        assert (await client.post(COMPLETIONS, json=body(model="tiny/loop"))).status_code == 503


# Shutdown

SERVER = """
import asyncio
from server.cli import bind, run_server
from server.engine import ModelInfo
from server.scheduler import Scheduler
from server.settings import Settings
from tests.fakes import SteppingEngine

class PacedEngine(SteppingEngine):  # needs no torch, so that the process is there in a moment
    info = ModelInfo("tiny", "fake", 400, 1, 8, 2, 2, True, False, 259, "float32", 1_000_000)
    tokenizer = None

    async def step(self, segments):
        await asyncio.sleep(0.01)
        return await super().step(segments)

settings = Settings(drain_timeout_s={drain_s}, http_drain={http_drain})
run_server(Scheduler(PacedEngine(num_pages=1000), max_running=3), settings, bind("127.0.0.1", 0))
"""


@contextmanager
def server_process(drain_s: float = 20.0, *, http_drain: bool = False) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server as its own process, with three slots and 20 ms per answer token, and its address."""
    with python_process(SERVER.format(drain_s=drain_s, http_drain=http_drain)) as serving:
        yield serving


async def six(client: httpx.AsyncClient, tokens: int) -> list["asyncio.Task[httpx.Response]"]:
    """Three that run, then three that wait; of each, two are streams."""
    tasks = []
    for at in range(6):
        request = client.post(COMPLETIONS, json=body(stream=at % 3 < 2, max_tokens=tokens))
        tasks.append(asyncio.create_task(request))
        await reach(client, min(at + 1, 3), "tinyloop_in_flight")
        await reach(client, max(at - 2, 0), "tinyloop_queue_depth")
    return tasks


async def test_at_sigterm_what_runs_is_finished_and_what_waits_is_told() -> None:
    """vllm PR 36964"""
    with server_process() as (process, url):
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            tasks = await six(client, tokens=120)
            process.terminate()
            answers = await asyncio.gather(*tasks)
        assert await asyncio.to_thread(process.wait, 10) == 0
    assert [answer.status_code for answer in answers] == [200] * 3 + [503] * 3
    for answer in answers[:2]:
        assert events(answer.text)[-1] == "[DONE]"
        assert '"finish_reason": "length"' in json.dumps(events(answer.text))
    assert answers[2].json()["usage"]["completion_tokens"] == 120
    assert {answer.json()["error"]["code"] for answer in answers[3:]} == {"draining"}


async def test_at_the_drain_deadline_what_still_runs_gets_a_last_event() -> None:
    """vllm PR 36964, with answers that are longer than the deadline"""
    with server_process(drain_s=0.3) as (process, url):
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            tasks = await six(client, tokens=LONG)
            process.terminate()
            answers = await asyncio.gather(*tasks)
        assert await asyncio.to_thread(process.wait, 10) == 0
    assert [answer.status_code for answer in answers] == [200] * 2 + [503] * 4
    for answer in answers[:2]:
        *_, error, done = events(answer.text)
        assert (error["error"]["code"], done) == ("draining", "[DONE]")
    assert {answer.json()["error"]["code"] for answer in answers[2:]} == {"draining"}


async def test_a_drain_over_http_is_answered_at_once_and_the_server_ends_by_itself() -> None:
    """litellm PR 28714"""
    with server_process(http_drain=True) as (process, url):
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            running = asyncio.create_task(client.post(COMPLETIONS, json=body(max_tokens=80)))
            await reach(client, 1, "tinyloop_in_flight")
            response = await client.post("/drain", json={})
            assert (response.status_code, response.json()) == (202, {"status": "draining"})
            assert not running.done()  # the drain goes on behind the answer
            assert (await client.get("/ready")).status_code == 503
            assert (await running).json()["usage"]["completion_tokens"] == 80
        assert await asyncio.to_thread(process.wait, 10) == 0


async def test_a_drain_over_http_must_be_allowed() -> None:
    """litellm PR 28714"""
    async with serving() as (client, _):
        assert (await client.post("/drain", json={})).status_code == 403
        assert await small_answer(client) == ["length"]
