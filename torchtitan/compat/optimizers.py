"""Optimizer updates.

- attributes `grad_scale` and `found_inf` of an optimizer: make a fused update skip itself on the device, as under
  `GradScaler`
"""

import torch


def fused_step(optimizer: torch.optim.Optimizer, skip: torch.Tensor) -> None:
    """A fused optimizer's step, which the device skips if the scalar `skip` is above 0."""
    found_inf = (skip > 0).float()  # torch's kernels skip at exactly 1, and take it off the count of steps
    optimizer.grad_scale, optimizer.found_inf = None, found_inf  # type: ignore[attr-defined]
    optimizer.step()
