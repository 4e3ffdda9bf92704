"""Expert parallelism of a decoder: spreads the experts of its mixtures over ranks."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from torchtitan.models.moe import MoE, mixtures
from torchtitan.parallel.expert import ExpertDispatch
from torchtitan.parallel.tensor import shard_parameters


def spread_experts(
    blocks: Sequence[nn.Module], expert_mesh: DeviceMesh, tensor_parallel: int
) -> list[tuple[nn.Module, nn.Module]]:
    """Leaves this rank's experts in the blocks; returns these blocks, and their experts."""
    spread: list[tuple[nn.Module, nn.Module]] = []
    mesh = expert_mesh["ep"]
    for block in blocks:
        if isinstance(mixture := getattr(block, "moe", None), MoE):
            spread.append((block, mixture.experts))
            # FSDP averages over its ranks; experts have tp / ep times as many of them as other weights.
            mixture.dispatch = ExpertDispatch(mesh, gradient_scale=tensor_parallel / mesh.size())
            for layer in mixture.experts.children() if mesh.size() > 1 else ():
                shard_parameters(layer, {"weight": Shard(0), "bias": Shard(0)}, mesh)
    return spread


def dispatches(model: nn.Module) -> list[ExpertDispatch]:
    """The dispatches of the mixtures on this rank, if their experts are spread."""
    all_dispatches = [mixture.dispatch for mixture in mixtures(model).values()]
    return [dispatch for dispatch in all_dispatches if isinstance(dispatch, ExpertDispatch)]


def set_all_to_all_dtype(model: nn.Module, name: str) -> None:
    """Sets the dtype in which rows are sent to the ranks that have their experts; "": as they are."""
    for dispatch in dispatches(model):
        dispatch.dtype = {"": None, "int8": torch.int8, "float8": torch.float8_e4m3fn}[name]
