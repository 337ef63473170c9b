"""How deep new requests may go while the server is saturated: a ceiling per priority, lowered and raised in steps.

Only requests that allow it (`min_loops`) ever get less than they asked for. Knows waits and loops; no requests, no
engine, no queue.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # of the way from min_loops to what was asked for
HOLD_S = 1.0  # between two moves of a ceiling
RELIEVED = 0.25  # of the saturation wait: below it a ceiling rises again; between the two it stays


@dataclass
class _Ceiling:
    step: int = 0
    moved_at: float = -math.inf


class DepthCeilings:
    """Hysteresis on the wait that a newcomer of each priority would have.

    Above `saturation_ms` a priority's ceiling falls by one share a second, below a quarter of it it rises again. A
    higher priority sees less work ahead, so its ceiling falls later. `saturation_ms` None: never.
    """

    def __init__(self, saturation_ms: float | None, clock: Callable[[], float]) -> None:
        self.saturation_ms = saturation_ms
        self._clock = clock
        self._ceilings: dict[int, _Ceiling] = {}  # of priorities that are lowered

    def allowed(self, priority: int, wait_ms: float | None, asked: int, least: int) -> int:
        """The most loops that a newcomer may have now, between `least` and `asked`."""
        if self.saturation_ms is None:
            return asked
        share = SHARES[self._step(priority, wait_ms or 0.0)]
        return least + math.ceil(share * (asked - least))

    def _step(self, priority: int, wait_ms: float) -> int:
        assert self.saturation_ms is not None
        ceiling = self._ceilings.get(priority, _Ceiling())
        now = self._clock()
        if now - ceiling.moved_at >= HOLD_S:
            if wait_ms > self.saturation_ms and ceiling.step < len(SHARES) - 1:
                ceiling.step, ceiling.moved_at = ceiling.step + 1, now
            elif wait_ms < RELIEVED * self.saturation_ms and ceiling.step > 0:
                ceiling.step, ceiling.moved_at = ceiling.step - 1, now
        if ceiling.step:
            self._ceilings[priority] = ceiling
        else:
            self._ceilings.pop(priority, None)
        return ceiling.step
