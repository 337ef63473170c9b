"""Programs: what the layers of a section ask of the kernels, recorded once, then run in one native call.

A layer is ordinary Python over kernels. Called with a `Symbol` instead of a tensor it computes nothing: each kernel
notes a step. A layer that does anything else with its rows cannot be recorded and goes on as it is. For a few rows the
calls themselves, some three hundred in a step of thirty layers, cost a third of the time.
"""

import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tinyloop.kernels.reads import Reads

KERNELS = ("norm", "silu_mul", "linear", "linear_int8", "attend", "sigmoid_mul")  # as in cpp/program.h
INPUT, OUTPUT, NONE = 0, 1, -1
STEP = 10  # whole numbers
LARGEST_HEAD = 1024  # elements; attention has room for no more


class NotRecordable(Exception):
    """Something else than a kernel was asked of the rows."""


@dataclass(frozen=True, eq=False)
class Symbol:
    """Stands for rows of `width` elements while a program is recorded. Reading anything else of it ends that."""

    recorder: "Recorder"
    width: int

    def __getattr__(self, name: str) -> Any:
        raise NotRecordable(name)

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise NotRecordable

    def _refuse(self, *_: Any) -> Any:
        raise NotRecordable

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __getitem__ = _refuse


@dataclass
class Recorder:
    """The steps so far, each with the symbols that it reads and makes."""

    steps: list[tuple[str, Symbol, Sequence[Symbol | None], Sequence[int]]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)  # whose addresses are in the steps

    def note(self, kernel: str, width: int, rows: Sequence[Any], *facts: int | Tensor) -> Tensor:
        """A step that makes rows of `width` out of `rows`: what comes in, and what is added."""
        made = Symbol(self, width)
        self.steps.append((kernel, made, rows, [self._fact(fact) for fact in facts]))
        return cast(Tensor, made)

    def attend(
        self, own: Any, page: int, layer: int, heads: int, kv_heads: int, q: Any, k: Any, v: Any, rope: Any, *,
        window: int = 0, scale: Tensor | None = None, first: bool = False,
    ) -> Tensor:  # fmt: skip
        """`layers.Attend` of one layer, at its place in a page, with the model's `own` rope and nothing special."""
        plain = rope is own and not window and scale is None and not first and q is k is v
        if not plain or not isinstance(q, Symbol):
            raise NotRecordable
        size = q.width // (heads + 2 * kv_heads)
        if size > LARGEST_HEAD:
            raise NotRecordable
        return self.note("attend", heads * size, (q,), layer, page, heads, kv_heads, size)

    def _fact(self, fact: int | Tensor) -> int:
        if isinstance(fact, int):
            return fact
        if not fact.is_contiguous():
            raise NotRecordable
        self.kept.append(fact)
        return fact.data_ptr()


@dataclass(frozen=True)
class Program:
    """`steps` [steps, 10] and the `widths` of its buffers, int64: see cpp/program.h."""

    steps: Tensor
    widths: Tensor
    kept: Sequence[Tensor]

    def run(
        self, kernel: Callable[..., None], h: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, reads: "Reads",
        keys: Tensor, values: Tensor,
    ) -> Tensor:  # fmt: skip
        """[rows, width] through all layers. `slots` [page rows, rows]; `keys`, `values`: [layers of a page, pages,
        page_size, kv_heads, head_dim]."""
        h, slots, pages, spans = h.contiguous(), slots.contiguous(), reads.pages.contiguous(), reads.spans.contiguous()
        out = torch.empty_like(h)
        kernel(self.steps.data_ptr(), len(self.steps), self.widths.data_ptr(), len(self.widths), h.data_ptr(),
               out.data_ptr(), h.shape[0], cos.data_ptr(), sin.data_ptr(), slots.data_ptr(), pages.data_ptr(),
               *pages.shape, spans.data_ptr(), len(spans), keys.data_ptr(), values.data_ptr(), keys.shape[1],
               keys[0].numel(), keys.shape[2], torch.get_num_threads())  # fmt: skip
        return out


def record(width: int, run: Callable[[Tensor, Recorder], Tensor]) -> Program | None:
    """The program of `run`, which takes rows of `width` to rows of `width`; None if it is more than kernels."""
    recorder = Recorder()
    first = Symbol(recorder, width)
    try:
        last = run(cast(Tensor, first), recorder)
    except NotRecordable:
        return None
    return _placed(recorder, first, cast(Symbol, last))


def _placed(recorder: Recorder, first: Symbol, last: Symbol) -> Program:
    """Give every symbol a buffer; one whose last reader has run is free for the next of the same width."""
    ends = {symbol: index for index, (_, _, rows, _) in enumerate(recorder.steps) for symbol in rows if symbol}
    readers = Counter(symbol for _, _, rows, _ in recorder.steps for symbol in rows)
    places, widths = {first: INPUT, last: OUTPUT}, [first.width, last.width]
    free = defaultdict[int, list[int]](list)

    def buffer(width: int) -> int:
        """A free one, or a new one."""
        if free[width]:
            return free[width].pop()
        widths.append(width)
        return len(widths) - 1

    lines = []
    for index, (kernel, made, rows, facts) in enumerate(recorder.steps):
        if made not in places:
            places[made] = buffer(made.width)
        read = [NONE if symbol is None else places[symbol] for symbol in (*rows, None)][:2]
        line = [KERNELS.index(kernel), places[made], *read, *facts]
        if kernel == "silu_mul":  # may become one with what makes its input, if nobody else reads that
            line.append(int(readers[rows[0]] == 1))
        if kernel == "attend":  # the turned queries need room too, for the time of the step
            line.append(buffer(made.width))
            free[made.width].append(line[-1])
        lines.append(line + [0] * (STEP - len(line)))
        for symbol in {symbol for symbol in rows if symbol and ends[symbol] == index} - {first, last}:
            free[symbol.width].append(places[symbol])
    return Program(torch.tensor(lines), torch.tensor(widths), tuple(recorder.kept))


def bits(number: float) -> int:
    """A float32 as the whole number of the same bits."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])
