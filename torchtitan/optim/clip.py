"""Gradient clipping by the norm over all parameters and ranks."""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.optim.combined import BaseOptimizer, optimizers_in
from torchtitan.parallel.sharded_tensors import local_tensor, replicas_of


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, optimizer: torch.optim.Optimizer | None = None
) -> torch.Tensor:
    """Scales gradients in place so that their total 2-norm is at most `max_norm`; inf does not scale. Returns the norm
    before, a float32 scalar on the device, the same on every rank.

    The norm is over the full model: all shards, tensor-parallel ranks and pipeline stages, with one all-reduce of one
    number. Collective: each rank passes the parameters it holds.

    Args:
        optimizer: scales the gradients that its next step can scale (`BaseOptimizer.take_factor`), to the same bits.
            Those stay as they are, which saves reading and writing them once more.
    """
    clipped = [parameter for parameter in parameters if parameter.grad is not None]
    norm = norm_over_ranks(squared_norm([parameter.grad for parameter in clipped]))  # type: ignore[misc]
    if max_norm < math.inf:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        singles = [] if optimizer is None else optimizers_in(optimizer)
        later = {
            parameter
            for single in singles
            if isinstance(single, BaseOptimizer)
            for parameter in single.take_factor(factor)
        }
        # Shards, not DTensors: experts have another mesh, and DTensor does not mix meshes in one operation.
        now = [local_tensor(parameter.grad) for parameter in clipped if parameter not in later]  # type: ignore[arg-type]
        if now:
            torch._foreach_mul_(now, factor)
    return norm


@torch.no_grad()
def squared_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """This rank's contribution to the squared norm of these gradients; a float64 scalar."""
    shards = [local_tensor(grad) for grad in grads]
    if shards[0].device.type == "cpu":
        # torch's CPU kernel accumulates in float32 one number at a time: 1e-4 off for a large sparse gradient, and
        # different for each layout. Rows are short enough; their norms are summed in float64.
        rows = [torch.linalg.vector_norm(grad, dim=-1, dtype=torch.float32) for grad in shards]
        norms = [torch.linalg.vector_norm(norms, dtype=torch.float64) for norms in rows]
    else:
        norms = list(torch._foreach_norm(shards, 2, dtype=torch.float32))
    by_replicas: dict[int, list[torch.Tensor]] = {}
    for grad, norm in zip(grads, norms, strict=True):
        by_replicas.setdefault(replicas_of(grad), []).append(norm)
    squares = [torch.stack(norms).double().square().sum() / replicas for replicas, norms in by_replicas.items()]
    return torch.stack(squares).sum()


def norm_over_ranks(square: torch.Tensor) -> torch.Tensor:
    """The norm from every rank's contribution to its square (which is overwritten); float32. Collective."""
    if dist.is_initialized():
        dist.all_reduce(square)
    return square.sqrt().float()
