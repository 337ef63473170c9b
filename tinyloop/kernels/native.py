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

from tinyloop.kernels import reference
from tinyloop.kernels.reads import Reads

LEVELS = ("plain", "avx2", "avx512", "bf16", "amx")  # of instruction sets: a processor has one and all before it
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
SIDE = 32  # `linear` takes sizes that are multiples of this
LARGEST_HEAD = 1024

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
    kernel = _kernel("silu_mul", gate_up.dtype)
    if kernel is None or not _fits(gate_up):
        return reference.silu_mul(gate_up)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    kernel(gate_up.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
    return out


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
           turned.data_ptr(), keys.data_ptr(), values.data_ptr(), rows, heads, k.shape[1], head_dim,
           torch.get_num_threads())  # fmt: skip
    return turned


def attention(q: Tensor, keys: Tensor, values: Tensor, reads: Reads, page_row: int) -> Tensor:
    """See `reference.attention`. Reads the pages where they are; nothing is gathered."""
    kernel = _kernel("attention", q.dtype)
    (rows, heads, head_dim), (_, page_size, kv_heads, _) = q.shape, keys.shape
    if kernel is None or not _fits(q, keys, values) or head_dim > LARGEST_HEAD or reads.ahead is not None:
        return reference.attention(q, keys, values, reads, page_row)
    pages, spans = reads.pages[page_row].contiguous(), reads.spans.contiguous()
    out = q.new_empty(rows, heads * head_dim)
    kernel(q.data_ptr(), keys.data_ptr(), values.data_ptr(), pages.data_ptr(), spans.data_ptr(),
           out.data_ptr(), reads.spans.shape[0], heads, kv_heads, head_dim, page_size,
           torch.get_num_threads())  # fmt: skip
    return out


def pack(weight: Tensor) -> Tensor | None:
    """Weights [out, in] in the order that `linear` reads; None if it cannot serve them."""
    kernel = getattr(library(), "pack", None)
    bfloat16 = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    if kernel is None or not bfloat16 or any(size % SIDE for size in weight.shape):
        return None
    weight = weight.contiguous()
    packed = torch.empty_like(weight)
    kernel(weight.data_ptr(), packed.data_ptr(), *weight.shape)
    return packed


def linear(x: Tensor, packed: Tensor, added: Tensor | None = None) -> Tensor:
    """`x @ weight.T + added` for weights that `pack` has packed. `x`: [rows, in]; `added`: [rows, out]."""
    x = x.contiguous()
    out_features, in_features = packed.shape
    y = x.new_empty(x.shape[0], out_features)
    assert x.shape[1] == in_features
    assert x.dtype == packed.dtype
    kernel = getattr(library(), "linear")  # noqa: B009 - typed as Any
    kernel(x.data_ptr(), packed.data_ptr(), _address(added), y.data_ptr(), x.shape[0], out_features, in_features,
           torch.get_num_threads())  # fmt: skip
    return y
