"""What a step costs, learned from the steps themselves: a part that every step pays, and a part for each row.

Reading the weights costs the same for one row as for many, so a single rate would be wrong by an order of magnitude
between a step of one answer token and a step of a prompt. Knows numbers and reports; no requests, no engine, no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tinyloop.sequence import StepReport

HALF_LIFE_S = 10.0  # of what was measured, idle time included: after a pause new steps soon outweigh the old


@dataclass
class Line:
    """Least squares of seconds = fixed + per_row * rows over samples that fade. Neither part is below 0.

    Until the rows differ, all of it is taken to be per row.
    """

    _n: float = field(default=0.0, init=False)
    _x: float = field(default=0.0, init=False)
    _y: float = field(default=0.0, init=False)
    _xx: float = field(default=0.0, init=False)
    _xy: float = field(default=0.0, init=False)

    def add(self, rows: float, seconds: float) -> None:
        self._n += 1
        self._x += rows
        self._y += seconds
        self._xx += rows * rows
        self._xy += rows * seconds

    def fade(self, keep: float) -> None:
        """Let the samples so far count less."""
        self._n, self._x, self._y = self._n * keep, self._x * keep, self._y * keep
        self._xx, self._xy = self._xx * keep, self._xy * keep

    @property
    def measured(self) -> bool:
        return self._n > 0 and self._x > 0

    @property
    def per_row(self) -> float:
        """Seconds per row."""
        if not self.measured:
            return 0.0
        spread = self._n * self._xx - self._x * self._x
        most = max(self._y / self._x, 0.0)
        if spread <= 1e-6 * self._n * self._xx:
            return most
        return min(max((self._n * self._xy - self._x * self._y) / spread, 0.0), most)

    @property
    def fixed(self) -> float:
        """Seconds that do not depend on the rows."""
        return max((self._y - self.per_row * self._x) / self._n, 0.0) if self.measured else 0.0

    def seconds(self, rows: float) -> float:
        return self.fixed + self.per_row * rows


class StepCost:
    """The core's cost and the boundary's (prelude, coda, head and sampling), each a line over its own rows.

    What passes between two steps (the dispatcher, the event loop) counts to the core: every step pays it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.core, self.boundary = Line(), Line()
        self._clock = clock
        self._faded_at = clock()
        self._rows = self._seconds = 0.0

    def add(self, report: StepReport, seconds: float) -> None:
        """One step that took `seconds`, everything included."""
        now = self._clock()
        keep = 0.5 ** ((now - self._faded_at) / HALF_LIFE_S)
        self._faded_at = now
        self.core.fade(keep)
        self.boundary.fade(keep)
        self.core.add(report.rows, max(seconds - report.boundary_seconds, 0.0))
        if report.leaving:  # prompts that only enter pay for the prelude alone, and say nothing of coda and head
            self.boundary.add(report.boundary_rows, report.boundary_seconds)
        self._rows = self._rows * keep + report.rows
        self._seconds = self._seconds * keep + seconds

    @property
    def rate(self) -> float | None:
        """Row-loops per second over recent steps, everything included; None before the first."""
        return self._rows / self._seconds if self._rows > 0 and self._seconds > 0 else None

    @property
    def boundary_in_steps(self) -> float:
        """What a boundary costs before its own first row, in what a core step costs before its own; 0 while unknown."""
        step = self.core.fixed
        return self.boundary.fixed / step if step > 0 else 0.0
