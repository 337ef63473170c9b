"""/v1/responses as the published client reads it, strictly: whole, streamed, gone on with, looked up, forgotten."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jsonschema
import openai
import pytest

from server.engine import Engine
from server.settings import Settings
from tests.http_support import INFO, ScriptedEngine, listening, named, served, until
from tests.test_http_forms import CALL, PARAMETERS, SCHEMA
from tests.test_replays_http import PACE_S, counts, serving
from tests.tiny_models import tiny_model

URL = "/v1/responses"
# API.md's list of what a strict reader asks for.
KEYS = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id",
    "instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p",
    "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage", "max_output_tokens",
    "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier", "prompt_cache_key",
}  # fmt: skip
TOOL = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": PARAMETERS}


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": INFO.id, "input": "Hi", **fields}


@asynccontextmanager
async def sdk(engine: Any = None, settings: Settings | None = None) -> AsyncIterator[openai.AsyncOpenAI]:
    async with listening(engine, settings) as (client, _), client_of(client) as sdk:
        yield sdk


def client_of(client: Any, key: str = "any") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{client.base_url}/v1", api_key=key, max_retries=0, _strict_response_validation=True
    )


async def test_every_key_is_there_and_null_where_there_is_nothing() -> None:
    async with served() as (client, _):
        answer = (
            await client.post(URL, json=ask(temperature=0.5, metadata={"a": "b"}, reasoning={"effort": "low"}))
        ).json()
    assert set(answer) >= KEYS
    assert (answer["status"], answer["error"], answer["incomplete_details"]) == ("completed", None, None)
    assert (answer["temperature"], answer["metadata"], answer["reasoning"]["effort"]) == (0.5, {"a": "b"}, "low")
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    [message] = answer["output"]
    assert message["content"] == [{"type": "output_text", "text": "Hello world", "annotations": [], "logprobs": []}]
    assert answer["usage"]["output_tokens"] == 11
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + 11


async def test_the_published_client_creates_and_streams() -> None:
    async with sdk() as client:
        answer = await client.responses.create(
            model=INFO.id, input="Hi", instructions="Be brief.", extra_body={"loops": 2}
        )
        stream = await client.responses.create(model=INFO.id, input="Hi", stream=True, max_output_tokens=5)
        events = [event async for event in stream]
    assert (answer.output_text, answer.status) == ("Hello world", "completed")
    assert answer.model_extra["tinyloop"]["loops_granted"] == 2  # type: ignore[index]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    assert list(dict.fromkeys(types)) == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert types.count("response.created") == types.count("response.output_item.added") == 1
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"  # type: ignore[union-attr]
    assert events[-1].response.output_text == "Hello"  # type: ignore[union-attr]


async def test_the_clients_stream_helper_assembles_the_same_answer() -> None:
    async with sdk() as client, client.responses.stream(model=INFO.id, input="Hi") as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert (final.output_text, final.status) == ("Hello world", "completed")


async def test_a_response_goes_on_from_the_one_it_names_without_its_instructions() -> None:
    async with served() as (client, engine):
        first = (await client.post(URL, json=ask(input="One", instructions="Be brief."))).json()
        streamed = await client.post(URL, json=ask(input="Two", previous_response_id=first["id"], stream=True))
        second = named(streamed.text)[-1][1]["response"]
        third = (await client.post(URL, json=ask(input="Three", previous_response_id=second["id"]))).json()
        texts = [engine.tokenizer.decode(seen.prompt) for seen in engine.seen]
    assert third["previous_response_id"] == second["id"]
    assert "Be brief." in texts[0]
    assert "Be brief." not in texts[2]
    assert [texts[2].count(word) for word in ("One", "Two", "Three", "Hello world")] == [1, 1, 1, 2]


@pytest.mark.parametrize("field", ["store", "capacity", "other key", "made up"])
async def test_what_is_not_kept_is_404(field: str) -> None:
    capacity = 0 if field == "capacity" else 1 << 20
    settings = Settings(store_bytes=capacity, api_keys=("mine", "yours"))
    async with served(settings=settings) as (client, engine):
        body = ask(store=False) if field == "store" else ask()
        headers = {"authorization": "Bearer mine"}
        first = (await client.post(URL, json=body, headers=headers)).json()
        key = "resp_0" if field == "made up" else first["id"]
        if field == "other key":
            headers = {"authorization": "Bearer yours"}
        asked = await client.post(URL, json=ask(previous_response_id=key), headers=headers)
        got = await client.get(f"{URL}/{key}", headers=headers)
        items = await client.get(f"{URL}/{key}/input_items", headers=headers)
        deleted = await client.delete(f"{URL}/{key}", headers=headers)
        cancelled = await client.post(f"{URL}/{key}/cancel", headers=headers)
    assert (asked.status_code, asked.json()["error"]["code"]) == (404, "previous_response_not_found")
    for response in (got, items, deleted, cancelled):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "response_not_found")
    assert len(engine.seen) == 1


async def test_a_kept_response_is_got_listed_and_deleted_by_the_published_client() -> None:
    async with sdk() as client:
        turns: Any = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Yes"},
                      {"role": "user", "content": [{"type": "input_text", "text": "Two"}]}]  # fmt: skip
        made = await client.responses.create(model=INFO.id, input=turns)
        assert await client.responses.retrieve(made.id) == made
        newest = [item.role async for item in client.responses.input_items.list(made.id, limit=1)]  # type: ignore[union-attr]
        oldest = [item async for item in client.responses.input_items.list(made.id, order="asc")]
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
    assert newest == ["user", "assistant", "user"]
    assert [item.content[0].text for item in oldest] == ["One", "Yes", "Two"]  # type: ignore[union-attr]


async def test_input_tokens_are_what_a_response_counts() -> None:
    async with sdk() as client:
        fields: Any = {"model": INFO.id, "input": "How many?", "instructions": "Count.", "tools": [TOOL]}
        counted = await client.responses.input_tokens.count(**fields)
        long = await client.responses.input_tokens.count(model=INFO.id, input="x" * 5000)
        fields["tools"] = []
        plain = await client.responses.input_tokens.count(**fields)
        made = await client.responses.create(**fields)
    assert plain.input_tokens == made.usage.input_tokens  # type: ignore[union-attr]
    assert counted.input_tokens > plain.input_tokens
    assert long.input_tokens > 5000


async def test_a_streamed_response_is_in_progress_until_it_is_cancelled() -> None:
    async with serving(PACE_S) as (client, _), client_of(client) as sdk:
        stream = await sdk.responses.create(
            model="tiny", input="Hi", stream=True, max_output_tokens=200, extra_body={"request_id": "mine"}
        )
        events = [await anext(stream)]
        key = events[0].response.id  # type: ignore[union-attr]
        assert (await sdk.responses.retrieve(key)).status == "in_progress"
        body = {"model": "tiny", "input": "Hi", "previous_response_id": key}
        asked = await client.post(URL, json=body)
        assert (await sdk.responses.cancel(key)).status == "cancelled"
        events += [event async for event in stream]
        assert (await sdk.responses.retrieve(key)).status == "cancelled"
        again = await client.post(f"{URL}/{key}/cancel")
    assert (asked.status_code, asked.json()["error"]["param"]) == (400, "previous_response_id")
    assert (again.status_code, again.json()["error"]["param"]) == (400, "response_id")
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.status == "cancelled"
    assert not [event for event in events if event.type == "error"]


async def test_deleting_a_response_in_progress_ends_and_forgets_it() -> None:
    async with serving(PACE_S) as (client, _), client_of(client) as sdk:
        stream = await sdk.responses.create(model="tiny", input="Hi", stream=True, max_output_tokens=200)
        key = (await anext(stream)).response.id  # type: ignore[union-attr]
        await sdk.responses.delete(key)
        assert [event async for event in stream][-1].type == "response.incomplete"
        assert (await client.get(f"{URL}/{key}")).status_code == 404


async def test_a_response_whose_reader_left_is_not_kept() -> None:
    async with serving(PACE_S) as (client, _):
        body = {"model": "tiny", "input": "Hi", "stream": True, "max_output_tokens": 200}
        async with client.stream("POST", URL, json=body) as response:
            first = await anext(response.aiter_lines())
            assert first == "event: response.created"
        await until(lambda: counts(client) == (0, 0))
        store = client.server.config.app.state.store  # type: ignore[attr-defined]
        await until(lambda: len(store) == 0)


async def test_an_error_in_the_middle_is_two_events_and_keeps_what_was_said() -> None:
    async with served(ScriptedEngine(fail_after=2)) as (client, _):
        found = named((await client.post(URL, json=ask(stream=True))).text)
        got = (await client.get(f"{URL}/{found[0][1]['response']['id']}")).json()
    (error, said), (failed, data) = found[-2:]
    assert (error, failed) == ("error", "response.failed")
    assert set(said) == {"type", "sequence_number", "code", "message", "param"}
    assert got == data["response"]
    assert got["status"] == "failed"
    assert got["output"][0]["content"][0]["text"] == "He"
    assert "secret" not in json.dumps(found)


async def test_a_silent_stream_says_that_it_is_in_progress() -> None:
    async with served(ScriptedEngine("ab", delay_s=0.08), Settings(keepalive_s=0.02)) as (client, _):
        found = named((await client.post(URL, json=ask(stream=True))).text)
    names = [name for name, _ in found]
    assert names[:3] == ["response.created", "response.in_progress", "response.in_progress"]
    assert names.count("response.created") == 1
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))


async def test_logprobs_come_where_they_are_asked_for() -> None:
    async with sdk() as client:
        include: Any = ["message.output_text.logprobs"]
        answer = await client.responses.create(model=INFO.id, input="Hi", top_logprobs=1, include=include)
        stream = await client.responses.create(model=INFO.id, input="Hi", top_logprobs=1, stream=True)
        events = [event async for event in stream]
    [part] = answer.output[0].content  # type: ignore[union-attr]
    assert [logprob.token for logprob in part.logprobs] == list("Hello world")  # type: ignore[union-attr]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [delta.logprobs[0].token for delta in deltas] == list("Hello world")


async def test_a_function_is_called_and_its_result_given_back() -> None:
    engine = ScriptedEngine(f"Let me see.{CALL}", max_context=4000)
    async with sdk(engine) as client:
        tools: Any = [TOOL]
        answer = await client.responses.create(model=INFO.id, input="Weather?", tools=tools, parallel_tool_calls=False)
        message, call = answer.output
        assert message.content[0].text == "Let me see."  # type: ignore[union-attr]
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Oslo"}, "completed")
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
        engine.script = "It rains."
        kept = await client.responses.create(model=INFO.id, input=result, tools=tools, previous_response_id=answer.id)
        whole: Any = [{"role": "user", "content": "Weather?"}, *answer.output, *result]
        sent = await client.responses.create(model=INFO.id, input=whole, tools=tools)
    assert kept.output_text == sent.output_text == "It rains."
    texts = [engine.tokenizer.decode(seen.prompt) for seen in engine.seen]
    assert texts[1] == texts[2]
    assert texts[1].index("Oslo") < texts[1].index("rain")


async def test_a_streamed_call_builds_up_the_call_that_it_ends_with() -> None:
    async with sdk(ScriptedEngine(f"Well.{CALL}", max_context=4000)) as client:
        tools: Any = [TOOL]
        stream = await client.responses.create(model=INFO.id, input="Weather?", tools=tools, stream=True)
        events = [event async for event in stream]
    types = list(dict.fromkeys(event.type for event in events))
    assert types[-6:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.function_call_arguments.delta", "response.function_call_arguments.done", "response.completed",
    ]  # fmt: skip
    arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    call = events[-1].response.output[1]  # type: ignore[union-attr]
    assert json.loads(arguments) == json.loads(call.arguments) == {"city": "Oslo"}
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [(event.output_index, event.item.type) for event in added] == [(0, "message"), (1, "function_call")]
    assert added[1].item.id == call.id


async def test_a_text_format_with_a_schema_is_kept_to() -> None:
    form = {"format": {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}}
    engine = Engine(tiny_model("ouro", pages=4000, max_position_embeddings=2048))
    async with served(engine) as (client, _):
        body = {"model": "tiny", "input": "Hi", "text": form, "max_output_tokens": 150, "seed": 1}
        answer = (await client.post(URL, json=body)).json()
    await engine.close()
    jsonschema.validate(json.loads(answer["output"][0]["content"][0]["text"]), SCHEMA)
    assert answer["text"]["format"]["schema"] == SCHEMA


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "input_text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "function_call_output"),
        ({"input": [{"role": "king", "content": "x"}]}, "input", "'user'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": 1000}, "input", "maximum context length is 400"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "auto"}, "truncation", "'disabled'"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'function'"),
        ({"tools": [TOOL, TOOL]}, "tools", "a name of its own"),
        ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters", "type object"),
        ({"tool_choice": "required"}, "tool_choice", "when tools are given"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [TOOL]}, "tool_choice", "not among the tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 3}}}, "text.format.schema", "schema"),
        ({"metadata": {"x" * 65: "a"}}, "metadata", "64"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options", "stream is true"),
        ({"nonsense": 1}, "nonsense", "Unknown parameter"),
        ({"reasoning": {"effort": "huge"}}, "reasoning", "'none'"),
    ],
)
async def test_what_is_wrong_is_400_and_named(fields: dict[str, Any], param: str, says: str) -> None:
    async with served() as (client, engine):
        response = await client.post(URL, json=ask(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert says in error["message"]
    assert not engine.seen


async def test_a_listing_has_bounds() -> None:
    async with served() as (client, _):
        key = (await client.post(URL, json=ask())).json()["id"]
        for query in ("limit=0", "limit=101", "order=up", "after=x"):
            response = await client.get(f"{URL}/{key}/input_items?{query}")
            assert (response.status_code, response.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_many_that_leave_at_any_moment_leave_nothing() -> None:
    async with serving(max_queue_depth=200) as (client, _):
        for at in range(40):
            body = {"model": "tiny", "input": "Hi", "stream": at % 2 == 0, "max_output_tokens": 20, "store": at % 3 > 0}
            task = asyncio.create_task(client.post(URL, json=body))
            await asyncio.sleep(0.001 * (at % 20))
            task.cancel()
        await until(lambda: counts(client) == (0, 0))
        store = client.server.config.app.state.store  # type: ignore[attr-defined]
        assert not [entry for entry, _ in store._entries.values() if entry.body["status"] == "in_progress"]
