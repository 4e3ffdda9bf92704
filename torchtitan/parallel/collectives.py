"""Collectives that gradients flow through, in eager and in compiled code. Tensors come back complete: awaited."""

from typing import Any

import torch

from torchtitan.compat.distributed import all_gather_tensor, reduce_scatter_tensor
from torchtitan.compat.distributed import functional_collectives as funcol


def gather(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """Joins the parts of all ranks along `dim`, in the order of ranks. Backward sums the ranks' gradients, and each
    rank gets its part of the sum.

    Args:
        group: name of the process group.
    """
    return _Gather.apply(x, dim, group)


def sum_scatter(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """Sums over the ranks; each gets its part along `dim`. Backward joins the gradients of all parts."""
    return _SumScatter.apply(x, dim, group)


def exchange(x: torch.Tensor, split: int, join: int, group: str, size: int) -> torch.Tensor:
    """All-to-all: `size` ranks each send a part along `split` to every other, and join what they get along `join`."""
    return _Exchange.apply(x, split, join, group, size)


def awaited(tensor: torch.Tensor) -> torch.Tensor:
    """What a functional collective gave, when it is there."""
    return tensor.wait() if isinstance(tensor, funcol.AsyncCollectiveTensor) else tensor


def gather_parts(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """`gather` without gradients."""
    return awaited(all_gather_tensor(x.contiguous(), dim, group))


def sum_scatter_parts(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """`sum_scatter` without gradients."""
    return awaited(reduce_scatter_tensor(x.contiguous(), "sum", dim, group))


def sum_over_ranks(x: torch.Tensor, group: str) -> torch.Tensor:
    """Without gradients."""
    return awaited(funcol.all_reduce(x, "sum", group))  # type: ignore[arg-type]


def exchange_parts(x: torch.Tensor, split: int, join: int, group: str, size: int) -> torch.Tensor:
    parts = torch.stack(x.chunk(size, split))
    received = awaited(funcol.all_to_all_single(parts, None, None, group))  # type: ignore[arg-type]
    return torch.cat(received.unbind(), join)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: str) -> torch.Tensor:  # type: ignore[override]
        ctx.dim, ctx.group = dim, group
        return gather_parts(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return sum_scatter_parts(grad, ctx.dim, ctx.group), None, None


class _SumScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: str) -> torch.Tensor:  # type: ignore[override]
        ctx.dim, ctx.group = dim, group
        return sum_scatter_parts(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return gather_parts(grad, ctx.dim, ctx.group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, split: int, join: int, group: str, size: int) -> torch.Tensor:  # type: ignore[override]
        ctx.way = (join, split, group, size)
        return exchange_parts(x, split, join, group, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return exchange_parts(grad, *ctx.way), None, None, None, None
