"""The gate of SwiGLU (arXiv 2002.05202), silu(gate) * up, and others by name.

Shapes: H inner channels of a feed-forward layer.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F

from torchtitan.kernels import pointwise
from torchtitan.kernels.dispatch import KERNELS, Kernel, find_kernel
from torchtitan.kernels.operator import Function
from torchtitan.registry import load

Activation = Callable[..., torch.Tensor]  # takes gate and up
GatedName = Literal["swiglu", "clamped_swiglu", "geglu"]
ActivationName = Literal[GatedName, "relu_squared"]


def activation(name: ActivationName) -> Activation:
    """From gate and value of a feed-forward, (..., H), to what its last layer multiplies; relu_squared has no value."""
    function: Activation = swiglu if name == "swiglu" else load(f"torchtitan.kernels.activations:{name}")
    return function


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of (..., H)."""
    out: torch.Tensor = find_kernel("swiglu", gate, up)(gate, up)
    return out


class _OnCpu(Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        pointwise.run_kernel("swiglu", gate.numel(), gate, up, out := torch.empty_like(gate))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        grads = torch.empty_like(gate), torch.empty_like(up)
        pointwise.run_kernel("swiglu_gradients", gate.numel(), grad.contiguous(), gate, up, *grads)
        return grads


_CPP = Kernel("pointwise.cpp", _OnCpu.apply, pointwise.applies_to)
KERNELS["swiglu"] = [_CPP, Kernel("torch's", lambda gate, up: F.silu(gate) * up)]
