"""The published OpenAI client, validating strictly, against a whole server with a tiny model on a real port."""

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from server.engine import Engine
from server.settings import Settings
from tests.http_support import listening
from tests.tiny_models import tiny_model

MESSAGES: Any = [{"role": "user", "content": "Weather in Oslo?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Weather(BaseModel):
    sky: Literal["clear", "rain"]
    celsius: int = Field(ge=-60, le=60)


@pytest.fixture
async def sdk() -> AsyncIterator[openai.AsyncOpenAI]:
    engine = Engine(tiny_model("ouro", pages=4000, max_position_embeddings=2048))
    settings = Settings(drain_timeout_s=1.0, api_keys=("secret",))
    async with (
        listening(engine, settings) as (client, _),
        openai.AsyncOpenAI(
            base_url=f"{client.base_url}/v1",
            api_key="secret",
            max_retries=0,
            _strict_response_validation=True,
        ) as sdk,
    ):
        yield sdk
    await engine.close()


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    (card,) = [model async for model in sdk.models.list()]
    assert (await sdk.models.retrieve(card.id)).id == "tiny"


async def test_a_wrong_key_is_an_authentication_error(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        await sdk.with_options(api_key="other").models.list()
    assert caught.value.code == "invalid_api_key"
    assert caught.value.request_id


async def test_a_chat_whole_and_streamed(sdk: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "seed": 7, "max_completion_tokens": 12,
                  "extra_body": {"loops": {"max": 3}}}  # fmt: skip
    whole = await sdk.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=2)
    stream = await sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(whole.choices) == 2
    assert whole.choices[0].logprobs is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert (chunks[-1].model_extra or {})["tinyloop"]["loops_used_mean"] == 3


@pytest.mark.parametrize("more", [{"echo": True}, {"logprobs": 1}])
async def test_completions_whole_and_streamed(sdk: openai.AsyncOpenAI, more: dict[str, Any]) -> None:
    """Where OpenAI itself sends null and the client's types forbid it, strictness is left out: the probability of an
    echoed first token (so not both at once), and the end of a choice that goes on."""
    asked: Any = {"model": "tiny@loops=2", "prompt": ["a", "b"], "max_tokens": 5, "seed": 1, **more}
    whole = await sdk.completions.create(**asked)
    texts = ["", ""]
    lenient = sdk.with_options(_extra_kwargs={"_strict_response_validation": False})
    async for chunk in await lenient.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert len((await sdk.completions.create(**asked, best_of=2)).choices) == 2


async def test_an_answer_of_a_type_is_parsed_whole_and_streamed(sdk: openai.AsyncOpenAI) -> None:
    parsed = await sdk.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Weather, seed=3)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    async with sdk.chat.completions.stream(
        model="tiny", messages=MESSAGES, response_format=Weather, seed=3, temperature=2
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Weather)


async def test_json_of_any_kind_is_an_object(sdk: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, response_format=form)
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)


async def test_a_tool_is_called_whole_and_streamed_and_told_the_result(sdk: openai.AsyncOpenAI) -> None:
    asked: Any = {
        "model": "tiny",
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": 5,
    }
    whole = await sdk.chat.completions.create(messages=MESSAGES, **asked)
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    assert whole.choices[0].finish_reason == "tool_calls"
    async with sdk.chat.completions.stream(messages=MESSAGES, **asked) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments
    assert "tool_calls.function.arguments.done" in kinds
    told: Any = [*MESSAGES, whole.choices[0].message.model_dump(exclude_none=True),
                 {"role": "tool", "tool_call_id": call.id, "content": "4 C"}]  # fmt: skip
    answer = await sdk.chat.completions.create(model="tiny", messages=told, max_tokens=5)
    assert answer.usage is not None


async def test_refusals_are_the_clients_own_errors(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"loops": 99})
    assert (caught.value.param, caught.value.code) == ("loops", "invalid_value")
    with pytest.raises(openai.NotFoundError):
        await sdk.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.InternalServerError) as unsupported:
        await sdk.embeddings.create(model="tiny", input="a")
    assert unsupported.value.status_code == 501
