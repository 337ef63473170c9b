"""/tinyloop/v1: generation down to the token and its loops, prefixes, the queue as it is and as it changes."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from server.settings import Settings
from server.watch import MOST_UNREAD, MOST_WATCHERS, Watch
from tests.http_support import INFO, ScriptedEngine, listening, named, served, until
from tests.test_replays_http import PACE_S, counts, serving

URL = "/tinyloop/v1"
GENERATE = f"{URL}/generate"
PROMPT = [5, 6, 7]


def ask(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_new_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}


async def post(client: httpx.AsyncClient, url: str = GENERATE, status: int = 200, **fields: Any) -> dict[str, Any]:
    response = await client.post(url, json=fields)
    assert response.status_code == status, response.text
    return dict(response.json())


async def test_every_token_comes_with_its_loops_and_likeliest() -> None:
    async with serving() as (client, engine):
        answer = await post(client, **ask(loops=3, logprobs=2))
        tokens = answer["tokens"]
        assert [token["loops"] for token in tokens] == [3] * 8
        assert all(token["top"][0]["id"] == token["id"] for token in tokens)  # greedy
        assert all(token["top"][0]["logprob"] == token["logprob"] >= token["top"][1]["logprob"] for token in tokens)
        assert answer["text"] == engine.tokenizer.decode([token["id"] for token in tokens])
        assert (answer["finish_reason"], answer["prompt_tokens"], answer["loops_granted"]) == ("length", 3, 3)
        assert 0 <= answer["times_ms"]["first_token"] <= answer["times_ms"]["total"]


async def test_loops_of_an_adaptive_answer_differ_by_token() -> None:
    async with serving() as (client, _):
        answer = await post(client, **ask(loops=4, exit_threshold=0.5, max_new_tokens=40))
        loops = [token["loops"] for token in answer["tokens"]]
    assert set(loops) <= {1, 2, 3, 4}
    assert len(set(loops)) > 1


async def test_a_stream_tells_the_same_tokens_one_by_one() -> None:
    async with serving() as (client, _):
        whole = await post(client, **ask(logprobs=1))
        response = await client.post(GENERATE, json=ask(logprobs=1, stream=True))
    (first, start), *events, (last, done) = named(response.text)
    assert (first, last) == ("start", "done")
    assert start["request_id"] == response.headers["x-request-id"]
    assert [name for name, _ in events] == ["token"] * 8
    for field in ("id", "loops"):
        assert [data[field] for _, data in events] == [token[field] for token in whole["tokens"]]
    logprobs = [token["logprob"] for token in whole["tokens"]]
    assert [data["logprob"] for _, data in events] == pytest.approx(logprobs, abs=1e-4)
    assert "".join(data["text"] for _, data in events) == whole["text"] == done["text"]
    assert "tokens" not in done


async def test_scoring_gives_the_prompts_own_tokens() -> None:
    async with serving() as (client, engine):
        answer = await post(client, prompt=[5, 6, 7, 8], mode="score", prompt_logprobs=1, loops=2)
        wanted = engine.model.score([5, 6, 7, 8], loops=2)
    assert answer["tokens"] == []
    assert [token["id"] for token in answer["prompt_logprobs"]] == [6, 7, 8]
    assert [token["logprob"] for token in answer["prompt_logprobs"]] == pytest.approx(wanted, abs=1e-4)


async def test_everything_of_a_request_reaches_the_engine() -> None:
    fields = {
        "loops": 3, "min_loops": 2, "prefill_loops": 3, "cache_window": 9, "cache_salt": "s", "max_new_tokens": 7,
        "prompt_logprobs": 1, "request_id": "mine",
    }  # fmt: skip
    sampling = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "seed": 4, "include_stop": True, "min_tokens": 1, "ignore_eos": True, "logprobs": 2,
    }  # fmt: skip
    more = {"logit_bias": {"7": 1.5}, "stop": "x", "stop_token_ids": [9]}
    async with served() as (client, engine):
        await post(client, prompt="Hi", **fields, **sampling, **more)
        await post(client, prompt="Hi", exit_threshold=0.5)
    request, adaptive = engine.seen
    for name, value in fields.items():
        assert getattr(request, name) == value, name
    for name, value in sampling.items():
        assert getattr(request.sampling, name) == value, name
    assert (request.sampling.logit_bias, request.sampling.stop, request.sampling.stop_token_ids) == (
        {7: 1.5},
        ("x",),
        (9,),
    )
    assert request.prompt == engine.tokenizer.encode("Hi")
    assert (adaptive.mode, adaptive.exit_threshold) == ("adaptive", 0.5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [259]}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"mode": "dream"}, "mode"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 500}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"prompt_logprobs": 129}, "prompt_logprobs"),
        ({"loops": 9}, "loops"),
        ({"messages": []}, "messages"),
    ],
)
async def test_what_is_wrong_is_400_and_named(fields: dict[str, Any], param: str) -> None:
    async with served() as (client, engine):
        error = (await post(client, status=400, **{"prompt": "Hi", **fields}))["error"]
    assert error["param"] == param
    assert not engine.seen


# Prefixes

LONG = list(range(40, 72))


async def test_a_registered_prefix_serves_at_every_depth_until_it_is_dropped() -> None:
    async with serving(pages=2000) as (client, _):
        made = await post(client, f"{URL}/prefixes", 201, prompt=LONG, loops=3)
        again = await post(client, f"{URL}/prefixes", 201, prompt=LONG, loops=3)
        assert made == again == {"id": made["id"], "tokens": 32, "loops": 3, "cache_window": 0}
        listed = (await client.get(f"{URL}/prefixes")).json()
        assert listed == {"capacity": 16, "prefixes": [made]}
        same = await post(client, **ask(prompt=[*LONG, 1], loops=3))
        shallower = await post(client, **ask(prompt=[*LONG, 2], loops=2))
        assert (same["cached_tokens"], same["cache_hit"]) == (32, "exact")
        assert (shallower["cached_tokens"], shallower["cache_hit"]) == (32, "shallower")
        assert (await client.delete(f"{URL}/prefixes/{made['id']}")).json() == {"id": made["id"], "dropped": True}
        assert (await client.get(f"{URL}/prefixes")).json()["prefixes"] == []
        missing = await client.delete(f"{URL}/prefixes/{made['id']}")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "prefix_not_found")
        client.server.scheduler.pool.clear()  # type: ignore[attr-defined]


async def test_a_tenant_sees_uses_and_drops_only_its_own_prefixes() -> None:
    settings = Settings(api_keys=("one", "two"), drain_timeout_s=1.0)
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    async with serving(settings=settings, pages=2000) as (client, _):
        made = (await client.post(f"{URL}/prefixes", json={"prompt": LONG}, headers=one)).json()
        used = [(await client.post(GENERATE, json=ask(prompt=[*LONG, 1]), headers=key)).json() for key in (one, two)]
        listed = [(await client.get(f"{URL}/prefixes", headers=key)).json()["prefixes"] for key in (one, two)]
        dropped = await client.delete(f"{URL}/prefixes/{made['id']}", headers=two)
        client.server.scheduler.pool.clear()  # type: ignore[attr-defined]
    assert [answer["cached_tokens"] for answer in used] == [32, 0]
    assert listed == [[made], []]
    assert dropped.status_code == 404


async def test_registering_waits_for_a_turn_and_does_not_disturb_who_runs() -> None:
    async with serving(PACE_S, pages=2000) as (client, _):
        alone = await post(client, **ask(max_new_tokens=30, cache_salt="a"))
        running = asyncio.create_task(post(client, **ask(max_new_tokens=30, cache_salt="b")))
        await until(lambda: counts(client) == (0, 1))
        await post(client, f"{URL}/prefixes", 201, prompt=LONG)
        assert (await running)["text"] == alone["text"]
        client.server.scheduler.pool.clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [1], "loops": 99}, "loops"), ({"prompt": [300]}, "prompt"),
     ({"prompt": [1] * 500}, "prompt"), ({"prompt": [1] * 100, "loops": 8}, "prompt"),
     ({"prompt": [1], "cache_window": -1}, "cache_window")],
)  # fmt: skip
async def test_a_prefix_that_cannot_be_is_400_and_named(fields: dict[str, Any], param: str) -> None:
    async with serving(pages=20) as (client, _):
        assert (await post(client, f"{URL}/prefixes", 400, **fields))["error"]["param"] == param


# The queue


async def test_a_snapshot_shows_who_runs_and_who_waits() -> None:
    async with serving(max_running=1) as (client, engine):
        engine.gate.clear()
        first = asyncio.create_task(post(client, **ask(request_id="first", loops=3)))
        await until(lambda: counts(client) == (0, 1))
        second = asyncio.create_task(post(client, **ask(request_id="second", priority=4)))
        await until(lambda: counts(client) == (1, 1))
        shown = (await client.get(f"{URL}/scheduler")).json()
        engine.gate.set()
        await asyncio.gather(first, second)
        after = (await client.get(f"{URL}/scheduler")).json()
    assert (shown["queue_depth"], shown["in_flight"], shown["dispatch"]) == (1, 1, "continuous")
    running, waiting = shown["requests"]
    assert (running["label"], running["loops_granted"], running["prompt_tokens"]) == ("first", 3, 3)
    assert (waiting["label"], waiting["state"], waiting["priority"]) == ("second", "queued", 4)
    assert after["requests"] == []


async def events_of(response: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


async def test_a_watcher_sees_every_move_of_a_request() -> None:
    async with serving() as (client, _):
        async with client.stream("GET", f"{URL}/scheduler/events") as response:
            events = events_of(response)
            assert (await anext(events))[0] == "snapshot"
            await post(client, **ask(request_id="mine"))
            moves = [data for name, data in [await anext(events) for _ in range(4)] if name == "move"]
        await until(lambda: not len(client.server.scheduler.watchers))  # type: ignore[attr-defined]
    assert [(move["previous"], move["state"]) for move in moves] == [
        (None, "queued"), ("queued", "dispatched"), ("dispatched", "decoding"), ("decoding", "done"),
    ]  # fmt: skip
    assert {move["request"]["label"] for move in moves} == {"mine"}
    assert moves[-1]["request"]["outcome"] == "length"
    assert [move["at"] for move in moves] == sorted(move["at"] for move in moves)


async def test_labels_of_other_tenants_are_not_shown() -> None:
    settings = Settings(api_keys=("one", "two"), drain_timeout_s=1.0)
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    async with serving(settings=settings) as (client, engine):
        engine.gate.clear()
        running = asyncio.create_task(client.post(GENERATE, json=ask(request_id="mine"), headers=one))
        await until(lambda: counts(client) == (0, 1))
        shown = [
            (await client.get(f"{URL}/scheduler", headers=key)).json()["requests"][0]["label"] for key in (one, two)
        ]
        cancelled = await client.delete(f"{URL}/requests/mine", headers=two)
        engine.gate.set()
        assert (await running).status_code == 200
    assert shown == ["mine", None]
    assert cancelled.status_code == 404


async def test_watchers_are_bounded_and_a_drain_ends_them() -> None:
    async with listening() as (client, _):
        scheduler = client.server.scheduler  # type: ignore[attr-defined]
        watches = [scheduler.watchers.watch() for _ in range(MOST_WATCHERS - 1)]
        async with client.stream("GET", f"{URL}/scheduler/events") as response:
            events = events_of(response)
            await anext(events)
            refused = await client.get(f"{URL}/scheduler/events")
            scheduler.begin_drain()
            assert [name async for name, _ in events][-1] == "end"
        for watch in watches:
            scheduler.watchers.leave(watch)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")


async def test_a_watcher_who_does_not_read_misses_the_oldest_and_is_told() -> None:
    watch, moves = Watch(), list(range(MOST_UNREAD + 3))
    for move in moves:
        watch.tell(move)  # type: ignore[arg-type]
    assert watch.take_missed() == 3
    assert watch.take_missed() == 0
    assert [await watch.next(1) for _ in range(MOST_UNREAD)] == moves[3:]
    assert await watch.next(0.01) is None


# By name


async def test_a_request_is_cancelled_by_its_label_or_its_id() -> None:
    async with serving(max_running=1) as (client, engine):
        engine.gate.clear()
        running = asyncio.create_task(client.post(GENERATE, json=ask(request_id="a/b")))
        await until(lambda: counts(client) == (0, 1))
        waiting = asyncio.create_task(client.post(GENERATE, json=ask()))
        await until(lambda: counts(client) == (1, 1))
        key = (await client.get(f"{URL}/scheduler")).json()["requests"][1]["id"]
        for name in (key, "a/b"):
            assert (await client.delete(f"{URL}/requests/{name}")).json() == {"id": name, "cancelled": 1}
        again = await client.delete(f"{URL}/requests/{key}")
        engine.gate.set()
        answers = await asyncio.gather(running, waiting)
    assert [answer.json()["error"]["code"] for answer in answers] == ["cancelled"] * 2
    assert (again.status_code, again.json()["error"]["code"]) == (404, "request_not_found")


async def test_the_models_facts() -> None:
    async with serving(pages=100) as (client, engine):
        facts = (await client.get(f"{URL}/model")).json()
    assert (facts["id"], facts["family"], facts["vocab_size"]) == ("tiny", "ouro", 259)
    assert facts["loops"] == {"min": 1, "max": engine.info.max_loops, "default": 4, "trained": 4, "adaptive": True,
                              "exit_signals": ["gate", "distance"]}  # fmt: skip
    assert facts["pages"] == {"num_pages": 100, "available": 100, "page_size": 4}
    async with served() as (client, _):
        assert (await client.get(f"{URL}/model")).json()["id"] == INFO.id


async def test_an_engine_that_keeps_its_kv_to_itself_registers_prefixes_too() -> None:
    async with served(ScriptedEngine()) as (client, _):
        made = await post(client, f"{URL}/prefixes", 201, prompt="Hello", cache_salt="a")
        assert (await client.get(f"{URL}/prefixes")).json()["prefixes"] == [made]
