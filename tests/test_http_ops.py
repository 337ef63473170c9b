"""Probes, metrics, models and what surrounds every answer."""

import asyncio
import re
from typing import Any

import pytest

from server.security import LOOPBACK
from server.settings import Settings
from tests.http_support import INFO, ScriptedEngine, chat, scheduler_of, served
from tinyloop import __version__


@pytest.mark.parametrize("url", ["/health", "/v1/health"])
async def test_health_follows_the_scheduler(url: str) -> None:
    async with served() as (client, _):
        assert (await client.get(url)).json() == {"status": "ok"}
        scheduler = scheduler_of(client)
        scheduler._task.cancel()
        await asyncio.sleep(0.01)
        response = await client.get(url)
    assert response.status_code == 503
    assert response.json()["status"] == "unhealthy"
    assert "dispatcher" in response.json()["reason"]


async def test_ready_is_red_while_draining_and_health_is_not() -> None:
    async with served() as (client, _):
        assert (await client.get("/ready")).status_code == 200
        scheduler_of(client).begin_drain()
        response = await client.get("/ready")
        assert response.status_code == 503
        assert response.json()["status"] == "draining"
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("url", ["/health", "/v1/health", "/ready"])
async def test_a_probe_may_ask_for_the_head_alone(url: str) -> None:
    async with served() as (client, _):
        assert (await client.head(url)).status_code == 200
        scheduler_of(client)._task.cancel()
        await asyncio.sleep(0.01)
        assert (await client.head(url)).status_code == 503


async def test_metrics_are_prometheus_text() -> None:
    async with served() as (client, _):
        await client.post("/v1/chat/completions", json=chat())
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'tinyloop_requests_total{outcome="done",reason="stop"} 1.0' in response.text
    assert re.search(r'tinyloop_model_loops\{bound="max"\} 8', response.text)


async def test_probes_do_not_wait_for_the_engine_or_a_long_prompt() -> None:
    async with served(ScriptedEngine(delay_s=5)) as (client, _):
        prompt = {"model": INFO.id, "prompt": "x " * 500_000}
        tasks = [asyncio.create_task(client.post("/v1/completions", json=prompt))]
        tasks += [asyncio.create_task(client.post("/v1/chat/completions", json=chat()))]
        for _ in range(10):
            async with asyncio.timeout(0.5):
                assert (await client.get("/health")).status_code == 200
                assert (await client.get("/metrics")).status_code == 200
            await asyncio.sleep(0.01)
        assert (await tasks[0]).status_code == 400
        tasks[1].cancel()


async def test_the_version_is_told() -> None:
    async with served() as (client, _):
        assert (await client.get("/version")).json() == {"version": __version__}


@pytest.mark.parametrize("name", ["tiny/loop", "tiny%2Floop", "tiny/loop@loops=2"])
async def test_a_model_is_found_under_its_name_slashes_and_all(name: str) -> None:
    async with served() as (client, _):
        listed = (await client.get("/v1/models")).json()
        single = (await client.get(f"/v1/models/{name}")).json()
    assert listed["object"] == "list"
    assert listed["data"] == [single]
    assert single["id"] == INFO.id
    assert single["max_model_len"] == INFO.max_context
    depths = {"min": 1, "max": 8, "default": 4, "trained": 4, "adaptive": True, "exit_signals": ["gate", "distance"]}
    assert single["tinyloop"]["loops"] == depths


async def test_an_unknown_model_is_404() -> None:
    async with served() as (client, _):
        response = await client.get("/v1/models/nope")
    assert response.status_code == 404
    message = "The model `nope` does not exist. Served models: tiny/loop."
    assert response.json()["error"] == {
        "message": message,
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


async def test_a_sane_request_id_comes_back_and_another_is_replaced() -> None:
    async with served() as (client, engine):
        for url in ("/health", "/nowhere"):
            assert (await client.get(url, headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
        for bad in (b"x" * 129, b"a b", b"\xc3\xa9", b""):
            response = await client.get("/health", headers=[(b"x-request-id", bad)])
            assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
        await client.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "abc-2"})
    assert engine.seen[0].request_id == "abc-2"


async def test_one_request_id_twice_at_once_is_two_requests() -> None:
    async with served() as (client, engine):
        post: Any = lambda: client.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "same"})  # noqa: E731
        answers = await asyncio.gather(post(), post())
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len({answer.json()["id"] for answer in answers}) == 2
    assert len(engine.seen) == 2


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("LocalHost", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
    ],
)
async def test_a_page_that_rebinds_its_name_is_not_answered(host: str, status: int) -> None:
    async with served(settings=Settings(allowed_hosts=LOOPBACK)) as (client, _):
        response = await client.get("/v1/models", headers={"host": host})
    assert response.status_code == status
    assert status == 200 or response.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(("address", "status"), [("127.0.0.1", 200), ("::1", 200), ("10.0.0.1", 403)])
async def test_http_1_0_without_a_host_is_answered_on_loopback(address: str, status: int) -> None:
    async with served(settings=Settings(allowed_hosts=LOOPBACK)) as (client, _):
        app: Any = client._transport.app  # type: ignore[attr-defined]
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "http_version": "1.0", "method": "GET", "path": "/health", "raw_path": b"/health",
            "query_string": b"", "headers": [], "server": (address, 8000), "scheme": "http", "root_path": "",
        }  # fmt: skip
        await app(scope, receive, send)
        await app({**scope, "http_version": "1.1"}, receive, send)
    statuses = [message["status"] for message in sent if message["type"] == "http.response.start"]
    assert statuses == [status, 403]
