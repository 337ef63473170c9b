"""python instructor_client.py URL: a typed answer by a tool call and by a schema, whole and growing."""

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")
    sky: Literal["clear", "rain"]
    windy: bool


facts = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    with openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0) as sdk:
        client = instructor.from_openai(sdk, mode=mode)
        asked = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Weather in Oslo?"}],
            "response_model": Weather,
            "max_tokens": 300,
            "max_retries": 0,
            "seed": 7,
        }
        *_, last = client.create_partial(**asked)
        facts[mode.name] = [client.create(**asked).model_dump(), last.model_dump()]
print(json.dumps(facts))
