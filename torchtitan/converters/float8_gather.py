"""Tensor parallelism gathers activations in float8 where every layer that takes them multiplies in float8 with one
scale a tensor: half of bf16's bytes, and one cast for all these layers instead of one each.

(Other recipes have a scale for each row, or for each column in the backward pass, and communicate in high precision.)
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn

from torchtitan.parallel.collectives import awaited, gather, gather_parts, sum_scatter_parts
from torchtitan.parallel.tensor import Gather


def gather_for(linears: Sequence[nn.Module]) -> Gather:
    """How the input of these layers is gathered."""
    if not all(type(linear).__name__ == "Float8Linear" for linear in linears):
        return gather
    from torchao.float8.config import ScalingGranularity, ScalingType

    configs: list[Any] = [linear.config for linear in linears]
    if any(
        config.cast_config_input.scaling_granularity is not ScalingGranularity.TENSORWISE
        or config.cast_config_input.scaling_type is not ScalingType.DYNAMIC
        for config in configs
    ):
        return gather
    return _gather_in_float8(configs[0].cast_config_input.target_dtype, linears[0].linear_mm_config)


@functools.cache  # one for all layers: what is compiled for one block then serves all
def _gather_in_float8(dtype: torch.dtype, products: Any) -> Gather:
    """
    Args:
        dtype: to gather in.
        products: torchao's settings of the products that follow.
    """
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole
    from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

    @torch._dynamo.allow_in_graph
    class GatherInFloat8(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, dim: int, group: str) -> torch.Tensor:  # type: ignore[override]
            ctx.dim, ctx.group = dim, group
            amax = awaited(funcol.all_reduce(x.abs().amax(), "max", group))  # type: ignore[arg-type]
            scale = amax_to_scale(amax, dtype)
            data = to_fp8_saturated(x.float() * scale, dtype)
            if data.device.type == "cpu":  # gloo knows no float8
                data = gather_parts(data.view(torch.uint8), dim, group).view(dtype)
            else:
                data = gather_parts(data, dim, group)
            return Float8TrainingTensor(data, scale, x.dtype, products, GemmInputRole.INPUT)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            return sum_scatter_parts(grad, ctx.dim, ctx.group), None, None

    return GatherInFloat8.apply
