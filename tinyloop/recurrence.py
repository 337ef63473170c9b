"""What the core carries from loop to loop, and what happens around its layers. Knows no batch and no pages.

A family that injects the prelude's output into every loop, or keeps several vectors, carries all of it side by side in
one state [rows, state_size]. So whatever was carried can be kept with a prefix, and the prefix deepened later.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tinyloop.layers import RMSNorm


class Run(Protocol):
    """Layers `[first, last)` of the core, counted inside of it: [rows, hidden_size] -> [rows, hidden_size]."""

    def __call__(self, h: Tensor, first: int = 0, last: int | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Recurrence:
    """The base: what a loop makes of the state is the next state."""

    def enter(self, h: Tensor, positions: Tensor) -> Tensor:
        """The state before the first loop, from what the prelude left [rows, hidden_size]; `positions`: [rows]."""
        return h

    def loop(self, state: Tensor, loops: Tensor, run: Run) -> Tensor:
        """The state after one more loop. `loops` [rows]: which one it is, from 0."""
        return run(state)

    def leave(self, state: Tensor) -> Tensor:
        """What coda and head read: [rows, hidden_size]."""
        return state

    def latent(self, state: Tensor) -> Tensor:
        """What of the state a loop moves, and an exit rule looks at: [rows, hidden_size]."""
        return self.leave(state)


@dataclass(frozen=True)
class NormedRecurrence(Recurrence):
    """The final norm runs after every loop, and its output feeds the next."""

    norm: RMSNorm

    def loop(self, state: Tensor, loops: Tensor, run: Run) -> Tensor:
        return self.norm(run(state))
