"""Who arrives when, with how many tokens: from a recorded trace or drawn at random, scaled, sped up and repeated.

Reads the Azure traces (csv: TIMESTAMP, ContextTokens, GeneratedTokens) and the Mooncake traces (jsonl or jsonl.gz:
timestamp in ms, input_length, output_length). Lengths only: nothing is known of texts or of shared prefixes.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TextIO

from tinyloop.errors import TinyLoopError

_ITEM = re.compile(r"(\d+)(?:-(\d+))?(?::(\d+(?:\.\d+)?))?")


Row = tuple[float, int, int]  # seconds, prompt tokens, answer tokens


class Arrival(NamedTuple):
    """Seconds since the first arrival, tokens, and loops asked for (None: the model's default)."""

    at: float
    prompt: int
    answer: int
    loops: int | None = None


@dataclass(frozen=True)
class Choice:
    """Whole numbers to draw from: `2`, `1-8`, `1,2,4`, or weighted, `1:3,2-4:1`."""

    ranges: tuple[tuple[int, int], ...]
    weights: tuple[float, ...]

    @classmethod
    def parse(cls, name: str, text: str, least: int = 1) -> Choice:
        """Raises TinyLoopError naming the option."""
        matches = [_ITEM.fullmatch(item.strip()) for item in text.split(",")]
        found = [(int(m[1]), int(m[2] or m[1]), float(m[3] or 1)) for m in matches if m]
        if len(found) < len(matches) or not sum(weight for *_, weight in found):
            raise TinyLoopError(f"{name}: {text!r} is not a number, a range such as 1-8, or a list such as 1:3,2-4:1")
        if any(not least <= low <= high for low, high, _ in found):
            raise TinyLoopError(f"{name}: numbers must be at least {least} and ranges go upwards, got {text!r}")
        return cls(tuple((low, high) for low, high, _ in found), tuple(weight for *_, weight in found))

    @property
    def most(self) -> int:
        return max(high for _, high in self.ranges)

    def draw(self, rng: random.Random) -> int:
        one = self.ranges[0] if len(self.ranges) == 1 else rng.choices(self.ranges, self.weights)[0]
        return one[0] if one[0] == one[1] else rng.randint(*one)


@dataclass(frozen=True)
class Trace:
    """Times in seconds from the first, in order; lengths in tokens."""

    times: tuple[float, ...]
    prompts: tuple[int, ...]
    answers: tuple[int, ...]

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Raises TinyLoopError naming the file and the request."""
        kind = _jsonl if path.name.endswith((".jsonl", ".jsonl.gz")) else _csv
        rows: list[Row] = []
        try:
            with _open(path) as file:
                for row in kind(file):
                    if not 0 <= row[0] < math.inf or row[1] < 1 or row[2] < 0:
                        raise ValueError(f"{row} is not a time and two lengths")
                    rows.append(row)
        except (OSError, EOFError, zlib.error) as error:
            raise TinyLoopError(f"cannot read the trace {path}: {getattr(error, 'strerror', None) or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise TinyLoopError(f"trace {path}, request {len(rows) + 1}: {type(error).__name__}: {error}") from error
        if not rows:
            raise TinyLoopError(f"trace {path} holds no requests")
        rows.sort(key=lambda row: row[0])
        times, prompts, answers = zip(*rows, strict=True)
        return cls(tuple(time - times[0] for time in times), prompts, answers)

    @property
    def rate(self) -> float:
        """Requests per second; 0 if all came at once."""
        return (len(self.times) - 1) / self.times[-1] if self.times[-1] > 0 else 0.0

    def arrivals(
        self, requests: int | None = None, *, scale: float = 1.0, speedup: float = 1.0, rate: float | None = None
    ) -> Iterator[Arrival]:
        """Lengths divided by `scale` (a prompt or an answer keeps at least one token), times by `speedup`, or so that
        `rate` requests come per second. Begins again when more requests are wanted than there are."""
        if rate is not None:
            if not self.rate:
                raise TinyLoopError("--rate cannot stretch a trace in which all requests come at once")
            speedup = rate / self.rate
        count, span = len(self.times), self.times[-1]
        again = span + span / max(count - 1, 1)
        for number in range(count if requests is None else requests):
            turn, row = divmod(number, count)
            at = (self.times[row] + turn * again) / speedup
            yield Arrival(at, _scaled(self.prompts[row], scale), _scaled(self.answers[row], scale))


def poisson(requests: int, rate: float, prompts: Choice, answers: Choice, seed: int) -> Iterator[Arrival]:
    """Independent arrivals, `rate` per second."""
    rng, at = random.Random(seed), 0.0
    for _ in range(requests):
        yield Arrival(at, prompts.draw(rng), answers.draw(rng))
        at += rng.expovariate(rate)


def with_loops(arrivals: Iterable[Arrival], loops: Choice, seed: int) -> Iterator[Arrival]:
    """Each arrival asks for loops of its own."""
    rng = random.Random(f"loops {seed}")
    return (arrival._replace(loops=loops.draw(rng)) for arrival in arrivals)


def _scaled(tokens: int, scale: float) -> int:
    return max(1, round(tokens / scale))


def _open(path: Path) -> TextIO:
    return gzip.open(path, "rt") if path.suffix == ".gz" else path.open()


def _csv(file: TextIO) -> Iterator[Row]:
    for row in csv.DictReader(file):
        at = datetime.fromisoformat(row["TIMESTAMP"]).replace(tzinfo=UTC).timestamp()
        yield at, int(row["ContextTokens"]), int(row["GeneratedTokens"])


def _jsonl(file: TextIO) -> Iterator[Row]:
    for line in file:
        row = json.loads(line)
        yield float(row["timestamp"]) / 1000, int(row["input_length"]), int(row["output_length"])
