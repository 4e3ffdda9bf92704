"""Experts' linear layers with float8 or int8 GEMMs: the rowwise recipes, with scales of each expert's own.

Forward and input gradient have one scale per token and one per row or column of each expert's weight. The weight
gradient sums over an expert's tokens, with one scale per column of these. So each expert computes what a converted
linear layer computes with the expert's weight and tokens. (float8 rowwise_with_gw_hp rounds a weight for the input
gradient with one scale per tensor; here it has one per column.)

Shapes: E experts, M rows of all experts together, K inputs and N outputs of each expert's layer.
"""

from typing import Any, ClassVar, NamedTuple

import torch

from torchtitan.converters.converter import ProfilerOp
from torchtitan.kernels.grouped_8bit import (
    grouped_matmul,
    grouped_matmul_over_rows,
    round_columns,
    round_rows,
    round_rows_and_columns,
    round_weight,
)
from torchtitan.kernels.grouped_gemm import grouped_mm, grouped_mm_over_rows
from torchtitan.kernels.quantize import quantize_once, quantize_weight
from torchtitan.kernels.quantized import Quantized
from torchtitan.models.moe import GroupedLinear


def grouped_op(dtype: str) -> ProfilerOp:
    """How the profiler shows the operator that loops over experts; `dtype` in its spelling."""
    return ProfilerOp("torchtitan::grouped_8bit_mm", (dtype,))


class GroupedGemms(NamedTuple):
    """Which of the three GEMMs are computed in `dtype`."""

    dtype: torch.dtype
    output: bool
    grad_input: bool
    grad_weight: bool
    emulate: bool


class GroupedInput(NamedTuple):
    """A layer's rounded input, for the output GEMM and for the weight gradient; None: that GEMM uses the input itself.

    ends: of the experts' rows in `columns`.
    """

    rows: Quantized | None
    columns: Quantized | None
    ends: torch.Tensor


def round_input(x: torch.Tensor, ends: torch.Tensor, gemms: GroupedGemms, trains: bool) -> GroupedInput:
    """
    Args:
        x: (M, K).
        trains: a backward pass follows.
    """
    if not (gemms.grad_weight and trains):
        return GroupedInput(round_rows(x, gemms.dtype) if gemms.output else None, None, ends)
    rows, columns, columns_ends = round_rows_and_columns(x, ends, gemms.dtype, gemms.emulate)
    return GroupedInput(rows if gemms.output else None, columns, columns_ends)


class GroupedMatmul(torch.autograd.Function):
    """x @ weight[expert].T. x: (M, K), weight: (E, N, K), out: (M, N).

    Saves x as the weight gradient needs it. The weight is rounded again in the backward pass: a saved 8-bit copy would
    take memory even after FSDP has freed the gathered weight.

    Args:
        low: x rounded by `round_input`.
    """

    apply: ClassVar[Any]

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, low: GroupedInput, gemms: GroupedGemms
    ) -> torch.Tensor:
        ctx.gemms, ctx.dtype = gemms, x.dtype
        if low.rows is None:
            ctx.save_for_backward(weight, None, ends, low.ends, *(low.columns or (x, None)))
            return grouped_mm(x, weight.transpose(1, 2), ends)
        rows, by_column = quantize_weight(weight, (gemms.dtype, "rows"), lambda w: round_weight(w, gemms.dtype))
        data, scale_inverse = rows
        ctx.save_for_backward(weight, by_column, ends, low.ends, *(low.columns or (x, None)))
        right = Quantized(data.transpose(1, 2), scale_inverse.transpose(1, 2))
        return grouped_matmul(low.rows, right, ends, x.dtype, gemms.emulate, fast=True)

    @staticmethod
    def backward(ctx: Any, out_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, by_column, ends, columns_ends, x, x_scale_inverse = ctx.saved_tensors
        gemms: GroupedGemms = ctx.gemms
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        out_grad = out_grad.contiguous()
        x_grad = weight_grad = rows = None
        if needs_weight and gemms.grad_weight:
            rows, columns, _ = round_rows_and_columns(out_grad, ends, gemms.dtype, gemms.emulate)
            right = Quantized(x, x_scale_inverse)
            weight_grad = grouped_matmul_over_rows(columns, right, columns_ends, weight.dtype, gemms.emulate)
        elif needs_weight:
            weight_grad = grouped_mm_over_rows(out_grad, x, ends)
        if needs_x and gemms.grad_input:
            left = round_rows(out_grad, gemms.dtype) if rows is None else rows
            key = gemms.dtype, "columns"
            right = quantize_weight(weight, key, lambda w: round_columns(w, gemms.dtype, by_column))
            x_grad = grouped_matmul(left, right, ends, ctx.dtype, gemms.emulate)
        elif needs_x:
            x_grad = grouped_mm(out_grad, weight, ends)
        return x_grad, weight_grad, None, None, None


class Grouped8BitLinear(GroupedLinear):
    """A linear layer of each expert with 8-bit GEMMs. Its weight is a plain parameter."""

    gemms: GroupedGemms

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        gemms, trains = self.gemms, torch.is_grad_enabled()
        # w1 and w3 share x. Its rows are sorted only one way, so the key need not contain the offsets.
        low = quantize_once(x, (gemms, trains), lambda x: round_input(x, offsets, gemms, trains))
        out: torch.Tensor = GroupedMatmul.apply(x, self.weight, offsets, low, gemms)
        return out

    @classmethod
    def of(cls, layer: GroupedLinear, gemms: GroupedGemms) -> "Grouped8BitLinear":
        """A layer with the parameter of `layer`."""
        new = cls.with_weight_of(layer)
        new.gemms = gemms
        return new
