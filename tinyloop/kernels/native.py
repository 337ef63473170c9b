"""The kernels on a CPU, in C++ (cpp/). Same signatures as `reference`, which serves what does not fit here.

Knows which build the processor can run, and which tensors the C++ takes: contiguous, float32 or bfloat16, on the CPU.
The environment variable TINYLOOP_NATIVE = 0 turns all of it off; the name of a level chooses a lower one.
"""

import logging
import os
from functools import cache
from importlib import import_module
from typing import Any

import torch  # also brings the OpenMP threads that the kernels run on
from torch import Tensor
from torch.nn import functional as F

from tinyloop.kernels import reference
from tinyloop.kernels.program import LARGEST_HEAD, Symbol, bits
from tinyloop.kernels.reads import Reads

LEVELS = ("plain", "avx2", "avx512", "bf16", "amx")  # of instruction sets: a processor has one and all before it
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
SIDE = 32  # outputs of a block of weights, and its inputs in bfloat16
GROUP = reference.GROUP
PLACES = ("cpu", "meta")  # where weights may lie; without memory they are only counted

log = logging.getLogger(__name__)


@cache
def library() -> Any | None:
    """The best build for this processor; None if there is none or it is not wanted."""
    wanted = os.environ.get("TINYLOOP_NATIVE", "")
    if wanted == "0":
        log.info("native kernels are turned off: torch serves")
        return None
    plain = _module("plain")
    best = LEVELS.index(plain.best_level()) if plain else 0
    if wanted in LEVELS:
        best = min(best, LEVELS.index(wanted))
    found = next((module for level in LEVELS[best::-1] if (module := _module(level))), None)
    if found is None:
        log.warning("native kernels are not built: torch serves, more slowly")
    return found


def _module(level: str) -> Any | None:
    try:
        return import_module(f"tinyloop.kernels._{level}")
    except ImportError:
        return None


@cache
def _kernel(name: str, dtype: torch.dtype) -> Any | None:
    return getattr(library(), f"{name}_{NAMES[dtype]}", None) if dtype in NAMES else None


def _fits(first: Tensor, *others: Tensor) -> bool:
    """One dtype, on the CPU, contiguous."""
    plain = first.device.type == "cpu" and first.is_contiguous()
    return plain and all(t.dtype == first.dtype and t.is_contiguous() for t in others)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def rms_norm(x: Tensor, weight: Tensor, eps: float, added: Tensor | None = None) -> Tensor:
    """See `reference.rms_norm`."""
    if isinstance(x, Symbol):
        return x.recorder.note("norm", x.width, (x, added), weight, x.width, bits(eps))
    kernel = _kernel("rms_norm", x.dtype)
    if kernel is None or not _fits(x, weight, x if added is None else added):
        return reference.rms_norm(x, weight, eps, added)
    out = torch.empty_like(x)
    size = x.shape[-1]
    kernel(x.data_ptr(), weight.data_ptr(), _address(added), out.data_ptr(), x.numel() // size, size, eps,
           torch.get_num_threads())  # fmt: skip
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul`."""
    if isinstance(gate_up, Symbol):
        return gate_up.recorder.note("silu_mul", gate_up.width // 2, (gate_up,), gate_up.width // 2)
    kernel = _kernel("silu_mul", gate_up.dtype)
    if kernel is None or not _fits(gate_up):
        return reference.silu_mul(gate_up)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    kernel(gate_up.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
    return out


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    """See `reference.sigmoid_mul`."""
    if isinstance(gate, Symbol):
        return gate.recorder.note("sigmoid_mul", gate.width, (gate, x), gate.width)
    kernel = _kernel("sigmoid_mul", gate.dtype)
    if kernel is None or not _fits(gate, x):
        return reference.sigmoid_mul(gate, x)
    out = torch.empty_like(gate)
    kernel(gate.data_ptr(), x.data_ptr(), out.data_ptr(), *gate.shape, torch.get_num_threads())
    return out


def heads(product: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.heads`."""
    if isinstance(product, Symbol):
        return product, product, product  # attention takes them apart
    return reference.heads(product, num_heads, num_kv_heads, head_dim)


def rope_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    """See `reference.rope_write`. Rows of q, k and v may be parts of one product."""
    kernel = _kernel("rope_write", q.dtype)
    (rows, heads, head_dim), (stride, *inner) = q.shape, q.stride()
    packed = all(t.stride() == (stride, head_dim, 1) and t.dtype == q.dtype for t in (k, v)) and inner == [head_dim, 1]
    if kernel is None or not packed or not _fits(keys, values) or not _fits(cos, sin) or cos.dtype != torch.float32:
        return reference.rope_write(q, k, v, cos, sin, keys, values, slots)
    slots = slots.contiguous()  # a row of a table may lie across it
    turned = q.new_empty(rows, heads, head_dim)
    kernel(q.data_ptr(), k.data_ptr(), v.data_ptr(), stride, cos.data_ptr(), sin.data_ptr(), slots.data_ptr(),
           keys.shape[0] * keys.shape[1], turned.data_ptr(), keys.data_ptr(), values.data_ptr(), rows, heads,
           k.shape[1], head_dim, torch.get_num_threads())  # fmt: skip
    return turned


def attention(q: Tensor, keys: Tensor, values: Tensor, reads: Reads, page_row: int) -> Tensor:
    """See `reference.attention`. Reads the pages where they are; nothing is gathered."""
    kernel = _kernel("attention", q.dtype)
    (rows, heads, head_dim), (_, page_size, kv_heads, _) = q.shape, keys.shape
    if kernel is None or not _fits(q, keys, values) or head_dim > LARGEST_HEAD or reads.ahead is not None:
        return reference.attention(q, keys, values, reads, page_row)
    pages, spans = reads.pages[page_row].contiguous(), reads.spans.contiguous()
    out = q.new_empty(rows, heads * head_dim)
    kernel(q.data_ptr(), keys.data_ptr(), values.data_ptr(), len(keys), pages.data_ptr(), len(pages),
           spans.data_ptr(), out.data_ptr(), rows, len(spans), heads, kv_heads, head_dim, page_size,
           torch.get_num_threads())  # fmt: skip
    return out


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.most_likely`."""
    kernel = _kernel("most_likely", logits.dtype)
    if kernel is None or not _fits(logits):
        return reference.most_likely(logits)
    largest, places = logits.new_empty(len(logits)), torch.empty(len(logits), dtype=torch.int64)
    kernel(logits.data_ptr(), largest.data_ptr(), places.data_ptr(), *logits.shape, torch.get_num_threads())
    return largest, places


def program_kernel(dtype: torch.dtype) -> Any | None:
    """What runs a `Program` of this dtype; None if it is not built."""
    return _kernel("run_program", dtype)


def pack(weight: Tensor) -> Tensor | None:
    """Weights [out, in] in the order that `linear` reads; None if it cannot serve them."""
    if _kernel("linear", weight.dtype) is None or weight.device.type not in PLACES:
        return None
    if weight.dtype == torch.float32:
        return _lines(weight)
    return _blocks(weight, SIDE, 2)


def missing_inputs(dtype: torch.dtype, in_features: int) -> int:
    """How many more the rows that `linear` gets have to have."""
    return -in_features % SIDE if dtype == torch.bfloat16 else 0


def linear(x: Tensor, packed: Tensor, out_features: int, added: Tensor | None = None) -> Tensor:
    """`x @ weight.T + added` for weights that `pack` has packed. `x`: [rows, in]; `added`: [rows, out]."""
    kernel = _kernel("linear", x.dtype)
    assert kernel is not None, x.dtype
    missing = missing_inputs(x.dtype, x.shape[1])
    x = F.pad(x, (0, missing)) if missing else x.contiguous()  # padding with nothing would copy
    y = x.new_empty(x.shape[0], out_features)
    assert packed.numel() == _up(out_features, SIDE) * x.shape[1]
    assert added is None or _fits(x, added)
    kernel(x.data_ptr(), packed.data_ptr(), _address(added), y.data_ptr(), x.shape[0], out_features, x.shape[1],
           torch.get_num_threads())  # fmt: skip
    return y


def pack_int8(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Int8 weights [out, in], plus 128, in the order that `linear_int8` reads; None if it has nothing for `dtype`."""
    if _kernel("linear_int8", dtype) is None or weight.device.type not in PLACES:
        return None
    return _blocks(weight, GROUP, 4).view(torch.uint8) ^ 128


def linear_int8(x: Tensor, packed: Tensor, scales: Tensor, added: Tensor | None = None) -> Tensor:
    """See `reference.linear_int8`; for weights that `pack_int8` has packed."""
    kernel = _kernel("linear_int8", x.dtype)
    assert kernel is not None, x.dtype
    x = x.contiguous()
    y = x.new_empty(x.shape[0], scales.shape[0])
    assert packed.numel() == _up(scales.shape[0], SIDE) * _up(x.shape[1], GROUP)
    assert added is None or _fits(x, added)
    kernel(x.data_ptr(), packed.data_ptr(), scales.data_ptr(), _address(added), y.data_ptr(), *y.shape, x.shape[1],
           torch.get_num_threads())  # fmt: skip
    return y


def _blocks(weight: Tensor, inputs: int, together: int) -> Tensor:
    """Blocks of 32 outputs and so many inputs, each [2, inputs / together, 16 outputs, together]; zeros at the ends.

    Inputs that stay together take 4 bytes.
    """
    missing = -weight.shape[1] % inputs, -weight.shape[0] % SIDE
    weight = F.pad(weight, (0, missing[0], 0, missing[1])) if any(missing) else weight.contiguous()
    words = weight.view(torch.int32)  # inputs that stay together are one: three times as fast to move
    shape = (len(weight) // SIDE, 2, SIDE // 2, weight.shape[1] // inputs, inputs // together)
    return words.view(shape).permute(0, 3, 1, 4, 2).contiguous().view(weight.dtype)


def _lines(weight: Tensor) -> Tensor:
    """For every 32 outputs one line of 32 for each input, [out / 32, in, 32]; zeros at the end."""
    missing = -len(weight) % SIDE
    weight = F.pad(weight, (0, 0, 0, missing)) if missing else weight
    return weight.reshape(-1, SIDE, weight.shape[1]).transpose(1, 2).contiguous()


def _up(size: int, to: int) -> int:
    return -(-size // to) * to
