"""Optimizer updates.

- attributes `grad_scale` and `found_inf` of an optimizer: a fused update that the device itself skips, as `GradScaler`
  has it
- `_dynamo.config.recompile_limit`: one compiled update for each shape of a parameter
"""

import contextlib
from typing import Any

import torch


def fused_step(optimizer: Any, skip: torch.Tensor) -> None:
    """The update of a fused optimizer, which leaves it out on the device where the scalar `skip` is above 0."""
    optimizer.grad_scale, optimizer.found_inf = None, skip
    optimizer.step()


def recompile_limit(count: int) -> contextlib.AbstractContextManager[None]:
    """Within it a function may be compiled so many times."""
    return torch._dynamo.config.patch(recompile_limit=count)
