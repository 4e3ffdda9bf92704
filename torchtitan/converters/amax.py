"""Largest magnitudes (amax) of tensors that are spread over ranks."""

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def stage_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks with the same layers as this one, sharded or not: their batches, sequence shards and GEMM shards belong
    to the same tensors. None for all ranks. Collective.

    Args:
        mesh: (pp, dp_replicate, fsdp, tp).
    """
    if mesh.size(0) == 1:
        return None
    group: dist.ProcessGroup | None
    group, _ = dist.new_subgroups_by_enumeration(mesh.mesh.flatten(1).tolist())
    return group


@torch.no_grad()
def local_amaxes(tensors: list[torch.Tensor]) -> torch.Tensor:
    """(number of tensors,): amax of each local tensor; NaN if it contains one."""
    if tensors[0].device.type == "cpu":  # torch's norm is slow there
        return torch.stack([torch.stack(torch.aminmax(tensor)) for tensor in tensors]).abs().amax(1)
    return torch.stack(torch._foreach_norm(tensors, math.inf))


def all_reduce_max(amaxes: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Maximum of each amax over the ranks, in one all-reduce. Nonfinite values become inf, since NaN has no order."""
    amaxes = amaxes.nan_to_num(nan=torch.inf, posinf=torch.inf)
    if dist.is_initialized():
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
    return amaxes
