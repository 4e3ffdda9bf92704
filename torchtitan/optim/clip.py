"""Gradient clipping by the norm over all parameters and ranks."""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.parallel.sharded_tensors import local_tensor, replicas_of


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scales gradients in place so that their total 2-norm is at most `max_norm`; inf does not scale. Returns the norm
    before, a float32 scalar on the device, the same on every rank.

    The norm is over the full model: all shards, tensor-parallel ranks and pipeline stages, with one all-reduce of one
    number. Collective: each rank passes the parameters it holds.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = norm_over_ranks(squared_norm(grads))
    if max_norm < math.inf:
        # Shards, not DTensors: experts have another mesh, and DTensor does not mix meshes in one operation.
        torch._foreach_mul_([local_tensor(grad) for grad in grads], (max_norm / (norm + 1e-6)).clamp(max=1.0))
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
