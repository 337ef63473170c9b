"""The description at /openapi.json is valid, names every route and body, and what is answered is what it says."""

import json
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import validate

from server.app import create_app
from server.scheduler import Scheduler
from server.settings import Settings
from tests.http_support import INFO, ScriptedEngine, chat, completion, events, served

APP = create_app(Scheduler(ScriptedEngine()))
DOCUMENT: dict[str, Any] = json.loads(json.dumps(APP.openapi()))
OPERATIONS = [(path, method, operation) for path, one in DOCUMENT["paths"].items() for method, operation in one.items()]
BODILESS = ("/drain", "/v1/embeddings", "/api/v0/embeddings", "/v1/responses/{response_id}/cancel")
ENDLESS = ("/metrics", "/tinyloop/v1/scheduler/events")
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def held_to(value: Any, path: str, method: str, status: int, media: str = "application/json") -> None:
    """Raises ValidationError unless `value` is what the document says, without any field that it does not name."""
    schema = DOCUMENT["paths"][path][method]["responses"][str(status)]["content"][media]["schema"]
    if media == "text/event-stream":
        schema = told_by(schema["properties"]["data"])
    jsonschema.validate(value, {**closed(schema), "components": closed(DOCUMENT["components"])})


def told_by(data: dict[str, Any]) -> dict[str, Any]:
    """What an event's data may hold: JSON, and where it says so a word that ends the stream."""
    if "anyOf" in data:
        return {"anyOf": list(map(told_by, data["anyOf"]))}
    return data.get("contentSchema", data)


def closed(schema: Any) -> Any:
    """The same with no further properties allowed in objects that have a list of them."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    listed = schema.get("type") == "object" and "properties" in schema
    return {"additionalProperties": False, **inner} if listed else inner


def test_the_document_is_valid() -> None:
    validate(DOCUMENT)


@pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS, ids=lambda value: str(value)[:30])
def test_every_operation_says_what_it_takes_and_gives(path: str, method: str, operation: dict[str, Any]) -> None:
    assert operation.get("description"), path
    for response in operation["responses"].values():
        assert "content" in response
        assert all(media["schema"] for media in response["content"].values())
    if method == "post" and path not in BODILESS:
        assert operation["requestBody"]["content"]["application/json"]["example"]
    assert "422" not in operation["responses"]


def bodies() -> list[tuple[str, dict[str, Any]]]:
    return [
        (path, operation["requestBody"]["content"]["application/json"])
        for path, _, operation in OPERATIONS
        if "requestBody" in operation
    ]


@pytest.mark.parametrize(("path", "body"), bodies(), ids=lambda value: str(value)[:30])
async def test_every_example_keeps_to_its_schema_and_is_answered(path: str, body: dict[str, Any]) -> None:
    example = body["example"]
    jsonschema.validate(example, {**body["schema"], "components": DOCUMENT["components"]})
    if "tokens" in example:
        example = {"tokens": [1, 2]}  # those of another vocabulary
    async with served(ScriptedEngine(max_context=2000)) as (client, _):
        named = example | {name: INFO.id for name in ("model", "instance_id") if name in example}
        response = await client.post(path, json=named)
    assert response.status_code == {
        "/tinyloop/v1/prefixes": 201,
        "/tinyloop/v1/trace": 501,  # of an engine without loops to show
        "/api/v1/models/unload": 501,
    }.get(path, 200)
    held_to(response.json(), path, "post", response.status_code)


CHATS: list[dict[str, Any]] = [
    chat(n=2, logprobs=True, top_logprobs=2, slo_ms={"ttft_ms": 9000}),
    chat(tools=TOOLS),
    chat(max_tokens=0),
]


@pytest.mark.parametrize("body", CHATS)
async def test_chats_are_answered_as_described(body: dict[str, Any]) -> None:
    async with served(ScriptedEngine("Hm. " + CALL, max_context=2000)) as (client, _):
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        chunks = events((await client.post("/v1/chat/completions", json={**body, **options})).text)
    held_to(whole, "/v1/chat/completions", "post", 200)
    assert chunks[-1] == "[DONE]"
    for chunk in chunks:
        held_to(chunk, "/v1/chat/completions", "post", 200, "text/event-stream")


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 2, "n": 2}, {"prompt": ["a", "b"]}, {"best_of": 2}])
async def test_completions_are_answered_as_described(fields: dict[str, Any]) -> None:
    async with served() as (client, _):
        whole = (await client.post("/v1/completions", json=completion(**fields))).json()
        single = {name: value for name, value in fields.items() if name != "best_of"}
        body = completion(**single, stream=True, stream_options={"include_usage": True})
        chunks = events((await client.post("/v1/completions", json=body)).text)
    held_to(whole, "/v1/completions", "post", 200)
    assert chunks[-1] == "[DONE]"
    for chunk in chunks:
        held_to(chunk, "/v1/completions", "post", 200, "text/event-stream")


@pytest.mark.parametrize(
    "path",
    [path for path, method, _ in OPERATIONS if method == "get" and path not in ENDLESS and "{" not in path],
)
async def test_what_is_read_is_as_described(path: str) -> None:
    async with served() as (client, _):
        response = await client.get(path)
    assert response.status_code == 200
    held_to(response.json(), path, "get", 200)


async def test_one_model_is_as_described() -> None:
    async with served() as (client, _):
        card = (await client.get(f"/v1/models/{INFO.id}")).json()
    held_to(card, "/v1/models/{name}", "get", 200)
    with pytest.raises(jsonschema.ValidationError):  # nor would a field that is not named go unseen
        held_to({**card, "odd": 1}, "/v1/models/{name}", "get", 200)


async def test_refusals_are_as_described() -> None:
    path = "/v1/chat/completions"
    async with served(settings=Settings(api_keys=("k",), max_body_bytes=1000)) as (client, _):
        answers = [await client.post(path, json=chat())]
        client.headers["authorization"] = "Bearer k"
        answers += [
            await client.post(path, json=chat(loops=99)),
            await client.post(path, json=chat(model="x")),
            await client.post(path, json=chat(user="x" * 2000)),
            await client.post(path, content="x"),
        ]
        embeddings = await client.post("/v1/embeddings", json={})
    assert [answer.status_code for answer in answers] == [401, 400, 404, 413, 415]
    for answer in answers:
        held_to(answer.json(), path, "post", answer.status_code)
    held_to(embeddings.json(), "/v1/embeddings", "post", 501)
