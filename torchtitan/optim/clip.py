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
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if grads[0].device.type == "cpu":
        # torch's CPU kernel sums in float32 one number after the other: 1e-4 off for a large sparse gradient, and
        # differently so for each layout. Rows are short enough; their norms are summed in float64.
        rows = [torch.linalg.vector_norm(grad, dim=-1) for grad in grads]
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(row_norms, dtype=torch.float64) for row_norms in rows])
        )
    else:
        norm = nn.utils.get_total_norm(grads, foreach=True)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    norm = norm.float()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm
