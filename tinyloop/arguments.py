"""Checks of what a caller handed over: first its type, then its bounds. Knows no field's meaning, only its name.

Messages repeat the value, and stay short whatever it is.
"""

import math
import reprlib
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import cast

from tinyloop.errors import RequestError

_LONG_BITS = 128  # beyond this an integer is described; Python itself refuses to print one of 4301 digits
_SHOWN = 80  # characters


def number(field: str, value: object, low: float = -math.inf, high: float = math.inf) -> None:
    """Raises RequestError unless `value` is a number within the bounds."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(field, f"{field} must be a number, got {shown(value)}")
    comparable = cast(float, value)
    if not low <= comparable <= high:  # also refuses NaN
        raise RequestError(field, f"{field} must be {_bounds(low, high)}, got {shown(value)}")


def whole(field: str, value: object, low: float = -math.inf, high: float = math.inf) -> None:
    """Raises RequestError unless `value` is a whole number within the bounds; 2.0 and True are not."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(field, f"{field} must be a whole number, got {shown(value)}")
    number(field, value, low, high)


def _bounds(low: float, high: float) -> str:
    if low == -math.inf:
        return f"at most {high}"
    return f"at least {low}" if high == math.inf else f"between {low} and {high}"


def nodes(value: object, most_deep: int, most: int) -> int | None:
    """How many values a JSON value holds, itself included; None if they are more than `most`, or nested deeper than
    `most_deep`. Never recurses."""
    level, count, depth = [value], 0, 0
    while level:
        count, depth = count + len(level), depth + 1
        if count > most or depth > most_deep:
            return None
        level = [item for one in level for item in _inside(one)]
    return count


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def shown(value: object) -> str:
    """A value as a message may repeat it."""
    return _Short().repr(value)[:_SHOWN]


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return f"an integer of {x.bit_length()} bits" if x.bit_length() > _LONG_BITS else repr(x)
