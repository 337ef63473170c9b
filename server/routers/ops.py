"""Probes, metrics and the version: what operators and their machines ask. None of it waits for the engine."""

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel

from server.openapi import described
from server.routers.shared import read_json, refusal, scheduler_of, settings_of
from tinyloop import __version__

if TYPE_CHECKING:
    from server.engine import ModelInfo


class Status(BaseModel):
    """`reason` says why it is not well."""

    status: str
    reason: str | None = None


class Version(BaseModel):
    version: str


router = APIRouter()
PROBE: dict[str, Any] = {
    "response_model": Status,
    "response_model_exclude_none": True,
    "responses": {503: {"model": Status, "description": "not so"}},
}
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


@router.head("/health", include_in_schema=False)
@router.head("/v1/health", include_in_schema=False)
@router.get("/health", **PROBE)
@router.get("/v1/health", **PROBE)
async def health(request: Request) -> JSONResponse:
    """200 while the process can do work, else 503: restart it."""
    scheduler = scheduler_of(request)
    if scheduler.healthy:
        return JSONResponse({"status": "ok"})
    return _unavailable("unhealthy", scheduler.unhealthy_reason or "the scheduler is not running")


@router.head("/ready", include_in_schema=False)
@router.get("/ready", **PROBE)
async def ready(request: Request) -> JSONResponse:
    """200 while new requests are taken, else 503: send them elsewhere."""
    scheduler = scheduler_of(request)
    if scheduler.draining:
        return _unavailable("draining", "the server is shutting down")
    return JSONResponse({"status": "ready"}) if scheduler.healthy else await health(request)


@router.post("/drain", status_code=202, response_model_exclude_none=True, **described(refusals=[408, 413, 415]))
async def drain(request: Request) -> Status:
    """Begin what SIGTERM begins, and say so at once: the drain cannot wait for the request that asked for it."""
    if not settings_of(request).http_drain:
        raise refusal(403, "drain_not_allowed", "this server was started without --http-drain")
    await read_json(request)  # of no use, but no web page can send it from another site unasked
    scheduler_of(request).begin_drain()
    if (start := getattr(request.app.state, "start_drain", None)) is not None:
        start()
    return Status(status="draining")


def _unavailable(status: str, reason: str) -> JSONResponse:
    return JSONResponse({"status": status, "reason": reason}, status_code=503)


@router.get("/metrics", response_class=PlainTextResponse, **described())
async def metrics(request: Request) -> PlainTextResponse:
    """Prometheus text."""
    scheduler = scheduler_of(request)
    return PlainTextResponse(scheduler.metrics_text(extra_lines=_model_lines(scheduler.info)), media_type=EXPOSITION)


def _model_lines(info: "ModelInfo") -> list[str]:
    """Gauges that belong to the model and not to the scheduler."""
    loops = {"min": info.min_loops, "max": info.max_loops, "default": info.default_loops, "trained": info.trained_loops}
    name = "tinyloop_model_loops"
    head = [f"# HELP {name} Loops that a request may ask for, and gets if it does not.", f"# TYPE {name} gauge"]
    return head + [f'{name}{{bound="{bound}"}} {value}' for bound, value in loops.items()]


@router.get("/version", **described())
async def version() -> Version:
    """The server's version."""
    return Version(version=__version__)
