"""python langchain_openai_client.py URL: a chat, a stream, a typed answer, a tool call and Responses."""

import json
import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    sky: Literal["clear", "rain"]
    windy: bool


@tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Tells the weather."""
    return city


ASKED = "Weather in Oslo?"
CHAT = {"base_url": sys.argv[1], "api_key": "none", "model": "tiny", "seed": 7, "max_retries": 0}
model = ChatOpenAI(**CHAT, max_completion_tokens=12, stream_usage=True, extra_body={"loops": 3})
whole = model.invoke(ASKED)
pieces = list(model.stream(ASKED))
longer = ChatOpenAI(**CHAT, max_completion_tokens=300)
calls = longer.bind_tools([weather], tool_choice="any", strict=True, parallel_tool_calls=False).invoke(ASKED).tool_calls
responses = ChatOpenAI(
    base_url=sys.argv[1], api_key="none", model="tiny", use_responses_api=True, max_tokens=12, temperature=0
)
facts = {
    "whole": whole.content,
    "streamed": "".join(piece.content for piece in pieces),
    "tokens": [
        whole.usage_metadata["output_tokens"],
        sum((p.usage_metadata or {}).get("output_tokens", 0) for p in pieces),
    ],
    "typed": longer.with_structured_output(Weather).invoke(ASKED).model_dump(),
    "typed_by_a_tool": longer.with_structured_output(Weather, method="function_calling", strict=True)
    .invoke(ASKED)
    .model_dump(),
    "calls": [[call["name"], call["args"]] for call in calls],
    "responses": [responses.invoke(ASKED).text, "".join(piece.text for piece in responses.stream(ASKED))],
}
print(json.dumps(facts))
