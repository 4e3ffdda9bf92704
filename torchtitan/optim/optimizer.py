"""Optimizers by name."""

from collections.abc import Iterable

import torch
from torch import nn

from torchtitan.config.training import Optimizer
from torchtitan.registry import Registry

OPTIMIZERS: Registry[type[torch.optim.Optimizer]] = Registry(
    "optimizer", "optimizer.name", {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
)


def build_optimizer(parameters: Iterable[nn.Parameter], config: Optimizer) -> torch.optim.Optimizer:
    """The optimizer over float32 parameters; `implementation` chooses torch's for-loop, foreach or fused update."""
    return OPTIMIZERS.get(config.name)(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),  # type: ignore[call-arg]
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
