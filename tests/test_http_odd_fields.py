"""Whatever a field holds, no API breaks: each answers, or refuses by name in its own shape."""

import json
import random
from typing import Any

import pytest

from server.app import create_app
from server.scheduler import Scheduler
from tests.http_support import INFO, ScriptedEngine, served

DOCUMENT: dict[str, Any] = create_app(Scheduler(ScriptedEngine())).openapi()
BODIES: dict[str, dict[str, Any]] = {
    path: one["post"]["requestBody"]["content"]["application/json"]
    for path, one in DOCUMENT["paths"].items()
    if "requestBody" in one.get("post", {})
}
NESTED: Any = []
for _ in range(60):
    NESTED = [NESTED]
ODD: list[Any] = [
    None, True, False, 0, -1, 1.5, 1e308, 2**31, 2**63, -(2**63), "", "x", "x" * 2000, "\u0000", "\ud800", "0", [],
    [[]], [None], [0], [-1], [2**40], ["a"], [1, "a"], [{}], [{"type": "text"}], [{"type": "text", "text": "a"}],
    [{"type": 1}], [{"type": []}], [{"role": "user"}], [{"role": "user", "content": [{"type": "text", "text": None}]}],
    [{"role": "assistant", "content": None}], [{"type": "function_call"}], [{"type": "function", "name": "f"}],
    [{"type": "tool_use"}], {}, {"a": 1}, {"1": 1}, {"type": "json_schema"}, {"type": "x"}, {"type": []}, {"min": 0},
    {"ttft_ms": -1}, {"effort": 1}, {"\ud800": 1}, NESTED, {"name": "x" * 500}, [{"name": "f", "input_schema": {}}],
]  # fmt: skip
PER_PATH = 250


def fields_of(schema: dict[str, Any]) -> list[str]:
    kind = schema["$ref"].rsplit("/", 1)[-1] if "$ref" in schema else None
    return sorted((DOCUMENT["components"]["schemas"][kind] if kind else schema)["properties"])


def test_there_is_something_to_try() -> None:
    assert len(BODIES) > 10
    assert all(len(fields_of(body["schema"])) > 0 for body in BODIES.values())


@pytest.mark.parametrize("path", BODIES)
async def test_odd_fields_are_answered_or_refused(path: str) -> None:
    rng = random.Random(path)
    example, fields = BODIES[path]["example"], fields_of(BODIES[path]["schema"])
    example = example | {name: INFO.id for name in ("model", "instance_id") if name in example}
    if "tokens" in example:
        example = {"tokens": [1, 2]}
    statuses = set()
    async with served(ScriptedEngine("Hi", max_context=2000)) as (client, _):
        for _ in range(PER_PATH):
            body = example | {rng.choice(fields): rng.choice(ODD) for _ in range(rng.choice([1, 1, 2]))}
            response = await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            statuses.add(response.status_code)
            assert response.status_code in (200, 201, 400, 404, 501), (body, response.text)
            if response.status_code == 400:
                assert len(response.text) < 1000
                assert response.json()["error"]["message"]
    assert 400 in statuses
