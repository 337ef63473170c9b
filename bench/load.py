"""Minutes of heavy use of a real server: what it still answers, how fast its probes are, whether its memory grows.

    python bench/load.py [--model smollm2] [--streams 256] [--minutes 3] [--loops 1 2 4] [--seed 0]

A server and a load generator run as processes of their own. The generator keeps `--streams` streamed requests open, of
short prompts and answers, and leaves a tenth of them at a random moment; it is killed and started anew three times.
Meanwhile this process probes /health and /metrics and reads the server's memory. When the load has ended, the server
must come back to rest. Everything shares one machine, so probes also wait for a processor. Memory for keys and values
is taken up page by page as pages are first used, and oneDNN keeps a kernel for every shape that it has met, 1,024 of
them. To see a leak behind these, bound both: `--serve "--kv-memory 128M"` and ONEDNN_PRIMITIVE_CACHE_CAPACITY=32.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shlex
import statistics
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
KILLS = 3  # of the load generator
LEAVE = 0.1  # part of the requests that are not read to the end
SHORT, LONG = 16, 64  # tokens of prompts and of answers
FIRST_TOKEN_ID, LAST_TOKEN_ID = 300, 20_000
PROBE_EVERY_S = 0.1
PROBE_LIMIT_S = 60.0
SLOW_MS = 500.0  # a probe that is told with its time
STOP_LIMIT_S = 60.0


# The load generator: one line on stdout for each request, "outcome tokens". It may be killed at any moment.


@dataclass
class Stream:
    """One of the open streams: one request after another until `until`, each with its own dice."""

    host: str
    port: int
    model: str
    loops: list[int]
    rng: random.Random
    until: float
    usual_s: float = 10.0  # how long a request takes; the moment of leaving lies somewhere in it

    async def run(self) -> None:
        await asyncio.sleep(self.rng.random())
        while time.monotonic() < self.until:
            outcome, tokens = await self.request()
            print(outcome.replace(" ", "_"), tokens, flush=True)
            if outcome != "done":
                await asyncio.sleep(0.5 + self.rng.random())

    async def request(self) -> tuple[str, int]:
        """How one request ended, and the events with tokens that came."""
        seen, began = [0], time.monotonic()
        limit_s = self.rng.random() * self.usual_s if self.rng.random() < LEAVE else None
        try:
            async with asyncio.timeout(limit_s):
                outcome = await self.exchange(seen)
        except TimeoutError:
            outcome = "left"
        except (OSError, EOFError, ValueError) as error:
            outcome = f"error {type(error).__name__}"
        if outcome == "done":
            self.usual_s += 0.2 * (time.monotonic() - began - self.usual_s)
        return outcome, seen[0]

    async def exchange(self, seen: list[int]) -> str:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(post("/v1/completions", self.body()))
            status = int((await reader.readline()).split()[1])
            if status == 200:
                return await read_events(reader, seen)
            return refusal(status, await reader.read())
        finally:
            writer.transport.abort()

    def body(self) -> dict[str, Any]:
        rng = self.rng
        return {
            "model": self.model,
            "prompt": [rng.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(rng.randint(SHORT, LONG))],
            "max_tokens": rng.randint(SHORT, LONG),
            "loops": rng.choice(self.loops),
            "stream": True,
            "ignore_eos": True,
        }


def post(path: str, fields: dict[str, Any]) -> bytes:
    raw = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


async def read_events(reader: asyncio.StreamReader, seen: list[int]) -> str:
    """Count events up to the last. Chunks of the transfer begin with an event, so lines are enough to go by."""
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            return "done"
        if line.startswith(b'data: {"error"'):
            return "error event"
        seen[0] += line.startswith(b"data: ")
    return "error early end"


def refusal(status: int, answer: bytes) -> str:
    """A full queue is what a client must expect; anything else is an error."""
    return "refused" if status == 503 and b'"queue_full"' in answer else f"error {status}"


async def generate_load(args: argparse.Namespace) -> None:
    until = time.monotonic() + args.seconds
    streams = [
        Stream(args.host, args.port, args.model, args.loops, random.Random(f"{args.seed}:{at}"), until)
        for at in range(args.streams)
    ]
    await asyncio.gather(*(stream.run() for stream in streams))


# What is watched meanwhile


@dataclass
class Report:
    """All that is counted and measured."""

    outcomes: Counter[str] = field(default_factory=Counter)
    latencies_ms: dict[str, list[float]] = field(default_factory=lambda: {"/health": [], "/metrics": []})
    slow: list[tuple[float, str, float]] = field(default_factory=list)  # seconds since the start, path, ms
    began: float = field(default_factory=time.monotonic)
    bad_probes: Counter[str] = field(default_factory=Counter)
    rss: list[tuple[float, int]] = field(default_factory=list)  # seconds since the load began, KiB
    most_running: float = 0
    most_waiting: float = 0

    def on_probe(self, path: str, began: float, ms: float) -> None:
        self.latencies_ms[path].append(ms)
        if ms > SLOW_MS:
            self.slow.append((round(began - self.began, 1), path, round(ms)))


async def get(host: str, port: int, path: str) -> tuple[int, str]:
    """Status and body of a new connection's only request."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())
        head, _, text = (await reader.read()).decode().partition("\r\n\r\n")
        return int(head.split()[1]), text
    finally:
        writer.transport.abort()


async def probe(host: str, port: int, path: str, report: Report) -> None:
    """Ask every 100 ms, or as soon as the answer before is there."""
    while True:
        began = time.monotonic()
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                status, text = await get(host, port, path)
        except (OSError, IndexError, ValueError) as error:
            report.bad_probes[f"{path} {type(error).__name__}"] += 1
        else:
            report.on_probe(path, began, 1000 * (time.monotonic() - began))
            if status != 200:
                report.bad_probes[f"{path} {status}"] += 1
            if path == "/metrics":
                report.most_running = max(report.most_running, series(text, "tinyloop_in_flight"))
                report.most_waiting = max(report.most_waiting, series(text, "tinyloop_queue_depth"))
        await asyncio.sleep(max(began + PROBE_EVERY_S - time.monotonic(), 0))


def series(text: str, name: str, labels: str = "") -> float:
    """The sum of the series of that name whose labels contain `labels`."""
    found = re.findall(rf"^{name}(?:\{{([^}}]*)\}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for given, value in found if labels in given)


async def watch_memory(pid: int, report: Report) -> None:
    began = time.monotonic()
    while True:
        report.rss.append((time.monotonic() - began, rss_kib(pid)))
        await asyncio.sleep(1)


def rss_kib(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) if found else 0


# Processes


@asynccontextmanager
async def process(*command: str) -> AsyncIterator[Process]:
    """A child that is ended in any case, first politely."""
    child = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=ROOT, stdout=PIPE)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), STOP_LIMIT_S)
        if child.returncode is None:
            child.kill()
            await child.wait()


async def address(server: Process) -> tuple[str, int]:
    """Where a server says that it listens."""
    assert server.stdout is not None
    first = (await server.stdout.readline()).decode()
    found = re.search(r"http://([\d.]+):(\d+)", first)
    if found is None:
        raise SystemExit("the server did not start")
    return found[1], int(found[2])


async def run_load(args: argparse.Namespace, host: str, port: int, report: Report) -> None:
    """One generator after another. All but the last are killed; the last lets its requests come to their ends."""
    seconds = args.minutes * 60 / (KILLS + 1)
    for at in range(KILLS + 1):
        options = ["--host", host, "--port", str(port), "--streams", str(args.streams), "--model", args.model]
        options += ["--seed", f"{args.seed + at}", "--loops", *map(str, args.loops)]
        last = at == KILLS
        options += ["--seconds", str(seconds if last else seconds + 60)]
        async with process(str(Path(__file__)), "--generate", *options) as generator:
            lines = asyncio.create_task(count_lines(generator, report))
            done, _ = await asyncio.wait({lines}, timeout=seconds + args.settle if last else seconds)
            if not done:
                generator.kill()
            await lines
            await generator.wait()


async def count_lines(generator: Process, report: Report) -> None:
    """Count outcomes until the generator is gone. A line that its end has cut is dropped."""
    assert generator.stdout is not None
    while (line := await generator.stdout.readline()).endswith(b"\n"):
        report.outcomes[line.decode().split()[0]] += 1


@asynccontextmanager
async def alongside(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for result in ended:
        if not isinstance(result, asyncio.CancelledError):
            raise RuntimeError("a probe ended early") from result


async def at_rest(host: str, port: int, limit_s: float) -> str:
    """The metrics once nothing runs or waits, or as they are when the time is up."""
    began = time.monotonic()
    while True:
        _, text = await get(host, port, "/metrics")
        busy = series(text, "tinyloop_in_flight") + series(text, "tinyloop_queue_depth")
        if not busy or time.monotonic() > began + limit_s:
            return text
        await asyncio.sleep(0.2)


# The run and its figures


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    report = Report()
    command = ["-m", "server.cli", "serve", args.model, "--port", "0", *shlex.split(args.serve)]
    async with process(*command) as server:
        host, port = await address(server)
        probes = [probe(host, port, path, report) for path in report.latencies_ms]
        _, before = await get(host, port, "/metrics")
        began = time.monotonic()
        async with alongside(*probes, watch_memory(server.pid, report)):
            await run_load(args, host, port, report)
            seconds = time.monotonic() - began
            _, after = await get(host, port, "/metrics")
            metrics = await at_rest(host, port, args.settle)
        memory = rss_kib(server.pid)
        tokens = [series(text, "tinyloop_generated_tokens_total") for text in (before, after)]
        server.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.wait(), STOP_LIMIT_S)
        exit_code = server.returncode
    return {
        **requests(metrics, report),
        "tokens_per_s": (tokens[1] - tokens[0]) / seconds,
        "seconds": seconds,
        **{f"{path[1:]}_ms": spread(values) for path, values in report.latencies_ms.items()},
        **growth(report, memory, args.minutes * 60),
        **rest(metrics),
        "slow_probes": report.slow,
        "most_running": report.most_running,
        "most_waiting": report.most_waiting,
        "exit_code": exit_code,
    }


def requests(metrics: str, report: Report) -> dict[str, Any]:
    """The server's own count of what became of requests, and all that nobody asked for, whoever saw it."""
    outcome = {name: count(metrics, name) for name in ("done", "cancelled", "rejected", "error")}
    full = series(metrics, "tinyloop_requests_total", 'outcome="rejected",reason="queue_full"')
    faults: dict[str, float] = {name: n for name, n in report.outcomes.items() if name.startswith("error")}
    faults |= report.bad_probes
    faults |= {"server error": outcome["error"], "other rejection": outcome["rejected"] - full}
    faults = {name: n for name, n in faults.items() if n}
    return {
        "done": outcome["done"],
        "cancelled": outcome["cancelled"],
        "left_by_client": report.outcomes["left"],
        "refused": full,
        "errors": sum(faults.values()),
        "error_kinds": faults,
    }


def count(metrics: str, outcome: str) -> float:
    return series(metrics, "tinyloop_requests_total", f'outcome="{outcome}"')


def spread(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum."""
    percentiles = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": percentiles[49], "p99": percentiles[98], "max": max(values)}


def growth(report: Report, at_end: int, load_s: float) -> dict[str, Any]:
    """Resident memory in MiB after a fifth of the time and at rest after the load, and the difference in percent."""
    last = report.rss[-1][1]
    by_fifths = [next((kib for at, kib in report.rss if at >= load_s * n / 5), last) for n in range(6)]
    warm = by_fifths[1]
    return {
        "rss_warm_mib": warm / 1024,
        "rss_end_mib": at_end / 1024,
        "rss_growth_percent": 100 * (at_end / warm - 1),
        "rss_by_fifths_mib": [round(kib / 1024) for kib in by_fifths],
    }


def rest(metrics: str) -> dict[str, Any]:
    """The gauges after the load. Prefixes that nobody uses do not count as usage."""
    names = ("in_flight", "queue_depth", "kv_usage_ratio")
    gauges = {name: series(metrics, f"tinyloop_{name}") for name in names}
    return {**gauges, "at_rest": not any(gauges.values())}


def table(figures: dict[str, Any], args: argparse.Namespace) -> str:
    latency = "{p50:.1f} / {p99:.1f} / {max:.1f}".format_map
    memory = "{rss_warm_mib:.0f} / {rss_end_mib:.0f} MiB, {rss_growth_percent:+.1f} %".format_map(figures)
    gauges = "{in_flight:g} / {queue_depth:g} / {kv_usage_ratio:g}".format_map(figures)
    rows = {
        "requests done": f"{figures['done']:.0f}",
        "cancelled (left by a client, the others by its kill)": "{cancelled:.0f} ({left_by_client})".format_map(
            figures
        ),
        "refused, queue full": f"{figures['refused']:.0f}",
        "errors that nobody asked for": f"{figures['errors']:.0f} {figures['error_kinds'] or ''}",
        "tokens/s": f"{figures['tokens_per_s']:.1f}",
        "most running / waiting": f"{figures['most_running']:.0f} / {figures['most_waiting']:.0f}",
        "/health p50 / p99 / max, ms": latency(figures["health_ms"]),
        "/metrics p50 / p99 / max, ms": latency(figures["metrics_ms"]),
        "memory after a fifth / at the end": memory,
        "running / waiting / KV in use after the load": gauges,
        "exit code after SIGTERM": f"{figures['exit_code']}",
    }
    head = f"| {args.model}, {args.streams} streams, {args.minutes:g} min, loops {args.loops} | |\n|---|---|"
    return "\n".join([head, *(f"| {name} | {value} |" for name, value in rows.items())])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--loops", type=int, nargs="+", default=[1, 2, 4], help="each request draws one of these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", default="", help="further options of `tinyloop serve`, in one argument")
    parser.add_argument("--settle", type=float, default=180.0, help="seconds that the last requests may take")
    for name, kind in (("--host", str), ("--port", int), ("--seconds", float)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--generate", action="store_true", help=argparse.SUPPRESS)  # be the load generator
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.generate:
        asyncio.run(generate_load(args))
        return
    load = os.getloadavg()[0]
    figures = asyncio.run(measure(args))
    figures |= {"load_average": [load, os.getloadavg()[0]], "cores": os.cpu_count()}
    print(table(figures, args))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
