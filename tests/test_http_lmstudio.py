"""LM Studio's REST API, v0 and v1: the shapes that its documentation shows, and chats that go on by id."""

import json
from typing import Any

import pytest

from server.settings import Settings
from tests.http_support import INFO, ScriptedEngine, chat, completion, events, named, served
from tests.test_replays_http import serving

CHAT = "/api/v1/chat"
STATS = {"tokens_per_second", "time_to_first_token", "generation_time", "stop_reason"}


def v1(**fields: Any) -> dict[str, Any]:
    return {"model": INFO.id, "input": "Hi", **fields}


# v0


async def test_v0_lists_the_model_as_loaded() -> None:
    async with served() as (client, _):
        listed = (await client.get("/api/v0/models")).json()
        one = (await client.get(f"/api/v0/models/{INFO.id}")).json()
        missing = await client.get("/api/v0/models/other")
    assert listed == {"object": "list", "data": [one]}
    assert one == {
        "id": INFO.id,
        "object": "model",
        "type": "llm",
        "publisher": "tinyloop",
        "arch": "fake",
        "compatibility_type": "safetensors",
        "quantization": "F32",
        "state": "loaded",
        "max_context_length": 400,
        "loaded_context_length": 400,
        "capabilities": ["tool_use"],
    }
    assert missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(("url", "body"), [("chat/completions", chat()), ("completions", completion())])
async def test_v0_answers_have_stats_model_info_and_runtime_beside_the_openai_shape(url: str, body: Any) -> None:
    async with served() as (client, _):
        response = await client.post(f"/api/v0/{url}", json=body | {"ttl": 300, "draft_model": "x", "loops": 2})
        plain = await client.post(f"/v1/{url}", json=body)
    answer = response.json()
    assert response.headers["x-tinyloop-loops"] == "2"
    assert set(answer) - set(plain.json()) == {"stats", "model_info", "runtime"}
    assert set(plain.json()) <= set(answer)
    assert set(answer["stats"]) == STATS
    assert answer["stats"]["stop_reason"] == "eosFound"
    assert answer["model_info"] == {"arch": "fake", "quant": "F32", "format": "safetensors", "context_length": 400}
    assert answer["runtime"]["name"] == "tinyloop-torch"


async def test_v0_streams_carry_the_facts_in_the_chunk_that_closes_a_choice() -> None:
    async with served() as (client, _):
        response = await client.post("/api/v0/chat/completions", json=chat(stream=True, max_tokens=3))
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert [("stats" in chunk, chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [
        *[(False, None)] * (len(chunks) - 1),
        (True, "length"),
    ]
    assert chunks[-1]["stats"]["stop_reason"] == "maxPredictedTokensReached"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"max_tokens": 4}, "maxPredictedTokensReached"), ({"max_tokens": -1}, "contextLengthReached")],
)
async def test_v0_says_which_length_ended_an_answer(fields: dict[str, Any], reason: str) -> None:
    async with served(ScriptedEngine("x" * 500)) as (client, _):
        answer = (await client.post("/api/v0/completions", json=completion(**fields))).json()
    assert answer["stats"]["stop_reason"] == reason


async def test_v0_says_that_a_stop_text_ended_an_answer() -> None:
    async with serving() as (client, _):
        body = {"model": "tiny", "prompt": [5, 6, 7], "temperature": 0, "max_tokens": 24, "ignore_eos": True}
        text = (await client.post("/api/v0/completions", json=body)).json()["choices"][0]["text"]
        stop = next(char for char in text if char.isprintable() and char != "\ufffd")
        answer = (await client.post("/api/v0/completions", json=body | {"stop": [stop]})).json()
    assert answer["stats"]["stop_reason"] == "stopStringFound"
    assert answer["stats"]["time_to_first_token"] > 0
    assert answer["choices"][0]["text"] == text.partition(stop)[0]


async def test_embeddings_are_refused_and_not_to_be_tried_again() -> None:
    async with served() as (client, _):
        response = await client.post("/api/v0/embeddings", json={"model": INFO.id, "input": "a"})
    assert response.status_code == 501
    assert response.json()["error"]["type"] == "not_supported_error"
    assert response.headers["x-should-retry"] == "false"


# v1


async def test_v1_lists_the_model_with_its_instance_and_efforts() -> None:
    async with served() as (client, _):
        [model] = (await client.get("/api/v1/models")).json()["models"]
    assert set(model) == {
        "type", "publisher", "key", "display_name", "architecture", "quantization", "size_bytes", "params_string",
        "loaded_instances", "max_context_length", "format", "capabilities", "description",
    }  # fmt: skip
    assert model["quantization"] == {"name": "F32", "bits_per_weight": 32}
    assert (model["params_string"], model["size_bytes"]) == ("1M", 4_000_000)
    [instance] = model["loaded_instances"]
    assert instance["id"] == INFO.id
    assert instance["config"]["context_length"] == 400
    assert model["capabilities"]["reasoning"] == {
        "allowed_options": ["off", "low", "medium", "high", "on"],
        "default": "medium",
    }


async def test_v1_chat_answers_in_its_shape() -> None:
    async with served() as (client, engine):
        response = await client.post(CHAT, json=v1(system_prompt="Be brief.", temperature=0.5, max_output_tokens=5))
    answer = response.json()
    assert set(answer) == {"model_instance_id", "output", "stats", "response_id", "tinyloop"}
    assert answer["output"] == [{"type": "message", "content": "Hello"}]
    assert set(answer["stats"]) == {
        "input_tokens", "total_output_tokens", "reasoning_output_tokens", "tokens_per_second",
        "time_to_first_token_seconds",
    }  # fmt: skip
    assert answer["stats"]["total_output_tokens"] == 5
    assert answer["stats"]["input_tokens"] == len(engine.seen[0].prompt)
    assert "Be brief." in engine.tokenizer.decode(engine.seen[0].prompt)


async def test_a_chat_goes_on_from_the_response_it_names() -> None:
    async with served() as (client, engine):
        first = (await client.post(CHAT, json=v1(system_prompt="Be brief.", input="One"))).json()
        second = await client.post(CHAT, json=v1(input="Two", previous_response_id=first["response_id"]))
        third = v1(input="Three", previous_response_id=second.json()["response_id"], system_prompt="Be long.")
        await client.post(CHAT, json=third)
        texts = [engine.tokenizer.decode(seen.prompt) for seen in engine.seen]
    assert texts[1].startswith(texts[0])
    assert "Hello world" in texts[1]
    assert texts[1].index("One") < texts[1].index("Two")
    assert "Be brief." not in texts[2]
    assert texts[2].index("Be long.") < texts[2].index("One") < texts[2].index("Three")


async def test_an_answer_that_is_not_kept_has_no_id() -> None:
    async with served() as (client, _):
        assert "response_id" not in (await client.post(CHAT, json=v1(store=False))).json()
    async with served(settings=Settings(store_bytes=100)) as (client, _):
        assert "response_id" not in (await client.post(CHAT, json=v1())).json()


async def test_what_one_key_has_kept_does_not_exist_for_another() -> None:
    async with served(settings=Settings(api_keys=("one", "two"))) as (client, engine):
        first = await client.post(CHAT, json=v1(), headers={"authorization": "Bearer one"})
        body = v1(previous_response_id=first.json()["response_id"])
        response = await client.post(CHAT, json=body, headers={"authorization": "Bearer two"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "previous_response_not_found"
    assert len(engine.seen) == 1


async def test_v1_streams_its_named_events_in_order_and_the_result_last() -> None:
    async with served() as (client, _):
        response = await client.post(CHAT, json=v1(stream=True, loops=2))
        whole = (await client.post(CHAT, json=v1(loops=2))).json()
    assert response.headers["x-tinyloop-loops"] == "2"
    found = named(response.text)
    names = list(dict.fromkeys(name for name, _ in found))
    assert names == [
        "chat.start", "prompt_processing.start", "prompt_processing.end", "message.start", "message.delta",
        "message.end", "chat.end",
    ]  # fmt: skip
    assert "".join(data["content"] for name, data in found if name == "message.delta") == "Hello world"
    result = found[-1][1]["result"]
    assert set(result) == set(whole)
    assert result["output"] == whole["output"]
    assert result["tinyloop"]["loops_requested"] == 2
    assert "[DONE]" not in response.text


async def test_a_silent_v1_stream_tells_how_far_the_prompt_has_been_read() -> None:
    async with served(ScriptedEngine("ab", delay_s=0.08), Settings(keepalive_s=0.02)) as (client, _):
        names = [name for name, _ in named((await client.post(CHAT, json=v1(stream=True))).text)]
    assert names[:3] == ["chat.start", "prompt_processing.start", "prompt_processing.progress"]
    assert names.count("chat.start") == names.count("prompt_processing.end") == names.count("chat.end") == 1


async def test_an_error_in_the_middle_of_a_v1_stream_is_an_event_and_chat_end_is_last() -> None:
    async with served(ScriptedEngine(fail_after=2)) as (client, _):
        found = named((await client.post(CHAT, json=v1(stream=True))).text)
    assert [name for name, _ in found[-2:]] == ["error", "chat.end"]
    assert found[-2][1]["error"]["type"] == "internal_error"
    assert "secret" not in json.dumps(found)
    assert found[-1][1]["result"]["output"][0]["content"] == "He"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"seed": 1}, "seed", "Unrecognized key(s) in object: 'seed'"),
        ({"messages": []}, "messages", "Unrecognized key(s)"),
        ({"integrations": ["mcp/x"]}, "integrations", "not supported"),
        ({"temperature": 1.5}, "temperature", "less than or equal to 1"),
        ({"input": [{"type": "image", "data_url": "data:x"}]}, "input", "'message' or 'text'"),
        ({"input": []}, "input", "at least 1"),
        ({"reasoning": "huge"}, "reasoning", "'off'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": 1000}, "input", "maximum context length is 400"),
        ({"context_length": 10}, "context_length", "context_length is 10"),
        ({"loops": 9}, "loops", "between 1 and 8"),
    ],
)
async def test_v1_is_strict_and_names_the_field(fields: dict[str, Any], param: str, says: str) -> None:
    async with served() as (client, engine):
        response = await client.post(CHAT, json=v1(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request", param)
    assert says in error["message"]
    assert not engine.seen


async def test_the_parts_of_an_input_are_one_turn() -> None:
    parts = [{"type": "text", "content": "One"}, {"type": "message", "content": "Two"}]
    async with served() as (client, engine):
        await client.post(CHAT, json=v1(input=parts))
    text = engine.tokenizer.decode(engine.seen[0].prompt)
    assert "One\nTwo" in text
    assert text.count("user") == 1


@pytest.mark.parametrize(("word", "loops"), [("off", 1), ("low", 2), ("medium", 4), ("high", 4), ("on", 4)])
async def test_v1_reasoning_is_a_depth(word: str, loops: int) -> None:
    async with served() as (client, engine):
        await client.post(CHAT, json=v1(reasoning=word))
    assert engine.seen[0].loops == loops


async def test_a_clients_own_context_bounds_the_answer() -> None:
    async with served() as (client, engine):
        await client.post(CHAT, json=v1(context_length=60))
    assert len(engine.seen[0].prompt) + engine.seen[0].max_new_tokens == 60


async def test_loading_finds_the_model_there_and_unloading_is_refused() -> None:
    async with served() as (client, _):
        loaded = await client.post("/api/v1/models/load", json={"model": INFO.id})
        echoed = await client.post("/api/v1/models/load", json={"model": INFO.id, "echo_load_config": True})
        deep = await client.post("/api/v1/models/load", json={"model": INFO.id, "context_length": 401})
        other = await client.post("/api/v1/models/load", json={"model": "other"})
        unloaded = await client.post("/api/v1/models/unload", json={"instance_id": INFO.id})
    assert loaded.json() == {"type": "llm", "instance_id": INFO.id, "load_time_seconds": 0.0, "status": "loaded"}
    assert echoed.json()["load_config"]["context_length"] == 400
    assert (deep.status_code, deep.json()["error"]["param"]) == (400, "context_length")
    assert (other.status_code, other.json()["error"]["type"]) == (404, "model_not_found")
    assert (unloaded.status_code, unloaded.json()["error"]["type"]) == (501, "not_implemented")
