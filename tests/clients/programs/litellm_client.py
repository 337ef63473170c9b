"""python litellm_client.py URL: a chat, a stream, a typed answer, a tool call and a plain completion."""

import json
import sys
from typing import Literal

import litellm
from pydantic import BaseModel


class Weather(BaseModel):
    sky: Literal["clear", "rain"]
    windy: bool


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
WHERE = {"api_base": sys.argv[1], "api_key": "none", "seed": 7, "num_retries": 0}
CHAT = {"model": "openai/tiny", "messages": [{"role": "user", "content": "Weather in Oslo?"}], **WHERE}
whole = litellm.completion(**CHAT, max_tokens=12, extra_body={"loops": 3})
chunks = list(
    litellm.completion(
        **CHAT, max_tokens=12, extra_body={"loops": 3}, stream=True, stream_options={"include_usage": True}
    )
)
typed = litellm.completion(**CHAT, max_tokens=300, response_format=Weather)
called = litellm.completion(**CHAT, max_tokens=300, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
plain = litellm.text_completion(
    model="text-completion-openai/tiny", prompt="Oslo", max_tokens=5, extra_body={"ignore_eos": True}, **WHERE
)
facts = {
    "whole": whole.choices[0].message.content,
    "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    "tokens": [whole.usage.completion_tokens, chunks[-1].usage.completion_tokens],
    "loops": whole.model_dump()["tinyloop"]["loops_granted"],
    "typed": Weather.model_validate_json(typed.choices[0].message.content).model_dump(),
    "calls": [[c.function.name, json.loads(c.function.arguments)] for c in called.choices[0].message.tool_calls],
    "plain": plain.usage.completion_tokens,
}
print(json.dumps(facts))
