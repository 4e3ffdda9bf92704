"""Largest magnitudes (amax) over all ranks that share a tensor."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def stage_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks that have the same layers as this one, whole or divided: their batches, parts of sequences and shares
    of products are parts of the same tensors. None for all. Collective.

    Args:
        mesh: (pp, dp_replicate, fsdp, tp).
    """
    if mesh.size(0) == 1:
        return None
    group, _ = dist.new_subgroups_by_enumeration(mesh.mesh.flatten(1).tolist())
    return group


def max_over(amaxes: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The largest of each over the ranks, in one all-reduce. What is not finite is inf: NaN has no order."""
    amaxes = amaxes.nan_to_num(nan=torch.inf, posinf=torch.inf)
    if dist.is_initialized():
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
    return amaxes
