"""Who may ask and how much of the server one client can hold: keys, hosts, pages, slow senders and slow readers."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.security import LOOPBACK, Hosts, Keys, read_keys
from server.settings import Settings
from server.sse import ClientGone, EventStream
from server.types import GenerationChunk
from tests.http_support import ScriptedEngine, chat, listening, scheduler_of, served, until
from tinyloop.errors import TinyLoopError

CHAT = "/v1/chat/completions"
KEYED = Settings(drain_timeout_s=1.0, api_keys=("alpha", "schlüssel"))
OPEN = ("/health", "/v1/health", "/ready", "/version")


def bearer(key: str) -> dict[str, Any]:
    return {"authorization": b"Bearer " + key.encode()}


@pytest.mark.parametrize("headers", [bearer("alpha"), bearer("schlüssel"), {"x-api-key": "alpha"}])
async def test_a_known_key_is_let_in(headers: dict[str, Any]) -> None:
    async with served(settings=KEYED) as (client, _):
        assert (await client.post(CHAT, json=chat(), headers=headers)).status_code == 200


WRONG_KEYS: list[dict[str, Any]] = [
    {}, bearer(""), bearer("alph"), bearer("alphaa"), bearer("ALPHA"), bearer("alpha,schlüssel"), bearer("schlussel"),
    {"authorization": "alpha"}, {"authorization": "Basic alpha"}, {"x-api-key": "é".encode()},
    {"authorization": "Bearer " + "x" * 9999},
]  # fmt: skip


@pytest.mark.parametrize("headers", WRONG_KEYS)
async def test_any_other_key_is_401_and_says_how_to_ask(headers: dict[str, Any]) -> None:
    async with served(settings=KEYED) as (client, engine):
        for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nothing")):
            response = await client.request(method, path, json=chat(), headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert "alpha" not in response.text
    assert not engine.seen


@pytest.mark.parametrize("path", OPEN)
async def test_probes_need_no_key(path: str) -> None:
    async with served(settings=KEYED) as (client, _):
        assert (await client.get(path)).status_code == 200


async def test_without_keys_everybody_may_ask_and_is_the_same_tenant() -> None:
    async with served() as (client, engine):
        for headers in ({}, bearer("a"), bearer("b")):
            assert (await client.post(CHAT, json=chat(), headers=headers)).status_code == 200
    assert {request.tenant for request in engine.seen} == {""}
    assert {request.cache_salt for request in engine.seen} == {""}


async def test_each_key_is_a_tenant_with_prefixes_of_its_own_and_is_not_kept() -> None:
    async with served(settings=KEYED) as (client, engine):
        for key in ("alpha", "schlüssel", "alpha"):
            await client.post(CHAT, json=chat(cache_salt="x"), headers=bearer(key))
    tenants = [request.tenant for request in engine.seen]
    assert tenants[0] == tenants[2] != tenants[1]
    assert len({request.cache_salt for request in engine.seen}) == 2
    assert "alpha" not in str(engine.seen)


@given(st.lists(st.text(min_size=1), max_size=4, unique=True), st.text())
def test_only_a_known_key_names_a_tenant(keys: list[str], key: str) -> None:
    sent = key.encode().decode("latin-1")
    tenant = Keys(keys).tenant({"x-api-key": sent})
    assert (tenant is not None) == (not keys or key in keys)


def test_keys_come_from_options_a_file_and_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TINYLOOP_API_KEYS", "c, d\ne")
    file = tmp_path / "keys"
    file.write_text("# ours\nb  # Bob\n\na\n")
    assert read_keys(["a"], file) == ("a", "b", "c", "d", "e")


def test_a_file_without_keys_does_not_open_the_server(tmp_path: Path) -> None:
    empty = tmp_path / "keys"
    empty.write_text("# none yet\n")
    for file in (empty, tmp_path / "missing", tmp_path):
        with pytest.raises(TinyLoopError, match="--api-key-file"):
            read_keys((), file)
    with pytest.raises(TinyLoopError, match="--api-key"):
        read_keys([" "])


def test_hosts_are_compared_without_port_and_case() -> None:
    hosts = Hosts((*LOOPBACK, "Box.local"))
    allowed = ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "[::1]", "box.LOCAL:80"]
    assert all(map(hosts.allow, allowed))
    for host in ("", "evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "localhost:80:80", "x@localhost"):
        assert not hosts.allow(host)


async def test_a_websocket_of_a_rebound_name_is_closed_before_it_opens() -> None:
    async with served(settings=Settings(allowed_hosts=LOOPBACK)) as (client, _):
        app: Any = client._transport.app  # type: ignore[attr-defined]
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        scope = {"type": "websocket", "path": "/llm", "headers": [(b"host", b"evil.example")], "app": app}
        await app(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


# Pages of other sites


ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "x-stainless-lang,authorization"}


async def test_no_page_may_ask_unless_it_was_named() -> None:
    async with served() as (client, _):
        preflight = await client.options(CHAT, headers={"origin": "https://a.example", **ASKS})
        answer = await client.get("/v1/models", headers={"origin": "https://a.example"})
    for response in (preflight, answer):
        assert not [name for name in response.headers if name.startswith("access-control")]


async def test_a_named_page_may_ask_with_any_headers_and_read_the_request_id() -> None:
    settings = Settings(drain_timeout_s=1.0, cors_origins=("https://a.example",), api_keys=("k",))
    async with served(settings=settings) as (client, _):
        page = {"origin": "https://a.example"}
        preflight = await client.options(CHAT, headers={**page, **ASKS})
        refused = await client.get("/v1/models", headers=page)
        answer = await client.get("/v1/models", headers={**page, **bearer("k")})
        other = await client.get("/v1/models", headers={"origin": "https://b.example", **bearer("k")})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-headers"] == ASKS["access-control-request-headers"]
    assert (refused.status_code, answer.status_code) == (401, 200)
    for response in (preflight, refused, answer):
        assert response.headers["access-control-allow-origin"] == "https://a.example"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in other.headers


# Slow senders and slow readers


async def test_a_body_that_does_not_come_is_408_and_held_no_place() -> None:
    async with listening(settings=Settings(body_timeout_s=0.2, drain_timeout_s=1.0), max_queue_depth=1) as (client, _):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
        writer.write(head.encode() + b'{"model": ')
        await writer.drain()
        assert (await client.post(CHAT, json=chat())).status_code == 200
        answer = (await asyncio.wait_for(reader.read(), 5)).decode()
        writer.close()
    assert answer.startswith("HTTP/1.1 408")
    assert "connection: close" in answer.lower()
    assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("speaks", [True, False], ids=["events", "keep-alive lines only"])
async def test_a_reader_who_takes_nothing_has_left(speaks: bool) -> None:
    closed: list[bool] = []

    async def words() -> Any:
        while speaks:
            yield "data: x\n\n"
        await asyncio.Event().wait()
        yield ""

    async def close() -> None:
        closed.append(True)

    async def stuck(message: Any) -> None:
        await asyncio.Event().wait()

    async def silent() -> Any:
        await asyncio.Event().wait()

    stream = EventStream(words(), on_error=lambda error: "", on_close=close, write_timeout_s=0.05, keepalive_s=0.1)
    with pytest.raises(ClientGone):
        await asyncio.wait_for(stream({"type": "http"}, silent, stuck), 5)
    assert closed


class Flood(ScriptedEngine):
    """Says more than the buffers of both sides hold, and then has all the time in the world."""

    async def _tokens(self, req: Any) -> Any:
        for at in range(req.max_new_tokens):
            await asyncio.sleep(0 if at < 1000 else 0.05)
            yield GenerationChunk(1, "x" * 50_000)


async def test_a_stream_that_nobody_reads_frees_its_request() -> None:
    settings = Settings(write_timeout_s=0.3, drain_timeout_s=1.0)
    async with listening(Flood(max_context=5000), settings) as (client, _):
        _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port, limit=1)
        body = json.dumps(chat(stream=True, max_tokens=2000)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        writer.write(head.encode() + b"\r\n\r\n" + body)
        scheduler = client.server.scheduler  # type: ignore[attr-defined]
        await until(lambda: scheduler.snapshot()["in_flight"])
        await until(lambda: not scheduler.snapshot()["in_flight"])
        cancelled = 'outcome="cancelled",reason="client"} 1.0' in (await client.get("/metrics")).text
        writer.transport.abort()
    assert cancelled


# Connections


async def lasts(client: Any, *pieces: bytes, every_s: float = 0.05) -> bytes:
    """What a connection is answered that sends these pieces and then waits for its end."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    told = bytearray()

    async def listen() -> None:
        with suppress(ConnectionError):
            while some := await reader.read(1 << 16):
                told.extend(some)

    ended = asyncio.create_task(listen())
    for piece in pieces:
        writer.write(piece)
        await asyncio.wait({ended}, timeout=every_s)
        if ended.done():
            break
    await asyncio.wait_for(ended, 5)
    writer.transport.abort()
    return bytes(told)


HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"
POST = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("pieces", "answered"),
    [((), 0), ((b"GET",), 0), ((HEAD, *[b"x-a: b\r\n"] * 20), 0), ((HEAD + b"\r\n", HEAD, *[b"x-a: b\r\n"] * 20), 1),
     ((HEAD + b"content-length: 900\r\n\r\n", *[b"x"] * 20), 1)],
    ids=["silent", "begun", "dripping headers", "dripping the second request", "dripping a body that nobody reads"],
)  # fmt: skip
async def test_a_connection_without_a_whole_request_is_closed_in_time(pieces: Any, answered: int) -> None:
    settings = Settings(request_timeout_s=0.3, body_timeout_s=20.0, drain_timeout_s=1.0)
    async with listening(settings=settings) as (client, _):
        began = asyncio.get_running_loop().time()
        answer = await lasts(client, *pieces)
        took = asyncio.get_running_loop().time() - began
    assert answer.count(b"HTTP/1.1 200") == answered
    assert took < 3


async def test_who_is_being_answered_is_not_closed() -> None:
    """A long answer outlasts the limit, also while half of a next request is there; so does a body that is read."""
    engine = ScriptedEngine("x" * 30, delay_s=0.03)
    async with listening(engine, Settings(request_timeout_s=0.2, drain_timeout_s=1.0)) as (client, _):
        body = json.dumps(chat(stream=True)).encode().ljust(900)
        answer = await lasts(client, POST + body[:10], body[10:] + b"GET /h", every_s=0.5)
    assert answer.count(b"data: [DONE]") == 1


async def test_connections_beyond_the_bound_are_closed_and_leave_the_others_alone() -> None:
    async with listening(settings=Settings(max_connections=3, drain_timeout_s=1.0)) as (client, _):
        assert (await client.get("/health")).status_code == 200
        held = [await asyncio.open_connection(client.base_url.host, client.base_url.port) for _ in range(2)]
        assert await lasts(client, HEAD + b"\r\n") == b""
        assert (await client.get("/health")).status_code == 200
        for _, writer in held:
            writer.transport.abort()
        await until(lambda: len(client.server.server_state.connections) == 1)
        answer = await lasts(client, HEAD + b"connection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


# Refusals


@pytest.mark.parametrize(("status", "expected"), [(503, 503), (429, 429)])
async def test_a_busy_server_refuses_with_the_status_of_its_operator(status: Any, expected: int) -> None:
    async with served(settings=Settings(busy_status=status, drain_timeout_s=1.0), max_queue_depth=1) as (
        client,
        engine,
    ):
        engine.gate.clear()
        tasks = [asyncio.create_task(client.post(CHAT, json=chat()))]
        await until(lambda: engine.running)
        tasks.append(asyncio.create_task(client.post(CHAT, json=chat())))
        await until(lambda: scheduler_of(client).snapshot()["queue_depth"] == 1)
        response = await client.post(CHAT, json=chat())
        scheduler_of(client).begin_drain()
        draining = await client.post(CHAT, json=chat())
        engine.gate.set()
        await asyncio.gather(*tasks)
    assert response.status_code == expected
    assert response.json()["error"]["code"] == "queue_full"
    assert int(response.headers["retry-after"]) >= 1
    assert draining.status_code == 503


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", CHAT])
async def test_no_internal_message_gets_out(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    async with served() as (client, _):

        def broken(*_: Any) -> Any:
            raise ValueError("secret path weights/model")

        for name in ("info", "check_open", "metrics_text"):
            monkeypatch.setattr(type(scheduler_of(client)), name, property(broken))
        response = await client.request("POST" if path == CHAT else "GET", path, json=chat())
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["type"] == "server_error"
    assert response.headers["x-request-id"] in response.json()["error"]["message"]
