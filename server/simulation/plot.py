"""A picture of a report, as SVG: latency, queue, depth and KV over virtual time, one panel below the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from server.simulation.report import Report
from tinyloop.errors import TinyLoopError

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 860, 150, 70, 20, 46, 44
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:15px;font-weight:600}"
    ".axis{stroke:#bbb}.grid{stroke:#eee}path{fill:none;stroke-width:1.6}"
)
_COLOURS = ("#2563eb", "#dc2626")
Line = tuple[str, Sequence[float]]


def save_plot(report: Report, path: Path) -> None:
    """Raises TinyLoopError if the name does not end in .svg or the file cannot be written."""
    if path.suffix != ".svg":
        raise TinyLoopError(f"--plot: the picture is an SVG, so its name must end in .svg, got {path.name}")
    try:
        path.write_text(svg(report))
    except OSError as error:
        raise TinyLoopError(f"--plot: cannot write {path}: {error.strerror}") from error


def svg(report: Report) -> str:
    """The whole picture."""
    time = report.timeline
    panels: list[tuple[str, list[Line]]] = [
        ("latency of the requests that came then, s", [("p50", time.p50_s), ("p99", time.p99_s)]),
        ("waiting requests", [("", time.queue)]),
        ("loops granted", [("", time.loops)]),
        ("KV pages in use, %", [("", [100 * share for share in time.kv])]),
    ]
    height = TOP + len(panels) * (PANEL + GAP)
    heading = f"{report.model}, {report.replicas} x, {report.requests_per_s:.2f} requests/s, {report.goodput:.1%} good"
    body = [f'<text class="title" x="{LEFT}" y="22">{_escaped(heading)}</text>']
    for number, (name, lines) in enumerate(panels):
        body += _panel(name, lines, TOP + number * (PANEL + GAP), len(time.kv) * time.width)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>{"".join(body)}</svg>\n'
    )


def _panel(name: str, lines: Sequence[Line], y: float, seconds: float) -> Iterator[str]:
    """One panel whose top is at `y`, with its axes."""
    most = _nice(max((value for _, values in lines for value in values if not math.isnan(value)), default=0.0))
    yield f'<text x="{LEFT}" y="{y + 10}">{_escaped(name)}</text>'
    low, high = y + PANEL, y + 20
    for share in (0.0, 0.5, 1.0):
        at = low + (high - low) * share
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>'
        yield f'<text text-anchor="end" x="{LEFT - 8}" y="{at + 4}">{most * share:g}</text>'
    yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{low}" y2="{low}"/>'
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = LEFT + (WIDTH - LEFT - RIGHT) * share
        yield f'<text text-anchor="middle" x="{at:.0f}" y="{low + 15}">{seconds * share:.0f} s</text>'
    for (label, values), colour in zip(lines, _COLOURS, strict=False):
        yield f'<path stroke="{colour}" d="{_path(values, low, high, most)}"/>'
        if label:
            x = WIDTH - RIGHT - 40 * (_COLOURS.index(colour) + 1)
            yield f'<text style="fill:{colour}" x="{x}" y="{y + 10}">{label}</text>'


def _path(values: Sequence[float], low: float, high: float, most: float) -> str:
    """A line through the middles of the slices; a slice without a value leaves a gap, a lone one a short dash."""
    step = (WIDTH - LEFT - RIGHT) / max(len(values), 1)
    parts, pen_down = [], False
    for index, value in enumerate(values):
        if not math.isnan(value):
            x, y = LEFT + (index + 0.5) * step, low + (high - low) * value / most
            parts.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}" + ("" if pen_down else "h1"))
        pen_down = not math.isnan(value)
    return "".join(parts)


def _nice(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... that is not below."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
