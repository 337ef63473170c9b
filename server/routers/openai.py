"""The OpenAI endpoints: models, chat completions, completions. Talks to the scheduler and knows nothing behind it.

An exchange in order: read the body, find the depth and the prompt's tokens, make one GenerationRequest per choice,
be admitted, then answer whole or as a stream. Everything up to admission ends in a real HTTP status if it fails.
"""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from server import structured
from server.openapi import described
from server.routers import asked
from server.routers.openai_views import DONE, ChatView, CompletionView, View
from server.routers.shared import (
    Job,
    chat_prompt,
    close_all,
    depth_headers,
    error_body,
    off_loop,
    open_streams,
    read_body,
    result_of,
    run_all,
    scheduler_of,
    settings_of,
    tenant_of,
)
from server.routers.telling import stream_headers
from server.schemas import openai as shapes
from server.schemas import openai_answers as answers
from server.schemas.common import parse
from server.schemas.openai_forms import NamedTool
from server.sse import EventStream, json_event, merged, unless_gone
from server.types import GenerationRequest, GenerationResult
from tinyloop.errors import RequestError
from tinyloop.sampling import SamplingParams

if TYPE_CHECKING:
    from server.engine import ModelInfo
    from server.scheduler import Arrival, ChunkStream
    from tinyloop.constraint import Constraint
    from tinyloop.tokenizer import Tokenizer
    from tinyloop.tools import Tools

router = APIRouter(prefix="/v1")
STARTED = int(time.time())
CHAT = described(
    shapes.ChatRequest,
    answers.ChatCompletion,
    {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Name the capital of France."}],
        "temperature": 0,
        "loops": {"min": 1, "max": 4},
    },
    events=answers.ChatChunk,
    busy=True,
)
COMPLETIONS = described(
    shapes.CompletionRequest,
    answers.Completion,
    {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4, "logprobs": 1, "loops": 2},
    events=answers.CompletionChunk,
    busy=True,
)


@router.get("/models", **described())
async def models(request: Request) -> answers.ModelList:
    """The served model, its depths, and what each reasoning effort stands for."""
    return answers.ModelList(data=[_card(scheduler_of(request).info)])


@router.get("/models/{name:path}", **described(refusals=[404]))
async def model(request: Request, name: str) -> answers.ModelCard:
    """One model."""
    info = scheduler_of(request).info
    asked.alias_loops(name, info)
    return _card(info)


@router.post("/chat/completions", **CHAT)
async def chat_completions(request: Request) -> Response:
    """The next turn of a conversation, whole or as a stream."""
    return await answer(request, read_chat)


@router.post("/completions", **COMPLETIONS)
async def completions(request: Request) -> Response:
    """What comes after a text, whole or as a stream."""
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
    body = parse(shapes.ChatRequest, await read_body(request, arrival))
    view, work = await chat_job(request, arrival, body)
    return view, work, body.stream


async def chat_job(request: Request, arrival: "Arrival", body: shapes.ChatRequest) -> tuple[ChatView, Job]:
    """What any API's chat comes to, once it has been put into the words of this one."""
    scheduler = scheduler_of(request)
    alias = asked.alias_loops(body.model, scheduler.info)
    tools = body.tools_asked()
    form = await structured.compiled(scheduler.tokenizer, body.schema_asked, tools)
    prompt = await rendered(request, body, tools)
    _check_tokens(body, [prompt], scheduler.info.vocab_size)
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    limit = asked.answer_limit(len(prompt), most, settings_of(request).default_max_tokens, scheduler.info, "messages")
    view = ChatView(
        prompts=[prompt],
        tool_names=[tool.name for tool in tools.offered] if tools else [],
        named_tool=isinstance(body.tool_choice, NamedTool),
        **_view_facts(request, body),
    )
    return view, job(request, body, view, [limit], alias, arrival, form)


async def rendered(request: Request, body: shapes.ChatRequest, tools: "Tools | None") -> tuple[int, ...]:
    """The conversation's tokens, with the tools that are offered."""
    return await chat_prompt(
        scheduler_of(request).tokenizer,
        [message.plain() for message in body.messages],
        tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )


async def read_completion(request: Request, arrival: "Arrival") -> tuple[View, Job, bool]:
    """The prompts as tokens, what is to be generated, and whether to stream it."""
    body = parse(shapes.CompletionRequest, await read_body(request, arrival))
    view, work = await completion_job(request, arrival, body)
    return view, work, body.stream


async def completion_job(
    request: Request, arrival: "Arrival", body: shapes.CompletionRequest
) -> tuple[CompletionView, Job]:
    """What a completion comes to."""
    scheduler, most = scheduler_of(request), settings_of(request).max_choices
    alias = asked.alias_loops(body.model, scheduler.info)
    given = body.prompts
    if len(given) * body.candidates > most:
        raise RequestError("prompt", f"prompts times n must be at most {most}, got {len(given) * body.candidates}")
    prompts = await off_loop(sum(map(len, given)), lambda: [_tokens(scheduler.tokenizer, text) for text in given])
    _check_tokens(body, prompts, scheduler.info.vocab_size)
    limits = [asked.answer_limit(len(tokens), body.max_tokens, 16, scheduler.info, "prompt") for tokens in prompts]
    texts = [_text(scheduler.tokenizer, prompt) for prompt in given] if body.echo else []
    form = await structured.compiled(scheduler.tokenizer, body.schema_asked)
    view = CompletionView(prompts=prompts, echoes=texts, **_view_facts(request, body))
    return view, job(request, body, view, limits, alias, arrival, form)


def _card(info: "ModelInfo") -> answers.ModelCard:
    loops = answers.LoopRange(
        min=info.min_loops,
        max=info.max_loops,
        default=info.default_loops,
        trained=info.trained_loops,
        adaptive=bool(info.exit_signals),
        exit_signals=list(info.exit_signals),
    )
    efforts = {effort: asked.effort_loops(effort, info) for effort in asked.EFFORT}
    depth = answers.ModelDepth(loops=loops, reasoning_effort_map=efforts)
    return answers.ModelCard(id=info.id, created=STARTED, max_model_len=info.max_context, tinyloop=depth)


def _view_facts(request: Request, body: shapes.Request) -> dict[str, Any]:
    options = body.stream_options or shapes.StreamOptions()
    return {
        "model": scheduler_of(request).info.id,
        "tokenizer": scheduler_of(request).tokenizer,
        "n": body.n,
        "candidates": body.candidates,
        "logprobs": body.logprob_count is not None,
        "include_usage": options.include_usage or options.continuous_usage_stats,
        "running_usage": options.continuous_usage_stats,
        "service_tier": asked.tier(body),
        "slo": asked.slo(body, request.headers),
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


def job(
    request: Request,
    body: shapes.Request,
    view: View,
    limits: Sequence[int],
    alias: int | None,
    arrival: "Arrival",
    form: "Constraint | None" = None,
) -> Job:
    """One GenerationRequest per choice. Raises RequestError for values out of bounds."""
    headers = request.headers
    depths = asked.depth(body, headers, alias, scheduler_of(request).info)
    scored = isinstance(view, CompletionView) and bool(view.echoes)
    tenant = tenant_of(request)
    requests = [
        GenerationRequest(
            prompt,
            max_new_tokens=limit,
            sampling=SamplingParams(**body.sampling(), seed=asked.choice_seed(body.seed, choice), constraint=form),
            cache_window=body.cache_window or 0,
            cache_salt=asked.cache_salt(body.cache_salt, tenant),
            tenant=tenant,
            request_id=body.request_id or request.state.request_id,
            token_ms=view.slo.tpot_ms,
            prompt_logprobs=body.logprob_count if scored else None,
            **depths,
        )
        for prompt, limit in zip(view.prompts, limits, strict=True)
        for choice in range(body.candidates)
    ]
    return Job(requests, arrival, asked.order(body), view.slo.wait_ms)


def _check_tokens(body: shapes.Request, prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    asked.check_tokens(
        vocab_size,
        prompt=[max(prompt) for prompt in prompts],
        logit_bias=[int(token) for token in body.logit_bias or ()],
        stop_token_ids=body.stop_token_ids or (),
    )


async def respond(request: Request, view: View, job: Job, *, stream: bool) -> Response:
    """Be admitted and answer. Raises what admission raises."""
    if not stream:
        results = await unless_gone(request.receive, run_all(scheduler_of(request), job))
        body = view.whole(results)
        report = body["tinyloop"]
        return JSONResponse(body, headers=depth_headers(report["loops_granted"], degraded=report["degraded"]))
    streams = await open_streams(scheduler_of(request), job)
    return EventStream(
        events(view, streams),
        on_error=lambda error: json_event(error_body(error, request.state.request_id)) + DONE,
        on_close=lambda: close_all(streams),
        headers=stream_headers(streams, scheduler_of(request).info.default_loops),
        keepalive_s=settings_of(request).keepalive_s,
        write_timeout_s=settings_of(request).write_timeout_s,
    )


async def events(view: View, streams: "Sequence[ChunkStream]") -> AsyncGenerator[str, None]:
    """The events of a streamed answer. A choice opens with its first token; nothing is sent before."""
    opened: set[int] = set()
    async with aclosing(merged(streams)) as arrivals:
        async for index, chunk in arrivals:
            told = result_of(streams[index]) if chunk is None else chunk
            if index not in opened and (opening := view.opening(index, told.prompt_logprobs)):
                yield view.chunk(opening)
            opened.add(index)
            if isinstance(told, GenerationResult):
                for choice in view.closing(index, told):
                    yield view.chunk(choice, told)
            else:
                for choice in view.deltas(index, told):
                    yield view.chunk(choice)
    if view.include_usage:
        yield view.usage_chunk([result_of(stream) for stream in streams])
    yield DONE
