"""The local part of tensors that are sharded over the mesh."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Placement

_inner_names: dict[type, str] = {}  # of the tensor inside a subclass


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside a subclass that customizes FSDP's all-gather; any other tensor unchanged."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor
    if type(tensor) not in _inner_names:  # once: torchao's float8 weight waits for the device in it
        (_inner_names[type(tensor)], *_), _ = tensor.__tensor_flatten__()
    inner: torch.Tensor = getattr(tensor, _inner_names[type(tensor)])
    return inner


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard as a plain tensor that shares its memory; an unsharded tensor, detached."""
    return unwrapped(tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach())


def sharded_like(
    like: torch.Tensor, local: torch.Tensor, shape: tuple[int, ...], placements: Sequence[Placement] | None = None
) -> torch.Tensor:
    """`local` as this rank's shard of a tensor of this global shape, sharded like `like`, or over its mesh with these
    placements. `local` itself if `like` is not sharded."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements if placements is None else placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


def shard_box(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement], place: Sequence[int]
) -> tuple[slice, ...]:
    """The part of a tensor that the rank at this place of the mesh holds: a slice with start and stop for each
    dimension."""
    box = [slice(0, size) for size in shape]
    strided = [dim for dim, placement in enumerate(placements) if hasattr(placement, "split_factor")]
    plain = [dim for dim, placement in enumerate(placements) if placement.is_shard() and dim not in strided]
    # A strided shard is one of what later dimensions of the mesh have left: FSDP shards after tensor parallelism.
    for mesh_dim in (*plain, *reversed(strided)):
        dim: int = placements[mesh_dim].dim  # type: ignore[attr-defined]
        start, stop = box[dim].start, box[dim].stop
        size = -(-(stop - start) // mesh_shape[mesh_dim])  # of a shard; the last ones may be smaller, or empty
        first = min(start + size * place[mesh_dim], stop)
        box[dim] = slice(first, min(first + size, stop))
    return tuple(box)
