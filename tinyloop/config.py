"""ModelConfig: the frozen facts of a checkpoint. Families make it from a config.json; all else follows from it."""

import sys
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Literal

from tinyloop.arguments import shown
from tinyloop.errors import CheckpointError

MOST_LAYERS = 4096
Section = Literal["prelude", "core", "coda"]
ExitSignal = Literal["gate", "distance"]


@dataclass(frozen=True, kw_only=True)
class Retrofit:
    """A training-free loop over an ordinary checkpoint: which layers are the core, and how far each loop moves.

    Loop r (from 0) does `h <- h + decay**-r * (core(h) - h)`, so one loop is the original model exactly. The step
    depends on the absolute loop only, never on how many loops a request gets.
    """

    prelude: int
    core: int
    decay: float = 4.0
    default_loops: int = 2
    max_loops: int = 8

    def __post_init__(self) -> None:
        for name in ("prelude", "core", "default_loops", "max_loops"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise CheckpointError(f"retrofit needs a whole number as {name}, got {shown(value)}")
        if not isinstance(self.decay, int | float) or not self.decay <= sys.float_info.max:  # also refuses NaN
            raise CheckpointError(f"retrofit needs a finite number as decay, got {shown(self.decay)}")
        if self.prelude < 0 or self.core < 1 or self.decay < 1:
            raise CheckpointError(f"retrofit needs prelude >= 0, core >= 1 and decay >= 1, got {self}")
        if not 1 <= self.default_loops <= self.max_loops:
            raise CheckpointError(f"retrofit needs 1 <= default_loops <= max_loops, got {self}")


@dataclass(frozen=True)
class Layout:
    """How layers are split into sections, and what one KV page covers. A layer that a loop applies several times, each
    time with keys and values of their own, counts as often (HRM-Text).

    A page holds `page_size` tokens of `layers_per_page` layers of one plane. That is the whole plane where only the
    core has layers (Ouro); with a prelude and a coda it is their greatest common divisor, so that any page of the one
    pool can serve any plane. With `one_plane` all loops of the core share one: each overwrites its own rows there.
    """

    prelude: int
    core: int
    coda: int
    one_plane: bool = False

    @property
    def layers(self) -> int:
        return self.prelude + self.core + self.coda

    @cached_property
    def layers_per_page(self) -> int:
        return gcd(self.prelude, self.core, self.coda)

    def span(self, section: Section) -> range:
        """The layers of a section, by absolute index."""
        first = {"prelude": 0, "core": self.prelude, "coda": self.prelude + self.core}[section]
        return range(first, first + getattr(self, section))

    def place(self, layer: int) -> tuple[int, int]:
        """Where a layer (absolute index) has its place in a plane of its section: which page, which layer of it."""
        inner = layer
        for layers in (self.prelude, self.core):
            if inner < layers:
                break
            inner -= layers
        return divmod(inner, self.layers_per_page)

    def pages(self, section: Section) -> int:
        """Pages that `page_size` tokens of one plane of this section take."""
        layers: int = getattr(self, section)
        return layers // self.layers_per_page

    def rows(self, loops: int) -> int:
        """Pages that `page_size` tokens take in all planes at `loops`: the rows of a page table."""
        planes = min(loops, 1) if self.one_plane else loops
        return self.pages("prelude") + self.pages("coda") + planes * self.pages("core")

    def first_row(self, section: Section, loop: int = 0) -> int:
        """Where a plane's rows begin in a page table. The core comes last, so deeper plans only add rows."""
        if section == "prelude":
            return 0
        if section == "coda":
            return self.pages("prelude")
        return self.rows(0 if self.one_plane else loop)


@dataclass(frozen=True)
class Rotary:
    """One table of rotary angles: its base, and how Llama 3 stretches it.

    Wavelengths above `context / low` are `factor` times as long, those below `context / high` stay, between the two the
    stretch goes over smoothly. Where a file holds the stretch of each pair of channels itself, it is in `stretch`.
    """

    theta: float
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    context: int = 0
    stretch: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a model is. Sizes in elements, `max_context` in tokens.

    The core carries `carried` vectors of `hidden_size` from loop to loop: one, or as many as the family keeps beside
    it. `rotary` are the tables of rotary angles that layers choose from. `loop_decay` is the retrofit's step schedule
    (None: each loop replaces the state). `trained_loops` is the depth the weights were trained at; `exit_gate` says
    whether the checkpoint learned when to leave.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    rotary: tuple[Rotary, ...]
    tie_embeddings: bool
    layout: Layout
    carried: int = 1
    default_loops: int = 1
    max_loops: int = 1
    trained_loops: int = 1
    loop_decay: float | None = None
    exit_gate: bool = False
    embedding_scale: float = 1.0
    norm_each_loop: bool = False  # a loop ends with the final norm, so the head needs none
    loop_window: int = 0  # every loop also reads the first loop's plane, and so many tokens of its own; 0: only its own
    gated_attention: bool = False  # what attention found is gated by another projection of its input
    own_layers: int = 0  # layers with weights of their own; 0: as many as the layout counts
    other_parameters: int = 0  # weights of matrices outside of layers and embeddings
    loop_reads_total: bool = False  # something fed to the core depends on how many loops there will be
    random_start: bool = False  # the core starts from noise, or from another token's last state
    bidirectional_prompt: bool = False  # prompt tokens look ahead

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
                     "max_context"):  # fmt: skip
            if getattr(self, name) < 1:
                raise CheckpointError(f"config: {name} must be at least 1, got {shown(getattr(self, name))}")
        if self.head_dim % 2:  # rope turns one half of a head against the other
            raise CheckpointError(f"config: head_dim must be even, got {shown(self.head_dim)}")
        if any(rotary.stretch and 2 * len(rotary.stretch) != self.head_dim for rotary in self.rotary):
            raise CheckpointError(f"config: the rope stretch is not that of {self.head_dim // 2} pairs of channels")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config: {self.num_heads} attention heads are not a multiple of {self.num_kv_heads} key-value heads"
            )
        if self.layout.layers > MOST_LAYERS:
            raise CheckpointError(f"config: at most {MOST_LAYERS} layers, got {shown(self.layout.layers)}")
        if self.layout.core < 1 or self.layout.prelude < 0 or self.layout.coda < 0:
            raise CheckpointError(f"config: the layers do not split into prelude, core and coda: {self.layout}")

    @property
    def state_size(self) -> int:
        """Elements of what the core carries from loop to loop."""
        return self.carried * self.hidden_size

    @property
    def whole_prompt(self) -> bool:
        """Whether what is computed depends on where the prompt is cut, so that it runs in one piece and alone."""
        return self.layout.one_plane or self.bidirectional_prompt

    @property
    def exit_signals(self) -> tuple[ExitSignal, ...]:
        """What tells when an answer token may leave the core, the default first; nothing where there is one loop.

        "gate": the learned probability of having left by then. "distance": how far the last loop moved the state, as a
        part of its size, which every looped model has.
        """
        if self.max_loops == 1:
            return ()
        return ("gate", "distance") if self.exit_gate else ("distance",)

    @property
    def kv_elements(self) -> int:
        """Elements of K and V that one token keeps in one layer (multiply by the element size)."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Weights in the matrices of one layer."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.hidden_size * ((3 if self.gated_attention else 2) * q + 2 * kv + 3 * self.intermediate_size)

    @property
    def parameters(self) -> int:
        """How many weights the matrices and embeddings hold (norms and gates left out)."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.layer_parameters * (self.own_layers or self.layout.layers) + embeddings + self.other_parameters

    @property
    def boundary_loops(self) -> float:
        """What prelude and coda cost a token, in loops of the core."""
        return (self.layout.prelude + self.layout.coda) / self.layout.core

    @property
    def head_loops(self) -> float:
        """What the head costs a row, in loops of the core."""
        return self.vocab_size * self.hidden_size / (self.layer_parameters * self.layout.core)


def prefix_serves_every_depth(config: ModelConfig) -> bool:
    """Whether plane r of a token prefix is the same however many loops a request runs.

    Plane r depends on the tokens and on planes 1..r alone exactly when nothing fed to the core depends on the number of
    loops to come, no loop reads what a later one left, the core starts from the prelude, and no token looks ahead. Then
    a prefix held to depth R serves every request of at most R loops, and the state that it left carries it deeper. A
    coda's planes always belong to one depth; they are rebuilt from the state at that depth.
    """
    return not (config.loop_reads_total or config.random_start or config.whole_prompt)
