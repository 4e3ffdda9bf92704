"""Differentiable collectives for eager and compiled code, and variants without gradients. All wait for the result."""

from collections.abc import Sequence
from typing import Any

import torch

from torchtitan.compat.distributed import (
    all_gather_tensor,
    fused_all_gather_matmul_over_tokens,
    reduce_scatter_tensor,
)
from torchtitan.compat.distributed import functional_collectives as funcol
from torchtitan.kernels.operator import Function, operator


def all_gather(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """Concatenates the shards of all ranks along `dim`, in rank order. Backward reduce-scatters the gradient."""
    return _GatherOrScatter.apply(x, True, dim, group)


def reduce_scatter(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """Sums over the ranks and scatters the sum along `dim`. Backward all-gathers the gradient."""
    return _GatherOrScatter.apply(x, False, dim, group)


def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """Sums over the ranks. Backward sums the gradient over the ranks, each of which has used the result."""
    out: torch.Tensor = _AllReduce.apply(x, group)
    return out


def all_to_all(x: torch.Tensor, split_dim: int, concat_dim: int, group: str, world_size: int) -> torch.Tensor:
    """Each of `world_size` ranks sends a chunk of x along `split_dim` to every rank, and concatenates what it receives
    along `concat_dim`."""
    return _AllToAll.apply(x, split_dim, concat_dim, group, world_size)


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Waits for the result of a functional collective."""
    return tensor.wait() if isinstance(tensor, funcol.AsyncCollectiveTensor) else tensor


def all_gather_no_grad(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """`all_gather` without gradients."""
    if x.shape[:dim].numel() == 1:  # this equals the first dimension, which asynchronous tensor parallelism can fuse
        gathered = wait_tensor(all_gather_tensor(x.flatten(0, dim).contiguous(), 0, group))
        return gathered.view(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    gathered = wait_tensor(all_gather_tensor(x.contiguous(), 0, group))
    return torch.cat(gathered.split(x.shape[0]), dim)  # not by all_gather_tensor, which torch 2.11 then cannot compile


def reduce_scatter_no_grad(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """`reduce_scatter` without gradients."""
    return wait_tensor(reduce_scatter_tensor(x.contiguous(), "sum", dim, group))


def all_reduce_no_grad(x: torch.Tensor, group: str) -> torch.Tensor:
    """Sums over the ranks, without gradients."""
    return wait_tensor(funcol.all_reduce(x, "sum", group))  # type: ignore[arg-type]


def all_to_all_no_grad(x: torch.Tensor, split_dim: int, concat_dim: int, group: str, world_size: int) -> torch.Tensor:
    chunks = torch.stack(x.chunk(world_size, split_dim))
    received = wait_tensor(funcol.all_to_all_single(chunks, None, None, group))  # type: ignore[arg-type]
    return torch.cat(received.unbind(), concat_dim)


@operator(
    "all_gather_matmul",
    lambda shard, others, group: [other.new_empty(shard.shape[1], other.shape[1]) for other in others],
)
def all_gather_matmul(shard: torch.Tensor, others: Sequence[torch.Tensor], group: str) -> list[torch.Tensor]:
    """all_gather(shard).T @ other, (C, D), of (tokens of this rank, C) and each (tokens, D): on CUDA, the GEMM of a
    shard hides the gather of the next, which requires symmetric memory. One operator, so that the compiler does not
    move the gather away from its GEMM."""
    if shard.device.type == "cuda":
        return fused_all_gather_matmul_over_tokens(shard, others, group)
    gathered = all_gather_no_grad(shard, 0, group)
    return [gathered.t() @ other for other in others]


class _GatherOrScatter(Function):
    """An all-gather, whose backward pass is a reduce-scatter, or the other way round."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gather: bool, dim: int, group: str) -> torch.Tensor:
        ctx.gather, ctx.dim, ctx.group = gather, dim, group
        return (all_gather_no_grad if gather else reduce_scatter_no_grad)(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        reverse = reduce_scatter_no_grad if ctx.gather else all_gather_no_grad
        return reverse(grad, ctx.dim, ctx.group), None, None, None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return all_reduce_no_grad(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce_no_grad(grad, ctx.group), None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, split_dim: int, concat_dim: int, group: str, world_size: int
    ) -> torch.Tensor:
        ctx.reverse = (concat_dim, split_dim, group, world_size)
        return all_to_all_no_grad(x, split_dim, concat_dim, group, world_size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return all_to_all_no_grad(grad, *ctx.reverse), None, None, None, None
