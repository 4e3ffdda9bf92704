"""This rank's shard of tensors that are sharded over the mesh, and where it lies in them."""

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Placement

_inner_names: dict[type, str] = {}  # name of the tensor inside a subclass


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


Box = tuple[slice, ...]
"""A part of a tensor: a slice with start and stop for each dimension."""

MeshDim = tuple[int, int, Placement]
"""Of one dimension of a mesh: its size, a rank's place in it, and how a tensor is placed over it."""


def mesh_dims(tensor: torch.Tensor) -> list[MeshDim]:
    """The dimensions of the tensor's mesh, with this rank's place; none if the tensor is not sharded."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    return list(zip(mesh.shape, mesh.get_coordinate() or (), tensor.placements, strict=True))


def replicas_of(tensor: torch.Tensor) -> int:
    """How many ranks hold the same shard."""
    return math.prod(size for size, _, placement in mesh_dims(tensor) if placement.is_replicate())


def local_box(tensor: torch.Tensor) -> Box:
    """Where this rank's shard lies in a tensor."""
    return shard_box(tensor.shape, mesh_dims(tensor))


def shard_box(shape: Sequence[int], dims: Sequence[MeshDim]) -> Box:
    """`local_box` of the rank at these places, for a tensor of this shape."""
    box = [slice(0, size) for size in shape]
    strided = [dim for dim in dims if hasattr(dim[2], "split_factor")]
    plain = [dim for dim in dims if dim[2].is_shard() and not hasattr(dim[2], "split_factor")]
    # A strided shard is one of what later dimensions of the mesh have left: FSDP shards after tensor parallelism.
    for mesh_size, place, placement in (*plain, *reversed(strided)):
        dim: int = placement.dim  # type: ignore[attr-defined]
        start, stop = box[dim].start, box[dim].stop
        size = -(-(stop - start) // mesh_size)  # a shard's size; the last ones may be smaller, or empty
        first = min(start + size * place, stop)
        box[dim] = slice(first, min(first + size, stop))
    return tuple(box)
