"""LoopPlan: how deep each token of a request goes, when it may leave early, and where its keys and values live.

Knows layers, loops and pages as integers. Knows no tensors.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tinyloop.arguments import number, shown, whole
from tinyloop.config import ExitSignal, Layout, ModelConfig, Section
from tinyloop.errors import RequestError


class Slot(NamedTuple):
    """Where one layer at one loop keeps its KV: a row of the page table, and the layer inside that page."""

    row: int
    layer: int


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """Depth of one request. Equal plans may be batched as one homogeneous group.

    Prompt tokens run `prefill_loops`, answer tokens `loops`. With `exit_threshold` an answer token leaves the core
    after the first loop where its probability of having exited reaches the threshold, or, if the signal is "distance",
    where the loop moved the state by less. A token attends to the `cache_window` most recent tokens, itself included; 0
    means all.

    A token that ran fewer loops than a later one keeps its last plane's keys and values in the deeper planes too, so
    that every plane a loop reads is complete (key-value sharing over depth: Geiping et al. 2025, Zhu et al. 2025).
    """

    layout: Layout
    loops: int
    prefill_loops: int
    exit_threshold: float | None = None
    exit_signal: ExitSignal | None = None  # None exactly where there is no threshold
    cache_window: int = 0

    @property
    def depth(self) -> int:
        """Core planes the request needs."""
        return max(self.loops, self.prefill_loops)

    @cached_property
    def rows(self) -> int:
        """Pages that `page_size` tokens of this request take."""
        return self.layout.rows(self.depth)

    def slot(self, layer: int, loop: int = 0) -> Slot:
        """The slot of an absolute layer index at a loop (counted from 0; ignored outside of the core)."""
        section = self._section(layer)
        if section == "core" and not 0 <= loop < self.depth:
            raise IndexError(f"loop {loop} of a plan with {self.depth} core planes")
        row, inner = divmod(layer - self.layout.span(section).start, self.layout.layers_per_page)
        return Slot(self.layout.first_row(section, loop) + row, inner)

    def _section(self, layer: int) -> Section:
        sections: tuple[Section, ...] = ("prelude", "core", "coda")
        for section in sections:
            if layer in self.layout.span(section):
                return section
        raise IndexError(f"layer {layer} of {self.layout.layers}")


def make_plan(
    config: ModelConfig,
    *,
    loops: int | None = None,
    prefill_loops: int | None = None,
    exit_threshold: float | None = None,
    exit_signal: str | None = None,
    cache_window: int = 0,
) -> LoopPlan:
    """A plan within the model's bounds; the exit signal is the model's first unless one is named. Raises RequestError
    that names the field and its bounds."""
    loops = config.default_loops if loops is None else loops
    prefill_loops = loops if prefill_loops is None else prefill_loops
    for name, value in (("loops", loops), ("prefill_loops", prefill_loops)):
        whole(name, value, 1, config.max_loops)
    whole("cache_window", cache_window, 0)
    signal = _signal(config, exit_threshold, exit_signal)
    window = 0 if cache_window >= config.max_context else cache_window
    return LoopPlan(layout=config.layout, loops=loops, prefill_loops=prefill_loops, exit_threshold=exit_threshold,
                    exit_signal=signal, cache_window=window)  # fmt: skip


def _signal(config: ModelConfig, threshold: float | None, named: str | None) -> ExitSignal | None:
    """What the threshold is compared with, if there is one."""
    offered = config.exit_signals
    if threshold is None:
        if named is not None:
            raise RequestError("exit_signal", "exit_signal needs exit_threshold")
        return None
    if not offered:
        raise RequestError("exit_threshold", f"exit_threshold: family {config.family} offers no exit signal")
    signal = next((one for one in offered if named in (None, one)), None)
    if signal is None:
        raise RequestError("exit_signal", f"exit_signal must be one of {', '.join(offered)}, got {shown(named)}")
    if signal == "distance":
        number("exit_threshold", threshold, 0, 1)
        return signal
    number("exit_threshold", threshold)
    if not 0 < threshold <= 1:
        raise RequestError("exit_threshold", f"exit_threshold must be above 0 and at most 1, got {shown(threshold)}")
    return signal
