"""How deep new requests may go while the server is busy: a ceiling per priority, lowered at once and raised slowly.

To take every request at the most that its own deadline allows would fill the time up to the deadline with deep
requests, and leave nothing for those that come after. So depth falls as the wait grows, well before the limit. Only
requests that allow it (`min_loops`) ever get less than they asked for. Knows waits and loops; no requests, no engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # of the way from min_loops to what was asked for
MARKS = (0.1, 0.2, 0.3, 0.45)  # waits, as parts of the limit, above which the next share holds
RELIEVED = 0.5  # of a mark: below it a ceiling rises again, between the two it stays
HOLD_S = 1.0  # that it stays so before it rises by one share


@dataclass
class _Ceiling:
    step: int
    pressed_at: float  # when the wait last justified it


class DepthCeilings:
    """Hysteresis on the wait that a newcomer of each priority would have, as a part of the longest that it may have.

    A higher priority sees less work ahead, so its ceiling falls later. `saturation_ms` is the limit of those that have
    no SLO; None: nobody is lowered.
    """

    def __init__(self, saturation_ms: float | None, clock: Callable[[], float]) -> None:
        self.saturation_ms = saturation_ms
        self._clock = clock
        self._ceilings: dict[int, _Ceiling] = {}  # of priorities that are lowered

    def allowed(self, priority: int, wait_ms: float | None, slo_ms: float | None, asked: int, least: int) -> int:
        """The most loops that a newcomer may have now, between `least` and `asked`."""
        if self.saturation_ms is None:
            return asked
        limit = self.saturation_ms if slo_ms is None else slo_ms
        return least + math.ceil(SHARES[self._step(priority, (wait_ms or 0.0) / limit)] * (asked - least))

    def _step(self, priority: int, pressure: float) -> int:
        now, ceiling = self._clock(), self._ceilings.get(priority)
        wanted = sum(pressure > mark for mark in MARKS)
        if ceiling is None or wanted > ceiling.step:
            ceiling = _Ceiling(wanted, now)
        elif pressure > RELIEVED * MARKS[ceiling.step - 1]:
            ceiling.pressed_at = now
        elif now - ceiling.pressed_at >= HOLD_S:
            ceiling = _Ceiling(ceiling.step - 1, now)
        if ceiling.step:
            self._ceilings[priority] = ceiling
        else:
            self._ceilings.pop(priority, None)
        return ceiling.step
