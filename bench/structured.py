"""Random JSON schemas, answered at random depths and samplings: do all answers validate, and what does the mask cost?

python bench/structured.py --schemas 100
"""

import argparse
import json
import random
import time
from dataclasses import dataclass
from typing import Any

import jsonschema

import tinyloop as tl
from tinyloop.constraint import json_schema, prepare

LONGEST = 160  # tokens
LEAVES: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -50, "maximum": 999},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 10, "multipleOf": 0.5},
    {"enum": ["red", "green", 3, None]},
    {"type": "string", "maxLength": 12},
    {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
    {"type": "string", "format": "date"},
]


def random_schema(dice: random.Random, depth: int = 3) -> dict[str, Any]:
    kind = dice.choice(["leaf", "record", "list", "either"]) if depth else "leaf"
    if kind == "leaf":
        return dice.choice(LEAVES)
    inner = [random_schema(dice, depth - 1) for _ in range(dice.randint(1, 3))]
    if kind == "list":
        return {"type": "array", "items": inner[0], "maxItems": dice.randint(1, 3)}
    if kind == "either":
        return {"anyOf": inner}
    properties = dict(zip(dice.sample(["name", "size", "x y", "é", "tags"], len(inner)), inner, strict=True))
    required = [name for name in properties if dice.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--schemas", type=int, default=100)
    options = parser.parse_args()
    dice, model = random.Random(0), tl.Model.load(options.model)
    began = time.perf_counter()
    prepare(model.tokenizer)
    print(f"vocabulary: {time.perf_counter() - began:.2f} s")
    answers = [answered(dice, model, random_schema(dice)) for _ in range(options.schemas)]
    whole, tokens = sum(answer.whole for answer in answers), sum(answer.tokens for answer in answers)
    compile_s, mask_s = sum(answer.compile_s for answer in answers), sum(answer.mask_s for answer in answers)
    print(f"{whole} answers validate, {len(answers) - whole} were cut at {LONGEST} tokens")
    print(f"compiling: {1000 * compile_s / len(answers):.2f} ms a schema; mask: {1e6 * mask_s / tokens:.0f} us a token")


@dataclass
class Answered:
    whole: bool
    tokens: int
    compile_s: float
    mask_s: float


def answered(dice: random.Random, model: tl.Model, schema: dict[str, Any]) -> Answered:
    """Answer once whole and once as a stream; both are the same, and validate if they were not cut."""
    began = time.perf_counter()
    form = json_schema(model.tokenizer, schema)
    compile_s = time.perf_counter() - began
    temperature, top_p, seed = dice.choice([0, 0.7, 1, 2]), dice.choice([1, 0.9]), dice.randrange(99)
    sampling = tl.SamplingParams(temperature=temperature, top_p=top_p, seed=seed, constraint=form)
    prompt = model.chat([{"role": "user", "content": f"Make up an example of {json.dumps(schema)[:300]}"}])
    loops = dice.choice([1, 2, 4])
    answer = model.generate(prompt, loops=loops, max_new_tokens=LONGEST, sampling=sampling)
    pieces = model.stream(prompt, loops=loops, max_new_tokens=LONGEST, sampling=sampling)
    assert "".join(piece.text for piece in pieces) == answer.text
    whole = answer.finish_reason == "stop"
    if whole:
        jsonschema.validate(json.loads(answer.text), schema)
    mask_s = replayed(form, answer.token_ids, model.config.vocab_size)
    return Answered(whole, len(answer.token_ids), compile_s, mask_s)


def replayed(form: Any, tokens: tuple[int, ...], vocab_size: int) -> float:
    """Seconds for the masks of one answer."""
    progress, began = form.start(), time.perf_counter()
    for token in tokens:
        progress.allowed(vocab_size)
        progress.advance(token)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
