"""Initialization that gives the same weights under every layout."""

import hashlib
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def init_weights(model: nn.Module, std_of: Callable[[str], float | None], seed: int) -> None:
    """Draws every parameter from a normal distribution cut at three standard deviations.

    Each parameter has a generator of its own, seeded by `seed` and the parameter's name, and is drawn whole before a
    rank keeps its share: so a weight does not depend on the mesh, on the pipeline stage, or on the order of
    parameters. (Drawing into sharded parameters directly gives every rank the same numbers on CPU.) It costs the
    memory of the largest parameter, once.

    Args:
        model: materialized, its parameters plain tensors or DTensors.
        std_of: standard deviation by parameter name; None fills with 1.
        seed: of the run.
    """
    for name, parameter in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        std = std_of(name)
        if std is None:
            parameter.fill_(1.0)
            continue
        generator = torch.Generator(device=parameter.device).manual_seed(_seed(seed, name))
        full = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        nn.init.trunc_normal_(full, std=std, a=-3 * std, b=3 * std, generator=generator)
        if isinstance(parameter, DTensor):
            parameter.to_local().copy_(local_shard(full, parameter))
        else:
            parameter.copy_(full)


def local_shard(full: torch.Tensor, like: DTensor) -> torch.Tensor:
    """What this rank holds of a tensor that is divided as `like` is."""
    return full[local_box(like)]


def local_box(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Which part of a tensor this rank holds: a slice with start and stop for each dimension."""
    box = [slice(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return tuple(box)
    mesh = tensor.device_mesh
    # The innermost dimension divided first: tensor parallelism before FSDP, which divides what it finds.
    for mesh_dim, placement in reversed(list(enumerate(tensor.placements))):
        if placement.is_shard() or hasattr(placement, "split_factor"):
            dim = placement.dim  # type: ignore[attr-defined]
            start, stop = box[dim].start, box[dim].stop
            size = -(-(stop - start) // mesh.size(mesh_dim))  # of a part; the last ones may be smaller, or empty
            first = min(start + size * mesh.get_local_rank(mesh_dim), stop)
            box[dim] = slice(first, min(first + size, stop))
    return tuple(box)


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest(), "big")
