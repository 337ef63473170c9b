"""One side of a comparison as a running process: a server over HTTP, or a program that answers over its pipes.

Knows how a side is started, asked and ended, not what is compared. A child and all that it starts are a process group
of their own, which a Ctrl-C in the terminal does not reach; the group is ended when the `with` is left.
"""

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any, Protocol

import pipe
from load import post

STOP_LIMIT_S = 20.0
ANSWER_LIMIT_S = 240.0


class DidNotStart(Exception):
    """A side that ended or said nothing within its time; the message ends with what it wrote last."""


@dataclass(frozen=True)
class Answered:
    """What a question gave: tokens of all answers, seconds until the last, seconds until the first of the first."""

    tokens: int
    seconds: float
    first_s: float


class Side(Protocol):
    process: Popen[str]

    def ask(self, prompts: list[list[int]], tokens: int) -> Answered:
        """All prompts at once, `tokens` answered to each."""


@dataclass(frozen=True)
class Spec:
    """How a side is started: `command` gets the port, or nothing where `piped`. `text` turns ids into a prompt."""

    name: str
    command: Callable[[int], list[str]]
    env: dict[str, str] = field(default_factory=dict)
    start_limit_s: float = 60.0
    piped: bool = False
    text: Callable[[Sequence[int]], str] | None = None

    @contextmanager
    def started(self, logs: Path) -> Iterator[Side]:
        """Raises DidNotStart."""
        log, port = logs / f"{self.name}.log".replace(" ", "-"), free_port()
        with child(self, port, log) as process:
            side = _piped(process, self) if self.piped else _server(process, port, self)
            if side is None:
                last = log.read_text(errors="replace").splitlines()[-15:]
                raise DidNotStart("\n".join([f"{self.name} did not start", *last]))
            yield side


# Over HTTP


@dataclass(frozen=True)
class Server:
    """An OpenAI-style server on a port of this machine."""

    process: Popen[str]
    port: int
    model: str
    text: Callable[[Sequence[int]], str] | None

    def ask(self, prompts: list[list[int]], tokens: int) -> Answered:
        return asyncio.run(asyncio.wait_for(self._ask(prompts, tokens), ANSWER_LIMIT_S))

    async def _ask(self, prompts: list[list[int]], tokens: int) -> Answered:
        began = time.perf_counter()
        answers = await asyncio.gather(*(self._stream(prompt, tokens) for prompt in prompts))
        seconds = time.perf_counter() - began
        return Answered(sum(made for made, _ in answers), seconds, answers[0][1])

    async def _stream(self, prompt: list[int], tokens: int) -> tuple[int, float]:
        """Tokens made, and seconds until the first. Plain sockets, since client and server share the processors."""
        began, first_s, events, last = time.perf_counter(), 0.0, 0, b""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(post("/v1/completions", self._body(prompt, tokens)))
            status = (await reader.readline()).split()[1]
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    first_s = first_s or time.perf_counter() - began
                    events, last = events + 1, line
                elif line.startswith(b"data: [DONE]"):
                    usage = json.loads(last[6:]).get("usage") or {}
                    return usage.get("completion_tokens", events), first_s
            raise ConnectionError(f"status {status.decode()}, and the stream ended early: {last[:300]!r}")
        finally:
            writer.transport.abort()

    def _body(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": self.text(prompt) if self.text else prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def _server(process: Popen[str], port: int, spec: Spec) -> Server | None:
    """The server once it lists its model; None if it has ended or the time is up."""
    until = time.monotonic() + spec.start_limit_s
    while time.monotonic() < until and process.poll() is None:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as got,
        ):
            return Server(process, port, json.load(got)["data"][0]["id"], spec.text)
        time.sleep(0.2)
    return None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


# Over pipes


@dataclass(frozen=True)
class Piped:
    """A program that speaks `pipe.py`."""

    process: Popen[str]

    def ask(self, prompts: list[list[int]], tokens: int) -> Answered:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        answer = pipe.ask(self.process.stdin, self.process.stdout, prompts, tokens)
        return Answered(int(answer["tokens"]), answer["seconds"], answer["first_s"])


def _piped(process: Popen[str], spec: Spec) -> Piped | None:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], spec.start_limit_s)
    return Piped(process) if ready and process.stdout.readline().strip() == pipe.READY else None


# Processes


def pause(side: Side) -> None:
    """Stop a side where it is. One that waits for work still looks for it, on the processors of the others."""
    os.killpg(side.process.pid, signal.SIGSTOP)


@contextmanager
def awake(side: Side) -> Iterator[Side]:
    """Let a paused side go on, for so long."""
    os.killpg(side.process.pid, signal.SIGCONT)
    try:
        yield side
    finally:
        pause(side)


@contextmanager
def child(spec: Spec, port: int, log: Path) -> Iterator[Popen[str]]:
    """The process of a side. What it prints goes to `log`, but for the answers of one that is `piped`."""
    with log.open("w") as out:
        pipes = {"stdin": PIPE, "stdout": PIPE} if spec.piped else {"stdin": DEVNULL, "stdout": out}
        env = os.environ | spec.env
        process = Popen(spec.command(port), **pipes, stderr=out, env=env, text=True, process_group=0)
    try:
        yield process
    finally:
        end(process)


def end(process: Popen[str]) -> None:
    """End a child and its group, first politely. Its number is its own until `wait` has returned."""
    for stream in filter(None, (process.stdin, process.stdout)):
        with contextlib.suppress(OSError):
            stream.close()
    for kind in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, TimeoutExpired):
            os.killpg(process.pid, kind)
            if kind != signal.SIGCONT:  # what is paused could not end politely
                process.wait(STOP_LIMIT_S)
                return
