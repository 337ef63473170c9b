"""Whatever is wrong with a request, the answer is an OpenAI error object with a true status."""

import asyncio
import json
import tracemalloc
from typing import Any

import httpx
import pytest

from server.errors import AdmissionRejected
from server.settings import Settings
from tests.http_support import INFO, ScriptedEngine, chat, completion, scheduler_of, served, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}


def check(response: httpx.Response, status: int, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert code is None or error["code"] == code
    assert param is None or error["param"] == param
    assert response.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b'{"a":',
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"model": "tiny/loop", "temperature": NaN}',
        b'{"model": "tiny/loop", "temperature": -Infinity}',
        b'{"model": "tiny/loop", "prompt": "a", "temperature": 1e999}',
        b'{"model": "tiny/loop", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b"[" * 200_000,
        b'{"model": "tiny/loop", "prompt": "\\ud800"}',
        b'{"model": "tiny/loop", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "\\ud800": 1}',
        b'{"model": "tiny/loop", "prompt": "a", "stream": true, "stream_options": {"\\ud800": 1}}',
        b'{"model": "tiny/loop", "messages": [{"\\ud800": 1}]}',
    ],
)
@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
async def test_a_body_that_is_not_a_json_object_of_numbers_and_text_is_400(url: str, raw: bytes) -> None:
    async with served() as (client, _):
        error = check(await client.post(url, content=raw, headers=JSON), 400)
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 200


WRONG: list[tuple[str, Any]] = [
    ("stream", "true"),
    ("temperature", "1"),
    ("temperature", -0.1),
    ("temperature", 999999),
    ("top_p", -1),
    ("top_p", 1.1),
    ("top_k", 1.5),
    ("repetition_penalty", 0),
    ("presence_penalty", 3),
    ("n", 0),
    ("n", 10**6),
    ("n", True),
    ("max_tokens", -2),
    ("max_tokens", 1.5),
    ("seed", 1.5),
    ("seed", "x"),
    ("stop", ["a", 1]),
    ("stop", ""),
    ("stop", ["x"] * 65),
    ("logit_bias", {"999999": 100}),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {str(i): 0 for i in range(2000)}),
    ("stop_token_ids", [259]),
    ("stop_token_ids", [-1]),
    ("loops", 0),
    ("loops", 99),
    ("loops", "deep"),
    ("loops", 2.0),
    ("min_loops", 9),
    ("min_loops", 5),
    ("prefill_loops", 0),
    ("cache_window", -1),
    ("slo_ms", 0),
    ("slo_ms", -5),
    ("priority", 1.5),
    ("service_tier", "gold"),
    ("reasoning_effort", "huge"),
    ("stream_options", {"include_usage": True}),
    ("request_id", "line\nbreak"),
    ("request_id", "x" * 129),
    ("model", 3),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_value_out_of_bounds_is_400_and_named(field: str, value: Any, stream: bool) -> None:
    fields = {field: value} if field in ("stream", "stream_options") else {"stream": stream, field: value}
    async with served() as (client, engine):
        for url, body in ((CHAT, chat(**fields)), (COMPLETIONS, completion(**fields))):
            assert field in check(await client.post(url, json=body), 400, "invalid_value", field)["message"]
    assert not engine.seen


async def test_loops_out_of_bounds_tells_the_bounds() -> None:
    async with served() as (client, _):
        error = check(await client.post(CHAT, json=chat(loops=99)), 400, "invalid_value", "loops")
    assert error["message"] == "loops must be between 1 and 8, got 99"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("chat_template", "{{ 1 }}"),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("functions", [{"name": "f"}]),
    ],
)
async def test_what_this_version_cannot_do_is_refused_by_name(field: str, value: Any) -> None:
    async with served() as (client, _):
        check(await client.post(CHAT, json=chat(**{field: value})), 400, "unsupported_parameter", field)


async def test_a_misspelt_field_is_refused() -> None:
    async with served() as (client, _):
        check(await client.post(CHAT, json=chat(temprature=0)), 400, "unknown_parameter", "temprature")
        body = chat(stream=True, stream_options={"include_usages": True})
        check(await client.post(CHAT, json=body), 400, "unknown_parameter", "stream_options.include_usages")


NUMBERS = (
    "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "stop_token_ids", "min_tokens", "loops", "min_loops", "prefill_loops", "exit_threshold",
    "cache_window", "priority", "slo_ms", "logprobs", "best_of", "prompt", "logit_bias",
)  # fmt: skip


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("digits", [401, 4299])
async def test_a_number_of_many_digits_is_400_and_not_repeated(field: str, digits: int) -> None:
    number: Any = int("9" * digits)
    value = {"stop_token_ids": [number], "prompt": [number], "logit_bias": {"1": number}}.get(field, number)
    async with served() as (client, engine):
        for sign in (1, -1):
            body = completion(**{field: value if isinstance(value, list | dict) else sign * value})
            assert "9" * 30 not in check(await client.post(COMPLETIONS, json=body), 400, param=field)["message"]
    assert not engine.seen


async def test_a_stop_string_that_is_too_long_is_told_its_length_in_characters() -> None:
    async with served() as (client, _):
        for stop in ("x" * 2000, ["x" * 2000]):
            error = check(await client.post(CHAT, json=chat(stop=stop)), 400, "invalid_value", "stop")
            assert "at most 1024 characters" in error["message"]
            assert "items" not in error["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{}],
        ["hi"],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "input_audio"}]}],
    ],
)
async def test_messages_that_cannot_be_read_are_400(messages: Any) -> None:
    async with served() as (client, _):
        check(await client.post(CHAT, json=chat(messages=messages)), 400, "invalid_value", "messages")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fields", [{"max_tokens": 1000}, {"prompt": "x" * 401}, {"prompt": "x" * 400}])
async def test_what_does_not_fit_the_context_is_400_before_any_byte(fields: dict[str, Any], stream: bool) -> None:
    async with served() as (client, _):
        response = await client.post(COMPLETIONS, json=completion(stream=stream, **fields))
        error = check(response, 400, "context_length_exceeded", "prompt")
        long = [{"role": "user", "content": "x" * 500}]
        check(await client.post(CHAT, json=chat(stream=stream, messages=long)), 400, "context_length_exceeded")
    assert "400 tokens" in error["message"]


async def test_a_prompt_that_fills_the_context_can_be_scored() -> None:
    async with served() as (client, _):
        body = completion(prompt="x" * 400, max_tokens=0)
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200


async def test_one_overflow_leaves_its_neighbour_alone() -> None:
    async with served(ScriptedEngine(delay_s=0.01)) as (client, _):
        good = asyncio.create_task(client.post(CHAT, json=chat()))
        await asyncio.sleep(0.02)
        check(await client.post(CHAT, json=chat(max_tokens=1000)), 400)
        assert (await good).status_code == 200


@pytest.mark.parametrize("model", ["gpt-4", "tiny/loop@deep", "tiny/loop@loops=", "tiny/loop@loops=x", ""])
async def test_an_unknown_model_is_404_and_the_served_one_is_named(model: str) -> None:
    async with served() as (client, _):
        error = check(await client.post(CHAT, json=chat(model=model)), 404, "model_not_found", "model")
        assert INFO.id in error["message"]


async def test_a_model_name_may_not_ask_for_loops_out_of_bounds() -> None:
    async with served() as (client, _):
        check(await client.post(CHAT, json=chat(model="tiny/loop@loops=99")), 400, "invalid_value", "loops")


@pytest.mark.parametrize("field", ["model", "prompt", "temperature", "loops", "x" * 3000, "logit_bias", "stop"])
async def test_an_error_never_repeats_a_long_input(field: str) -> None:
    secret = "s3cret" * 50_000
    bodies = (completion(**{field: secret}), completion(**{field: [secret]}), completion(**{field: {secret: secret}}))
    async with served() as (client, _):
        for body in bodies:
            response = await client.post(COMPLETIONS, json=body)
            assert response.status_code in (400, 404)
            assert len(response.content) < 1000
            assert "s3cret" * 20 not in response.text


async def test_a_million_wrong_elements_make_one_error() -> None:
    raw = json.dumps(completion(prompt=["a", *[1] * 500_000])).encode()
    async with served() as (client, _):
        tracemalloc.start()
        check(await client.post(COMPLETIONS, content=raw, headers=JSON), 400, "invalid_value", "prompt")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100 << 20


@pytest.mark.parametrize("declared", [True, False])
async def test_a_large_body_is_413_whether_or_not_it_says_so(declared: bool) -> None:
    raw = json.dumps(completion(prompt="x" * 5000)).encode()

    async def pieces() -> Any:
        for at in range(0, len(raw), 512):
            yield raw[at : at + 512]

    async with served(settings=Settings(max_body_bytes=2000)) as (client, _):
        response = await client.post(COMPLETIONS, content=raw if declared else pieces(), headers=JSON)
    check(response, 413, "request_too_large")


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_that_is_not_called_json_is_415(media: str) -> None:
    async with served() as (client, _):
        response = await client.post(CHAT, content=json.dumps(chat()), headers={"content-type": media})
        check(response, 415, "unsupported_media_type")
        charset = {"content-type": "application/json; charset=utf-8"}
        assert (await client.post(CHAT, content=json.dumps(chat()), headers=charset)).status_code == 200


async def test_an_unknown_route_and_a_wrong_method_have_the_same_shape() -> None:
    async with served() as (client, _):
        check(await client.get("/v1/nothing"), 404, "not_found")
        response = await client.get(CHAT)
    check(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "x", "99"])
async def test_a_header_out_of_bounds_is_400(value: str) -> None:
    async with served() as (client, _):
        check(await client.post(CHAT, json=chat(), headers={"x-tinyloop-loops": value}), 400)


async def held(client: httpx.AsyncClient, engine: ScriptedEngine, count: int) -> list[asyncio.Task[Any]]:
    """`count` requests of which one runs and the others wait."""
    engine.gate.clear()
    tasks = [asyncio.create_task(client.post(CHAT, json=chat()))]
    await until(lambda: engine.running)
    tasks += [asyncio.create_task(client.post(CHAT, json=chat())) for _ in range(count - 1)]
    await until(lambda: scheduler_of(client).snapshot()["queue_depth"] == count - 1)
    return tasks


@pytest.mark.parametrize("stream", [True, False])
async def test_a_full_queue_is_a_real_503_that_says_when_to_come_back(stream: bool) -> None:
    async with served(max_queue_depth=1) as (client, engine):
        tasks = await held(client, engine, 2)
        response = await client.post(CHAT, json=chat(stream=stream))
        check(response, 503, "queue_full")
        assert int(response.headers["retry-after"]) >= 1
        engine.gate.set()
        assert {task.status_code for task in await asyncio.gather(*tasks)} == {200}


@pytest.mark.parametrize("stream", [True, False])
async def test_choices_are_admitted_together_or_not_at_all(stream: bool) -> None:
    async with served(max_queue_depth=2) as (client, engine):
        tasks = await held(client, engine, 2)
        check(await client.post(CHAT, json=chat(stream=stream, n=3)), 503, "queue_full")
        assert scheduler_of(client).snapshot()["queue_depth"] == 1
        engine.gate.set()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_wait_longer_than_the_slo_is_503_with_the_predicted_wait(stream: bool) -> None:
    async with served() as (client, _):
        scheduler = scheduler_of(client)

        def refuse(*_: Any, **__: Any) -> Any:
            raise AdmissionRejected("predicted wait of 2500 ms exceeds the SLO of 10 ms", 2500)

        scheduler.submit = scheduler.submit_stream = refuse
        response = await client.post(CHAT, json=chat(stream=stream, slo_ms=10))
    check(response, 503, "slo_unattainable")
    assert response.headers["retry-after"] == "3"


async def test_a_draining_server_refuses_and_finishes_what_runs() -> None:
    async with served() as (client, engine):
        (task,) = await held(client, engine, 1)
        scheduler_of(client).begin_drain()
        response = await client.post(CHAT, json=chat())
        check(response, 503, "draining")
        assert int(response.headers["retry-after"]) >= 1
        engine.gate.set()
        assert (await task).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_shutdown_cancels_hears_of_it(stream: bool) -> None:
    async with served() as (client, engine):
        engine.gate.clear()
        task = asyncio.create_task(client.post(CHAT, json=chat(stream=stream)))
        await until(lambda: engine.running)
        await scheduler_of(client).shutdown(drain_timeout_s=0.01)
        check(await task, 503, "draining")


async def test_a_stream_that_shutdown_cuts_ends_with_an_error_event() -> None:
    engine = ScriptedEngine("x" * 100, delay_s=0.01)
    async with served(engine) as (client, _):
        task = asyncio.create_task(client.post(CHAT, json=chat(stream=True)))
        await until(lambda: engine.made >= 3)
        await scheduler_of(client).shutdown(drain_timeout_s=0.01)
        text = (await task).text
    assert '"code":"draining"' in text
    assert text.endswith("data: [DONE]\n\n")
