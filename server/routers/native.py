"""This server's own endpoints, /tinyloop/v1: token-level generation, prefixes, and the scheduler to look at."""

import hashlib
import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import to_json

from server.openapi import NamedEvent, described
from server.routers import asked
from server.routers.native_views import GenerateTeller, row
from server.routers.shared import (
    Job,
    off_loop,
    read_body,
    refusal,
    scheduler_of,
    settings_of,
    tenant_of,
    undropped,
)
from server.routers.telling import renaming, tell
from server.schemas import native as shapes
from server.schemas.common import parse
from server.schemas.openai_answers import LoopRange
from server.sse import EventStream, named_event, unless_gone
from server.types import GenerationRequest
from server.watch import Watch
from tinyloop.errors import RequestError
from tinyloop.kv.prefix import Entry
from tinyloop.sampling import SamplingParams

if TYPE_CHECKING:
    from server.scheduler import Scheduler
    from tinyloop.tokenizer import Tokenizer

router = APIRouter(prefix="/tinyloop/v1", tags=["TinyLoop"])
GENERATE = described(
    shapes.Generate,
    shapes.Generated,
    {"prompt": "The capital of France is", "max_new_tokens": 4, "temperature": 0, "logprobs": 1, "loops": 2},
    events=NamedEvent,
    busy=True,
)
REGISTER = described(
    shapes.Register, None, {"prompt": "Answer in one short sentence.", "loops": 2}, refusals=[501], busy=True
)
TRACE = described(
    shapes.TraceRequest,
    shapes.Traced,
    {"prompt": "The capital of France is", "loops": 4, "top": 3},
    busy=True,
    refusals=[501],
)
MOST_TRACED = 128  # tokens; a loop of as many takes about as long as a step with a whole chunk of a prompt
LOOK_EVERY_S = 1.0  # a watcher who hears of no move gets a snapshot so often, if anything is different


@router.post("/generate", **GENERATE)
async def generate(request: Request) -> Response:
    """Tokens for a prompt of text or tokens, whole or as a stream; no chat template."""
    with scheduler_of(request).arrival() as arrival:
        with scheduler_of(request).counting_refusals():
            scheduler, body = scheduler_of(request), parse(shapes.Generate, await read_body(request, arrival))
            prompt = await _tokens(scheduler.tokenizer, body.prompt)
            wait_ms = asked.slo(body, request.headers).wait_ms
            work = Job([_asked(request, body, prompt)], arrival, asked.order(body), wait_ms)
        label = body.request_id or request.state.request_id
        teller = GenerateTeller(label, prompt, scheduler.info.id, scheduler.tokenizer)
        return await tell(request, teller, work, stream=body.stream)


@router.delete("/requests/{name:path}", **described(refusals=[404]))
async def cancel(request: Request, name: str) -> shapes.Cancelled:
    """Cancel a request by its id or by the label that its caller gave it. Only its own tenant can."""
    count = scheduler_of(request).cancel_named(name, tenant_of(request))
    if not count:
        raise refusal(404, "request_not_found", "no request of this name runs or waits", "name")
    return shapes.Cancelled(id=name, cancelled=count)


@router.get("/model", **described())
async def model(request: Request) -> shapes.ModelFacts:
    """What is served, and the room there is for it."""
    scheduler = scheduler_of(request)
    info, pages = scheduler.info, scheduler.pages
    return shapes.ModelFacts(
        id=info.id,
        family=info.family,
        parameters=info.parameters,
        weights=info.weights,
        vocab_size=info.vocab_size,
        max_context=info.max_context,
        loops=LoopRange(
            min=info.min_loops,
            max=info.max_loops,
            default=info.default_loops,
            trained=info.trained_loops,
            adaptive=bool(info.exit_signals),
            exit_signals=list(info.exit_signals),
        ),
        reasoning_effort_map={effort: asked.effort_loops(effort, info) for effort in asked.EFFORT},
        has_chat_template=info.has_chat_template,
        kv_memory=info.kv_memory,
        pages=None if pages is None else shapes.Pages(**asdict(pages)),
    )


def _asked(request: Request, body: shapes.Generate, prompt: list[int]) -> GenerationRequest:
    scheduler, tenant = scheduler_of(request), tenant_of(request)
    alias = None if body.model is None else asked.alias_loops(body.model, scheduler.info)
    asked.check_tokens(
        scheduler.info.vocab_size,
        prompt=prompt,
        logit_bias=[int(token) for token in body.logit_bias or ()],
        stop_token_ids=body.stop_token_ids or (),
    )
    limit = 0 if body.mode == "score" else body.max_new_tokens
    asked.answer_limit(len(prompt), limit, limit, scheduler.info, "prompt")
    depths = asked.depth(body, request.headers, alias, scheduler.info)
    return GenerationRequest(
        prompt,
        max_new_tokens=limit,
        sampling=SamplingParams(**body.sampling()),
        cache_window=body.cache_window or 0,
        cache_salt=asked.cache_salt(body.cache_salt, tenant),
        tenant=tenant,
        request_id=body.request_id or request.state.request_id,
        prompt_logprobs=body.prompt_logprobs,
        token_ms=asked.slo(body, request.headers).tpot_ms,
        **(depths if body.mode is None else depths | {"mode": body.mode}),
    )


async def _tokens(tokenizer: "Tokenizer", prompt: str | list[int]) -> list[int]:
    if not isinstance(prompt, str):
        tokens = prompt
    else:
        encoded = await off_loop(len(prompt), lambda: tokenizer.encode(prompt))
        begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        tokens = begin + encoded
    if not tokens:
        raise RequestError("prompt", "prompt must not be empty")
    return tokens


@router.post("/trace", **TRACE)
async def trace(request: Request) -> Response:
    """What the model would say after each loop, for each token of a short prompt. Others' tokens go on meanwhile."""
    scheduler = scheduler_of(request)
    with scheduler.arrival() as arrival:
        with scheduler.counting_refusals():
            body = parse(shapes.TraceRequest, await read_body(request, arrival))
            if not scheduler.traces:
                raise refusal(501, "not_supported", "this engine shows no loops")
            tokens = await _tokens(scheduler.tokenizer, body.prompt)
            asked.check_tokens(scheduler.info.vocab_size, prompt=tokens)
            if len(tokens) > MOST_TRACED:
                raise RequestError("prompt", f"prompt: at most {MOST_TRACED} tokens are traced, got {len(tokens)}")
            loops = asked.within("loops", body.loops or scheduler.info.default_loops, scheduler.info)
        # The place in the queue is held until the end.
        work = scheduler.trace(tokens, loops, body.top, tenant_of(request))
        traced = await unless_gone(request.receive, work)
    return Response(to_json(traced, inf_nan_mode="null"), media_type="application/json")


# Prefixes


@router.post("/prefixes", status_code=201, **REGISTER)
async def register(request: Request) -> shapes.Prefix:
    """Compute a prefix and keep it. It is read like any prompt, beside the requests of others."""
    scheduler, tenant = scheduler_of(request), tenant_of(request)
    with scheduler.arrival() as arrival, renaming({"tokens": "prompt", "max_new_tokens": "prompt"}.get):
        with scheduler.counting_refusals():
            body = parse(shapes.Register, await read_body(request, arrival))
            tokens = await _tokens(scheduler.tokenizer, body.prompt)
            asked.check_tokens(scheduler.info.vocab_size, prompt=tokens)
            loops = body.loops or scheduler.info.default_loops
            asked.within("loops", loops, scheduler.info)
            asked.answer_limit(len(tokens), 0, 0, scheduler.info, "prompt")
            if not scheduler.pool.capacity:
                raise refusal(501, "not_supported", "this server was started to keep no prefixes")
        salt = asked.cache_salt(body.cache_salt, tenant)
        arrival.release()
        kept = scheduler.aregister_prefix(tokens, loops, body.cache_window, salt, tenant)
        await unless_gone(request.receive, undropped(kept))
    return _prefix(Entry(tuple(tokens), loops, body.cache_window, salt=salt))


@router.get("/prefixes", **described())
async def prefixes(request: Request) -> shapes.Prefixes:
    """The caller's own."""
    return shapes.Prefixes(
        capacity=scheduler_of(request).pool.capacity, prefixes=[_prefix(entry) for entry in _own(request)]
    )


@router.delete("/prefixes/{prefix_id}", **described(refusals=[404]))
async def drop(request: Request, prefix_id: str) -> shapes.Dropped:
    """Keep a prefix no longer. What it held stays cached while there is room."""
    for entry in _own(request):
        if _prefix(entry).id == prefix_id:
            await scheduler_of(request).adrop_prefix(entry)
            return shapes.Dropped(id=prefix_id)
    raise refusal(404, "prefix_not_found", "no prefix of this id is registered", "prefix_id")


def _own(request: Request) -> list[Entry]:
    tenant = tenant_of(request)
    return [entry for entry in scheduler_of(request).pool.registered if entry.salt.startswith(tenant)]


def _prefix(entry: Entry) -> shapes.Prefix:
    """The id says what the prefix is: the same one registered again has the same."""
    what = [entry.tokens, entry.loops, entry.cache_window, entry.salt]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:24]
    return shapes.Prefix(id=key, tokens=len(entry.tokens), loops=entry.loops, cache_window=entry.cache_window)


# The scheduler


@router.get("/scheduler", **described())
async def snapshot(request: Request) -> shapes.Snapshot:
    """The queue as it is now."""
    return _snapshot(scheduler_of(request), tenant_of(request))


@router.get("/scheduler/events", response_class=Response, **described(events=NamedEvent, busy=True))
async def watch(request: Request) -> EventStream:
    """The queue as it changes: a snapshot, then every move of every request, until the caller leaves."""
    scheduler = scheduler_of(request)
    scheduler.check_open()
    view = scheduler.watchers.watch()

    async def leave() -> None:
        scheduler.watchers.leave(view)

    return EventStream(
        _moves(scheduler, view, tenant_of(request)),
        on_error=lambda error: named_event("end"),
        on_close=leave,
        keepalive_s=settings_of(request).keepalive_s,
        write_timeout_s=settings_of(request).write_timeout_s,
    )


async def _moves(scheduler: "Scheduler", view: Watch, tenant: str) -> AsyncGenerator[str, None]:
    shown = _snapshot(scheduler, tenant)
    yield named_event("snapshot", **dict(shown))
    while not (scheduler.draining and not scheduler.requests()):
        move = await view.next(LOOK_EVERY_S)
        if missed := view.take_missed():
            yield named_event("missed", moves=missed)
        if move is not None:
            moved = {"previous": move.previous, "state": move.state, "at": round(move.at, 6)}
            yield named_event("move", **moved, request=row(move.request, tenant))
        elif (now := _snapshot(scheduler, tenant)) != shown:
            shown = now
            yield named_event("snapshot", **dict(now))
    yield named_event("end")


def _snapshot(scheduler: "Scheduler", tenant: str) -> shapes.Snapshot:
    rows: Iterator[Any] = (row(one, tenant) for one in scheduler.requests())
    return shapes.Snapshot(**scheduler.snapshot(), requests=list(rows))
