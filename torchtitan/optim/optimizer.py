"""Optimizers by name."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torchtitan.config.training import Optimizer
from torchtitan.optim.compact import AdamW4bit, AdamW8bit, AdamWFp8, CompactAdamW
from torchtitan.registry import Registry

IN_CODES = {"AdamW8bit": AdamW8bit, "AdamW4bit": AdamW4bit, "AdamWFp8": AdamWFp8}
"""Those that hold their moments in codes."""

OPTIMIZERS: Registry[type[torch.optim.Optimizer]] = Registry(
    "optimizer", "optimizer.name", {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, **IN_CODES}
)


def build_optimizer(parameters: Iterable[nn.Parameter], config: Optimizer, seed: int = 0) -> torch.optim.Optimizer:
    """The optimizer over these parameters, this rank's.

    torch's AdamW and Adam where everything is float32 (`implementation` chooses the for-loop, foreach or fused
    update); what is smaller goes to `CompactAdamW`.

    Args:
        seed: of stochastic rounding.
    """
    parameters = list(parameters)
    kind: Any = OPTIMIZERS.get(config.name)
    options = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    state_dtype = getattr(torch, config.state_dtype)
    if kind is torch.optim.AdamW and any(dtype != torch.float32 for dtype in (state_dtype, *_dtypes(parameters))):
        kind = CompactAdamW
    if issubclass(kind, CompactAdamW):
        root = config.second_moment == "sqrt_v"
        return kind(parameters, **options, state_dtype=state_dtype, root=root, seed=seed)
    implementation = config.implementation
    return kind(parameters, **options, fused=implementation == "fused", foreach=implementation == "foreach")


def _dtypes(parameters: list[nn.Parameter]) -> set[torch.dtype]:
    return {parameter.dtype for parameter in parameters}


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """For the next update. A rate that is a tensor stays one: compiled updates, such as torchao's, ask for it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def update(optimizer: Any, skip: torch.Tensor | None) -> bool:
    """Makes the update, unless `skip`, a scalar on the device, is above 0.

    torch's fused updates look at it on the device themselves (as they do for gradient scaling: `found_inf`); for others
    the host must, and waits for it.

    Returns:
        False where the host knows that it was left out.
    """
    if skip is None:
        optimizer.step()
    elif optimizer.defaults.get("fused"):
        optimizer.grad_scale, optimizer.found_inf = None, skip
        optimizer.step()
    elif skip.item() > 0:
        return False
    else:
        optimizer.step()
    return True
