"""What HTTP adds to the engine's own time: for a request, and for each token of a stream.

    python bench/overhead.py [--requests 300] [--pace-ms 5]

The scheduler is the real one and its engine a fake (`tests/fakes.py`) whose tokens say when they were made and how long
the engine has worked until then. A client on a socket subtracts that from what it has waited, so the figures hold
everything but the engine: reading, checks, admission, the dispatcher, events, the socket, and the client's own parsing.

`request` is a whole answer of one token. `late` is how long after it was made a token arrives when one comes every
`--pace-ms`; `each` is a token's share of a long stream whose tokens are made at once. How late tokens are that a bare
socket sends shows what of `late` is the machine's: two processes that have to wake up.
"""

import argparse
import asyncio
import http.client
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine import machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the fakes of the tests

from tests.fakes import SteppingEngine  # noqa: E402
from tests.http_support import INFO, ScriptedEngine, python_process  # noqa: E402
from tinyloop.sequence import Segment, StepReport  # noqa: E402

STAMP = re.compile(rb"<(\d+),(\d+)>")  # when it was made, and the engine's time until then; in ns
PROMPT = "Hello there"
CHAT: dict[str, Any] = {"model": INFO.id, "messages": [{"role": "user", "content": PROMPT}]}
APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": INFO.id, "prompt": PROMPT},
    "/v1/messages": CHAT,
    "/v1/responses": {"model": INFO.id, "input": PROMPT, "store": False},
    "/tinyloop/v1/generate": {"prompt": PROMPT},
}
LIMITS = {"/v1/responses": "max_output_tokens", "/tinyloop/v1/generate": "max_new_tokens"}
LONG = 256  # tokens of a stream
PACED = 64
SERVER = """
import sys
sys.path.insert(0, "bench")
from overhead import StampingEngine
from server.cli import bind, run_server
from server.scheduler import Scheduler
from server.settings import Settings
run_server(Scheduler(StampingEngine({pace_s})), Settings(), bind("127.0.0.1", 0))
"""

BARE = """
import asyncio, time, uvloop

async def answer(reader, writer):
    while await reader.readuntil(b"}}"):
        writer.write(b"HTTP/1.1 200 OK\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n")
        for _ in range({tokens}):
            await asyncio.sleep({pace_s})
            data = b"data: <%d,0>\\n\\n" % time.perf_counter_ns()
            writer.write(b"%x\\r\\n%s\\r\\n" % (len(data), data))
        writer.write(b"0\\r\\n\\r\\n")

async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print("http://%s:%d" % server.sockets[0].getsockname(), flush=True)
    await server.serve_forever()

uvloop.run(main())
"""


class StampingEngine(SteppingEngine):
    """A step takes `pace_s`, or no longer than counting does."""

    def __init__(self, pace_s: float) -> None:
        super().__init__(num_pages=1 << 16, chunk=1 << 10)
        scripted = ScriptedEngine(max_context=4096)
        self.info, self.tokenizer = scripted.info, scripted.tokenizer  # type: ignore[assignment]
        self.pace_s, self.spent = pace_s, 0

    async def step(self, segments: list[Segment]) -> StepReport:
        began = time.perf_counter_ns()
        report = await super().step(segments)
        self.steps.clear()
        if self.pace_s:
            await asyncio.sleep(self.pace_s)
        made = time.perf_counter_ns()
        self.spent += made - began
        stamp = f"<{made},{self.spent}>"
        for event in report.tokens:  # a whole answer is its lease's text
            event.lease.text.text = event.lease.text.text.removesuffix("x") + stamp
        return replace(report, tokens=[replace(event, text=stamp) for event in report.tokens])


class Client:
    """One connection that stays open."""

    def __init__(self, address: str) -> None:
        self.connection = http.client.HTTPConnection(address.removeprefix("http://"))

    def post(self, path: str, tokens: int, *, stream: bool) -> http.client.HTTPResponse:
        limit = LIMITS.get(path, "max_tokens")
        body = json.dumps({**APIS[path], limit: tokens, "stream": stream, "loops": 1})
        self.connection.request("POST", path, body, {"content-type": "application/json"})
        response = self.connection.getresponse()
        assert response.status == 200, response.read()
        return response

    def request_ms(self, path: str) -> float:
        """Of one answer of one token, which the engine makes at once."""
        began = time.perf_counter_ns()
        body = self.post(path, 1, stream=False).read()
        waited = time.perf_counter_ns() - began
        assert STAMP.search(body), body
        return waited / 1e6

    def arrivals(self, path: str, tokens: int) -> Iterator[tuple[int, int, int]]:
        """When each token of a stream was made, what the engine had spent until then, and when it came; in ns."""
        last = 0
        for line in self.post(path, tokens, stream=True):
            if (stamp := STAMP.search(line)) and int(stamp[1]) > last:  # some events say the whole text again
                last = int(stamp[1])
                yield last, int(stamp[2]), time.perf_counter_ns()


def each_ms(arrivals: list[tuple[int, int, int]]) -> float:
    """A token's share of the time from the first to the last, less the engine's."""
    (_, spent, came), (_, spent_at_last, came_last) = arrivals[0], arrivals[-1]
    return (came_last - came - (spent_at_last - spent)) / (len(arrivals) - 1) / 1e6


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians in ms, by path."""
    found: dict[str, dict[str, float]] = {path: {} for path in APIS}
    with python_process(SERVER.format(pace_s=0)) as (_, address):
        client = Client(address)
        for path in APIS:
            spent = [client.request_ms(path) for _ in range(args.requests + 20)][20:]
            streams = [list(client.arrivals(path, LONG)) for _ in range(12)][2:]
            assert {len(stream) for stream in streams} == {LONG}
            found[path]["request"] = statistics.median(spent)
            found[path]["each"] = statistics.median(map(each_ms, streams))
    pace_s = args.pace_ms / 1000
    with python_process(SERVER.format(pace_s=pace_s)) as (_, address):
        client = Client(address)
        for path in APIS:
            found[path]["late"] = late_ms(client, path)
    with python_process(BARE.format(pace_s=pace_s, tokens=PACED)) as (_, address):
        found["a bare socket"] = {"late": late_ms(Client(address), "/v1/completions")}
    return found


def late_ms(client: Client, path: str) -> float:
    late = [came - made for _ in range(4) for made, _, came in client.arrivals(path, PACED)]
    return statistics.median(late) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--pace-ms", type=float, default=5)
    found = measure(parser.parse_args())
    print("| p50, ms | request | token, late | token, each |\n|---|---|---|---|")
    for path, row in found.items():
        figures = (f"{row[name]:.3f}" if name in row else "" for name in ("request", "late", "each"))
        print(f"| {path} | {' | '.join(figures)} |")
    print(json.dumps({"machine": machine(), "ms": found}))


if __name__ == "__main__":
    main()
