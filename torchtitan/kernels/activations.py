"""Activations of feed-forward layers other than SwiGLU.

Shapes: H inner channels of a feed-forward layer.
"""

from typing import Any

import torch
import torch.nn.functional as F

from torchtitan.compat.dynamo import is_compiling
from torchtitan.kernels.operator import Function
from torchtitan.kernels.swiglu import Activation

LIMIT, SLOPE = 7.0, 1.702  # gpt-oss has these


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1), where gate is at most 7 and up between -7 and 7 (gpt-oss); (..., H)."""
    return _recomputed(_clamped_swiglu, gate, up)


def geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, by the approximation with tanh (arXiv 2002.05202, 1606.08415); (..., H)."""
    return _recomputed(_geglu, gate, up)


def relu_squared(gate: torch.Tensor, up: None) -> torch.Tensor:
    """relu(gate)² (arXiv 2109.08668); (..., H)."""
    return F.relu(gate).square()


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(SLOPE * gate) * (up + 1)


def _geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _recomputed(function: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    # The compiler chooses itself what to keep.
    out: torch.Tensor = function(gate, up) if is_compiling() else _Recomputed.apply(function, gate, up)
    return out


class _Recomputed(Function):
    """A pointwise function that keeps its inputs only: autograd would keep several steps of it."""

    @staticmethod
    def forward(ctx: Any, function: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(gate, up)
        return function(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        return None, *torch.autograd.grad(out, inputs, grad)
