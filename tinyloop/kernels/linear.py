"""Linear layers, with weights reordered once for the processor where that is possible.

In float32 and bfloat16 on a CPU: for our own kernels where they are built, whose rows never change one another's bits.
Else in bfloat16 for the matrix unit through torch: about twice as fast as `torch.nn.functional.linear`, and our own
kernel again up to twice as fast for few rows. In int8 half the bytes are read.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyloop.kernels import native, reference
from tinyloop.kernels.program import NotRecordable, Symbol


class Linear:
    """`y = x @ weight.T + bias + added`. `weight`: [out, in]; `x`: [rows, in]; `added`: [rows, out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        packed = native.pack(weight)
        self.native = packed is not None
        self.reordered = packed is None and _can_reorder(weight)
        if packed is None:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight) if self.reordered else weight
        self.weight = packed

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        if isinstance(x, Symbol):
            return self.note(x, added)
        if self.native:
            y = native.linear(x, self.weight, self.out_features, added)
            return y if self.bias is None else y + self.bias
        if self.reordered:
            y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        else:
            y = F.linear(x, self.weight, self.bias)
        return y if added is None else added + y

    def note(self, x: Symbol, added: Tensor | None) -> Tensor:
        """Add this product to a program."""
        if not self.native or self.bias is not None or native.missing_inputs(self.weight.dtype, self.in_features):
            raise NotRecordable
        facts = self.weight, self.out_features, self.in_features
        return x.recorder.note("linear", self.out_features, (x, added), *facts)


class Int8Linear(Linear):
    """Like `Linear`, with weights and inputs brought to int8: see `reference.linear_int8`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        whole, self.scales = reference.quantize(weight)
        packed = native.pack_int8(whole, weight.dtype)
        self.native = packed is not None
        self.weight = whole if packed is None else packed

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        if isinstance(x, Symbol):
            return self.note(x, added)
        run = native.linear_int8 if self.native else reference.linear_int8
        y = run(x, self.weight, self.scales, added)
        return y if self.bias is None else y + self.bias

    def note(self, x: Symbol, added: Tensor | None) -> Tensor:
        if not self.native or self.bias is not None:
            raise NotRecordable
        facts = self.weight, self.out_features, self.in_features, self.scales
        return x.recorder.note("linear_int8", self.out_features, (x, added), *facts)


def _can_reorder(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._is_mkldnn_bf16_supported()
