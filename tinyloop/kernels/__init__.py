"""The kernels: one signature each. Every family and the runner call these and nothing below them."""

from tinyloop.kernels.linear import Linear
from tinyloop.kernels.reference import attention, gather_pages, rms_norm, rope, silu_mul, write_rows

__all__ = ["Linear", "attention", "gather_pages", "rms_norm", "rope", "silu_mul", "write_rows"]
