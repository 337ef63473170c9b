"""The dial over HTTP: every way to turn it, what beats what, its bounds, deadlines, and how the answer tells of it."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from server.engine import Engine
from server.routers.asked import Slo
from server.types import GenerationResult, Timings
from tests.http_support import INFO, chat, completion, events, scheduler_of, served
from tests.tiny_models import tiny_model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(tiny_model("ouro"))
    yield engine
    asyncio.run(engine.close())
    engine.check()


ASKED: list[tuple[dict[str, Any], dict[str, str], dict[str, Any]]] = [
    ({"loops": {"max": 6}}, {}, {"loops": 6}),
    ({"loops": {"min": 2, "max": 6}}, {}, {"loops": 6, "min_loops": 2}),
    ({"loops": {"min": 2}}, {"x-tinyloop-loops": "7"}, {"loops": None, "min_loops": 2}),
    ({"loops": {"max": 6, "exit_threshold": 0.9}}, {}, {"loops": 6, "mode": "adaptive", "exit_threshold": 0.9}),
    ({"loops": {"exit_threshold": 0.03, "exit_signal": "distance"}}, {},
     {"mode": "adaptive", "exit_threshold": 0.03, "exit_signal": "distance"}),
    ({"exit_threshold": 0.03, "exit_signal": "distance"}, {},
     {"mode": "adaptive", "exit_threshold": 0.03, "exit_signal": "distance"}),
    ({"loops": {}}, {}, {"loops": None}),
    ({"loops": {"min": 2, "max": 6}, "min_loops": 2}, {}, {"loops": 6, "min_loops": 2}),
    ({}, {"x-tinyloop-loops": "auto"}, {"loops": None, "min_loops": 1}),
    ({"loops": "auto", "min_loops": 3}, {}, {"loops": None, "min_loops": 3}),
    ({}, {"x-tinyloop-loops": "5", "x-tinyloop-min-loops": "2"}, {"loops": 5, "min_loops": 2}),
    ({"min_loops": 3}, {"x-tinyloop-loops": "5", "x-tinyloop-min-loops": "2"}, {"loops": 5, "min_loops": 3}),
    ({"tinyloop": {"loops": 3, "min_loops": 2}}, {"x-tinyloop-loops": "5"}, {"loops": 3, "min_loops": 2}),
    ({"tinyloop": {"loops": 3}, "loops": 3}, {}, {"loops": 3}),
    ({"loops": 99, "loops_policy": "clamp"}, {}, {"loops": 8}),
    ({"loops": 0, "loops_policy": "clamp"}, {}, {"loops": 1}),
    ({"loops": {"min": 0, "max": 99}, "loops_policy": "clamp"}, {}, {"loops": 8, "min_loops": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "headers", "expected"), ASKED)
@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
async def test_every_way_to_ask_for_a_depth(
    url: str, fields: dict[str, Any], headers: dict[str, str], expected: dict[str, Any]
) -> None:
    body = chat(**fields) if url == CHAT else completion(**fields)
    async with served() as (client, engine):
        response = await client.post(url, json=body, headers=headers)
    assert response.status_code == 200, response.text
    default = {"loops": None, "min_loops": None, "mode": "generate", "exit_threshold": None, "exit_signal": None}
    seen = {name: getattr(engine.seen[0], name) for name in default}
    assert seen == default | expected


WRONG: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("loops", {"loops": {"max": 99}}, {}),
    ("loops", {"loops": {"max": 2.5}}, {}),
    ("loops.most", {"loops": {"most": 3}}, {}),
    ("min_loops", {"loops": {"min": 0, "max": 4}}, {}),
    ("min_loops", {"loops": {"min": 5, "max": 4}}, {}),
    ("min_loops", {"loops": {"min": 2, "max": 4}, "min_loops": 3}, {}),
    ("exit_threshold", {"loops": {"exit_threshold": 0.5}, "exit_threshold": 0.6}, {}),
    ("exit_signal", {"exit_threshold": 0.5, "exit_signal": "kl"}, {}),
    ("exit_signal", {"loops": {"exit_signal": "gate"}, "exit_signal": "distance"}, {}),
    ("loops", {"tinyloop": {"loops": 3}, "loops": 4}, {}),
    ("tinyloop", {"tinyloop": 3}, {}),
    ("tinyloop.depth", {"tinyloop": {"depth": 3}}, {}),
    ("loops_policy", {"loops_policy": "round"}, {}),
    ("x-tinyloop-min-loops", {}, {"x-tinyloop-min-loops": "x"}),
    ("min_loops", {}, {"x-tinyloop-min-loops": "99"}),
    ("slo_ms", {"slo_ms": {"ttft_ms": 0}}, {}),
    ("slo_ms", {"slo_ms": {"ttft_ms": "1"}}, {}),
    ("slo_ms.wait", {"slo_ms": {"wait": 1}}, {}),
    ("x-llm-d-slo-tpot-ms", {}, {"x-llm-d-slo-tpot-ms": "-1"}),
]  # fmt: skip


@pytest.mark.parametrize(("param", "fields", "headers"), WRONG)
async def test_what_cannot_be_meant_is_400_and_named(
    param: str, fields: dict[str, Any], headers: dict[str, str]
) -> None:
    async with served() as (client, engine):
        response = await client.post(CHAT, json=chat(**fields), headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not engine.seen


@pytest.mark.parametrize(
    ("fields", "headers", "wait_ms", "token_ms"),
    [
        ({"slo_ms": 500}, {}, 500, None),
        ({"slo_ms": {"ttft_ms": 300, "tpot_ms": 40}}, {}, 300, 40),
        ({"slo_ms": {"e2e_ms": 200}}, {}, 200, None),
        ({"slo_ms": {"ttft_ms": 300, "e2e_ms": 200}}, {}, 200, None),
        ({}, {"x-tinyloop-slo-ms": "250"}, 250, None),
        ({}, {"x-llm-d-slo-ttft-ms": "250", "x-llm-d-slo-tpot-ms": "30"}, 250, 30),
        ({}, {"x-slo-ttft-ms": "250"}, 250, None),
        ({"slo_ms": {"tpot_ms": 40}}, {"x-tinyloop-slo-ms": "250"}, None, 40),
    ],
)
async def test_deadlines_reach_the_scheduler(
    fields: dict[str, Any], headers: dict[str, str], wait_ms: float | None, token_ms: float | None
) -> None:
    seen: list[float | None] = []
    async with served() as (client, engine):
        scheduler = scheduler_of(client)
        submit = scheduler.submit

        async def spy(request: Any, *, priority: int, slo_ms: float | None) -> Any:
            seen.append(slo_ms)
            return await submit(request, priority=priority, slo_ms=slo_ms)

        scheduler.submit = spy
        assert (await client.post(CHAT, json=chat(**fields), headers=headers)).status_code == 200
    assert seen == [wait_ms]
    assert engine.seen[0].token_ms == token_ms


def result(first_s: float, total_s: float, tokens: int) -> GenerationResult:
    return GenerationResult(token_ids=(1,) * tokens, timings=Timings(first_token_s=first_s, total_s=total_s))


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(), None),
        (Slo(ttft_ms=100), True),
        (Slo(ttft_ms=99), False),
        (Slo(tpot_ms=100), True),
        (Slo(tpot_ms=99), False),
        (Slo(e2e_ms=1100), True),
        (Slo(100, 100, 1099), False),
    ],
)
def test_a_deadline_is_met_if_every_part_of_it_is(slo: Slo, met: bool | None) -> None:
    assert slo.met([result(0.1, 1.1, 11)]) is met
    assert slo.met([result(0.1, 1.1, 11), result(9, 99, 2)]) is (None if met is None else False)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_answer_tells_what_was_run_for_its_tokens(engine: Engine, stream: bool) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, "stream": stream, "loops": 3}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    async with served(engine) as (client, _):
        response = await client.post(COMPLETIONS, json={**body, **usage, "slo_ms": {"ttft_ms": 60_000}})
        free = (await client.post(COMPLETIONS, json={**body, "stream": False})).json()["tinyloop"]
    report = (events(response.text)[-2] if stream else response.json())["tinyloop"]
    assert (report["loops_used_mean"], report["loops_histogram"]) == (3.0, {"3": 6})
    assert report["slo_met"] is True
    assert free["slo_met"] is None
    assert report["tpot_ms"] == pytest.approx((report["total_ms"] - report["ttft_ms"]) / 5, abs=0.002)


@pytest.mark.parametrize("rule", [{"exit_threshold": 0.7}, {"exit_threshold": 0.8, "exit_signal": "distance"}])
async def test_tokens_that_exit_early_are_counted_by_their_depth(engine: Engine, rule: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    async with served(engine) as (client, _):
        span = {"max": 4, **rule}
        report = (await client.post(COMPLETIONS, json={**body, "loops": span})).json()["tinyloop"]
    used = {int(loops): count for loops, count in report["loops_histogram"].items()}
    assert sum(used.values()) == 20
    assert min(used) < 4
    assert report["loops_used_mean"] == pytest.approx(sum(k * v for k, v in used.items()) / 20, abs=1e-3)


async def test_every_advertised_effort_is_what_it_says() -> None:
    async with served() as (client, engine):
        card = (await client.get(f"/v1/models/{INFO.id}")).json()
        efforts = card["tinyloop"]["reasoning_effort_map"]
        for effort in efforts:
            await client.post(CHAT, json=chat(reasoning_effort=effort, max_tokens=1))
    assert [request.loops for request in engine.seen] == list(efforts.values())
    assert list(efforts) == ["none", "minimal", "low", "medium", "high", "xhigh", "max"]
