"""/v1/messages as the published client reads it, strictly: whole, streamed, with tools, and its errors."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import jsonschema
import pytest

from server.engine import Engine
from server.settings import Settings
from tests.http_support import INFO, ScriptedEngine, listening, named, served
from tests.test_http_forms import CALL, PARAMETERS, SCHEMA
from tests.test_replays_http import serving
from tests.tiny_models import tiny_model

URL = "/v1/messages"
TOOL: Any = {"name": "weather", "description": "Tells it.", "input_schema": PARAMETERS}
TURN: Any = [{"role": "user", "content": "Hi"}]


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": INFO.id, "max_tokens": 50, "messages": TURN, **fields}


@asynccontextmanager
async def sdk(engine: Any = None, settings: Settings | None = None) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        listening(engine, settings) as (client, _),
        anthropic.AsyncAnthropic(
            base_url=str(client.base_url), api_key="any", max_retries=0, _strict_response_validation=True
        ) as sdk,
    ):
        yield sdk


async def test_the_published_client_gets_a_message() -> None:
    async with sdk() as client:
        message = await client.messages.create(model=INFO.id, max_tokens=50, messages=TURN, extra_body={"loops": 2})
    assert message.content[0].text == "Hello world"  # type: ignore[union-attr]
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    assert message.usage.output_tokens == 11
    assert message.model_extra["tinyloop"]["loops_granted"] == 2  # type: ignore[index]


async def test_the_published_client_streams_the_events_in_order() -> None:
    async with sdk() as client:
        stream = await client.messages.create(model=INFO.id, max_tokens=5, messages=TURN, stream=True)
        events = [event async for event in stream]
        async with client.messages.stream(model=INFO.id, max_tokens=5, messages=TURN) as helper:
            final = await helper.get_final_message()
    types = [event.type for event in events]
    assert list(dict.fromkeys(types)) == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert [types.count(name) for name in dict.fromkeys(types)] == [1, 1, 5, 1, 1, 1]
    assert (final.content[0].text, final.stop_reason) == ("Hello", "max_tokens")  # type: ignore[union-attr]
    assert final.usage.output_tokens == 5


async def test_a_stop_sequence_is_told_whole_and_streamed() -> None:
    """vllm #55324"""
    async with serving() as (client, _):
        body = ask(model="tiny", temperature=0, max_tokens=24)
        text = (await client.post(URL, json=body)).json()["content"][0]["text"]
        stop = next(char for char in text if char.isprintable() and char != "\ufffd")
        whole = (await client.post(URL, json=body | {"stop_sequences": [stop]})).json()
        streamed = named((await client.post(URL, json=body | {"stop_sequences": [stop], "stream": True})).text)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop)
    assert "".join(block["text"] for block in whole["content"]) == text.partition(stop)[0]
    [delta] = [data["delta"] for name, data in streamed if name == "message_delta"]
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": stop}


async def test_system_and_blocks_become_the_conversation() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "One", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "x"},
                                          {"type": "text", "text": "Yes"}]},
        {"role": "user", "content": "Two"},
    ]  # fmt: skip
    async with served() as (client, engine):
        for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
            await client.post(URL, json=ask(messages=turns, system=system))
    first, second = (engine.tokenizer.decode(seen.prompt, skip_special=False) for seen in engine.seen)
    assert first == second
    assert "hm" not in first
    assert [first.index(text) for text in ("Be brief.", "One", "Yes", "Two")] == sorted(
        first.index(text) for text in ("Be brief.", "One", "Yes", "Two")
    )


async def test_a_last_turn_of_the_assistant_is_gone_on_with() -> None:
    async with served() as (client, engine):
        await client.post(URL, json=ask(messages=[*TURN, {"role": "assistant", "content": "The answer is"}]))
    assert engine.tokenizer.decode(engine.seen[0].prompt, skip_special=False).endswith("assistant\nThe answer is")


async def test_count_tokens_is_what_a_message_counts() -> None:
    async with sdk(ScriptedEngine(max_context=4000)) as client:
        fields: Any = {"model": INFO.id, "messages": TURN, "system": "Be brief.", "tools": [TOOL]}
        counted = await client.messages.count_tokens(**fields)
        made = await client.messages.create(max_tokens=3, **fields)
        long = await client.messages.count_tokens(model=INFO.id, messages=[{"role": "user", "content": "x" * 5000}])
    assert counted.input_tokens == made.usage.input_tokens
    assert long.input_tokens > 5000


async def test_a_tool_is_used_and_its_result_given_back() -> None:
    engine = ScriptedEngine(f"Let me see.{CALL}", max_context=4000)
    async with sdk(engine) as client:
        asked: Any = {"model": INFO.id, "max_tokens": 300, "tools": [TOOL]}
        message = await client.messages.create(messages=TURN, **asked)
        async with client.messages.stream(messages=TURN, **asked) as stream:
            streamed = await stream.get_final_message()
        text, call = message.content
        assert message.stop_reason == streamed.stop_reason == "tool_use"
        assert (text.text, call.name, call.input) == ("Let me see.", "weather", {"city": "Oslo"})  # type: ignore[union-attr]
        assert streamed.content[1].input == {"city": "Oslo"}  # type: ignore[union-attr]
        result: Any = {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]},  # type: ignore[union-attr]
            {"type": "text", "text": "And now?"},
        ]}  # fmt: skip
        engine.script = "It rains."
        said: Any = {"role": "assistant", "content": message.content}
        answer = await client.messages.create(messages=[*TURN, said, result], **asked)
    assert answer.content[0].text == "It rains."  # type: ignore[union-attr]
    prompt = engine.tokenizer.decode(engine.seen[-1].prompt)
    assert prompt.rindex("Oslo") < prompt.rindex("rain") < prompt.rindex("And now?")


@pytest.mark.parametrize(("choice", "demanded"), [("auto", False), ("any", True), ("tool", True), ("none", False)])
async def test_a_tool_choice_says_whether_a_tool_must_be_used(choice: str, demanded: bool) -> None:
    engine = Engine(tiny_model("ouro", pages=4000, max_position_embeddings=2048))
    chosen = {"type": choice} | ({"name": "weather"} if choice == "tool" else {})
    async with served(engine) as (client, _):
        body = ask(model="tiny", tools=[TOOL], tool_choice=chosen, max_tokens=150, seed=1)
        answer = (await client.post(URL, json=body)).json()
    await engine.close()
    used = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert bool(used) >= demanded
    for block in used:
        jsonschema.validate(block["input"], PARAMETERS)
    assert choice != "none" or not used


async def test_an_output_format_is_kept_to_and_an_effort_is_a_depth() -> None:
    engine = Engine(tiny_model("ouro", pages=4000, max_position_embeddings=2048))
    async with served(engine) as (client, _):
        config = {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}
        answer = (await client.post(URL, json=ask(model="tiny", output_config=config, max_tokens=150, seed=1))).json()
    await engine.close()
    jsonschema.validate(json.loads(answer["content"][0]["text"]), SCHEMA)
    assert answer["tinyloop"]["loops_granted"] == 2


async def test_a_key_in_its_own_header_is_a_key() -> None:
    async with served(settings=Settings(api_keys=("mine",))) as (client, _):
        missing = await client.post(URL, json=ask())
        given = await client.post(URL, json=ask(), headers={"x-api-key": "mine"})
    assert (missing.status_code, missing.json()["error"]["type"]) == (401, "authentication_error")
    assert given.status_code == 200


async def test_errors_have_their_shape_and_the_client_its_classes() -> None:
    async with served() as (client, _):
        response = await client.post(URL, json=ask(model="other"))
    assert response.json() == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "The model `other` does not exist. Served models: tiny/loop."},
        "request_id": response.headers["x-request-id"],
    }
    async with sdk(ScriptedEngine(fail_after=2)) as client:
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="other", max_tokens=5, messages=TURN)
        with pytest.raises(anthropic.BadRequestError, match="maximum context length is 400"):
            await client.messages.create(model=INFO.id, max_tokens=1000, messages=TURN)
        stream = await client.messages.create(model=INFO.id, max_tokens=5, messages=TURN, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="internal error"):
            async for _ in stream:
                pass


async def test_a_silent_stream_pings() -> None:
    async with served(ScriptedEngine("ab", delay_s=0.08), Settings(keepalive_s=0.02)) as (client, _):
        names = [name for name, _ in named((await client.post(URL, json=ask(stream=True))).text)]
    assert names[0] == "ping"
    assert names.count("message_start") == names.count("message_stop") == 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens: should be greater than or equal to 1"),
        ({"temperature": 1.5}, "temperature: should be less than or equal to 1"),
        ({"messages": []}, "messages: should have at least 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "tool_result or thinking"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 3}}}, "output_config.format.schema"),
        ({"container": "x"}, "container is not supported"),
        ({"nonsense": 1}, "Unknown parameter: 'nonsense'"),
    ],
)
async def test_what_is_wrong_is_400_and_named(fields: dict[str, Any], says: str) -> None:
    async with served() as (client, engine):
        response = await client.post(URL, json=ask(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert says in error["message"], error
    assert not engine.seen
