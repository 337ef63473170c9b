"""Linear layers, with weights reordered once for the processor where that is possible.

In bfloat16 on a CPU: for our own kernel where it is built, else for the matrix unit through torch. Reordered weights
run about twice as fast as `torch.nn.functional.linear`, and our own kernel again up to twice as fast for few rows.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyloop.kernels import native


class Linear:
    """`y = x @ weight.T + bias + added`. `weight`: [out, in]; `x`: [rows, in]; `added`: [rows, out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        packed = native.pack(weight) if bias is None else None
        self.native = packed is not None
        self.reordered = packed is None and _can_reorder(weight)
        if packed is None:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight) if self.reordered else weight
        self.weight = packed

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        if self.native:
            return native.linear(x, self.weight, added)
        if self.reordered:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        else:
            y = F.linear(x, self.weight, self.bias)
        return y if added is None else added + y


def _can_reorder(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._is_mkldnn_bf16_supported()
