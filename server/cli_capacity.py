"""`tinyloop simulate` and `tinyloop calibrate`: capacity planning on the command line.

tinyloop calibrate smollm2 --out smollm2.json
tinyloop simulate --costs smollm2.json --trace conv.csv --scale 32 --rate 6 --policy continuous,row_budget=256

Loads the simulator only when it is needed, and an engine only through `load`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyloop.errors import TinyLoopError

if TYPE_CHECKING:
    from server.engine import Engine
    from server.policy import Policy
    from server.simulation.trace import Arrival

LoadEngine = Callable[..., "Engine"]  # as Engine.load: a name, and dtype and kv_memory by keyword


def add_commands(cli: typer.Typer, load: LoadEngine) -> None:
    """Add both commands. `load` gives the engine that `calibrate` measures."""

    def calibrate(
        model: Annotated[str, typer.Argument(help="A bundled name, a folder, a GGUF file or a hub id.")] = "smollm2",
        out: Annotated[Path, typer.Option(help="Where the costs go, as JSON.")] = Path("costs.json"),
        seconds: Annotated[float, typer.Option(help="How long to measure; the grid is run at least once.")] = 90.0,
        dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
        seed: Annotated[int, typer.Option(help="Draws what is measured.")] = 0,
    ) -> None:
        """Measure what a step costs on this machine, for `simulate`. Keep the machine otherwise idle."""
        from server.simulation.calibrate import calibrate as measure

        _above_zero("--seconds", seconds)
        measure(load(model, dtype=dtype), seconds=seconds, seed=seed, say=print).save(out)
        print(f"wrote {out}")

    cli.command()(calibrate)
    cli.command()(simulate)


def simulate(
    costs: Annotated[Path, typer.Option(help="What `tinyloop calibrate` wrote.")] = Path("costs.json"),
    trace: Annotated[
        Path | None, typer.Option(help="Azure csv, or Mooncake jsonl or jsonl.gz; none: Poisson arrivals.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Dispatch mode and settings, as continuous,row_budget=256,aging=10.")
    ] = "continuous",
    requests: Annotated[
        int | None, typer.Option(help="How many; a trace is repeated. None: all of the trace, or 10000.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second, all servers together.")] = None,
    speedup: Annotated[float, typer.Option(help="Divides the trace's times; not with --rate.")] = 1.0,
    scale: Annotated[float, typer.Option(help="Divides the trace's lengths.")] = 1.0,
    prompt: Annotated[str, typer.Option(help="Without a trace: prompt tokens, as 128 or 16-512.")] = "16-512",
    answer: Annotated[str, typer.Option(help="Without a trace: answer tokens.")] = "16-256",
    loops: Annotated[
        str | None, typer.Option(help="Loops asked for: 2, 1-8, or weighted, 1:3,2-4:1. None: the default.")
    ] = None,
    min_loops: Annotated[int | None, typer.Option(help="The fewest a request may be lowered to.")] = None,
    slo_ms: Annotated[float | None, typer.Option(help="Longest predicted wait for the first token.")] = None,
    max_queue_depth: Annotated[int, typer.Option(help="Requests that may wait at a server.")] = 128,
    max_running: Annotated[int | None, typer.Option(help="Requests that may run at once on a server.")] = None,
    replicas: Annotated[int, typer.Option(help="Servers; who arrives goes to the one with least to do.")] = 1,
    seed: Annotated[int, typer.Option(help="Draws arrivals and loops.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a picture, an .svg.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the figures as JSON.")] = None,
    jump: Annotated[bool, typer.Option(help="Take many equal steps at once; --no-jump is the slow check.")] = True,
) -> None:
    """Run a trace through the server's own policy and admission on virtual time, and say what came of it."""
    from server.simulation.costs import StepCosts
    from server.simulation.fleet import simulate as run
    from server.simulation.plot import save_plot
    from server.simulation.replica import Server

    for name, count in (("--replicas", replicas), ("--max-queue-depth", max_queue_depth), ("--requests", requests),
                        ("--min-loops", min_loops), ("--max-running", max_running)):  # fmt: skip
        _at_least_one(name, count)
    for name, value in (("--rate", rate), ("--speedup", speedup), ("--scale", scale), ("--slo-ms", slo_ms)):
        _above_zero(name, value)
    if rate is not None and speedup != 1.0:
        raise TinyLoopError("--rate and --speedup cannot go together: both set the pace")
    measured = StepCosts.load(costs)
    limits = {} if max_running is None else {"max_running": max_running}
    parse_policy(policy, **limits)  # says now what is wrong with it
    server = Server(
        policy=lambda: parse_policy(policy, **limits),
        max_queue_depth=max_queue_depth,
        slo_ms=slo_ms,
        min_loops=min_loops,
    )
    arrivals, seconds = _arrivals(trace, requests, rate, speedup, scale, (prompt, answer), seed)
    arrivals = _with_loops(arrivals, loops, measured.model.max_loops, seed)
    report = run(measured, arrivals, server, replicas=replicas, jump=jump, slice_s=max(seconds / 100, 1e-3))
    print(report.table())
    if plot is not None:
        save_plot(report, plot)
    if json_out is not None:
        write_text(json_out, report.to_json())


def parse_policy(text: str, **settings: Any) -> Policy:
    """`continuous`, or with settings, `continuous,row_budget=256,aging=10`. Raises TinyLoopError."""
    from server.policy import DispatchMode, Policy

    mode, *pairs = text.split(",")
    if mode not in list(DispatchMode):
        raise TinyLoopError(f"--policy: {mode!r} is not one of {', '.join(DispatchMode)}")
    kinds = {one.name: str(one.type) for one in fields(Policy) if one.init and one.name != "mode"}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name.strip() not in kinds:
            raise TinyLoopError(f"--policy: {name!r} is not one of {', '.join(kinds)}")
        try:
            settings[name.strip()] = _setting(kinds[name.strip()], value.strip())
        except ValueError:
            raise TinyLoopError(f"--policy: {name.strip()} needs a number, got {value!r}") from None
    try:
        return Policy(DispatchMode(mode), **settings)
    except ValueError as error:
        raise TinyLoopError(f"--policy: {error}") from error


def _setting(kind: str, value: str) -> float | int | None:
    if value == "none" and "None" in kind:
        return None
    return float(value) if "float" in kind else int(value)


def _arrivals(
    trace: Path | None,
    requests: int | None,
    rate: float | None,
    speedup: float,
    scale: float,
    lengths: tuple[str, str],
    seed: int,
) -> tuple[Iterator[Arrival], float]:
    """Who arrives, and for how many seconds about."""
    from server.simulation.trace import Choice, Trace, poisson

    if trace is None:
        if rate is None:
            raise TinyLoopError("--rate is needed where there is no --trace")
        count = requests or 10_000
        prompts, answers = Choice.parse("--prompt", lengths[0]), Choice.parse("--answer", lengths[1])
        return poisson(count, rate, prompts, answers, seed), count / rate
    recorded = Trace.read(trace)
    pace = recorded.rate * speedup if rate is None else rate
    arrivals = recorded.arrivals(requests, scale=scale, speedup=speedup, rate=rate)
    return arrivals, (requests or len(recorded.times)) / pace if pace else 1.0


def _with_loops(arrivals: Iterator[Arrival], loops: str | None, most: int, seed: int) -> Iterator[Arrival]:
    from server.simulation.trace import Choice, with_loops

    if loops is None:
        return arrivals
    choice = Choice.parse("--loops", loops)
    if choice.most > most:
        raise TinyLoopError(f"--loops must be at most {most}, the model's most, got {choice.most}")
    return with_loops(arrivals, choice, seed)


def _at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise TinyLoopError(f"{name} must be at least 1, got {value}")


def _above_zero(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise TinyLoopError(f"{name} must be above 0 and finite, got {value:g}")


def write_text(path: Path, text: str) -> None:
    """Raises TinyLoopError if the file cannot be written."""
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise TinyLoopError(f"cannot write {path}: {error.strerror}") from error
