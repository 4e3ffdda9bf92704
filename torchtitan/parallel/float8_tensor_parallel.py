"""Tensor parallelism gathers activations in float8 where every layer that takes them multiplies in float8 with one
scale a tensor: half of bf16's bytes, and one cast for all these layers instead of one each.

(Other recipes have a scale for each row, or for each column in the backward pass, and communicate in high precision.)
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchtitan.compat.distributed import functional_collectives as funcol
from torchtitan.kernels import rounding
from torchtitan.kernels.quantize import float8_scale
from torchtitan.parallel.collectives import all_gather, all_gather_no_grad, reduce_scatter_no_grad, wait_tensor
from torchtitan.parallel.tensor import AllGather


def all_gather_for(linears: Sequence[nn.Module]) -> AllGather:
    """How the input of these layers is all-gathered: in the dtype that each of them names as its `all_gather_dtype`, or
    else as it is."""
    dtypes = {getattr(linear, "all_gather_dtype", None) for linear in linears}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return all_gather if dtype is None else _float8_all_gather(dtype)


@functools.cache  # one for all layers: what is compiled for one block then serves all
def _float8_all_gather(dtype: torch.dtype) -> AllGather:
    from torchtitan.compat.torchao_float8 import Float8TrainingTensor, GemmInputRole, LinearMMConfig

    @torch.compiler.allow_in_graph
    class Float8AllGather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, dim: int, group: str) -> torch.Tensor:  # type: ignore[override]
            ctx.dim, ctx.group = dim, group
            flat = x.flatten(0, -2)
            amax = wait_tensor(funcol.all_reduce(rounding.amax(flat).amax(), "max", group))  # type: ignore[arg-type]
            scale = float8_scale(amax, dtype)
            data = rounding.round_to(flat, scale, dtype).view(x.shape)
            if data.device.type == "cpu":  # gloo knows no float8
                data = all_gather_no_grad(data.view(torch.uint8), dim, group).view(dtype)
            else:
                data = all_gather_no_grad(data, dim, group)
            return Float8TrainingTensor(data, scale, x.dtype, LinearMMConfig(), GemmInputRole.INPUT)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            return reduce_scatter_no_grad(grad, ctx.dim, ctx.group), None, None

    return Float8AllGather.apply
