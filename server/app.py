"""The FastAPI application and the server that runs it: one middleware, one place where errors become responses.

    app = create_app(Scheduler(engine))
    uvicorn.run(app)

Knows the scheduler's start, drain and end, and nothing of what it does between.
"""

import asyncio
import re
import signal
import socket
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.openapi import describe
from server.routers import anthropic, decisions, lmstudio, lmstudio_v1, native, openai, ops, responses, tokens
from server.routers.shared import Dress, error_response, openai_error, refusal
from server.security import OPEN_PATHS, Hosts, Keys
from server.settings import Settings
from server.sse import ClientGone
from server.store import ResponseStore
from tinyloop import __version__
from tinyloop.errors import RequestError

if TYPE_CHECKING:
    from server.scheduler import Scheduler

DRESSES: tuple[tuple[str, Dress], ...] = (
    ("/v1/messages", anthropic.dress),
    ("/api/v1/", lmstudio_v1.dress),
)
EXPOSED = ("x-request-id", "x-tinyloop-loops", "x-tinyloop-degraded", "retry-after")
_SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")


def create_app(scheduler: "Scheduler", settings: Settings | None = None) -> FastAPI:
    """An application that starts `scheduler` when it starts, and drains it when it stops."""
    settings = settings or Settings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        await scheduler.start()
        try:
            yield
        finally:
            await scheduler.shutdown(drain_timeout_s=settings.drain_timeout_s)

    app = FastAPI(title="TinyLoop", version=__version__, lifespan=lifespan)
    app.state.scheduler, app.state.settings = scheduler, settings
    app.state.store = ResponseStore(settings.store_bytes)
    for module in (ops, openai, tokens, responses, decisions, anthropic, lmstudio, lmstudio_v1, native):
        app.include_router(module.router)
    describe(app)
    app.add_exception_handler(RequestValidationError, _http_error)
    app.add_exception_handler(HTTPException, _http_error)  # also routes that do not exist
    app.add_middleware(Envelope, keys=Keys(settings.api_keys), hosts=Hosts(settings.allowed_hosts))
    if settings.cors_origins:  # around the envelope: a page may read a refusal too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):  # a query or a path; bodies are read by the routers
        wrong = error.errors()[0]
        error = RequestError(str(wrong["loc"][-1]), f"{wrong['loc'][-1]}: {wrong['msg'].removeprefix('Input ')}")
    return error_response(error, request.state.request_id, request.app.state, dress_of(request.url.path))


def dress_of(path: str) -> Dress:
    """How the API that a path belongs to shows its errors."""
    return next((dress for prefix, dress in DRESSES if path.startswith(prefix)), openai_error)


class Envelope:
    """Around everything: the request's id and tenant, the checks of who asks, an answer for whatever was raised."""

    def __init__(self, app: ASGIApp, keys: Keys, hosts: Hosts) -> None:
        self.app, self.keys, self.hosts = app, keys, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope))
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            try:
                await send(message)
            except RuntimeError as error:  # uvloop's way to say that the connection was closed meanwhile
                if "handler is closed" not in str(error):
                    raise
                raise ClientGone from error

        try:
            scope["state"]["tenant"] = self._checked(scope)
            await self.app(scope, receive, send_with_id)
        except (ClientGone, ClientDisconnect):
            return
        except Exception as error:
            if scope["type"] == "websocket" and isinstance(error, HTTPException):
                await send({"type": "websocket.close", "code": 1008})
                return
            if started or scope["type"] != "http":
                raise
            answer = error_response(error, request_id, scope["app"].state, dress_of(scope["path"]))
            await answer(scope, receive, send_with_id)

    def _checked(self, scope: Scope) -> str:
        """The tenant. Raises HTTPException for a Host header or a key that is not known here."""
        if not self.hosts.allow(_host(scope)):
            raise refusal(403, "host_not_allowed", "this Host header is not served here; see --allow-host")
        headers = Headers(scope=scope)
        tenant = self.keys.tenant(headers)
        if tenant is None and scope.get("method") != "OPTIONS" and scope["path"] not in OPEN_PATHS:
            said = "authorization" in headers or "x-api-key" in headers
            problem = "this API key is not known" if said else "an API key is needed: authorization: Bearer KEY"
            challenge = {"WWW-Authenticate": "Bearer"}
            raise refusal(401, "invalid_api_key", problem, headers=challenge)
        return tenant or ""


def _host(scope: Scope) -> str:
    """The Host header. HTTP/1.0 need not send one; what it asks for is then the address that it has reached."""
    reached = scope["server"][0] if scope.get("http_version") == "1.0" and scope["server"] else ""
    return Headers(scope=scope).get("host", f"[{reached}]" if ":" in reached else reached)


def _request_id(headers: Headers) -> str:
    """The caller's, if it is harmless in a header and a log line; else a new one."""
    given = headers.get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex


class DrainingServer(uvicorn.Server):
    """Drains at the first signal and only then stops listening, so that probes and newcomers get an answer, not a
    reset. Ends at once at the second. `on_start` is told the address."""

    def __init__(
        self,
        config: uvicorn.Config,
        scheduler: "Scheduler",
        drain_timeout_s: float,
        on_start: Callable[[str, int], None] = lambda host, port: None,
    ) -> None:
        super().__init__(config)
        self.scheduler, self.drain_timeout_s, self.on_start = scheduler, drain_timeout_s, on_start
        self.loop: asyncio.AbstractEventLoop | None = None
        self.drain: asyncio.Task[None] | None = None
        self.signalled = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.on_start(host, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.signalled or self.loop is None:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        else:
            self.signalled = True
            self.loop.call_soon_threadsafe(self.start_drain)

    def start_drain(self) -> None:
        assert self.loop is not None
        self.drain = self.drain or self.loop.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await self.scheduler.shutdown(drain_timeout_s=self.drain_timeout_s)
        finally:
            self.should_exit = True
