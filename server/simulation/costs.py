"""StepCosts: the seconds of a step from what is in it, kept as JSON.

A step touches sections (core, prelude, coda, head). Each that is touched costs a fixed part, since its weights are read
once however many rows there are; a part by rows, piecewise linear because few rows wait for memory and many for
arithmetic; a part for each segment; and three for attention: its calls, the keys gathered by segment, and the keys
that each row looks at. The turn around it (dispatcher, event loop) has a fixed part, one by segment and one by token.

Knows segments and numbers; no clock, no requests, no engine, no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tinyloop.config import Layout
from tinyloop.errors import TinyLoopError
from tinyloop.sequence import Segment

VERSION = 1
KNOTS = (0, 2, 8, 32, 128)  # rows at which the slope may change


class Load(NamedTuple):
    """What one section of a step has to do. `calls` of attention per layer; `gathered` keys, once for each segment; and
    `attended`, since each row looks at every key up to the end of its segment."""

    rows: int = 0
    segments: int = 0
    calls: int = 0
    gathered: int = 0
    attended: int = 0


class Shape(NamedTuple):
    """What is in a step. `heads`: rows through the head, a token each."""

    segments: int
    core: Load
    prelude: Load
    coda: Load
    heads: int


def shape_of(segments: Sequence[Segment], layout: Layout, page_size: int) -> Shape:
    """The shape of a step that is about to start; answers are taken to end at their full length."""
    core: list[tuple[int, int]] = []  # rows and end of each segment
    entering: list[tuple[int, int]] = []
    leaving: list[tuple[int, int]] = []
    heads = 0
    for segment in segments:
        rows = segment.rows
        part = rows, segment.start + rows
        if segment.state is None and not segment.loop:  # tokens of a kept prefix come back without the prelude
            entering.append(part)
        elif segment.loop >= segment.loops:
            leaving.append(part)
            left = _tokens_left(segment, part[1])
            heads += left > 0
            if left <= 1:
                continue
            part = 1, part[1] + 1
            entering.append(part)
        core.append(part)
    prelude = _load(entering, page_size) if layout.prelude else _NOTHING
    coda = _load(leaving, page_size) if layout.coda else _NOTHING
    return Shape(len(segments), _load(core, page_size), prelude, coda, heads)


def _tokens_left(segment: Segment, end: int) -> int:
    """Tokens of the answer still to be made when this segment leaves; 0 if it makes none."""
    lease = segment.lease
    tokens = len(lease.tokens)
    return lease.max_new_tokens + lease.prompt_tokens - tokens if end == tokens else 0


def _load(parts: list[tuple[int, int]], page_size: int) -> Load:
    """Segments of equal length share a call of attention where their histories are about as long, as in a batch."""
    if not parts:
        return _NOTHING
    rows = ends = attended = 0
    calls = set()
    for count, end in parts:
        rows, ends, attended = rows + count, ends + end, attended + count * end
        calls.add((count, ((end - 1) // page_size).bit_length()))
    return Load(rows, len(parts), len(calls), ends, attended)


_NOTHING = Load()


@dataclass(frozen=True)
class Part:
    """The cost of one section, in seconds: `slopes` per row between KNOTS, the others per unit of a Load."""

    fixed: float = 0.0
    slopes: tuple[float, ...] = (0.0,) * len(KNOTS)
    segment: float = 0.0
    call: float = 0.0
    gathered: float = 0.0
    attended: float = 0.0

    def seconds(self, load: Load) -> float:
        rows, segments, calls, gathered, attended = load
        if not rows:
            return 0.0
        attention = self.call * calls + self.gathered * gathered + self.attended * attended
        return self.by_rows(rows) + self.segment * segments + attention

    def by_rows(self, rows: int) -> float:
        """With the fixed part; 0 for none."""
        table = self._table
        return table[rows] if rows < len(table) else self._curve(rows)

    @cached_property
    def _table(self) -> list[float]:
        return [0.0, *(self._curve(rows) for rows in range(1, 1024))]

    def _curve(self, rows: int) -> float:
        return self.fixed + sum(slope * part for slope, part in zip(self.slopes, ramps(rows), strict=True))

    @property
    def per_key(self) -> float:
        """One more token of history for a single row."""
        return self.gathered + self.attended


@dataclass(frozen=True)
class Turn:
    """What passes outside of the engine's step."""

    fixed: float = 0.0
    segment: float = 0.0
    token: float = 0.0

    def seconds(self, shape: Shape) -> float:
        return self.fixed + self.segment * shape.segments + self.token * shape.heads


@dataclass(frozen=True)
class ModelFacts:
    """What a simulator has to know of the model. Layers by section, `page_bytes` in bytes, all else in tokens or pages;
    `head_loops` is what the head costs a row, in loops of the core. `one_plane`: all loops keep their KV in one;
    `whole_prompt`: a prompt is not cut. Files that say neither are of models without."""

    name: str
    prelude: int
    core: int
    coda: int
    page_size: int
    num_pages: int
    max_context: int
    default_loops: int
    max_loops: int
    max_chunk: int
    page_bytes: int
    head_loops: float
    one_plane: bool = False
    whole_prompt: bool = False

    @property
    def layout(self) -> Layout:
        return Layout(self.prelude, self.core, self.coda, self.one_plane)


@dataclass(frozen=True)
class StepCosts:
    """One model on one machine. `error`: mean |predicted - measured| / measured over the steps it was fitted to."""

    model: ModelFacts
    turn: Turn
    core: Part
    prelude: Part
    coda: Part
    head: Part
    error: float = 0.0

    def boundary_seconds(self, shape: Shape) -> float:
        """Prelude, coda and head."""
        return self.prelude.seconds(shape.prelude) + self.coda.seconds(shape.coda) + self.head.by_rows(shape.heads)

    def seconds(self, shape: Shape) -> float:
        """The whole turn."""
        return self.turn.seconds(shape) + self.core.seconds(shape.core) + self.boundary_seconds(shape)

    # JSON

    def save(self, path: Path) -> None:
        """Raises TinyLoopError if the file cannot be written."""
        try:
            path.write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n")
        except OSError as error:
            raise TinyLoopError(f"cannot write the costs to {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> StepCosts:
        """Raises TinyLoopError, naming the file, for whatever is not what `save` writes."""
        try:
            raw = json.loads(path.read_text())
            if raw.pop("version") != VERSION:
                raise ValueError(f"only version {VERSION} is known")
            kinds = {"model": ModelFacts, "turn": Turn}
            parts = {one.name: _checked(kinds.get(one.name, Part), raw.pop(one.name)) for one in fields(cls)[:-1]}
            return cls(**parts, error=float(raw.pop("error")))
        except OSError as error:
            raise TinyLoopError(f"cannot read the costs in {path}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            message = f"{path} does not hold step costs ({error}); `tinyloop calibrate` writes them"
            raise TinyLoopError(message) from error


def ramps(rows: int) -> list[int]:
    """How many of the rows lie between each knot and the next."""
    return [min(max(rows - low, 0), high - low) for low, high in zip(KNOTS, (*KNOTS[1:], 1 << 60), strict=True)]


def _checked(kind: type[Any], raw: dict[str, Any]) -> Any:
    """One of the values above from its JSON. Every number is finite and at least 0."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}
    for name, value in values.items():
        for number in value if isinstance(value, tuple) else (value,):
            if name != "name" and not (isinstance(number, int | float) and 0 <= number < math.inf):
                raise ValueError(f"{name} is {number!r}")
    if kind is Part and len(values["slopes"]) != len(KNOTS):
        raise ValueError(f"{len(values['slopes'])} slopes instead of {len(KNOTS)}")
    for name in ("core", "page_size", "num_pages", "max_chunk") if kind is ModelFacts else ():
        number = values[name]
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} is {number!r}")
    for name in ("one_plane", "whole_prompt"):
        if not isinstance(values.get(name, False), bool):
            raise ValueError(f"{name} is {values[name]!r}")
    return kind(**values)
