"""Experts' linear layers with mxfp8 GEMMs on Blackwell: torchao's kernels. (`grouped_blocks.py` emulates them.)

Shapes: E experts, M rows of all experts together, K inputs and N outputs of each expert's layer.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

from torchtitan.models.moe import GroupedLinear

if TYPE_CHECKING:
    from torchtitan.compat.torchao import ScaleCalculationMode


class GroupedMX(NamedTuple):
    """How blocks are scaled, whether the weight gradient stays in high precision, and whether torchao emulates it."""

    scales: "ScaleCalculationMode"
    hp_weight_grad: bool
    emulate: bool = False


def grouped_mx_matmul(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, settings: GroupedMX) -> torch.Tensor:
    """x @ weight[expert].T. x: (M, K), weight: (E, N, K), out: (M, N)."""
    from torchtitan.compat.torchao import KernelPreference, grouped_mxfp8_mm

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
        return grouped_mx_matmul(x, self.weight, offsets, self.settings)
