"""Structured output and tools over HTTP: the answer has its form, streamed or not, at any depth; tools are called in
the published shape."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from server.engine import Engine
from tests.http_support import ScriptedEngine, chat, completion, events, served
from tests.tiny_models import tiny_model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"t": {"type": "integer", "minimum": 0, "maximum": 40}, "sky": {"enum": ["clear", "rain"]}},
    "required": ["t", "sky"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA}}
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "clock"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(tiny_model("ouro", pages=4000, max_position_embeddings=2048))
    yield engine
    asyncio.run(engine.close())
    engine.check()


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 150, "seed": 1, **fields}


def talking(script: str = "Hello") -> ScriptedEngine:
    return ScriptedEngine(script, max_context=2000)


async def post(client: httpx.AsyncClient, body: dict[str, Any], url: str = CHAT) -> dict[str, Any]:
    response = await client.post(url, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


@pytest.mark.parametrize("loops", [1, 3])
@pytest.mark.parametrize("temperature", [0, 2])
async def test_an_answer_validates_streamed_or_not(engine: Engine, loops: int, temperature: float) -> None:
    body = ask(response_format=FORMAT, loops=loops, temperature=temperature)
    async with served(engine) as (client, _):
        whole = await post(client, body)
        streamed = events((await client.post(CHAT, json={**body, "stream": True})).text)[:-1]
    content = whole["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads(content), SCHEMA)
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in streamed) == content


async def test_every_choice_of_every_prompt_has_the_form(engine: Engine) -> None:
    body = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "max_tokens": 150, "seed": 2, "response_format": FORMAT}
    async with served(engine) as (client, _):
        choices = (await post(client, body, COMPLETIONS))["choices"]
    for choice in choices:
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)
    assert len({choice["text"] for choice in choices}) > 1


async def test_an_answer_without_a_schema_is_an_object_or_was_cut(engine: Engine) -> None:
    async with served(engine) as (client, _):
        for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "any"}}):
            choice = (await post(client, ask(response_format=form, seed=5)))["choices"][0]
            assert choice["message"]["content"].startswith("{")
            assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)


async def test_an_answer_cut_by_its_limit_says_so(engine: Engine) -> None:
    async with served(engine) as (client, _):
        choice = (await post(client, ask(response_format=FORMAT, max_tokens=3)))["choices"][0]
    assert choice["finish_reason"] == "length"


async def test_plain_text_may_be_asked_for(engine: Engine) -> None:
    async with served(engine) as (client, _):
        free, text = [
            await post(client, ask(max_tokens=20, **more)) for more in ({}, {"response_format": {"type": "text"}})
        ]
    assert free["choices"][0]["message"] == text["choices"][0]["message"]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "strin"}, "Invalid type"),
        ({"not": {}}, "not"),
        ({"enum": ["x" * 70_000]}, "characters"),
        ([], "object"),
        ({"type": "object", "properties": {"a": {"$ref": "https://example.com"}}}, "example.com"),
    ],
)
async def test_a_schema_that_cannot_be_kept_to_is_400_and_named(schema: Any, said: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with served() as (client, engine):
        for url, body in ((CHAT, chat(response_format=form)), (COMPLETIONS, completion(response_format=form))):
            response = await client.post(url, json=body)
            assert response.status_code == 400, response.text
            assert "response_format" in response.json()["error"]["param"]
            assert "schema" in response.json()["error"]["message"]
            assert said in response.json()["error"]["message"]
    assert not engine.seen


@pytest.mark.parametrize(
    "form", [{"type": "xml"}, {}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}]
)
async def test_a_format_that_is_none_is_400(form: Any) -> None:
    async with served() as (client, _):
        response = await client.post(CHAT, json=chat(response_format=form))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"


# Tools


def arguments(call: dict[str, Any]) -> Any:
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    return json.loads(call["function"]["arguments"])


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
@pytest.mark.parametrize("loops", [1, 2])
async def test_a_call_that_is_demanded_is_made_and_keeps_to_its_schema(
    engine: Engine, choice: Any, reason: str, loops: int
) -> None:
    body = ask(tools=TOOLS[:1], tool_choice=choice, parallel_tool_calls=False, loops=loops, temperature=2)
    async with served(engine) as (client, _):
        answer = (await post(client, body))["choices"][0]
        response = await client.post(CHAT, json={**body, "stream": True})
    jsonschema.validate(arguments(answer["message"]["tool_calls"][0]), PARAMETERS)
    assert answer["message"]["content"] is None
    assert answer["finish_reason"] == reason
    chunks = events(response.text)[:-1]
    deltas = [c["choices"][0]["delta"]["tool_calls"][0] for c in chunks if "tool_calls" in c["choices"][0]["delta"]]
    streamed = "".join(delta["function"]["arguments"] for delta in deltas)
    assert streamed == answer["message"]["tool_calls"][0]["function"]["arguments"]
    assert chunks[-1]["choices"][0]["finish_reason"] == reason


async def test_when_a_call_is_free_the_tools_are_told_and_calls_are_found() -> None:
    async with served(talking("Let me see.\n" + CALL)) as (client, engine):
        choice = (await post(client, chat(tools=TOOLS)))["choices"][0]
    assert choice["message"]["content"] == "Let me see.\n"
    assert [arguments(call) for call in choice["message"]["tool_calls"]] == [{"city": "Oslo"}]
    assert choice["finish_reason"] == "tool_calls"
    assert '"name": "clock"' in engine.tokenizer.decode(engine.seen[0].prompt)
    assert engine.seen[0].sampling.constraint is not None


async def test_a_streamed_call_opens_once_with_id_and_name_and_then_only_grows() -> None:
    async with served(talking("Hm. " + CALL + "\n" + CALL.replace("Oslo", "Rome"))) as (client, _):
        *chunks, done = events((await client.post(CHAT, json=chat(tools=TOOLS, stream=True))).text)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hm. "
    calls = [choice["delta"]["tool_calls"][0] for choice in choices if "tool_calls" in choice["delta"]]
    first, *rest = [call for call in calls if call["index"] == 0]
    assert first == {
        "index": 0,
        "id": first["id"],
        "type": "function",
        "function": {"name": "weather", "arguments": ""},
    }
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in rest)
    assert json.loads("".join(call["function"]["arguments"] for call in rest)) == {"city": "Oslo"}
    assert [call["index"] for call in calls] == sorted(call["index"] for call in calls)
    assert len({call["id"] for call in calls if "id" in call}) == 2
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]


async def test_text_that_only_begins_like_a_call_is_text() -> None:
    for text in ("a <tool_call", "a <tool_call>\nno", "1 < 2"):
        async with served(talking(text)) as (client, _):
            whole = (await post(client, chat(tools=TOOLS)))["choices"][0]
            chunks = events((await client.post(CHAT, json=chat(tools=TOOLS, stream=True))).text)[:-1]
        assert whole["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
        assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "stop"


async def test_no_call_is_made_when_none_is_wanted() -> None:
    async with served(talking(CALL)) as (client, engine):
        choice = (await post(client, chat(tools=TOOLS, tool_choice="none")))["choices"][0]
    assert choice["message"]["content"] == CALL
    assert engine.seen[0].sampling.constraint is None


async def test_calls_and_results_go_back_to_the_model() -> None:
    made = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "1", "content": "4 C"},
    ]
    async with served() as (client, engine):
        await post(client, chat(messages=messages, max_tokens=1))
    prompt = engine.tokenizer.decode(engine.seen[0].prompt, skip_special=False)
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>" in prompt
    assert "<|im_start|>user\n<tool_response>\n4 C\n</tool_response><|im_end|>" in prompt


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": [{"type": "custom"}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "x" * 65}}]}),
    ("tools", {"tools": [TOOLS[0], TOOLS[0]]}),
    ("tools", {"tools": [TOOLS[1]] * 129}),
    ("tools[0].function.parameters", {"tools": [function(parameters={"type": "array"})]}),
    ("tools[0].function.parameters", {"tools": [function(parameters={"not": {}})]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rain"}}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": "maybe"}),
    ("messages", {"messages": [{"role": "assistant", "tool_calls": [{"function": []}]}]}),
]  # fmt: skip


@pytest.mark.parametrize(("param", "fields"), WRONG)
async def test_tools_that_cannot_be_called_are_400_and_named(param: str, fields: dict[str, Any]) -> None:
    async with served() as (client, engine):
        response = await client.post(CHAT, json=chat(**fields))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not engine.seen


async def test_only_allowed_tools_are_told() -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    async with served(talking()) as (client, engine):
        await post(client, chat(tools=TOOLS, tool_choice=choice, max_tokens=1))
    assert "clock" not in engine.tokenizer.decode(engine.seen[0].prompt)


async def test_a_schema_holds_for_what_is_no_call(engine: Engine) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 7}}}
    body = ask(tools=TOOLS, response_format=form, logit_bias={"27": -100})
    async with served(engine) as (client, _):
        choice = (await post(client, body))["choices"][0]
    assert choice["message"].get("tool_calls") or choice["message"]["content"] == "7"
