"""The kernels: one signature each. Every family and the runner call these and nothing below them.

`reference` says in torch what they compute; `native` does it in C++ where that is built and the tensors fit.
"""

from tinyloop.kernels.linear import Int8Linear, Linear
from tinyloop.kernels.native import (
    attention,
    heads,
    most_likely,
    program_kernel,
    rms_norm,
    rope_write,
    sigmoid_mul,
    silu_mul,
)
from tinyloop.kernels.reads import Reads
from tinyloop.kernels.reference import rope

__all__ = [
    "Int8Linear",
    "Linear",
    "Reads",
    "attention",
    "heads",
    "most_likely",
    "program_kernel",
    "rms_norm",
    "rope",
    "rope_write",
    "sigmoid_mul",
    "silu_mul",
]
