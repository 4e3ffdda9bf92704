"""The gate of SwiGLU in 8 bits: its inputs, kept for the backward pass, or its gradients.

Shapes: T tokens, H inner channels of a feed-forward layer.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch

from torchtitan.kernels import rounding
from torchtitan.kernels.dispatch import device_type, has_no_memory
from torchtitan.kernels.operator import Function, fused, operator
from torchtitan.kernels.quantize import (
    Quantized,
    dequantize,
    float8_scale,
    has_triton_kernels,
    quantize,
    round_to_float8,
)
from torchtitan.kernels.swiglu import swiglu
from torchtitan.registry import deferred

Rounded = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_round_gradients: Callable[..., Rounded] = deferred("torchtitan.kernels.swiglu_triton:round_gradients")
SavedDtype = Literal["int8", "float8"]


def swiglu_saved_in_8_bits(gate: torch.Tensor, up: torch.Tensor, dtype: SavedDtype) -> torch.Tensor:
    """The same result; its gradients are those at the rounded inputs, with one scale per token. Keeps 2 bytes per token
    and channel, where autograd keeps 6 in bfloat16, and the compiler 4."""
    return _SwiGLU.apply(gate, up, dtype)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, dtype: SavedDtype) -> torch.Tensor:
        ctx.save_for_backward(*_rounded(gate, dtype), *_rounded(up, dtype))
        return swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate_grad, up_grad = _gradients(grad.flatten(0, -2), *ctx.saved_tensors)
        return gate_grad.view_as(grad), up_grad.view_as(grad), None


def _rounded(x: torch.Tensor, dtype: SavedDtype) -> Quantized:
    """(..., H) to (T, H) in 8 bits."""
    x = x.flatten(0, -2)
    return quantize(x, "rowwise") if dtype == "int8" else _to_float8(x)


@fused
def _to_float8(x: torch.Tensor) -> Quantized:
    return round_to_float8(x, float8_scale(rounding.amax(x), torch.float8_e4m3fn), torch.float8_e4m3fn)


@fused
def _gradients(
    grad: torch.Tensor, gate: torch.Tensor, gate_scale: torch.Tensor, up: torch.Tensor, up_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of gate and up, (T, H), in the dtype of `grad`."""
    wide, up = dequantize(gate, gate_scale, torch.float32), dequantize(up, up_scale, torch.float32)
    sigmoid = wide.sigmoid()
    slope = sigmoid * (1 + wide * (1 - sigmoid))
    return (grad * up * slope).to(grad.dtype), (grad * wide * sigmoid).to(grad.dtype)


def _empty_gradients(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> Any:
    rows, columns = grad.shape
    by_row = [grad.new_empty(rows, columns, dtype=dtype) for _ in range(2)]
    by_column = [grad.new_empty(columns, rows, dtype=dtype).t() for _ in range(3)]
    inverses = (grad.new_empty(2, rows, 1, dtype=torch.float32), grad.new_empty(3, 1, columns, dtype=torch.float32))
    return *by_row, inverses[0], *by_column, inverses[1]


@operator("round_swiglu_gradients", _empty_gradients)
def _round_on_gpu(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> Rounded:
    return _round_gradients(grad.contiguous(), gate.contiguous(), up.contiguous(), dtype)


def rounds_swiglu_gradients(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `round_swiglu_gradients` takes tensors like x; in a plan, whether it would on the GPU of the plan."""
    return has_triton_kernels(x, dtype) or (has_no_memory(x) and device_type(x) == "cuda")


def round_swiglu_gradients(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype
) -> tuple[tuple[Quantized, Quantized], tuple[Quantized, Quantized], Quantized]:
    """The gradients of gate and up, each with a scale per token and with one per channel, for the two GEMMs that use
    it, and silu(gate) * up with one per channel, for the weight gradient of the next layer.

    grad, gate, up: (T, H); results: (T, H), column-major if the scales are those of channels.
    """
    gate_rows, up_rows, rows, gate_columns, up_columns, product, columns = _round_on_gpu(grad, gate, up, dtype)
    return (
        (Quantized(gate_rows, rows[0]), Quantized(gate_columns, columns[0])),
        (Quantized(up_rows, rows[1]), Quantized(up_columns, columns[1])),
        Quantized(product, columns[2]),
    )
