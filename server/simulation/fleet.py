"""`simulate`: arrivals, sent to the replica with the least work ahead, and what became of them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from server.simulation.costs import StepCosts
from server.simulation.recorder import Recorder
from server.simulation.replica import Replica, Server
from server.simulation.report import Report
from server.simulation.trace import Arrival
from tinyloop.errors import TinyLoopError


def simulate(
    costs: StepCosts,
    arrivals: Iterable[Arrival],
    server: Server,
    *,
    replicas: int = 1,
    jump: bool = True,
    slice_s: float = 1.0,
) -> Report:
    """Run all arrivals (in order of time) to their ends. `slice_s`: width of what is shown over time.

    Raises TinyLoopError if there are none.
    """
    recorder = Recorder(slice_s)
    fleet = [Replica(costs, server, recorder, jump=jump) for _ in range(replicas)]
    for arrival in arrivals:
        recorder.arrivals += 1
        for replica in fleet:
            replica.run_until(arrival.at)
        target = fleet[0] if replicas == 1 else min(fleet, key=lambda replica: replica.work_ahead)
        target.enter(arrival)
        _check(recorder)
    if not recorder.arrivals:
        raise TinyLoopError("there are no requests to simulate")
    for replica in fleet:
        replica.run_until(math.inf)
    _check(recorder)
    return Report.of(recorder, costs.model, slo_ms=server.slo_ms, replicas=replicas)


def _check(recorder: Recorder) -> None:
    """Nothing can go wrong in a simulated engine, and nobody cancels: such an end is a bug."""
    if recorder.failed:
        raise RuntimeError(f"simulated requests ended without an answer: {dict(recorder.failed)}")
