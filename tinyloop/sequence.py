"""The values that travel between scheduler and runner: leases, segments, and the report of a step.

Nothing here computes and nothing here knows torch: the scheduler's policy reads these values to decide what steps next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyloop.kv.pages import PageTable
    from tinyloop.kv.prefix import PrefixPool
    from tinyloop.plan import LoopPlan
    from tinyloop.sampling import Logprobs, Sampler
    from tinyloop.text import TextStream


@dataclass
class Span:
    """Known tokens `[start, end)` still to be run; `loop` loops of them are kept from a prefix."""

    start: int
    end: int
    loop: int = 0


@dataclass(eq=False)
class Lease:
    """What an admitted request holds in the runner: its tokens, its pages, and how its answer is made.

    Positions `[0, cached)` came from a prefix, though parts of them may need more loops or another coda. `done` tokens
    are complete in every plane. After a yield the answer so far is read again like a prompt: `known` tokens in all.
    """

    plan: LoopPlan
    tokens: list[int]  # prompt, then answer
    prompt_tokens: int
    max_new_tokens: int
    sampler: Sampler
    text: TextStream
    pages: PageTable
    prefixes: PrefixPool | None = None  # where its tokens are looked up and kept
    salt: str = ""
    cached: int = 0
    hit: str = ""  # "exact", "shallower" or "deepened"
    known: int = 0
    done: int = 0
    todo: list[Span] = field(default_factory=list)  # not yet in a segment, by position
    depths: list[int] = field(default_factory=list)  # loops that each answer token ran
    prompt_logprobs: int | None = None  # None: not wanted; n: with the n most likely tokens
    prompt_logprob_values: list[Logprobs] = field(default_factory=list)  # of prompt tokens 1, 2, ...
    segments: list[Segment] = field(default_factory=list)  # in flight, by position
    finish_reason: str | None = None

    @property
    def answer_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def loops_at(self, position: int) -> int:
        """How many loops the known token at a position gets."""
        answer = position - self.prompt_tokens
        if answer < 0:
            return self.plan.prefill_loops
        return self.depths[answer] if answer < len(self.depths) else self.plan.loops


@dataclass(eq=False)
class Segment:
    """Consecutive tokens `[start, start + rows)` of one lease that stand at the same depth and move together.

    A fresh segment is not yet in the core. It enters through the prelude, or, if `loop` is above 0, from kept states.
    """

    lease: Lease
    start: int
    rows: int
    loops: int  # how many it gets
    loop: int = 0  # how many it has run
    state: Any = None  # what the core carries, [rows, state_size]; None while it is fresh
    slots: Any = None  # of its tokens in each row of the page table, once they have their pages
    survival: float = 1.0  # probability of not having exited, by the gate
    whole: bool = False  # cutting it would change what is computed

    @property
    def end(self) -> int:
        return self.start + self.rows

    @property
    def fresh(self) -> bool:
        """Has not entered; may still be trimmed."""
        return self.state is None

    @property
    def at_boundary(self) -> bool:
        """Its next step begins with boundary work: entering if fresh, coda and head if it finished its loops."""
        return self.state is None or self.loop >= self.loops

    @property
    def is_prompt(self) -> bool:
        return self.start < self.lease.known

    def leaves(self, signal: float) -> bool:
        """Whether it leaves the core after the loop that gave this exit signal. To be asked once after each loop."""
        plan = self.lease.plan
        threshold = plan.exit_threshold or 0.0
        if plan.exit_signal == "distance":
            return signal < threshold
        self.survival *= 1 - signal
        return 1 - self.survival >= threshold

    def trim(self, rows: int) -> Segment:
        """Shorten a fresh segment to at most `rows` tokens, unless it is whole; what is cut off is offered again."""
        assert self.fresh, "a segment in the prelude or beyond cannot be trimmed"
        self.rows = self.rows if self.whole else min(self.rows, rows)
        return self


@dataclass(frozen=True)
class TokenEvent:
    """One token of an answer. `finish_reason` is set on the last; `loops` is what was run for it."""

    lease: Lease
    token_id: int
    text: str
    loops: int
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended the answer


@dataclass(frozen=True)
class StepReport:
    """What one step did. `finished` are leases that are complete (their last token, if any, is in `tokens`)."""

    tokens: Sequence[TokenEvent] = ()
    finished: Sequence[Lease] = ()
    rows: int = 0  # rows that went through the core
    seconds: float = 0.0
    boundary_rows: float = 0.0  # rows outside of the core, each as the part of a core loop that its layers are
    boundary_seconds: float = 0.0  # of `seconds`
    leaving: int = 0  # rows that left the core; 0 if the boundary was only entered
