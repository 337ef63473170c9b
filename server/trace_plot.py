"""A heat map of a trace, as PNG: loops from left to right, tokens from top to bottom, in each cell the likeliest token.

Needs matplotlib, which is no dependency of the server: `pip install 'tinyloop[plot]'`.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tinyloop.errors import TinyLoopError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tinyloop.trace import Trace

CELL = (1.3, 0.3)  # inches
MARGIN = (3.0, 1.2)
MOST_TOKENS = 400  # more would be a picture that no viewer opens
SHOWN = 14  # characters of a token


def check(path: Path) -> None:
    """Raises TinyLoopError if there can be no picture of this name: said before a model is loaded."""
    if path.suffix != ".png":
        raise TinyLoopError(f"--png: the picture is a PNG, so its name must end in .png, got {path.name}")
    if find_spec("matplotlib") is None:
        raise TinyLoopError("--png needs matplotlib: pip install 'tinyloop[plot]'")


def save_heat_map(trace: Trace, path: Path) -> None:
    """Colour is the entropy in nats. Raises TinyLoopError if it cannot be drawn or written."""
    check(path)
    if len(trace.tokens) > MOST_TOKENS:
        raise TinyLoopError(f"--png: at most {MOST_TOKENS} tokens fit into a picture, got {len(trace.tokens)}")
    figure = heat_map(trace)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # its font lacks most scripts; a box is drawn
        try:
            figure.savefig(path, dpi=120)
        except OSError as error:
            raise TinyLoopError(f"--png: cannot write {path}: {error.strerror}") from error


def heat_map(trace: Trace) -> Figure:
    """The picture itself."""
    from matplotlib.figure import Figure

    size = (MARGIN[0] + trace.loops * CELL[0], MARGIN[1] + len(trace.tokens) * CELL[1])
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    entropy = [[view.entropy for view in token.loops] for token in trace.tokens]
    most = max(map(max, entropy))
    image = axes.imshow(entropy, aspect="auto", cmap="viridis", vmin=0, vmax=most)
    for row, token in enumerate(trace.tokens):
        for loop, view in enumerate(token.loops):
            text = f"{short(view.top[0].text)} {view.top[0].probability:.0%}"
            colour = "white" if view.entropy < most / 2 else "black"
            axes.text(loop, row, text, ha="center", va="center", fontsize=7, color=colour, parse_math=False)
    axes.set_xticks(range(trace.loops), [str(loop + 1) for loop in range(trace.loops)])
    axes.set_yticks(range(len(trace.tokens)), [short(token.text) for token in trace.tokens], parse_math=False)
    axes.set_xlabel("loops")
    axes.set_title(f"{trace.model}: the likeliest next token after each loop", parse_math=False)
    figure.colorbar(image, label="entropy, nats")
    return figure


def short(text: str) -> str:
    """A token as it may be shown: quoted, with control characters spelled out."""
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")
