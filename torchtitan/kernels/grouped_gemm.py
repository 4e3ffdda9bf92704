"""Grouped GEMMs: one for each expert, over rows that are sorted by expert.

Shapes: E experts, M rows of all experts together, K inputs and N outputs of each expert's layer.
"""

from typing import Any

import torch
import torch.nn.functional as F

from torchtitan.kernels.dispatch import device_type
from torchtitan.kernels.operator import Function, operator

ALIGNMENT = 16  # multiple of an expert's 8-bit rows where a GPU sums over them: its operands are aligned to 16 bytes


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiplies each expert's rows with its weight: (M, K) and (E, N, K) to (M, N); differentiable. x is sorted by
    expert; offsets: (E,) int32, the end of each expert's rows."""
    return _GroupedLinear.apply(x, weight, offsets)


def add_bias(x: torch.Tensor, bias: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Adds each expert's bias to its rows: (M, N) and (E, N) to (M, N); differentiable. As in `grouped_linear`."""
    return _AddBias.apply(x, bias, offsets)


def ends_of(counts: torch.Tensor) -> torch.Tensor:
    """(E,) rows of each expert to (E,) int32: where they end."""
    return counts.cumsum(0).to(torch.int32)


def reorder_rows(x: torch.Tensor, order: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x[order], where each row of x appears once, or k times; differentiable. `places`: where it does, (rows,) or
    (rows, k). So the gradient is a gather, and a sum over k in a fixed order, not a scatter of atomic additions."""
    return _ReorderRows.apply(x, order, places)


def sum_over_experts(x: torch.Tensor) -> torch.Tensor:
    """(..., k, D) to (..., D), summed in float32 and rounded once."""
    if x.shape[-2] == 2:  # the same, and eight times as fast on a CPU
        return x.select(-2, 0) + x.select(-2, 1)
    return x.sum(-2)


class _ReorderRows(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        x_grad = grad.index_select(0, places.flatten())
        return x_grad if places.ndim == 1 else sum_over_experts(x_grad.unflatten(0, places.shape)), None, None


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return grouped_mm(x, weight.transpose(1, 2), offsets)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, offsets = ctx.saved_tensors
        grad = grad.contiguous()
        x_grad = grouped_mm(grad, weight, offsets) if ctx.needs_input_grad[0] else None
        weight_grad = grouped_mm_over_rows(grad, x, offsets) if ctx.needs_input_grad[1] else None
        return x_grad, weight_grad, None


class _AddBias(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(offsets)
        rows = torch.arange(x.shape[0], dtype=offsets.dtype, device=x.device)
        return x + bias.index_select(0, torch.searchsorted(offsets, rows, right=True))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # A grouped GEMM with ones sums in a fixed order, unlike atomic additions; eight columns, so that it is aligned.
        ones = grad.new_ones(grad.shape[0], 8)
        return grad, grouped_mm_over_rows(grad.contiguous(), ones, ctx.saved_tensors[0])[..., 0], None


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """(M, K) x (E, K, N) to (M, N): rows of expert e times weight[e]; without offsets, x times the only weight."""
    if offsets is None:
        return x @ weight
    if _has_grouped_kernel(x):
        return F.grouped_mm(x, weight, offs=offsets)
    return grouped_mm_loop(x, weight, offsets)


def grouped_mm_over_rows(grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """(M, N) and (M, K) to (E, N, K): gradient.T @ x over the rows of each expert; without offsets, of all, (N, K)."""
    if offsets is None:
        return grad.t() @ x
    if _has_grouped_kernel(x):
        return F.grouped_mm(grad.t(), x, offs=offsets)
    return grouped_mm_over_rows_loop(grad, x, offsets)


def _has_grouped_kernel(x: torch.Tensor) -> bool:
    """Whether torch has one kernel for all experts; it is for bfloat16 on CUDA only, elsewhere torch loops as well."""
    return device_type(x) == "cuda" and x.dtype == torch.bfloat16


# Operators, so that the compiler need not know how many rows an expert has.
@operator("grouped_mm", lambda x, weight, offsets: x.new_empty(x.shape[0], weight.shape[2]))
def grouped_mm_loop(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`grouped_mm` as a loop over the experts."""
    out = x.new_empty(x.shape[0], weight.shape[2])
    for rows, matrix in zip(rows_of(offsets), weight, strict=True):
        torch.mm(x[rows], matrix, out=out[rows])
    return out


@operator("grouped_mm_over_rows", lambda grad, x, offsets: x.new_empty(offsets.shape[0], grad.shape[1], x.shape[1]))
def grouped_mm_over_rows_loop(grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`grouped_mm_over_rows` as a loop over the experts."""
    out = x.new_empty(len(offsets), grad.shape[1], x.shape[1])
    for rows, result in zip(rows_of(offsets), out, strict=True):  # padded operands have other rows at the end
        torch.mm(grad[rows].t(), x[rows], out=result)
    return out


def rows_of(offsets: torch.Tensor) -> list[slice]:
    """The rows of each expert."""
    ends = offsets.tolist()
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
