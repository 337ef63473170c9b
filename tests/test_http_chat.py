"""POST /v1/chat/completions: what clients send is understood, what they get back has the published shape."""

import json
from typing import Any

import pytest

from server.settings import Settings
from tests.http_support import INFO, ScriptedEngine, chat, events, scheduler_of, served

URL = "/v1/chat/completions"


async def post(engine: ScriptedEngine | None = None, **fields: Any) -> Any:
    async with served(engine) as (client, _):
        return await client.post(URL, json=chat(**fields))


async def stream(engine: ScriptedEngine | None = None, **fields: Any) -> list[Any]:
    response = await post(engine, stream=True, **fields)
    assert response.status_code == 200, response.text
    return events(response.text)


async def test_an_answer_has_the_published_shape() -> None:
    response = await post(max_tokens=5, loops=2)
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == INFO.id
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 5
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 5
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert body["tinyloop"]["loops_requested"] == body["tinyloop"]["loops_granted"] == 2
    assert body["tinyloop"]["degraded"] is False
    assert response.headers["x-tinyloop-loops"] == "2"


async def test_a_stream_keeps_its_id_and_names_the_role_once_and_ends_with_done() -> None:
    *chunks, done = await stream()
    assert done == "[DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("role") for delta in deltas].count("assistant") == 1
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello world"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]


@pytest.mark.parametrize("options", [{}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}])
async def test_usage_is_streamed_only_on_request(options: dict[str, Any]) -> None:
    assert all("usage" not in chunk for chunk in (await stream(**options))[:-1])


async def test_the_usage_chunk_comes_last_with_no_choices_and_tells_the_depth() -> None:
    *chunks, last, _ = await stream(stream_options={"include_usage": True}, loops=3)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len("Hello world")
    assert last["tinyloop"]["loops_requested"] == 3


async def test_running_usage_counts_up() -> None:
    chunks = await stream(stream_options={"include_usage": True, "continuous_usage_stats": True}, max_tokens=3)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]][-3:] == [3, 3, 3]


async def test_each_choice_of_a_stream_finishes_exactly_once() -> None:
    chunks = (await stream(n=3, max_tokens=4))[:-1]
    finished = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(finished) == [0, 1, 2]
    roles = [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1, 2]


async def test_a_stream_never_cuts_a_character() -> None:
    script = "né 🙂 日本\u2028x"
    response = await post(ScriptedEngine(script), stream=True)
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in events(response.text)[:-1])
    assert text == script
    assert "\u2028" not in response.text  # some clients would split the event there


async def test_every_choice_draws_from_its_own_seed_and_the_first_from_the_given_one() -> None:
    async with served() as (client, engine):
        body = (await client.post(URL, json=chat(n=3, seed=1715852364, max_tokens=1))).json()
        seeds = [req.sampling.seed for req in engine.seen]
        await client.post(URL, json=chat(n=3, seed=1715852364, max_tokens=1))
    assert len(body["choices"]) == 3
    assert seeds[0] == 1715852364
    assert len(set(seeds)) == 3
    assert [req.sampling.seed for req in engine.seen[3:]] == seeds


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**80])
async def test_any_whole_number_is_a_seed(seed: int) -> None:
    assert (await post(seed=seed, max_tokens=1)).status_code == 200


async def test_sampling_fields_reach_the_engine() -> None:
    async with served() as (client, engine):
        fields = {
            "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
            "repetition_penalty": 1.1, "logit_bias": {"65": -100}, "seed": 7, "stop": "END", "stop_token_ids": [66],
            "include_stop_str_in_output": True, "min_tokens": 2, "ignore_eos": True, "logprobs": True,
            "top_logprobs": 3, "cache_window": 16, "cache_salt": "s", "request_id": "r-1",
        }  # fmt: skip
        assert (await client.post(URL, json=chat(**fields))).status_code == 200
    sampling = engine.seen[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
    assert (sampling.logit_bias, sampling.seed, sampling.stop) == ({65: -100}, 7, ("END",))
    assert (sampling.stop_token_ids, sampling.include_stop, sampling.min_tokens) == ((66,), True, 2)
    assert (sampling.ignore_eos, sampling.logprobs) == (True, 3)
    assert (engine.seen[0].cache_window, engine.seen[0].cache_salt, engine.seen[0].request_id) == (16, "s", "r-1")


async def test_what_a_client_leaves_out_or_sets_to_null_is_the_default() -> None:
    async with served() as (client, engine):
        nulls = dict.fromkeys(("temperature", "top_p", "seed", "stop", "tools", "response_format", "logit_bias"))
        await client.post(URL, json=chat(**nulls))
    assert engine.seen[0].sampling.temperature == 1.0
    assert engine.seen[0].max_new_tokens == INFO.max_context - len(engine.seen[0].prompt)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 9}, 9),
        ({"max_tokens": 9, "max_completion_tokens": 3}, 3),
        ({"max_completion_tokens": 1}, 1),
        ({"max_tokens": 0}, 0),
    ],
)
async def test_the_limit_is_what_the_client_says(fields: dict[str, int], expected: int) -> None:
    response = await post(**fields)
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == expected


async def test_no_limit_means_the_default_and_minus_one_the_rest_of_the_context() -> None:
    async with served(settings=Settings(default_max_tokens=7)) as (client, engine):
        await client.post(URL, json=chat())
        await client.post(URL, json=chat(max_tokens=-1))
    prompt = len(engine.seen[0].prompt)
    assert [req.max_new_tokens for req in engine.seen] == [7, INFO.max_context - prompt]


MESSAGES: list[list[dict[str, Any]]] = [
    [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    [{"role": "developer", "content": "s"}, {"role": "user", "content": "u"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    [{"role": "user", "content": "u"}, {"role": "assistant", "content": None}, {"role": "user", "content": "v"}],
    [{"role": "user", "content": "u"}, {"role": "assistant", "content": []}, {"role": "user", "content": "v"}],
    [
        {"role": "user", "content": "u", "name": "n"},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ],
]


@pytest.mark.parametrize("messages", MESSAGES)
async def test_every_form_of_a_text_message_is_read(messages: list[dict[str, Any]]) -> None:
    assert (await post(messages=messages)).status_code == 200


async def test_a_function_speaks_as_a_tool() -> None:
    async with served() as (client, engine):
        await client.post(URL, json=chat(messages=[{"role": "function", "name": "f", "content": "4"}]))
        await client.post(URL, json=chat(messages=[{"role": "tool", "tool_call_id": "f", "content": "4"}]))
    assert engine.seen[0].prompt == engine.seen[1].prompt


async def test_parts_are_joined_and_the_developer_is_the_system() -> None:
    async with served() as (client, engine):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        await client.post(URL, json=chat(messages=[{"role": "developer", "content": parts}]))
    prompt = engine.tokenizer.decode(engine.seen[0].prompt, skip_special=False)
    assert prompt == "<|im_start|>system\nab<|im_end|>\n<|im_start|>assistant\n"


async def test_a_user_cannot_write_control_tokens() -> None:
    async with served() as (client, engine):
        await client.post(URL, json=chat(messages=[{"role": "user", "content": "<|im_end|>"}]))
    assert [token for token in engine.seen[0].prompt if token >= 256] == [257, 258, 257]


async def test_log_probabilities_have_the_published_shape_and_are_finite() -> None:
    body = (await post(logprobs=True, top_logprobs=2, max_tokens=2)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["H", "e"]
    assert content[0]["bytes"] == [72]
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.25, -9999.0]


async def test_streamed_log_probabilities_cover_tokens_that_show_no_text() -> None:
    chunks = (await stream(ScriptedEngine("🙂"), logprobs=True))[:-1]
    entries = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "🙂"
    assert entries[0]["token"] == "bytes:\\xf0"


@pytest.mark.parametrize(
    ("fields", "headers", "loops"),
    [
        ({}, {}, None),
        ({"loops": 2}, {}, 2),
        ({"loops": 2}, {"x-tinyloop-loops": "3"}, 2),
        ({}, {"x-tinyloop-loops": "3"}, 3),
        ({"model": f"{INFO.id}@loops=6"}, {}, 6),
        ({"model": f"{INFO.id}@loops=6", "reasoning_effort": "low"}, {}, 2),
        ({"reasoning_effort": "none"}, {}, 1),
        ({"loops": "auto"}, {}, None),
    ],
)
async def test_depth_comes_from_body_then_header_then_effort_then_name(
    fields: dict[str, Any], headers: dict[str, str], loops: int | None
) -> None:
    async with served() as (client, engine):
        response = await client.post(URL, json=chat(**fields), headers=headers)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == INFO.id
    assert engine.seen[0].loops == loops
    assert engine.seen[0].min_loops == (1 if fields.get("loops") == "auto" else None)


async def test_an_exit_threshold_makes_the_depth_adaptive() -> None:
    async with served() as (client, engine):
        await client.post(URL, json=chat(exit_threshold=0.9, min_loops=2, prefill_loops=3))
    request = engine.seen[0]
    assert (request.mode, request.exit_threshold, request.min_loops, request.prefill_loops) == ("adaptive", 0.9, 2, 3)


async def test_priority_is_taken_from_the_body_or_the_tier() -> None:
    seen: list[tuple[int, float | None]] = []
    async with served() as (client, _):
        scheduler = scheduler_of(client)
        submit = scheduler.submit

        async def spy(request: Any, *, priority: int, slo_ms: float | None) -> Any:
            seen.append((priority, slo_ms))
            return await submit(request, priority=priority, slo_ms=slo_ms)

        scheduler.submit = spy
        await client.post(URL, json=chat(priority=3, slo_ms=500, service_tier="flex"))
        await client.post(URL, json=chat(service_tier="priority"), headers={"x-tinyloop-slo-ms": "250"})
        response = await client.post(URL, json=chat(service_tier="auto"))
    assert seen == [(3, 500), (10, 250), (0, None)]
    assert response.json()["service_tier"] == "default"


async def test_an_engine_error_in_the_middle_of_a_stream_is_an_event_and_then_done() -> None:
    *_, error, done = await stream(ScriptedEngine(fail_after=2))
    assert done == "[DONE]"
    assert error["error"]["type"] == "server_error"
    assert "secret" not in json.dumps(error)


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_engine_error_before_the_first_token_is_a_real_status(streamed: bool) -> None:
    response = await post(ScriptedEngine(fail_after=0), stream=streamed)
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in response.json()["error"]["message"]


async def test_a_silent_stream_is_kept_alive_by_comments() -> None:
    engine = ScriptedEngine("ab", delay_s=0.08)
    async with served(engine, Settings(keepalive_s=0.02)) as (client, _):
        response = await client.post(URL, json=chat(stream=True))
    assert response.text.startswith(": keep-alive\n\n")
    assert events(response.text)[-1] == "[DONE]"


async def test_an_error_after_a_keep_alive_is_an_event() -> None:
    engine = ScriptedEngine("ab", delay_s=0.08, fail_after=0)
    async with served(engine, Settings(keepalive_s=0.02)) as (client, _):
        response = await client.post(URL, json=chat(stream=True))
    assert [type(item) for item in events(response.text)] == [dict, str]
    assert events(response.text)[0]["error"]["code"] == "internal_error"
