"""`tinyloop inspect` and `tinyloop trace`: what a model is, and what it would say after each loop.

tinyloop inspect ./Ouro-1.4B --weights int8
tinyloop trace "The capital of France is" --loops 8 --png france.png

Loads torch only when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from tinyloop.config import ModelConfig
    from tinyloop.inspection import Inspection
    from tinyloop.trace import Trace

Name = Annotated[str, typer.Argument(metavar="MODEL", help="A bundled name, a folder, a GGUF file or a hub id.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
WeightsOption = Annotated[str, typer.Option(help="auto (as dtype says) or int8: half the bytes, at a small loss.")]
PIPED_WIDTH = 100  # columns where the output is no terminal


def add_commands(cli: typer.Typer, size: Callable[[str], int]) -> None:
    """Add both commands. `size` reads bytes as people write them."""

    def inspect(
        model: Name = "smollm2",
        dtype: Dtype = "auto",
        weights: WeightsOption = "auto",
        kv_memory: Annotated[str | None, typer.Option(help="Memory for keys and values, such as 2GiB.")] = None,
    ) -> None:
        """Say what a model is and what memory it needs, from its configuration; weights are not loaded."""
        from tinyloop import model as library
        from tinyloop.checkpoint import read_config
        from tinyloop.inspection import inspect as look

        memory = None if kv_memory is None else size(kv_memory)
        library.check_kv_memory(memory)
        kind, int8 = library.pick_dtype(dtype), library.pick_int8(weights)
        print("\n".join(described(look(read_config(model), kind, int8=int8, kv_memory=memory))))

    cli.command()(inspect)
    cli.command()(trace)


def described(found: Inspection) -> Iterator[str]:
    """The lines of `tinyloop inspect`."""
    config, layout = found.config, found.config.layout
    dtype = str(found.dtype).removeprefix("torch.")
    yield f"family      {config.family}"
    yield f"parameters  {config.parameters / 1e6:,.0f}M in matrices and embeddings, {config.max_context} of context"
    yield f"layers      {layout.prelude} prelude, {layout.core} core, {layout.coda} coda"
    yield f"loops       {_depths(config)}"
    for loops in _shown_loops(config):
        yield f"KV          {found.kv_bytes(loops) / 1024:,.1f} KiB per token at {loops}"
    kept = f"int8 and {dtype}" if found.int8 else dtype
    yield f"weights     {_mib(found.weight_bytes)} in {kept}"
    yield f"KV budget   {_mib(found.kv_pool_bytes)}"
    yield f"memory      {_mib(found.memory)} for both; torch and a step's own tensors come on top"
    yield f"prefix      {_prefix(config)}"


def _depths(config: ModelConfig) -> str:
    trained = f", trained {config.trained_loops}" if config.max_loops > 1 else ""
    exits = f"exit by {' or '.join(config.exit_signals)}" if config.exit_signals else "no early exit"
    return f"1 to {config.max_loops}, default {config.default_loops}{trained}, {exits}"


def _shown_loops(config: ModelConfig) -> list[int]:
    """Powers of two, the default and the most."""
    powers = {1 << power for power in range(config.max_loops.bit_length())}
    return sorted(powers | {config.default_loops, config.max_loops})


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def _prefix(config: ModelConfig) -> str:
    from tinyloop.inspection import prefix_rule

    return prefix_rule(config)


def trace(
    prompt: Annotated[str, typer.Argument(help="The text to look into.")],
    model: Annotated[str, typer.Option(help="A bundled name, a folder, a GGUF file or a hub id.")] = "smollm2",
    loops: Annotated[int | None, typer.Option(help="Loops to follow.")] = None,
    top: Annotated[int, typer.Option(help="Likeliest tokens to keep of each view.")] = 5,
    dtype: Dtype = "auto",
    weights: WeightsOption = "auto",
    json_out: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Write a heat map; needs matplotlib.")] = None,
) -> None:
    """Show what the model would say after each loop, for each token of a prompt."""
    import tinyloop as tl
    from server.cli_capacity import write_text

    if png is not None:
        from server.trace_plot import check

        check(png)
    traced = tl.Model.load(model, dtype=dtype, weights=weights).trace(prompt, loops=loops, top=top)
    _print(table(traced))
    if json_out is not None:
        write_text(json_out, traced.to_json())
    if png is not None:
        from server.trace_plot import save_heat_map

        save_heat_map(traced, png)


def table(traced: Trace) -> Table:
    """One row for each token and loop."""
    from rich.table import Table
    from rich.text import Text

    gated = traced.tokens[0].loops[0].exited is not None
    columns = Table(title=Text(f"{traced.model}: after each loop"))
    for name in ("token", "loop", "likeliest next"):
        columns.add_column(name)
    for name in ("entropy", "moved", *(["exited"] if gated else [])):
        columns.add_column(name, justify="right", no_wrap=True)
    for token in traced.tokens:
        for loop, view in enumerate(token.loops, 1):
            best = "  ".join(f"{guess.text!r} {guess.probability:.0%}" for guess in view.top[:3])
            exited = [] if view.exited is None else [f"{view.exited:.3f}"]
            cells = ["" if loop > 1 else repr(token.text), str(loop), best, f"{view.entropy:.2f}",
                     f"{view.distance:.3f}", *exited]  # fmt: skip
            columns.add_row(*map(Text, cells), end_section=loop == traced.loops)
    return columns


def _print(found: Table) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    console.print(found)
