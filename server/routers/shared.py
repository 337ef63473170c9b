"""What the routers share: reading a body, handing generations to the scheduler without losing one, and errors.

Work is handed over as a `Job`; whoever leaves early cancels all of it. An error becomes a `Problem`, which each API
dresses. Knows no API's answers; of their errors, only the OpenAI shape, which is also how everything outside of any
API fails.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as RoutingError
from starlette.requests import ClientDisconnect

from server.errors import EngineError, HttpError, RequestCancelled, SchedulerShutdown, ServerError, http_error
from server.request import SHUTDOWN
from server.settings import Settings
from server.sse import stop
from server.store import ResponseStore
from server.types import GenerationRequest, GenerationResult
from tinyloop import chat
from tinyloop.tools import conversation

if TYPE_CHECKING:
    from starlette.datastructures import State

    from server.scheduler import Arrival, ChunkStream, Scheduler
    from tinyloop.tokenizer import Tokenizer
    from tinyloop.tools import Tools

T = TypeVar("T")
log = logging.getLogger("tinyloop")
_CLOSE = {"connection": "close"}  # the rest of the body is not read
LONG_TEXT = 2_000  # characters; tokenising more than this would hold up the event loop


@dataclass(frozen=True)
class Job:
    """The generations of one HTTP request, admitted together or not at all, and the place that they hold until then."""

    requests: Sequence[GenerationRequest]
    arrival: "Arrival"
    priority: int = 0
    slo_ms: float | None = None


def scheduler_of(request: Request) -> "Scheduler":
    return cast("Scheduler", request.app.state.scheduler)


def settings_of(request: Request) -> Settings:
    return cast(Settings, request.app.state.settings)


def tenant_of(request: Request) -> str:
    """On whose behalf a request comes: a digest of its API key, or "" where none is asked for."""
    return cast(str, request.state.tenant)


def store_of(request: Request) -> ResponseStore:
    return cast(ResponseStore, request.app.state.store)


def refusal(
    status: int,
    code: str,
    message: str,
    param: str | None = None,
    *,
    headers: Mapping[str, str] | None = None,
) -> HTTPException:
    """What HTTP itself is refused for."""
    return HTTPException(status, {"message": message, "param": param, "code": code}, dict(headers or {}))


async def read_json(request: Request) -> bytes:
    """The raw body. Raises HTTPException 415 for another media type, 413 for too many bytes, 408 for slow ones."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":  # what a browser sends across sites without asking is never JSON
        raise refusal(415, "unsupported_media_type", "the content type must be application/json")
    limit = settings_of(request).max_body_bytes
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared[:20]) <= limit:
        try:
            async with asyncio.timeout(settings_of(request).body_timeout_s):
                raw = await _read(request, limit)
        except ClientDisconnect:
            raise refusal(400, "incomplete_body", "the connection ended before the body did") from None
        except TimeoutError:
            raise refusal(408, "request_timeout", "the body did not come in time", headers=_CLOSE) from None
        if raw is not None:
            return raw
    raise refusal(413, "request_too_large", f"the body must not be larger than {limit} bytes", headers=_CLOSE)


async def _read(request: Request, limit: int) -> bytes | None:
    """The body, or None as soon as it is too large."""
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > limit:
            return None
    return bytes(raw)


async def read_body(request: Request, arrival: "Arrival") -> bytes:
    """The raw body of a request that has come in time to hold a place in the queue. Raises what `submit` would."""
    scheduler_of(request).check_open()
    raw = await read_json(request)
    await arrival.take()
    return raw


async def off_loop(characters: int, work: Callable[[], T]) -> T:
    """The result of `work`, in a thread if it has much text to go through: probes must not wait for it."""
    return await asyncio.to_thread(work) if characters > LONG_TEXT else work()


async def chat_prompt(
    tokenizer: "Tokenizer",
    messages: Sequence[Mapping[str, Any]],
    tools: "Tools | None" = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> tuple[int, ...]:
    """A conversation, and the tools that it may call, as the model is to see it. Raises RequestError."""
    told, shown = conversation(tokenizer.chat_template, messages, tools.offered if tools else ())
    render = partial(
        chat.render,
        tokenizer,
        told,
        tools=shown,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    return tuple(await off_loop(sum(len(message["content"]) for message in told), render))


async def run_all(scheduler: "Scheduler", job: Job) -> list[GenerationResult]:
    """All results, in order. The first failure ends the rest."""
    tasks = [asyncio.create_task(_run(scheduler, job, request)) for request in job.requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await stop(*tasks)


async def _run(scheduler: "Scheduler", job: Job, request: GenerationRequest) -> GenerationResult:
    job.arrival.release()  # and the next thing that happens is the submission
    return await undropped(scheduler.submit(request, priority=job.priority, slo_ms=job.slo_ms))


async def undropped(submission: Awaitable[T]) -> T:
    """What was submitted, in a task of its own. Raises `dropped` where the scheduler cancels it."""
    try:
        return await submission
    except asyncio.CancelledError as ended:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise dropped(*ended.args[:1]) from None


async def open_streams(scheduler: "Scheduler", job: Job) -> "list[ChunkStream]":
    """All streams, admitted. If one is refused, those before it are given back."""
    streams: list[ChunkStream] = []
    job.arrival.release()
    try:
        for request in job.requests:
            streams.append(scheduler.submit_stream(request, priority=job.priority, slo_ms=job.slo_ms))
    except BaseException:
        await close_all(streams)
        raise
    return streams


async def close_all(streams: "Sequence[ChunkStream]") -> None:
    for stream in streams:
        await stream.aclose()


def dropped(reason: str = SHUTDOWN) -> ServerError:
    """A generation was cancelled and not by its caller: the server is going down, or somebody cancelled it by name."""
    if reason == SHUTDOWN:
        return SchedulerShutdown("the server is shutting down")
    return RequestCancelled("the request was cancelled by its id")


def result_of(stream: "ChunkStream") -> GenerationResult:
    """The answer of a stream that has ended. Raises what kept it from having one."""
    if stream.result is None:
        raise dropped(stream.request.outcome_reason)
    return stream.result


def depth_headers(loops: int | None, *, degraded: bool) -> dict[str, str]:
    """What was granted, for clients that do not look into the body."""
    headers = {} if loops is None else {"x-tinyloop-loops": str(loops)}
    return headers | ({"x-tinyloop-degraded": "true"} if degraded else {})


def granted_loops(stream: "ChunkStream", default: int) -> int:
    """The loops a stream was admitted with, which may be fewer than it asked for."""
    prepared = stream.request.prepared
    return (stream.request.req.loops or default) if prepared is None else prepared.plan.loops


@dataclass(frozen=True)
class Problem:
    """What went wrong, for an API to dress. `field` names the offending field of the request, if there is one."""

    status: int
    code: str
    message: str
    field: str | None
    request_id: str


Dress = Callable[[Problem], dict[str, Any]]
_TYPES = {"queue_full": "rate_limit_error", "slo_unattainable": "rate_limit_error"}
_KINDS = {401: "authentication_error", 501: "not_supported_error", 503: "unavailable_error"}
_CODES = {"invalid_request": "invalid_value"}


def openai_error(problem: Problem) -> dict[str, Any]:
    """An error as the OpenAI API shows it."""
    kind = _KINDS.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    kind = _TYPES.get(problem.code, kind)
    return {"error": {"message": problem.message, "type": kind, "param": problem.field, "code": problem.code}}


def error_body(error: Exception, request_id: str) -> dict[str, Any]:
    """An error as the OpenAI API shows it."""
    return openai_error(problem_of(error, request_id))


def problem_of(error: Exception, request_id: str) -> Problem:
    if isinstance(error, RoutingError):
        return _routing_problem(error, request_id)
    known = _logged(error, request_id)
    code = getattr(error, "code", None) or _CODES.get(known.code, known.code)
    return Problem(known.status, code, known.message, known.field or None, request_id)


def _routing_problem(error: RoutingError, request_id: str) -> Problem:
    detail: Any = error.detail
    if isinstance(detail, dict):  # a refusal of ours
        return Problem(error.status_code, detail["code"], detail["message"], detail["param"], request_id)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    return Problem(error.status_code, code, str(detail), None, request_id)


def _logged(error: Exception, request_id: str) -> HttpError:
    """What is known of an error. One that nobody raised on purpose is logged, and its message stays here."""
    known = http_error(error)
    if known.status != 500 or isinstance(error, EngineError):
        return known
    log.error("request %s failed", request_id, exc_info=error)
    return HttpError(500, known.code, f"internal error, id {request_id}")


def error_response(error: Exception, request_id: str, state: "State", dress: Dress = openai_error) -> JSONResponse:
    """The answer to a request that failed before its first byte. `state` is the application's."""
    headers = dict(error.headers or {}) if isinstance(error, RoutingError) else {}
    problem = problem_of(error, request_id)
    if problem.status == 503:
        headers["retry-after"] = str(http_error(error).retry_after_s or _queue_seconds(state.scheduler))
    if problem.status in (409, 500, 501):
        headers["x-should-retry"] = "false"
    status = state.settings.busy_status if problem.code in _TYPES else problem.status
    return JSONResponse(dress(problem), status, headers)


def _queue_seconds(scheduler: "Scheduler") -> int:
    """How long the present queue takes to pass, by the measured rate; at least a second."""
    state = scheduler.snapshot()
    waves: float = (state["queue_depth"] + 1) / max(state["in_flight"], 1)
    dispatch_ms: float = state["ema_dispatch_ms"] or 0
    return max(1, math.ceil(waves * dispatch_ms / 1000))
