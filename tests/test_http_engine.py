"""The endpoints over the real engine and a tiny model."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.engine import Engine
from server.settings import Settings
from tests.http_support import events, listening, served, until
from tests.test_openapi import held_to
from tests.tiny_models import tiny_model

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(tiny_model("ouro"))
    yield engine
    asyncio.run(engine.close())
    engine.check()


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [5, 6, 7, 8, 9], "ignore_eos": True, **fields}


async def answer(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(COMPLETIONS, json=body(**fields))
    assert response.status_code == 200, response.text
    return dict(response.json())


@pytest.mark.parametrize("loops", [1, 3])
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echoed_log_probabilities_are_the_models_score(engine: Engine, loops: int, max_tokens: int) -> None:
    async with served(engine) as (client, _):
        whole = await answer(client, echo=True, logprobs=1, max_tokens=max_tokens, loops=loops)
    logprobs = whole["choices"][0]["logprobs"]
    expected = engine.model.score([5, 6, 7, 8, 9], loops=loops)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:5] == pytest.approx(expected, abs=1e-4)
    assert {len(values) for values in logprobs.values()} == {5 + max_tokens}
    assert whole["usage"]["completion_tokens"] == max_tokens


@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_a_streamed_echo_is_scored_like_a_whole_one(engine: Engine, max_tokens: int) -> None:
    fields = {"echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
    async with served(engine) as (client, _):
        whole = (await answer(client, **fields))["choices"][0]
        chunks = events((await client.post(COMPLETIONS, json=body(**fields, stream=True))).text)[:-1]
    choices = [chunk["choices"][0] for chunk in chunks]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    for name, values in whole["logprobs"].items():
        streamed = [value for part in parts for value in part[name]]
        if "logprobs" in name and name != "top_logprobs":
            assert streamed[1:] == pytest.approx(values[1:], abs=1e-5)
        elif name != "top_logprobs":
            assert streamed == values
    assert "".join(choice["text"] for choice in choices) == whole["text"]


async def test_the_likeliest_of_several_has_the_highest_mean(engine: Engine) -> None:
    fields = {"max_tokens": 4, "seed": 3, "logprobs": 0}
    async with served(engine) as (client, _):
        every = (await answer(client, **fields, n=4))["choices"]
        best = (await answer(client, **fields, n=2, best_of=4))["choices"]
    ranked = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [choice["text"] for choice in best] == [choice["text"] for choice in ranked[:2]]


async def test_a_seed_gives_the_same_answer_streamed_or_not_alone_or_not(engine: Engine) -> None:
    async with served(engine) as (client, _):
        alone = (await answer(client, seed=42, max_tokens=12))["choices"][0]["text"]
        crowd = await asyncio.gather(
            *(answer(client, max_tokens=12, loops=1 + at % 4) for at in range(5)),
            answer(client, seed=42, max_tokens=12),
        )
        response = await client.post(COMPLETIONS, json=body(seed=42, max_tokens=12, stream=True))
    assert crowd[-1]["choices"][0]["text"] == alone
    assert "".join(chunk["choices"][0]["text"] for chunk in events(response.text)[:-1]) == alone


async def test_choices_differ_and_come_again_with_the_seed(engine: Engine) -> None:
    async with served(engine) as (client, _):
        first, second = [await answer(client, seed=7, n=3, max_tokens=12) for _ in range(2)]
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    assert [choice["text"] for choice in second["choices"]] == texts


async def test_a_header_tells_the_depth_before_the_stream_has_ended(engine: Engine) -> None:
    async with served(engine) as (client, _):
        response = await client.post(COMPLETIONS, json=body(stream=True, loops=2, max_tokens=3))
    assert response.headers["x-tinyloop-loops"] == "2"


@pytest.mark.parametrize("stream", [True, False])
async def test_whoever_leaves_gives_back_every_page(stream: bool) -> None:
    engine = Engine(tiny_model("ouro"))
    async with listening(engine) as (client, _):
        before = engine.usage().available
        for _ in range(3):
            task = asyncio.create_task(client.post(COMPLETIONS, json=body(stream=stream, n=2, max_tokens=240)))
            await until(lambda: engine.usage().available < before)
            task.cancel()
            await until(lambda: not engine.runner.leases, 1.0)
        assert len((await answer(client, max_tokens=2))["choices"]) == 1
    await engine.close()
    engine.check()


async def test_what_can_never_fit_is_400() -> None:
    engine = Engine(tiny_model("ouro", pages=8))
    async with served(engine) as (client, _):
        response = await client.post(COMPLETIONS, json=body(max_tokens=100))
    await engine.close()
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "kv_budget_exceeded"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_depth_that_was_lowered_is_said_in_the_body_the_headers_and_a_counter(stream: bool) -> None:
    engine = Engine(tiny_model("ouro", pages=8))
    asked = {"max_tokens": 11, "loops": 4, "stream": stream}  # 16 tokens at 4 loops are 16 pages
    async with served(engine) as (client, _):
        refused = await client.post(COMPLETIONS, json=body(**asked))
        response = await client.post(
            COMPLETIONS,
            json=body(**asked, min_loops=1, **({"stream_options": {"include_usage": True}} if stream else {})),
        )
        metrics = (await client.get("/metrics")).text
    await engine.close()
    assert refused.status_code == 400
    report = (events(response.text)[-2] if stream else response.json())["tinyloop"]
    assert (report["loops_requested"], report["loops_granted"], report["degraded"]) == (4, 2, True)
    assert (response.headers["x-tinyloop-loops"], response.headers["x-tinyloop-degraded"]) == ("2", "true")
    assert 'tinyloop_loop_downgrades_total{reason="memory"} 1.0' in metrics


async def test_auto_is_the_default_depth_and_may_be_lowered() -> None:
    engine = Engine(tiny_model("ouro", pages=8))
    async with served(engine) as (client, _):
        response = await client.post(COMPLETIONS, json=body(max_tokens=11, loops="auto"))
        easy = await client.post(COMPLETIONS, json=body(max_tokens=1, loops="auto"))
    await engine.close()
    assert (response.headers["x-tinyloop-loops"], easy.headers["x-tinyloop-loops"]) == ("2", "4")
    assert "x-tinyloop-degraded" not in easy.headers


async def test_a_prefix_serves_another_depth_and_the_answer_says_how() -> None:
    async with served(Engine(tiny_model("ouro"))) as (client, _):
        prompt = list(range(40))
        hits = [
            (whole["usage"]["prompt_tokens_details"]["cached_tokens"], whole["tinyloop"]["cache_hit"])
            for whole in [await answer(client, prompt=prompt, loops=loops, max_tokens=2) for loops in (4, 4, 2, 8)]
        ]
        metrics = (await client.get("/metrics")).text
    assert hits == [(0, ""), (39, "exact"), (39, "shallower"), (39, "deepened")]
    for depth in ("exact", "shallower", "deepened"):
        assert f'tinyloop_prefix_hit_tokens_total{{depth="{depth}"}} 39.0' in metrics


async def test_salts_and_api_keys_keep_prefixes_apart() -> None:
    async with served(Engine(tiny_model("ouro")), Settings(drain_timeout_s=1.0, api_keys=("a", "b"))) as (client, _):
        cached = []
        for key, salt in (("a", None), ("b", None), ("a", "x"), ("a", None), ("a", "x")):
            client.headers["authorization"] = f"Bearer {key}"
            whole = await answer(client, prompt=list(range(40)), cache_salt=salt)
            cached.append(whole["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 0, 39, 39]


async def test_every_arrival_is_counted_once_also_those_that_the_router_turns_away(engine: Engine) -> None:
    async with served(engine) as (client, _):
        await answer(client)
        for wrong in ({"model": "other"}, {"loops": 99}, {"prompt": []}, {"max_tokens": 10**6}, {"nonsense": 1}):
            assert (await client.post(COMPLETIONS, json=body(**wrong))).status_code in (400, 404)
        await client.post(COMPLETIONS, content=b"{", headers={"content-type": "application/json"})
        metrics = (await client.get("/metrics")).text
    assert 'tinyloop_requests_total{outcome="done",reason="length"} 1.0' in metrics
    assert 'tinyloop_requests_total{outcome="rejected",reason="invalid"} 6.0' in metrics


TRACE = "/tinyloop/v1/trace"


async def test_a_trace_is_what_the_model_would_say_after_each_loop(engine: Engine) -> None:
    async with served(engine) as (client, _):
        response = await client.post(TRACE, json={"prompt": [5, 6, 7], "loops": 3, "top": 2})
        metrics = (await client.get("/metrics")).text
    assert response.json() == json.loads(engine.model.trace([5, 6, 7], loops=3, top=2).to_json())
    held_to(response.json(), TRACE, "post", 200)
    assert "tinyloop_loops_total 9.0" in metrics, "three tokens and three loops are counted"


@pytest.mark.parametrize(
    ("fields", "param", "bound"),
    [({"prompt": [1] * 129}, "prompt", "128"), ({"prompt": []}, "prompt", "empty"), ({"loops": 99}, "loops", "8"),
     ({"top": 21}, "top", "20"), ({"prompt": [999]}, "prompt", "below")],
)  # fmt: skip
async def test_a_trace_that_cannot_be_is_400_and_names_the_bound(
    engine: Engine, fields: dict[str, Any], param: str, bound: str
) -> None:
    async with served(engine) as (client, _):
        response = await client.post(TRACE, json={"prompt": [1], **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert bound in response.json()["error"]["message"]


async def test_others_get_their_tokens_while_a_prompt_is_traced(engine: Engine) -> None:
    """Between two loops of a trace there is a turn of the dispatcher. A trace holds a place in the queue."""
    loops: list[int] = []  # tokens of the stream at each loop of a trace
    seen: list[str] = []
    trace_loop = engine.trace_loop

    async def counted(tracing: Any) -> None:
        loops.append(len(seen))
        await trace_loop(tracing)

    async with listening(engine, max_queue_depth=3) as (client, _):
        engine.trace_loop = counted  # type: ignore[method-assign]
        ask = {"prompt": [1] * 100, "loops": 8}
        async with client.stream("POST", COMPLETIONS, json=body(max_tokens=100, stream=True, loops=1)) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            traces = [asyncio.create_task(client.post(TRACE, json=ask)) for _ in range(2)]
            async for line in lines:
                seen.append(line)
        answers = await asyncio.gather(*traces)
        del engine.trace_loop
        assert not client.server.scheduler.door.arriving  # type: ignore[attr-defined]
    assert [answer.status_code for answer in answers] == [200, 200]
    during = [count for count in loops if count < len(seen)]
    assert len(during) > 4
    assert len(set(during)) > 4, "tokens came between its loops"
