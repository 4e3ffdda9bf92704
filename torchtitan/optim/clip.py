"""Gradient clipping by the norm over all parameters and ranks."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scales gradients in place so that their total 2-norm is at most `max_norm`.

    Returns:
        The norm before clipping, a float32 scalar on the device, the same on every rank.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters], foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm
