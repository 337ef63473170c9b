"""Constrained answers: whatever the sampling and the depth, they have their form, and nobody beside them notices."""

import json
import time
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schemas import schemas
from tests.tiny_models import GREEDY, RETROFIT, tiny_model, tiny_tokenizer
from tinyloop.constraint import MAX_SCHEMA_DEPTH, grammar, json_schema
from tinyloop.errors import RequestError
from tinyloop.model import Model
from tinyloop.plan import make_plan
from tinyloop.sampling import Sampler, SamplingParams

RECORD = {
    "type": "object",
    "properties": {"t": {"type": "number", "minimum": 0, "maximum": 9}, "on": {"type": "boolean"}},
    "required": ["t", "on"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model("llama", tinyloop=RETROFIT)


def packed(model: Model, prompts: list[list[int]], each: list[SamplingParams], length: int) -> list[Any]:
    """Answers of requests that sample differently, in the same steps."""
    plan = make_plan(model.config, loops=2)
    pairs = zip(prompts, each, strict=True)
    return model._run([model._job(prompt, plan, length, params) for prompt, params in pairs])


samplings = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 5.0]),
        "top_p": st.sampled_from([1.0, 0.5, 0.0]),
        "top_k": st.sampled_from([0, 1, 20]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "min_tokens": st.sampled_from([0, 30]),
        "ignore_eos": st.booleans(),
        "seed": st.integers(0, 99),
    }
)


@settings(max_examples=60, deadline=None)
@given(schemas, samplings, st.sampled_from([1, 2, 4]))
def test_an_answer_parses_and_validates_or_was_cut(
    model: Model, schema: dict[str, Any], sampling: dict[str, Any], loops: int
) -> None:
    form = json_schema(model.tokenizer, schema)
    params = SamplingParams(**sampling, constraint=form)
    answer = model.generate([1, 2, 3], loops=loops, max_new_tokens=120, sampling=params)
    if answer.finish_reason == "stop":
        jsonschema.validate(json.loads(answer.text), schema)
    else:
        assert len(answer.token_ids) == 120


def test_the_form_ends_the_answer_at_its_last_character(model: Model) -> None:
    form = json_schema(model.tokenizer, {"const": "yes"})
    answer = model.generate([1, 2, 3], max_new_tokens=5, sampling=SamplingParams(constraint=form, ignore_eos=True))
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ('"yes"', "stop", 5)


def test_an_answer_cut_by_its_limit_says_so(model: Model) -> None:
    form = json_schema(model.tokenizer, {"const": "yes"})
    answer = model.generate([1, 2, 3], max_new_tokens=3, sampling=SamplingParams(constraint=form))
    assert (answer.text, answer.finish_reason) == ('"ye', "length")


def test_neighbours_of_a_constrained_answer_keep_every_token(model: Model) -> None:
    form = json_schema(model.tokenizer, RECORD)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    free = SamplingParams(seed=3, ignore_eos=True)
    bound = SamplingParams(seed=3, constraint=form)
    alone = [
        model.generate(prompt, loops=2, max_new_tokens=20, sampling=params).token_ids
        for prompt, params in zip(prompts, (free, bound, GREEDY), strict=True)
    ]
    together = packed(model, prompts, [free, bound, GREEDY], 20)
    assert [answer.token_ids for answer in together] == alone


def test_answers_that_share_a_constraint_do_not_share_their_progress() -> None:
    form = json_schema(tiny_tokenizer(), {"const": "ab"})
    first, second = form.start(), form.start()
    first.advance(int(first.allowed(259).argmax()))
    assert first.allowed(259).tolist() != second.allowed(259).tolist()


def test_rows_that_pad_the_vocabulary_are_never_allowed() -> None:
    mask = json_schema(tiny_tokenizer(), {}).start().allowed(300)
    assert mask[:259].any()
    assert not mask[259:].any()


def test_log_probabilities_stay_those_of_the_model() -> None:
    tokenizer = tiny_tokenizer()
    logits = np.zeros(259, np.float32)
    sampler = Sampler(SamplingParams(constraint=json_schema(tokenizer, {"const": 1}), logprobs=0, temperature=0))
    _, logprobs = sampler.choose(logits)
    assert logprobs is not None
    assert logprobs.chosen == pytest.approx(-np.log(259))


class Losing:
    """A form that is followed for two tokens and then lost."""

    def __init__(self) -> None:
        self.seen = 0

    def start(self) -> "Losing":
        return self

    def allowed(self, size: int) -> Any:
        return np.ones(size, np.bool_)

    def advance(self, token: int) -> None:
        self.seen += 1

    @property
    def lost(self) -> bool:
        return self.seen == 2

    complete = False


def test_an_answer_whose_form_is_lost_is_cut_and_its_neighbour_goes_on(model: Model) -> None:
    lost: Any = Losing()
    bound = SamplingParams(constraint=lost, temperature=0, logit_bias={258: -100, 256: -100})
    answers = packed(model, [[1, 2, 3], [4, 5, 6]], [bound, GREEDY], 9)
    assert [(answer.finish_reason, len(answer.token_ids)) for answer in answers] == [("length", 2), ("length", 9)]


def test_a_token_against_the_grammar_loses_it() -> None:
    tokenizer = tiny_tokenizer()
    progress = json_schema(tokenizer, {"const": 1}).start()
    progress.advance(tokenizer.encode("x")[0])
    assert progress.lost
    assert not progress.complete


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: list[Any] = [
    deep(MAX_SCHEMA_DEPTH),
    {"enum": list(range(5000))},
    {"enum": ["x" * 70_000]},
    {"type": "strin"},
    {"not": {"type": "string"}},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"$ref": "http://example.com/schema"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "pattern": "("},
    {"x-guidance": {"lenient": True}, "not": {"type": "string"}},
    {"properties": {"a": {"x-guidance": {"lenient": True}, "not": {"type": "string"}}}},
    {"type": ["string", 5]},
    {"enum": ["\ud800"]},
    {"anyOf": []},
    {"type": "integer", "minimum": 10**400},
    {"type": "string", "maxLength": -1},
    [],
    "text",
    True,
]


@pytest.mark.parametrize("schema", REFUSED, ids=lambda schema: json.dumps(schema)[:40])
def test_a_schema_that_cannot_be_kept_to_is_refused_by_its_name(schema: Any) -> None:
    with pytest.raises(RequestError, match="the_field") as caught:
        json_schema(tiny_tokenizer(), schema, "the_field")
    assert caught.value.field == "the_field"
    assert len(str(caught.value)) < 300


HEAVY: list[dict[str, Any]] = [
    {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"},
    {"type": "string", "pattern": "(a|b)*a(a|b){300}"},
    {"type": "array", "items": {"type": "array", "items": {"type": "string"}, "minItems": 10**6}, "minItems": 10**6},
    {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "(a|b){9,99}"} for i in range(400)}},
    {"enum": [f"word{i}" * 3 for i in range(3000)]},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
]


@pytest.mark.parametrize("schema", HEAVY, ids=lambda schema: json.dumps(schema)[:40])
def test_a_heavy_schema_is_refused_or_compiled_and_followed_within_bounds(schema: dict[str, Any]) -> None:
    """Fuel, not time, is what is bounded; the seconds are far above what it takes on a quiet machine."""
    began = time.process_time()
    try:
        progress = json_schema(tiny_tokenizer(), schema).start()
    except RequestError:
        progress = None
    for _ in range(40 if progress else 0):
        assert progress is not None
        mask = progress.allowed(259)
        if progress.lost or progress.complete:
            break
        progress.advance(int(mask.nonzero()[0][0]))
    assert time.process_time() - began < 10


def test_a_grammar_that_is_wrong_names_its_field() -> None:
    with pytest.raises(RequestError, match="tools") as caught:
        grammar(tiny_tokenizer(), "start: missing", "tools")
    assert caught.value.field == "tools"
