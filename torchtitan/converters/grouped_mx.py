"""Experts' linear layers with GEMMs in microscaling formats: blocks of 32 numbers share a scale.

The GEMMs are torchao's on Blackwell, and emulated here elsewhere.

For the weight gradient, blocks are of 32 of an expert's rows; the last one is filled up with zeros.

Shapes: E experts, M rows of all experts together, K inputs and N outputs of each expert's layer.
"""

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from torchtitan.kernels.grouped_8bit import pad_groups
from torchtitan.kernels.grouped_gemm import grouped_mm, grouped_mm_over_rows
from torchtitan.models.moe import GroupedLinear

if TYPE_CHECKING:
    from torchtitan.compat.torchao_mx import ScaleCalculationMode

BLOCK = 32


class GroupedMX(NamedTuple):
    """How blocks are scaled, whether the weight gradient stays in high precision, and whether GEMMs are emulated."""

    scales: "ScaleCalculationMode"
    hp_weight_grad: bool
    emulate: bool


class GroupedMXMatmul(torch.autograd.Function):
    """x @ weight[expert].T in emulated mxfp8. x: (M, K), weight: (E, N, K), out: (M, N)."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, settings: GroupedMX
    ) -> torch.Tensor:
        ctx.settings = settings
        ctx.save_for_backward(x, weight, ends)
        return grouped_mm(_rounded(x, settings), _rounded(weight, settings).transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, out_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        settings: GroupedMX = ctx.settings
        out_grad = out_grad.contiguous()
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            by_column = _rounded(weight.transpose(1, 2), settings).transpose(1, 2)
            x_grad = grouped_mm(_rounded(out_grad, settings), by_column, ends)
        if ctx.needs_input_grad[1] and settings.hp_weight_grad:
            weight_grad = grouped_mm_over_rows(out_grad, x, ends)
        elif ctx.needs_input_grad[1]:
            left, padded_ends = pad_groups(out_grad, ends, BLOCK)
            right, _ = pad_groups(x, ends, BLOCK)
            left, right = (_rounded(operand.t(), settings).t() for operand in (left, right))
            weight_grad = grouped_mm_over_rows(left, right, padded_ends)
        return x_grad, weight_grad, None, None


def with_kernels(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, settings: GroupedMX) -> torch.Tensor:
    """`GroupedMXMatmul` with torchao's kernels."""
    from torchtitan.compat.torchao_mx import KernelPreference, grouped_mxfp8_mm

    out: torch.Tensor = grouped_mxfp8_mm(
        x,
        weight.transpose(1, 2),
        ends,
        out_dtype=x.dtype,
        kernel_preference=KernelPreference.EMULATED if settings.emulate else KernelPreference.AUTO,
        wgrad_with_hp=settings.hp_weight_grad,
        scale_calculation_mode=settings.scales,
        pad_token_groups_for_grouped_mm=True,  # to 32 rows
    )
    return out


def _rounded(x: torch.Tensor, settings: GroupedMX) -> torch.Tensor:
    """x rounded to blocks along its last dimension."""
    rounded: torch.Tensor = _round_to_blocks(x.contiguous(), settings.scales.name)
    return rounded


# A custom operator, because torchao's code depends on the number of rows, which the compiler does not know.
@torch.library.custom_op("torchtitan::round_to_mx_blocks", mutates_args=())
def _round_to_blocks(x: torch.Tensor, scales: str) -> torch.Tensor:
    from torchtitan.compat.torchao_mx import MXTensor, ScaleCalculationMode

    if x.numel() == 0:
        return x.clone()
    rounded = MXTensor.to_mx(x, torch.float8_e4m3fn, BLOCK, ScaleCalculationMode[scales])
    high: torch.Tensor = rounded.dequantize(x.dtype)
    return high


@_round_to_blocks.register_fake
def _(x: torch.Tensor, scales: str) -> torch.Tensor:
    return torch.empty_like(x)


class GroupedMXLinear(GroupedLinear):
    """A linear layer of each expert with mxfp8 GEMMs. Its weight is a plain parameter."""

    settings: GroupedMX

    @classmethod
    def of(cls, layer: GroupedLinear, settings: GroupedMX) -> "GroupedMXLinear":
        """A layer with the parameter of `layer`."""
        new = cls.with_weight_of(layer)
        new.settings = settings
        return new

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor
        if self.settings.emulate:
            out = GroupedMXMatmul.apply(x, self.weight, offsets, self.settings)
        else:
            out = with_kernels(x, self.weight, offsets, self.settings)
        return out
