"""From measured steps to `StepCosts`: least squares of the relative error, with no cost below 0. Numbers only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from server.simulation.costs import KNOTS, Load, ModelFacts, Part, Shape, StepCosts, Turn, ramps

REFITS = 3  # with weights from the fit before

Vector = NDArray[np.float64]


class Measured(NamedTuple):
    """One step: what was in it, and the seconds of the whole turn, of the step, and of its boundary."""

    shape: Shape
    turn_s: float
    step_s: float
    boundary_s: float


def fit(model: ModelFacts, steps: Sequence[Measured]) -> StepCosts:
    """Turn, core and boundary one by one, since each was measured by itself."""
    shapes = [step.shape for step in steps]
    turn = _solve([(1.0, s.segments, s.heads) for s in shapes], [m.turn_s - m.step_s for m in steps])
    core = _solve([_features(s.core) for s in shapes], [m.step_s - m.boundary_s for m in steps])
    outer = [m for m in steps if m.shape.prelude.rows or m.shape.coda.rows or m.shape.heads]
    rows = [[*_features(s.prelude), *_features(s.coda), *_by_rows(s.heads)] for s in (m.shape for m in outer)]
    boundary = _solve(rows, [m.boundary_s for m in outer])
    width = len(_features(Load()))
    costs = StepCosts(
        model,
        Turn(*turn),
        core=_part(core),
        prelude=_part(boundary[:width]),
        coda=_part(boundary[width : 2 * width]),
        head=_part(boundary[2 * width :]),
    )
    return replace(costs, error=mean_error(costs, steps))


def mean_error(costs: StepCosts, steps: Iterable[Measured]) -> float:
    """Mean |predicted - measured| / measured of the turns."""
    return float(np.mean([abs(costs.seconds(m.shape) - m.turn_s) / m.turn_s for m in steps]))


def _by_rows(rows: int) -> list[float]:
    return [float(rows > 0), *ramps(rows)]


def _features(load: Load) -> list[float]:
    return [*_by_rows(load.rows), *load[1:]]


def _part(found: Sequence[float]) -> Part:
    fixed, slopes, rest = found[0], tuple(found[1 : len(KNOTS) + 1]), found[len(KNOTS) + 1 :]
    return Part(fixed, slopes, *rest)


def _solve(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Least squares of the relative error, no coefficient below 0.

    Relative to the prediction of the fit before: relative to the measured value it would sink below the mean, because
    a disturbed step would count less than a quick one.
    """
    if not rows:
        return [0.0] * (2 * len(_features(Load())) + len(_by_rows(0)))
    a, b = np.array(rows, float), np.maximum(np.array(seconds, float), 0.0)
    scale = np.maximum(np.abs(a).max(axis=0), 1e-30)
    floor = max(float(np.median(b)), 1e-9) / 100
    weights = 1 / np.maximum(b, floor)
    for _ in range(REFITS):
        found = nnls(a / scale * weights[:, None], b * weights) / scale
        weights = 1 / np.maximum(a @ found, floor)
    return [float(value) for value in found]


def nnls(a: Vector, b: Vector) -> Vector:
    """The x >= 0 that minimises |a x - b|: the active set method of Lawson and Hanson (1974)."""
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], bool)
    for _ in range(3 * a.shape[1]):
        slope = np.where(free, -np.inf, a.T @ (b - a @ x))
        best = int(slope.argmax())
        if slope[best] <= 1e-9 * np.linalg.norm(a[:, best]) * np.linalg.norm(b):
            break
        free[best] = True
        x = _towards(a, b, x, free)
    return x


def _towards(a: Vector, b: Vector, x: Vector, free: NDArray[np.bool_]) -> Vector:
    """The minimum over the free ones; those that would fall below 0 are bound again (in `free`) on the way."""
    while free.any():
        goal = np.zeros_like(x)
        goal[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
        low = free & (goal <= 0)
        if not low.any():
            return goal
        step = np.min(x[low] / np.maximum(x[low] - goal[low], 1e-300))
        x = np.where(free, x + step * (goal - x), 0.0)
        free &= ~(low & (x <= 1e-12 * max(x.max(), 1e-300)))
    return np.zeros_like(x)
