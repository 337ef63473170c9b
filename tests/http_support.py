"""An engine that answers from a script, and the application around it. Byte-level tokens: one per byte of text."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from server.app import DrainingServer, create_app
from server.connections import patient
from server.engine import ModelInfo
from server.scheduler import Scheduler
from server.settings import Settings
from server.types import GenerationChunk, GenerationRequest, GenerationResult
from tests.tiny import CHAT_TEMPLATE, SPECIAL, byte_tokenizer
from tinyloop.sampling import Logprobs
from tinyloop.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
INFO = ModelInfo(
    id="tiny/loop",
    family="fake",
    max_context=400,
    min_loops=1,
    max_loops=8,
    default_loops=4,
    trained_loops=4,
    exit_signals=("gate", "distance"),
    has_chat_template=True,
    vocab_size=259,
    weights="float32",
    parameters=1_000_000,
)


class ScriptedEngine:
    """Says `script`, one token per byte, as far as the request allows. `gate` holds it back while it is cleared."""

    def __init__(
        self,
        script: str = "Hello world",
        *,
        delay_s: float = 0.0,
        fail_after: int | None = None,
        max_context: int = 400,
    ) -> None:
        self.info = replace(INFO, max_context=max_context)
        self.tokenizer = Tokenizer(
            byte_tokenizer(),
            special_tokens={"bos_token": SPECIAL[0], "eos_token": SPECIAL[2]},
            chat_template=CHAT_TEMPLATE,
        )
        self.script, self.delay_s, self.fail_after = script, delay_s, fail_after
        self.gate = asyncio.Event()
        self.gate.set()
        self.seen: list[GenerationRequest] = []
        self.running = self.made = 0

    async def generate_stream(self, req: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        self.seen.append(req)
        self.running += 1
        try:
            async for chunk in self._tokens(req):
                self.made += 1
                yield chunk
        finally:
            self.running -= 1

    async def _tokens(self, req: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        ids = self.tokenizer.encode(self.script)
        shown = ""
        for at, token in enumerate(ids[: req.max_new_tokens]):
            await self.gate.wait()
            await asyncio.sleep(self.delay_s)
            if at == self.fail_after:
                raise RuntimeError("secret detail of the engine")
            text = self.tokenizer.decode(ids[: at + 1])
            text = shown if text.endswith("\ufffd") else text
            last = "stop" if at + 1 == len(ids) else "length" if at + 1 == req.max_new_tokens else None
            scores = self._scores(req) if at == 0 else ()
            yield GenerationChunk(token, text[len(shown) :], self._logprobs(req, token), last, req.loops, scores)
            shown = text

    async def generate(self, req: GenerationRequest) -> GenerationResult:
        chunks = [chunk async for chunk in self.generate_stream(req)]
        return GenerationResult(
            token_ids=tuple(chunk.token_id for chunk in chunks),
            text="".join(chunk.text for chunk in chunks),
            finish_reason=(chunks[-1].finish_reason or "stop") if chunks else "length",
            prompt_tokens=len(req.prompt),
            loops_requested=req.loops or INFO.default_loops,
            loops_granted=req.loops or INFO.default_loops,
            logprobs=tuple(chunk.logprobs for chunk in chunks if chunk.logprobs),
            prompt_logprobs=self._scores(req),
        )

    def _scores(self, req: GenerationRequest) -> tuple[Logprobs, ...]:
        if req.prompt_logprobs is None:
            return ()
        top = ((1, -float("inf")),)
        return tuple(
            Logprobs(-float("inf"), ((int(token), -0.5), *top)[: req.prompt_logprobs]) for token in req.prompt[1:]
        )

    def _logprobs(self, req: GenerationRequest, token: int) -> Logprobs | None:
        if req.sampling.logprobs is None:
            return None
        wanted = tuple((one, -1.0 - at) for at, one in enumerate(req.sampling.logprob_tokens))
        return Logprobs(-0.25, ((token, -0.25), (1, -float("inf")))[: req.sampling.logprobs], wanted)


@asynccontextmanager
async def served(
    engine: Any = None, settings: Settings | None = None, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """A client of an application around `engine`, started and in the end drained."""
    engine = engine or ScriptedEngine()
    app = create_app(Scheduler(engine, **options), settings or Settings(drain_timeout_s=1.0))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(app.router.lifespan_context(app))
        transport = httpx.ASGITransport(app=app)
        yield await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://test")), engine


@asynccontextmanager
async def listening(
    engine: Any = None, settings: Settings | None = None, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """Like `served`, on a real port, in this event loop and without signal handlers."""
    engine, settings = engine or ScriptedEngine(), settings or Settings(drain_timeout_s=1.0)
    scheduler = Scheduler(engine, **options)
    config = uvicorn.Config(
        create_app(scheduler, settings),
        http=patient(settings),
        port=0,
        log_level="error",
        timeout_graceful_shutdown=2,
    )
    server = DrainingServer(config, scheduler, settings.drain_timeout_s)
    task = asyncio.create_task(server._serve())
    try:
        await until(lambda: server.started or task.done())
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            client.server = server  # type: ignore[attr-defined]
            yield client, engine
    finally:
        server.should_exit = True
        await task


@contextmanager
def python_process(code: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that runs `code` from the checkout, and the last word of its first line: the address of its server."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline().split()
        assert first, process.stderr.read()
        yield process, first[-1]
    finally:
        process.kill()
        process.communicate()


def scheduler_of(client: httpx.AsyncClient) -> Any:
    return client._transport.app.state.scheduler  # type: ignore[attr-defined]


async def until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    """Wait for something that another task does. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": INFO.id, "messages": [{"role": "user", "content": "Hi"}], **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": INFO.id, "prompt": "Hi", **fields}


def events(text: str) -> list[Any]:
    """The data of an event stream; [DONE] stays a string."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def named(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of each event; both must agree."""
    found = []
    for block in text.strip().split("\n\n"):
        if block.startswith("event: "):
            head, data = block.split("\n")
            found.append((head.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return found
