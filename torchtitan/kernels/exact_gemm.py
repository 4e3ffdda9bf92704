"""A GEMM with float32 output from bfloat16 operands, for routers.

Products of bfloat16 numbers are exact in float32, and tensor cores sum them in float32. So the result is as exact as
a float32 GEMM of the same numbers, which runs without tensor cores. In the backward pass one operand is
float32: it is split into two bfloat16 numbers (16 bits of mantissa), far below the rounding of the result to bfloat16.
"""

from typing import Any

import torch
import torch.nn.functional as F

from torchtitan.kernels.dispatch import device_type
from torchtitan.kernels.operator import Function


def exact_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in float32: (..., D) and (E, D) to (..., E)."""
    if device_type(x) == "cuda" and x.dtype == weight.dtype == torch.bfloat16:
        return ExactLinear.apply(x.flatten(0, -2), weight).view(*x.shape[:-1], -1)
    return F.linear(x.float(), weight.float())


class ExactLinear(Function):
    """`exact_linear` of bfloat16 operands: x (T, D), weight (E, D), result (T, E) float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        # Masking bits rounds here: the compiler for GPUs drops a cast to bfloat16 and back.
        high = (grad.view(torch.int32) & -(2**16)).view(torch.float32)
        halves = torch.cat([high, grad - high], 1).bfloat16()  # (T, 2 E)
        x_grad = halves @ torch.cat([weight, weight])
        weight_grad = torch.mm(halves.t(), x, out_dtype=torch.float32).unflatten(0, (2, -1)).sum(0)
        return x_grad, weight_grad.to(weight.dtype)
