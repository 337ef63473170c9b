"""Bytes that are hardly HTTP, on every route that takes a body: the server refuses or answers, and keeps nothing."""

import json
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.app import create_app
from server.scheduler import Scheduler
from tests.http_support import ScriptedEngine, python_process
from tests.test_http_odd_fields import ODD

SERVER = """
import asyncio, os
os.dup2(os.open("{log}", os.O_WRONLY | os.O_CREAT), 2)  # a pipe that nobody reads would hold the server up
from server.cli import bind, run_server
from server.engine import Engine
from server.scheduler import Scheduler
from server.settings import Settings
from tests.tiny_models import tiny_model
engine = Engine(tiny_model("ouro"))
settings = Settings(body_timeout_s=2, drain_timeout_s=5, max_body_bytes={most}, default_max_tokens=8)
run_server(Scheduler(engine, prefix_pool_capacity=4), settings, bind("127.0.0.1", 0))
asyncio.run(engine.close())
engine.check()
print("the accounts balance")
"""
ROUTES: dict[str, dict[str, Any]] = {
    path: one["post"].get("requestBody", {}).get("content", {}).get("application/json", {}).get("example", {})
    for path, one in create_app(Scheduler(ScriptedEngine())).openapi()["paths"].items()
    if "post" in one
}
LIMITED = {"max_tokens", "max_output_tokens", "max_new_tokens"}
ANSWER_S = 20.0  # much more than any answer takes; beyond it the server hangs
MEANT = {501, 503}  # not offered; no room
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
GAUGES = ("in_flight", "queue_depth", "kv_usage_ratio")
FLAT_MIB = 24
MOST_BYTES = 1 << 20


@dataclass
class Sent:
    """What goes over one connection. `answers` are owed while it stays HTTP; none once it has been broken."""

    head: list[bytes]
    body: bytes
    line: bytes
    answers: int = 1
    before: bytes = b""
    extra: list[bytes] = field(default_factory=list)

    @property
    def raw(self) -> bytes:
        return self.before + b"\r\n".join([self.line, *self.head, *self.extra, b"", b""]) + self.body


def request(path: str, body: bytes, *, framed: bool = True) -> Sent:
    length = [b"content-length: %d" % len(body)] if framed else []
    return Sent([b"host: test", b"content-type: application/json", *length], body, b"POST %s HTTP/1.1" % path.encode())


def valid(path: str, dice: Random) -> dict[str, Any]:
    """The route's own example, small enough for thousands of answers."""
    fields = ROUTES[path] | {name: "tiny" for name in ("model", "instance_id") if name in ROUTES[path]}
    fields |= {name: dice.randint(1, 4) for name in LIMITED & fields.keys()}
    if "tokens" in fields:
        fields["tokens"] = [1, 2, 3]
    return fields | ({"stream": True} if LIMITED & fields.keys() and dice.random() < 0.4 else {})


def chunked(body: bytes, dice: Random) -> list[bytes]:
    pieces, at = [], 0
    while at < len(body):
        size = dice.randint(1, len(body))
        pieces.append(body[at : at + size])
        at += size
    return [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces] + [b"0\r\n\r\n"]


Break = Callable[[str, bytes, Random], Sent]


def as_it_is(path: str, body: bytes, dice: Random) -> Sent:
    return request(path, body)


def cut_short(path: str, body: bytes, dice: Random) -> Sent:
    sent = request(path, body)
    sent.body, sent.answers = body[: dice.randrange(len(body) or 1)], 0
    return sent


def cut_json(path: str, body: bytes, dice: Random) -> Sent:
    return request(path, body[: dice.randrange(len(body) or 1)])


def wrong_length(path: str, body: bytes, dice: Random) -> Sent:
    sent = request(path, body, framed=False)
    longer = b"%d" % (len(body) + 7)
    lengths = [b"0", b"1", b"-1", b"x", b"", b"+5", b"5, 6", b"0x10", b"1e3", b"9" * 30, longer, b" 5 "]
    sent.extra = [b"content-length: " + dice.choice(lengths) for _ in range(dice.choice([0, 1, 1, 2]))]
    sent.answers = 0
    return sent


def in_chunks(path: str, body: bytes, dice: Random) -> Sent:
    sent = request(path, b"".join(chunked(body, dice)), framed=False)
    sent.extra = [b"transfer-encoding: chunked"]
    return sent


def chunks_cut_short(path: str, body: bytes, dice: Random) -> Sent:
    sent = in_chunks(path, body, dice)
    sent.body, sent.answers = sent.body[: dice.randrange(len(sent.body))], 0
    return sent


def wrong_chunks(path: str, body: bytes, dice: Random) -> Sent:
    sent = in_chunks(path, body, dice)
    sizes = [b"-1", b"x", b"", b"f" * 20, b"5;a=b", b"1 ", b"0"]
    sent.body = dice.choice(sizes) + b"\r\n" + body + b"\r\n0\r\n\r\n"
    sent.extra += dice.choice([[], [b"content-length: 3"], [b"transfer-encoding: gzip"]])
    sent.answers = 0
    return sent


def odd_field(path: str, body: bytes, dice: Random) -> Sent:
    fields = json.loads(body) if body else {}
    name = dice.choice([*fields, "loops", "n", "stop", "seed", "priority", "tools", "response_format", "stream"])
    return request(path, json.dumps(fields | {name: dice.choice(ODD)}).encode())


def huge_field(path: str, body: bytes, dice: Random) -> Sent:
    fields = json.loads(body) if body else {}
    size = dice.choice([10_000, 200_000, 2_000_000])
    huge: list[Any] = ["x" * size, "é\n" * (size // 2), [0] * (size // 4), list(map(str, range(size // 16))), 10**4000]
    name = dice.choice([*fields, "messages", "stop", "metadata", "logit_bias", "x" * size])
    return request(path, json.dumps(fields | {name: dice.choice(huge)}).encode())


def deep(path: str, body: bytes, dice: Random) -> Sent:
    depth = dice.choice([50, 3_000, 200_000])
    name = dice.choice([*(json.loads(body) if body else {}), "tools"]).encode()
    opening, closing = dice.choice([(b"[", b"]"), (b'{"a":', b"}")])
    closed = dice.random() < 0.5
    return request(path, b'{"%s":%s' % (name, opening * depth) + (b"1" + closing * depth + b"}" if closed else b""))


def no_object(path: str, body: bytes, dice: Random) -> Sent:
    others = [b"", b"null", b"[]", b"1", b'"x"', b"NaN", b"{}", b"\xef\xbb\xbf{}", b"{}{}", b"\0"]
    return request(path, dice.choice(others))


def junk_bytes(path: str, body: bytes, dice: Random) -> Sent:
    at, junk = dice.randrange(len(body) + 1), dice.choice([b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\0", b"\xf0\x9f"])
    return request(path, body[:at] + junk * dice.randint(1, 9) + body[at:])


def flipped(path: str, body: bytes, dice: Random) -> Sent:
    """Any byte of the whole request may be another."""
    sent = request(path, body)
    raw = bytearray(sent.raw)
    for _ in range(dice.randint(1, 6)):
        raw[dice.randrange(len(raw))] = dice.randrange(256)
    return Sent([], b"", b"", 0, before=bytes(raw))


def noise(path: str, body: bytes, dice: Random) -> Sent:
    return Sent([], b"", b"", 0, before=dice.randbytes(dice.choice([1, 50, 5_000])))


def odd_headers(path: str, body: bytes, dice: Random) -> Sent:
    sent = request(path, body)
    odd = [
        b"content-type: text/plain", b"content-type:", b"content-encoding: gzip", b"expect: x",
        b"expect: 100-continue", b"upgrade: websocket", b"connection: upgrade", b"connection: close",
        b"host: elsewhere", b"host:", b"x" * 70_000, b"x-a: " + b"y" * 70_000, b"x-request-id: \xff\xfe",
        b"x-request-id: " + b"z" * 5_000, b"accept: \x00", b": empty", b" folded", b"no colon",
        b"authorization: Bearer \xff", b"x-tinyloop-loops: 99", b"x-tinyloop-loops: \xe9",
        b"x-tinyloop-priority: 1e999", b"x-tinyloop-slo-ms: nan", b"x-tinyloop-ttft-ms: -1", b"range: bytes=0-",
    ]  # fmt: skip
    sent.extra = [dice.choice(odd) for _ in range(dice.randint(1, 3))] * dice.choice([1, 1, 1, 150])
    sent.answers = 0
    return sent


def odd_line(path: str, body: bytes, dice: Random) -> Sent:
    sent, route = request(path, body), path.encode()
    lines = [
        b"POST %s HTTP/1.0", b"POST %s HTTP/2.0", b"POST %s HTTP/9", b"POST %s", b"post %s HTTP/1.1",
        b"GET %s HTTP/1.1", b"PUT %s HTTP/1.1", b"BREW %s HTTP/1.1", b"POST %s?%%ff=%%00 HTTP/1.1",
        b"POST //%s HTTP/1.1", b"OPTIONS %s HTTP/1.1", b"POST http://other%s HTTP/1.1", b"POST %s/../.. HTTP/1.1",
        b"POST %s%%2f%%00 HTTP/1.1", b"CONNECT %s HTTP/1.1",
    ]  # fmt: skip
    sent.line = dice.choice(lines) % route
    sent.answers = 0
    return sent


def pipelined(path: str, body: bytes, dice: Random) -> Sent:
    """Several at once, all owed an answer, and perhaps something broken behind them."""
    several = dice.randint(2, 4)
    sent = request(path, body)
    sent.before, sent.answers = sent.raw * (several - 1), several
    sent.body += dice.choice([b"", b"", b"\r\n", b"POST /v1", b"\xff" * 30])
    return sent


BREAKS: list[Break] = [
    as_it_is, cut_short, cut_json, wrong_length, in_chunks, chunks_cut_short, wrong_chunks, odd_field, huge_field, deep,
    no_object, junk_bytes, flipped, noise, odd_headers, odd_line, pipelined,
]  # fmt: skip


class Server:
    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        host, port = address.removeprefix("http://").split(":")
        self.address = (host, int(port))

    def statuses(self, sent: Sent, dice: Random) -> list[int]:
        """Of all answers. Reads until those that are owed are complete, or else until the server hangs up on one that
        says no more; raises TimeoutError if it does not."""
        with socket.create_connection(self.address, timeout=ANSWER_S) as connection:
            try:
                for piece in torn(sent.raw, dice):
                    connection.sendall(piece)
                if not sent.answers:
                    if dice.random() < 0.3:
                        return []  # gone without a word
                    select.select([connection], [], [], 0.05)  # an answer before the end, if there is one
                    connection.shutdown(socket.SHUT_WR)
                return statuses_of(connection, sent.answers)
            except (ConnectionResetError, BrokenPipeError, OSError) as error:
                if isinstance(error, TimeoutError) or sent.answers:
                    raise
                return []  # it may hang up on nonsense before all of that has come

    def ask(self, path: str, method: str = "GET") -> tuple[int, str]:
        with socket.create_connection(self.address, timeout=ANSWER_S) as connection:
            connection.sendall(f"{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n".encode())
            raw = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        return int(STATUS.match(raw)[1]), raw.partition(b"\r\n\r\n")[2].decode()  # type: ignore[index]

    def gauges(self) -> dict[str, float]:
        status, text = self.ask("/metrics")
        assert status == 200
        found = dict(re.findall(r"^tinyloop_(\w+) (\S+)$", text, re.MULTILINE))
        return {name: float(found[name]) for name in GAUGES}

    def settle(self) -> None:
        """Whoever left is forgotten within seconds, and what they held is free. Prefixes are kept until dropped."""
        for prefix in json.loads(self.ask("/tinyloop/v1/prefixes")[1])["prefixes"]:
            assert self.ask(f"/tinyloop/v1/prefixes/{prefix['id']}", "DELETE")[0] == 200
        deadline = time.monotonic() + 5
        while any((left := self.gauges()).values()):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        assert self.ask("/health")[0] == 200

    def facts(self, name: str) -> float:
        """MiB of memory or a count, of the process."""
        if name == "fds":
            return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"{name}:\s*(\d+)", status)[1]) / 1024  # type: ignore[index]


def torn(raw: bytes, dice: Random) -> Iterator[bytes]:
    """Sometimes in two pieces, so that the parser has to remember."""
    at = dice.randrange(len(raw) + 1) if dice.random() < 0.2 else 0
    if at:
        yield raw[:at]
        time.sleep(0.002)
    yield raw[at:]


def statuses_of(connection: socket.socket, answers: int) -> list[int]:
    reader, found = connection.makefile("rb"), []
    if not answers:
        return [int(status) for status in STATUS.findall(reader.read())]
    for _ in range(answers):
        found.append(int(STATUS.match(reader.readline())[1]))  # type: ignore[index]
        headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in head_of(reader))}
        if b"chunked" in headers.get(b"transfer-encoding", b""):
            while size := int(reader.readline(), 16):
                reader.read(size + 2)
            reader.readline()
        else:
            reader.read(int(headers[b"content-length"]))
        if headers.get(b"connection") == b"close":  # one that was refused unread ends what follows it
            break
    return found


def head_of(reader: Any) -> Iterator[bytes]:
    while line := reader.readline().strip():
        yield line


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Ends in order, whatever it was sent: no trace of an error, and every page is back."""
    log = tmp_path_factory.mktemp("fuzz") / "stderr"
    with python_process(SERVER.format(most=MOST_BYTES, log=log)) as (process, address):
        yield Server(process, address)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
    err = log.read_text()
    assert out.endswith("the accounts balance\n")
    assert "Traceback" not in err, err[-4000:]
    assert "failed" not in err, err[-4000:]


def attack(server: Server, path: str, how: Break, seed: int) -> None:
    dice = Random(seed)
    body = json.dumps(valid(path, dice)).encode()
    sent = how(path, body, dice)
    if len(sent.body) > MOST_BYTES:  # refused while it still comes, and what is on the way then may cut the answer off
        sent.answers = 0
    found = server.statuses(sent, dice)
    assert not [status for status in found if status >= 500 and status not in MEANT], found
    assert found or not sent.answers


@pytest.mark.parametrize("path", ROUTES)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(how=st.sampled_from(BREAKS), seed=st.integers(0, 2**32))
def test_broken_requests_break_nothing(server: Server, path: str, how: Break, seed: int) -> None:
    attack(server, path, how, seed)


def test_memory_and_connections_stay_flat(server: Server) -> None:
    def round_of(seed: int) -> None:
        dice = Random(seed)
        for path in ROUTES:
            for how in BREAKS:
                attack(server, path, how, dice.randrange(2**32))
        server.settle()

    round_of(1)
    before, fds = server.facts("VmRSS"), server.facts("fds")
    for seed in (2, 3):
        round_of(seed)
    assert server.facts("VmRSS") < before + FLAT_MIB
    assert server.facts("fds") <= fds + 2


def test_a_body_that_never_comes_is_not_waited_for(server: Server) -> None:
    sent = request("/v1/completions", b'{"prompt"')
    sent.extra = [b"x-a: b"]
    sent.head[-1] = b"content-length: 500"
    assert server.statuses(sent, Random(0)) == [408]
    server.settle()


def test_nonsense_behind_a_request_is_no_fault(server: Server) -> None:
    """The connection is closed for it, maybe while the request before it is being answered; see the log at the end."""
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 4}).encode()
    for _ in range(20):
        sent = request("/v1/completions", body)
        sent.body += b"\xff" * 30
        sent.answers = 0
        server.statuses(sent, Random(1))
    server.settle()
