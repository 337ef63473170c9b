"""LM Studio's REST v0: the OpenAI endpoints, with the model's and the answer's facts beside the answer."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.openapi import described
from server.routers.asked import alias_loops
from server.routers.openai import answer, chat_job, completion_job
from server.routers.openai_views import View
from server.routers.shared import Job, read_body, refusal, scheduler_of
from server.schemas import lmstudio as shapes
from server.schemas.common import parse
from server.types import GenerationResult
from tinyloop import __version__

if TYPE_CHECKING:
    from server.engine import ModelInfo
    from server.scheduler import Arrival

router = APIRouter(prefix="/api/v0", tags=["LM Studio v0"])
CHAT = described(
    shapes.ChatRequest,
    shapes.ChatCompletion,
    {"model": "smollm2", "messages": [{"role": "user", "content": "Name the capital of France."}], "loops": 2},
    events=shapes.ChatChunk,
    busy=True,
)
COMPLETIONS = described(
    shapes.CompletionRequest,
    shapes.Completion,
    {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4, "loops": 2},
    events=shapes.CompletionChunk,
    busy=True,
)
FORMATS = ["safetensors", "gguf"]
_SHORT = {"float": "F", "bfloat": "BF"}


@router.get("/models", **described())
async def models(request: Request) -> shapes.ModelEntries:
    """The served model."""
    return shapes.ModelEntries(data=[_entry(scheduler_of(request).info)])


@router.get("/models/{name:path}", **described(refusals=[404]))
async def model(request: Request, name: str) -> shapes.ModelEntry:
    """One model."""
    info = scheduler_of(request).info
    alias_loops(name, info)
    return _entry(info)


@router.post("/chat/completions", **CHAT)
async def chat_completions(request: Request) -> Response:
    """The next turn of a conversation, with the facts of the answer and the model beside it."""
    return await answer(request, _read_chat)


@router.post("/completions", **COMPLETIONS)
async def completions(request: Request) -> Response:
    """What follows a prompt, with the facts of the answer and the model beside it."""
    return await answer(request, _read_completion)


async def _read_chat(request: Request, arrival: "Arrival") -> tuple[View, Job, bool]:
    body = parse(shapes.ChatRequest, await read_body(request, arrival))
    return *_with_facts(request, await chat_job(request, arrival, body)), body.stream


async def _read_completion(request: Request, arrival: "Arrival") -> tuple[View, Job, bool]:
    body = parse(shapes.CompletionRequest, await read_body(request, arrival))
    return *_with_facts(request, await completion_job(request, arrival, body)), body.stream


def _with_facts(request: Request, asked: tuple[View, Job]) -> tuple[View, Job]:
    view, work = asked
    view.beside = partial(told, info=scheduler_of(request).info)
    return view, work


@router.post("/embeddings", status_code=501, **described(refusals=[501]))
async def embeddings(request: Request) -> None:
    """There is no embedding model here, and a language model's states are not a substitute that anybody measured."""
    raise refusal(501, "not_supported", "this server has no embedding model")


def quantization(info: "ModelInfo") -> tuple[str, int]:
    """A type such as `bfloat16` as LM Studio names it, and its bits."""
    kind = info.weights.rstrip("0123456789")
    bits = info.weights.removeprefix(kind)
    return _SHORT.get(kind, kind.upper()) + bits, int(bits or 8)


def _entry(info: "ModelInfo") -> shapes.ModelEntry:
    return shapes.ModelEntry(
        id=info.id,
        arch=info.family,
        compatibility_type=FORMATS[0],
        quantization=quantization(info)[0],
        max_context_length=info.max_context,
        loaded_context_length=info.max_context,
        capabilities=["tool_use"] if info.has_chat_template else [],
    )


def stop_reason(result: GenerationResult, reason: str | None, info: "ModelInfo") -> shapes.StopReason:
    if reason == "tool_calls":
        return "toolCalls"
    if isinstance(result.stop_reason, str):
        return "stopStringFound"
    if result.finish_reason == "stop":
        return "eosFound"
    full = result.prompt_tokens + len(result.token_ids) >= info.max_context
    return "contextLengthReached" if full else "maxPredictedTokensReached"


def rate(result: GenerationResult) -> tuple[float, float, float]:
    """Answer tokens a second, seconds to the first of them and from there to the end."""
    times, tokens = result.timings, len(result.token_ids)
    first_s = times.total_s if times.first_token_s is None else times.first_token_s
    rest_s = times.total_s - first_s
    return round((tokens - 1) / rest_s, 3) if tokens > 1 and rest_s > 0 else 0.0, round(first_s, 6), round(rest_s, 6)


def told(results: Sequence[GenerationResult], reasons: Sequence[str | None], info: "ModelInfo") -> dict[str, Any]:
    """What v0 adds to an answer; of several choices, the slowest speaks."""
    at = max(range(len(results)), key=lambda i: results[i].timings.total_s)
    slowest = results[at]
    per_second, first_s, rest_s = rate(slowest)
    stats = shapes.Stats(
        tokens_per_second=per_second,
        time_to_first_token=first_s,
        generation_time=rest_s,
        stop_reason=stop_reason(slowest, reasons[at], info),
    )
    quant = quantization(info)[0]
    facts = shapes.ModelFacts(arch=info.family, quant=quant, format=FORMATS[0], context_length=info.max_context)
    runtime = shapes.Runtime(name="tinyloop-torch", version=__version__, supported_formats=FORMATS)
    return shapes.Told(stats=stats, model_info=facts, runtime=runtime).model_dump()
