"""POST /v1/decisions: many small questions about one text, each answered by a single readout.

Every question is a request of its own to the scheduler, a few at a time, and begins with the same tokens: what the
first has computed the others find. No token of an answer is ever generated.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from server import decide
from server.openapi import described
from server.routers import asked
from server.routers.openai_views import loop_report
from server.routers.shared import (
    Job,
    depth_headers,
    off_loop,
    read_body,
    run_all,
    scheduler_of,
    tenant_of,
)
from server.schemas import decisions as shapes
from server.schemas.common import parse
from server.schemas.responses_answers import InputDetails, Usage
from server.sse import stop, unless_gone
from server.types import GenerationRequest, GenerationResult
from tinyloop.sampling import SamplingParams
from tinyloop.tokenizer import Tokenizer

router = APIRouter(prefix="/v1", tags=["Decisions"])
EXAMPLE = {
    "model": "smollm2",
    "input": "The app crashed twice today.",
    "questions": [
        {"type": "predicate", "name": "angry", "instructions": "Is the user angry?"},
        {"type": "choice", "name": "area", "instructions": "What is it about?",
         "choices": [{"value": "bug", "description": "a defect"}, {"value": "billing", "description": "money"}]},
        {"type": "score", "name": "urgency", "instructions": "How urgent is it?",
         "levels": [{"label": "low"}, {"label": "high"}]},
    ],
    "loops": 2,
}  # fmt: skip
DECISIONS = described(shapes.DecisionRequest, shapes.Decision, EXAMPLE, busy=True)
AT_ONCE = 8  # questions of one request in the scheduler
Asked = shapes.Predicate | shapes.Choice | shapes.Score


@dataclass(frozen=True)
class Reading:
    """A question as tokens, and the tokens that its next one is compared with."""

    question: Asked
    prompt: tuple[int, ...]
    labels: tuple[int, ...]


@router.post("/decisions", **DECISIONS)
async def decisions(request: Request) -> Response:
    """Probabilities for every question."""
    scheduler = scheduler_of(request)
    with scheduler.arrival() as arrival:
        with scheduler.counting_refusals():
            body = parse(shapes.DecisionRequest, await read_body(request, arrival))
            alias = asked.alias_loops(body.model, scheduler.info)
            readings = await off_loop(len(body.text), lambda: _readings(scheduler.tokenizer, body))
            longest = max(len(reading.prompt) for reading in readings)
            asked.answer_limit(longest, 1, 1, scheduler.info, "input")
            depths = asked.depth(body, request.headers, alias, scheduler.info)
            slo = asked.slo(body, request.headers)
            requests = [
                GenerationRequest(
                    reading.prompt,
                    max_new_tokens=1,
                    sampling=SamplingParams(temperature=0, logprobs=0, logprob_tokens=reading.labels, ignore_eos=True),
                    cache_window=body.cache_window or 0,
                    cache_salt=asked.cache_salt(body.cache_salt, tenant_of(request)),
                    tenant=tenant_of(request),
                    request_id=body.request_id or request.state.request_id,
                    **depths,
                )
                for reading in readings
            ]
        work = Job(requests, arrival, asked.order(body), slo.wait_ms)
        results = await unless_gone(request.receive, _run(request, work))
    report = loop_report(results, slo)
    answers = [_answer(reading, result) for reading, result in zip(readings, results, strict=True)]
    decision = shapes.Decision(
        model=scheduler.info.id, answers=answers, usage=_usage(readings, results), tinyloop=report
    )
    headers = depth_headers(report.loops_granted, degraded=report.degraded)
    return JSONResponse(decision.model_dump(), headers=headers)


async def _run(request: Request, work: Job) -> list[GenerationResult]:
    """All readouts, in order: the first alone, for the others to find its prefix, and then a few at a time. The first
    failure ends the rest."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(asked: GenerationRequest) -> GenerationResult:
        async with slots:
            [result] = await run_all(scheduler_of(request), replace(work, requests=[asked]))
            return result

    first = await one(work.requests[0])
    tasks = [asyncio.create_task(one(asked)) for asked in work.requests[1:]]
    try:
        return [first, *await asyncio.gather(*tasks)]
    finally:
        await stop(*tasks)


def _readings(tokenizer: Tokenizer, body: shapes.DecisionRequest) -> list[Reading]:
    around = decide.frame(tokenizer, body.text)
    return [_reading(tokenizer, around, at, question) for at, question in enumerate(body.questions)]


def _reading(tokenizer: Tokenizer, around: decide.Frame, at: int, question: Asked) -> Reading:
    if isinstance(question, shapes.Predicate):
        text, tokens = f"{question.text}\nAnswer Yes or No.", decide.yes_no(tokenizer)
    else:
        options = _options(question)
        field = f"questions[{at}].{'choices' if isinstance(question, shapes.Choice) else 'levels'}"
        found = decide.labels(tokenizer, len(options), field)
        shown = [(label, option) for (label, _), option in zip(found, options, strict=True)]
        text, tokens = decide.listed(question.text, shown), tuple(token for _, token in found)
    return Reading(question, around.around(tokenizer.encode(text, special=False)), tokens)


def _options(question: shapes.Choice | shapes.Score) -> list[str]:
    if isinstance(question, shapes.Choice):
        named = [(_spelled(option.value), option.description) for option in question.choices]
    else:
        named = [(level.label, level.description) for level in question.levels]
    return [name if description is None else f"{name}: {description}" for name, description in named]


def _spelled(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _answer(
    reading: Reading, result: GenerationResult
) -> shapes.PredicateAnswer | shapes.ChoiceAnswer | shapes.ScoreAnswer:
    question, shares = reading.question, decide.shares(dict(result.logprobs[0].wanted), reading.labels)
    if isinstance(question, shapes.Predicate):
        return shapes.PredicateAnswer(name=question.name, probability=shares[0])
    best = max(range(len(shares)), key=shares.__getitem__)
    if isinstance(question, shapes.Choice):
        chosen = [
            shapes.OptionProbability(value=option.value, probability=share)
            for option, share in zip(question.choices, shares, strict=True)
        ]
        choice = question.choices[best].value
        return shapes.ChoiceAnswer(name=question.name, choice=choice, probabilities=chosen, confidence=shares[best])
    levels = [
        shapes.LevelProbability(value=at, label=level.label, probability=share)
        for at, (level, share) in enumerate(zip(question.levels, shares, strict=True))
    ]
    score = sum(at * share for at, share in enumerate(shares)) / (len(shares) - 1)
    return shapes.ScoreAnswer(name=question.name, score=score, probabilities=levels, confidence=shares[best])


def _usage(readings: Sequence[Reading], results: Sequence[GenerationResult]) -> Usage:
    """Tokens of every question's prompt; the common beginning counts each time, and is then cached."""
    given = sum(len(reading.prompt) for reading in readings)
    cached = sum(result.cached_tokens for result in results)
    details = InputDetails(cached_tokens=cached)
    return Usage(input_tokens=given, output_tokens=0, total_tokens=given, input_tokens_details=details)
