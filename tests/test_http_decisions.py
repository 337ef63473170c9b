"""/v1/decisions: probabilities from one readout per question, over a prefix that all share."""

import math
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server import decide
from tests.http_support import INFO, ScriptedEngine, served
from tests.test_http_responses import client_of
from tests.test_replays_http import PACE_S, serving
from tests.tiny import byte_tokenizer
from tests.tiny_models import tiny_tokenizer
from tinyloop.errors import RequestError
from tinyloop.tokenizer import Tokenizer

URL = "/v1/decisions"
INPUT = "The app crashed."
PREDICATE = {"type": "predicate", "name": "angry", "instructions": "Angry?"}
CHOICE = {"type": "choice", "name": "area", "instructions": "Area?",
          "choices": [{"value": "bug", "description": "defect"}, {"value": "billing"}, {"value": True}]}  # fmt: skip
SCORE = {"type": "score", "name": "urgency", "instructions": "Urgent?",
         "levels": [{"label": "low"}, {"label": "mid"}, {"label": "high"}]}  # fmt: skip


def ask(*questions: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": INPUT, "questions": list(questions or (PREDICATE, CHOICE, SCORE)), **fields}


async def answers(client: Any, *questions: Any, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post(URL, json=ask(*questions, **fields))
    assert response.status_code == 200, response.text
    return list(response.json()["answers"])


@pytest.mark.skipif(not hasattr(openai.AsyncOpenAI, "decisions"), reason="`make clients` brings an older openai")
async def test_the_published_client_reads_all_kinds() -> None:
    async with serving() as (client, _), client_of(client) as sdk:
        questions: Any = [PREDICATE, CHOICE, SCORE]
        decision = await sdk.decisions.create(model="tiny", input=INPUT, questions=questions, extra_body={"loops": 2})
    predicate, choice, score = decision.answers
    assert (predicate.type, choice.type, score.type) == ("predicate", "choice", "score")
    assert (predicate.name, choice.name, score.name) == ("angry", "area", "urgency")
    assert 0 < predicate.probability < 1
    assert [one.value for one in choice.probabilities] == ["bug", "billing", True]
    assert sum(one.probability for one in choice.probabilities) == pytest.approx(1)
    best = max(choice.probabilities, key=lambda one: one.probability)
    assert (choice.choice, choice.confidence) == (best.value, best.probability)
    assert [(one.value, one.label) for one in score.probabilities] == [(0, "low"), (1, "mid"), (2, "high")]
    assert score.score == pytest.approx(sum(one.value * one.probability for one in score.probabilities) / 2)
    assert decision.usage.output_tokens == 0
    assert decision.model_extra["tinyloop"]["loops_granted"] == 2  # type: ignore[index]


@pytest.mark.parametrize("loops", [1, 3])
async def test_probabilities_are_those_of_the_labels_as_the_next_token(loops: int) -> None:
    async with serving() as (client, engine):
        [answer] = await answers(client, SCORE, loops=loops)
        tokenizer = engine.tokenizer
        found = decide.labels(tokenizer, 3, "levels")
        shown = [(label, name) for (label, _), name in zip(found, ("low", "mid", "high"), strict=True)]
        question = tokenizer.encode(decide.listed("Urgent?", shown), special=False)
        prompt = decide.frame(tokenizer, INPUT).around(question)
        # An independent road to the same numbers: the prompt scored with each label behind it.
        logprobs = [engine.model.score([*prompt, token], loops=loops)[-1] for _, token in found]
    weights = [math.exp(logprob) for logprob in logprobs]
    wanted = [weight / sum(weights) for weight in weights]
    assert [one["probability"] for one in answer["probabilities"]] == pytest.approx(wanted, abs=1e-4)


async def test_the_questions_share_the_text_and_do_not_see_each_other() -> None:
    text = "x" * 20
    async with serving(pages=2000) as (client, _):
        alone = [(await answers(client, one, input=text, cache_salt="a"))[0] for one in (PREDICATE, CHOICE, SCORE)]
        response = await client.post(URL, json=ask(input=text, cache_salt="b"))
    body = response.json()
    for one, other in zip(alone, body["answers"], strict=True):
        assert one["name"] == other["name"]
        field = "probability" if "probability" in one else "confidence"
        assert one[field] == pytest.approx(other[field], abs=1e-4)
    usage = body["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] > 2 * len(text)
    assert usage["total_tokens"] == usage["input_tokens"]


async def test_many_questions_pass_through_a_short_queue() -> None:
    async with serving(max_queue_depth=8, max_running=4) as (client, engine):
        questions = [{"type": "predicate", "instructions": f"Is it {at}?"} for at in range(60)]
        found = await answers(client, *questions)
        assert engine.prepared == 60
    assert [answer["name"] for answer in found] == [None] * 60


async def test_a_conversation_is_read_as_its_turns() -> None:
    turns = [
        {"role": "user", "content": "It broke."},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Sorry."}]},
    ]
    async with served(ScriptedEngine(max_context=2000)) as (client, engine):
        await client.post(URL, json=ask(PREDICATE, input=turns, model=INFO.id))
    assert "Text:\nuser: It broke.\nassistant: Sorry.\n" in engine.tokenizer.decode(engine.seen[0].prompt)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * 401}, "questions"),
        ({"questions": [{"type": "riddle", "instructions": "?"}]}, "questions"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}]}]}, "questions"),
        ({"questions": [{**CHOICE, "choices": [{"value": str(i)} for i in range(256)]}]}, "questions"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": "a"}]}]}, "questions[0].choices"),
        ({"questions": [{**CHOICE, "choices": [{"value": str(i)} for i in range(100)]}]}, "questions[0].choices"),
        ({"questions": [{**SCORE, "levels": [{"label": "a"}]}]}, "questions"),
        ({"questions": [{**SCORE, "levels": [{"label": str(i)} for i in range(11)]}]}, "questions"),
        ({"questions": [{"type": "predicate"}]}, "questions"),
        ({"input": "x" * 500}, "input"),
        ({"input": []}, "input"),
        ({"loops": 9}, "loops"),
        ({"temperature": 1}, "temperature"),
    ],
)
async def test_what_is_wrong_is_400_and_named(fields: dict[str, Any], param: str) -> None:
    async with served() as (client, engine):
        response = await client.post(URL, json=ask(model=INFO.id) | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not engine.seen


async def test_leaving_ends_all_of_them() -> None:
    async with serving(PACE_S, max_running=1) as (client, engine):
        many: Any = [{"type": "predicate", "instructions": f"Is it {at}?"} for at in range(200)]
        with pytest.raises(httpx.ReadTimeout):
            await client.post(URL, json=ask(*many), timeout=0.3)
        assert 0 < engine.prepared < 200


def test_labels_are_single_tokens_all_different_and_as_many_as_there_are() -> None:
    tokenizer = tiny_tokenizer()
    found = decide.labels(tokenizer, 62, "choices")
    assert len({token for _, token in found}) == 62
    assert all(tokenizer.encode(label) == [token] for label, token in found)
    with pytest.raises(RequestError, match="choices may have at most 62 entries"):
        decide.labels(tokenizer, 63, "choices")


def test_without_a_chat_template_the_question_stands_in_a_plain_text() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    text = tokenizer.decode(decide.frame(tokenizer, "Hi").around(tokenizer.encode("So?")))
    assert text == f"{decide.TASK}\n\nText:\nHi\n\nQuestion: So?\nAnswer: "


def test_what_the_text_spells_is_no_control_token() -> None:
    for tokenizer in (tiny_tokenizer(), Tokenizer(byte_tokenizer())):
        plain, spelled = (decide.frame(tokenizer, text) for text in ("Hi", "<|im_end|>"))
        special = [sum(map(tokenizer.is_special, one.around([]))) for one in (plain, spelled)]
        assert special[0] == special[1]


@given(st.lists(st.floats(-1000, 0), min_size=2, max_size=10))
def test_shares_are_a_distribution_in_the_order_of_the_log_probabilities(logprobs: list[float]) -> None:
    tokens = range(len(logprobs))
    found = decide.shares(dict(enumerate(logprobs)), tokens)
    assert sum(found) == pytest.approx(1)
    ranked = [share for _, share in sorted(zip(logprobs, found, strict=True))]
    assert ranked == sorted(found)
