"""The local part of tensors that are sharded over the mesh."""

import torch
from torch.distributed.tensor import DTensor


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside a subclass that customizes FSDP's all-gather; any other tensor unchanged."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor
    (name, *_), _ = tensor.__tensor_flatten__()
    inner: torch.Tensor = getattr(tensor, name)
    return inner


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard as a plain tensor that shares its memory; an unsharded tensor, detached."""
    return unwrapped(tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach())


def sharded_like(like: torch.Tensor, local: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`local` as this rank's shard of a tensor of this global shape, sharded like `like`. `local` itself if `like` is
    not sharded."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
