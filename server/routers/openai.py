"""The OpenAI endpoints: models, chat completions, completions. Talks to the scheduler and knows nothing behind it.

An exchange in order: read the body, find the depth and the prompt's tokens, make one GenerationRequest per choice,
be admitted, then answer whole or as a stream. Everything up to admission ends in a real HTTP status if it fails.
"""

import hashlib
import json
import math
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from server.routers.openai_views import DONE, ChatView, CompletionView, View
from server.routers.shared import (
    Job,
    close_all,
    dropped,
    error_body,
    granted_loops,
    off_loop,
    open_streams,
    read_json,
    refusal,
    run_all,
    scheduler_of,
    settings_of,
)
from server.schemas import openai as shapes
from server.schemas import openai_answers as answers
from server.sse import EventStream, event, merged, unless_gone
from server.types import GenerationRequest, GenerationResult
from tinyloop import chat
from tinyloop.errors import ContextOverflow, RequestError
from tinyloop.sampling import SamplingParams

if TYPE_CHECKING:
    from server.engine import ModelInfo
    from server.scheduler import Arrival, ChunkStream
    from tinyloop.tokenizer import Tokenizer

router = APIRouter(prefix="/v1")
STARTED = int(time.time())
NO_KEY = "-" * 64  # in the place of a key's digest
TIER_PRIORITY = {"flex": -10, "priority": 10, "fast": 10}
EFFORT = {"none": 0.0, "minimal": 0.25, "low": 0.5, "medium": 1.0, "high": 1.0, "xhigh": 1.0, "max": 1.0}


@router.get("/models")
async def models(request: Request) -> answers.ModelList:
    return answers.ModelList(data=[_card(scheduler_of(request).info)])


@router.get("/models/{name:path}")
async def model(request: Request, name: str) -> answers.ModelCard:
    info = scheduler_of(request).info
    alias_loops(name, info)
    return _card(info)


@router.post("/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await answer(request, read_chat)


@router.post("/completions")
async def completions(request: Request) -> Response:
    return await answer(request, read_completion)


Reader = Callable[[Request, "Arrival"], Awaitable[tuple[View, Job, bool]]]


async def answer(request: Request, read: Reader) -> Response:
    """Read a request, have it admitted, and answer. Its place in the queue is held from before the expensive part."""
    with scheduler_of(request).arrival() as arrival:
        with scheduler_of(request).counting_refusals():
            view, work, stream = await read(request, arrival)
        return await respond(request, view, work, stream=stream)


async def read_chat(request: Request, arrival: "Arrival") -> tuple[View, Job, bool]:
    """The conversation as a prompt, what is to be generated, and whether to stream it."""
    scheduler = scheduler_of(request)
    scheduler.check_open()
    raw = await read_json(request)
    await arrival.take()
    body = shapes.parse(shapes.ChatRequest, raw)
    alias = alias_loops(body.model, scheduler.info)
    messages = [message.plain() for message in body.messages]

    ending: dict[str, Any] = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
    }
    render = partial(chat.render, scheduler.tokenizer, messages, **ending)
    prompt = await off_loop(sum(len(message["content"]) for message in messages), render)
    _check_tokens(body, [prompt], scheduler.info.vocab_size)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    limit = answer_limit(len(prompt), asked, settings_of(request).default_max_tokens, scheduler.info, "messages")
    view = ChatView(prompts=[tuple(prompt)], **_view_facts(request, body))
    return view, job(request, body, view, [limit], alias, arrival), body.stream


async def read_completion(request: Request, arrival: "Arrival") -> tuple[View, Job, bool]:
    """The prompts as tokens, what is to be generated, and whether to stream it."""
    scheduler, most = scheduler_of(request), settings_of(request).max_choices
    scheduler.check_open()
    raw = await read_json(request)
    await arrival.take()
    body = shapes.parse(shapes.CompletionRequest, raw)
    alias = alias_loops(body.model, scheduler.info)
    given = body.prompts
    if len(given) * body.n > most:
        raise RequestError("prompt", f"prompts times n must be at most {most}, got {len(given) * body.n}")
    prompts = await off_loop(sum(map(len, given)), lambda: [_tokens(scheduler.tokenizer, text) for text in given])
    _check_tokens(body, prompts, scheduler.info.vocab_size)
    limits = [answer_limit(len(tokens), body.max_tokens, 16, scheduler.info, "prompt") for tokens in prompts]
    texts = [_text(scheduler.tokenizer, prompt) for prompt in given] if body.echo else []
    view = CompletionView(prompts=prompts, echoes=texts, **_view_facts(request, body))
    return view, job(request, body, view, limits, alias, arrival), body.stream


def _card(info: "ModelInfo") -> answers.ModelCard:
    loops = answers.LoopRange(
        min=info.min_loops,
        max=info.max_loops,
        default=info.default_loops,
        trained=info.trained_loops,
        adaptive=info.adaptive,
    )
    efforts = {effort: effort_loops(effort, info) for effort in EFFORT}
    depth = answers.ModelDepth(loops=loops, reasoning_effort_map=efforts)
    return answers.ModelCard(id=info.id, created=STARTED, max_model_len=info.max_context, tinyloop=depth)


def _view_facts(request: Request, body: shapes.Request) -> dict[str, Any]:
    options = body.stream_options or shapes.StreamOptions()
    return {
        "model": scheduler_of(request).info.id,
        "tokenizer": scheduler_of(request).tokenizer,
        "n": body.n,
        "logprobs": body.logprob_count is not None,
        "include_usage": options.include_usage or options.continuous_usage_stats,
        "running_usage": options.continuous_usage_stats,
        "service_tier": body.service_tier if body.service_tier in TIER_PRIORITY else "default",
    }


def _tokens(tokenizer: "Tokenizer", prompt: str | list[int]) -> tuple[int, ...]:
    """A prompt's token ids. An empty text is the start of a document, if the model knows such a thing."""
    if not isinstance(prompt, str):
        return tuple(prompt)
    begin = tokenizer.bos_id if tokenizer.add_bos or not prompt else None
    tokens = tokenizer.encode(prompt)
    if begin is None and not tokens:
        raise RequestError("prompt", "prompt must not be empty")
    return tuple(tokens if begin is None else [begin, *tokens])


def _text(tokenizer: "Tokenizer", prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt)


def alias_loops(name: str, info: "ModelInfo") -> int | None:
    """The loops that a model name such as `smollm2@loops=4` asks for. Raises 404 for a model that is not served."""
    base, _, loops = name.partition("@loops=")
    if base != info.id or (name != base and not (loops.isascii() and loops.isdecimal() and len(loops) < 6)):
        shown = name if len(name) <= shapes.SHOWN else name[: shapes.SHOWN] + "..."
        message = f"The model `{shown}` does not exist. Served models: {info.id}."
        raise refusal(404, "model_not_found", message, "model")
    return _within("loops", int(loops), info) if loops else None


def _within(field: str, loops: int, info: "ModelInfo") -> int:
    if not info.min_loops <= loops <= info.max_loops:
        raise RequestError(field, f"{field} must be between {info.min_loops} and {info.max_loops}, got {loops}")
    return loops


def effort_loops(effort: str, info: "ModelInfo") -> int:
    """How many loops a reasoning effort stands for. Never more than the model was trained with."""
    loops = math.ceil(EFFORT[effort] * info.trained_loops)
    return min(max(loops, info.min_loops), info.max_loops)


def depth(body: shapes.Request, headers: Mapping[str, str], alias: int | None, info: "ModelInfo") -> dict[str, Any]:
    """The depth fields of a GenerationRequest. The body beats the header, then come the effort and the model's name."""
    loops, least = body.loops, body.min_loops
    if loops is None and "x-tinyloop-loops" in headers:
        loops = int(_header_number(headers, "x-tinyloop-loops", 1))
    if loops is None and body.reasoning_effort is not None:
        loops = effort_loops(body.reasoning_effort, info)
    if loops is None:
        loops = alias
    if loops == "auto":
        loops, least = None, least or info.min_loops
    given = {"loops": loops, "min_loops": least, "prefill_loops": body.prefill_loops}
    for field, value in given.items():
        if value is not None:
            _within(field, value, info)
    if least is not None and least > (loops or info.default_loops):
        most = loops or info.default_loops
        raise RequestError("min_loops", f"min_loops must be at most loops ({most}), got {least}")
    mode = {} if body.exit_threshold is None else {"mode": "adaptive", "exit_threshold": body.exit_threshold}
    return given | mode


def _header_number(headers: Mapping[str, str], name: str, least: float) -> float:
    text = headers[name]
    try:
        number = float(text[:20])
    except ValueError:
        number = math.nan
    if not least <= number < 1e12:
        raise RequestError(name, f"the header {name} must be a number of at least {least:g}")
    return number


def answer_limit(prompt: int, asked: int | None, default: int, info: "ModelInfo", field: str) -> int:
    """How many tokens an answer may have. `asked` -1 is the rest of the context. Raises ContextOverflow."""
    room = info.max_context - prompt
    limit = min(default, max(room, 1)) if asked is None else max(room, 1) if asked == -1 else asked
    if limit > room:
        raise ContextOverflow(
            field,
            f"This model's maximum context length is {info.max_context} tokens. However, you requested "
            f"{prompt + limit} tokens ({prompt} in the {field}, {limit} for the answer).",
        )
    return limit


def cache_salt(own: str, headers: Mapping[str, str], *, by_key: bool) -> str:
    """What keeps prefixes apart: the request's own salt, and with `by_key` one that is derived from its API key."""
    return (tenant(headers) or NO_KEY) + own if by_key else own


def tenant(headers: Mapping[str, str]) -> str:
    """Who gets a share of the work of their own: whoever has an API key of their own. The key itself is not kept."""
    key = headers.get("authorization", "")
    return hashlib.sha256(key.encode()).hexdigest() if key else ""


def choice_seed(seed: int | None, choice: int) -> int | None:
    """Every choice draws its own numbers; the first draws those that it would draw alone."""
    return seed if seed is None or choice == 0 else random.Random(f"{seed}:{choice}").getrandbits(63)


def job(
    request: Request, body: shapes.Request, view: View, limits: Sequence[int], alias: int | None, arrival: "Arrival"
) -> Job:
    """One GenerationRequest per choice. Raises RequestError for values out of bounds."""
    depths = depth(body, request.headers, alias, scheduler_of(request).info)
    scored = isinstance(view, CompletionView) and bool(view.echoes)
    salt = cache_salt(body.cache_salt or "", request.headers, by_key=settings_of(request).salt_by_key)
    requests = [
        GenerationRequest(
            prompt,
            max_new_tokens=limit,
            sampling=SamplingParams(**body.sampling(), seed=choice_seed(body.seed, choice)),
            cache_window=body.cache_window or 0,
            cache_salt=salt,
            tenant=tenant(request.headers),
            request_id=body.request_id or request.state.request_id,
            prompt_logprobs=body.logprob_count if scored else None,
            **depths,
        )
        for prompt, limit in zip(view.prompts, limits, strict=True)
        for choice in range(body.n)
    ]
    slo_ms = body.slo_ms
    if slo_ms is None and "x-tinyloop-slo-ms" in request.headers:
        slo_ms = _header_number(request.headers, "x-tinyloop-slo-ms", 0)
    tier = TIER_PRIORITY.get(body.service_tier or "", 0)
    return Job(requests, arrival, tier if body.priority is None else body.priority, slo_ms)


def _check_tokens(body: shapes.Request, prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Token ids index rows of the vocabulary: one outside must not get as far as the engine."""
    used = {
        "prompt": max(map(max, prompts)),
        "logit_bias": max(map(int, body.logit_bias or ()), default=0),
        "stop_token_ids": max(body.stop_token_ids or (), default=0),
    }
    for field, token in used.items():
        if token >= vocab_size:
            raise RequestError(field, f"{field}: token ids must be below {vocab_size}, got {token}")


async def respond(request: Request, view: View, job: Job, *, stream: bool) -> Response:
    """Be admitted and answer. Raises what admission raises."""
    if not stream:
        results = await unless_gone(request.receive, run_all(scheduler_of(request), job))
        body = view.whole(results)
        report = body["tinyloop"]
        return JSONResponse(body, headers=depth_headers(report["loops_granted"], degraded=report["degraded"]))
    default = scheduler_of(request).info.default_loops
    streams = await open_streams(scheduler_of(request), job)
    return EventStream(
        events(view, streams),
        on_error=lambda error: event(json.dumps(error_body(error, request.state.request_id))) + DONE,
        on_close=lambda: close_all(streams),
        headers=lambda: depth_headers(
            min(granted_loops(stream, default) for stream in streams),
            degraded=any(stream.request.downgraded_by for stream in streams),
        ),
        keepalive_s=settings_of(request).keepalive_s,
    )


async def events(view: View, streams: "Sequence[ChunkStream]") -> AsyncGenerator[str, None]:
    """The events of a streamed answer. A choice opens with its first token; nothing is sent before."""
    opened: set[int] = set()
    async with aclosing(merged(streams)) as arrivals:
        async for index, chunk in arrivals:
            choice = view.closing(index, _result(streams[index])) if chunk is None else view.delta(index, chunk)
            if index not in opened and (opening := view.opening(index)):
                yield view.chunk(opening)
            opened.add(index)
            if choice:
                yield view.chunk(choice)
    if view.include_usage:
        yield view.usage_chunk([_result(stream) for stream in streams])
    yield DONE


def _result(stream: "ChunkStream") -> GenerationResult:
    if stream.result is None:
        raise dropped()
    return stream.result


def depth_headers(loops: int | None, *, degraded: bool) -> dict[str, str]:
    """What was granted, for clients that do not look into the body."""
    headers = {} if loops is None else {"x-tinyloop-loops": str(loops)}
    return headers | ({"x-tinyloop-degraded": "true"} if degraded else {})
