"""Tensor parallelism that all-gathers activations in float8, if all layers that use them multiply in tensorwise float8:
half the bytes of bf16, and one cast for all these layers. (Other recipes, with a scale per row, or per column in the
backward pass, communicate in high precision.)"""

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
    """How to all-gather the input of these layers: in their `all_gather_dtype` if all name the same, else as it is."""
    dtypes = {getattr(linear, "all_gather_dtype", None) for linear in linears}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return all_gather if dtype is None else _float8_all_gather(dtype)


@functools.cache  # one function for all layers, so that one block's compiled code serves all
def _float8_all_gather(dtype: torch.dtype) -> AllGather:
    from torchtitan.compat.torchao import Float8TrainingTensor, GemmInputRole, LinearMMConfig

    @torch.compiler.allow_in_graph
    class Float8AllGather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
            ctx.dim, ctx.group = dim, group
            flat = x.flatten(0, -2)
            amax = wait_tensor(funcol.all_reduce(rounding.amax(flat).amax(), "max", group))  # type: ignore[arg-type]
            scale = float8_scale(amax, dtype)
            data = rounding.round_to(flat, scale, dtype).view(x.shape)
            if data.device.type == "cpu":  # gloo does not support float8
                data = all_gather_no_grad(data.view(torch.uint8), dim, group).view(dtype)
            else:
                data = all_gather_no_grad(data, dim, group)
            out: torch.Tensor = Float8TrainingTensor(data, scale, x.dtype, LinearMMConfig(), GemmInputRole.INPUT)
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            return reduce_scatter_no_grad(grad, ctx.dim, ctx.group), None, None

    return Float8AllGather.apply
