"""Experts' linear layers whose GEMMs are emulated in block-scaled formats, as in `block_linear.py`.

For the weight gradient, blocks are of one expert's rows; the last one is filled up with zeros. A format's scale of the
matrix is that of an expert's weight, but of the rows of all experts.

Shapes: E experts, M rows of all experts together, K inputs and N outputs of each expert's layer.
"""

from typing import Any, ClassVar

import torch

from torchtitan.converters.block_linear import BlockGemms
from torchtitan.kernels.block_formats import round_to_blocks
from torchtitan.kernels.grouped_8bit import pad_groups
from torchtitan.kernels.grouped_gemm import grouped_mm, grouped_mm_over_rows
from torchtitan.models.moe import GroupedLinear


class GroupedBlockMatmul(torch.autograd.Function):
    """x @ weight[expert].T. x: (M, K), weight: (E, N, K), out: (M, N)."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, gemms: BlockGemms) -> torch.Tensor:
        ctx.gemms = gemms
        ctx.save_for_backward(x, weight, ends)
        if not gemms.output:
            return grouped_mm(x, weight.transpose(1, 2), ends)
        right = round_to_blocks(weight, gemms.weight).transpose(1, 2)
        return grouped_mm(round_to_blocks(x, gemms.x), right, ends)

    @staticmethod
    def backward(ctx: Any, out_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        gemms: BlockGemms = ctx.gemms
        out_grad = out_grad.contiguous()
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            by_column = round_to_blocks(weight.transpose(1, 2), gemms.weight).transpose(1, 2)
            x_grad = grouped_mm(round_to_blocks(out_grad, gemms.out_grad), by_column, ends)
        if ctx.needs_input_grad[1] and gemms.grad_weight:
            right, padded_ends = pad_groups(x, ends, gemms.x.columns)
            left, _ = pad_groups(out_grad, ends, gemms.x.columns)
            left = round_to_blocks(left.t(), gemms.over_tokens(gemms.out_grad))
            right = round_to_blocks(right.t(), gemms.over_tokens(gemms.x))
            weight_grad = grouped_mm_over_rows(left.t(), right.t(), padded_ends)
        elif ctx.needs_input_grad[1]:
            weight_grad = grouped_mm_over_rows(out_grad, x, ends)
        return x_grad, weight_grad, None, None


class GroupedBlockLinear(GroupedLinear):
    """A linear layer of each expert with emulated block-scaled GEMMs. Its weight is a plain parameter."""

    gemms: BlockGemms

    @classmethod
    def of(cls, layer: GroupedLinear, gemms: BlockGemms) -> "GroupedBlockLinear":
        """A layer with the parameter of `layer`."""
        new = cls.with_weight_of(layer)
        new.gemms = gemms
        return new

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = GroupedBlockMatmul.apply(x, self.weight, offsets, self.gemms)
        return out
