"""Optimizers by name."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from torchtitan.compat.optimizers import fused_step
from torchtitan.config.training import Optimizer
from torchtitan.optim.low_bit_adamw import AdamW4bit, AdamW8bit, AdamWFp8, LowBitAdamW
from torchtitan.registry import Registry

QUANTIZED_OPTIMIZERS = {"AdamW8bit": AdamW8bit, "AdamW4bit": AdamW4bit, "AdamWFp8": AdamWFp8}
"""Optimizers that quantize their moments."""

OPTIMIZERS: Registry[type[torch.optim.Optimizer]] = Registry(
    "optimizer", "optimizer.name", {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, **QUANTIZED_OPTIMIZERS}
)


WITHOUT_DECAY: dict[str, Callable[[nn.Module, nn.Parameter], bool]] = {
    "norms": lambda module, parameter: parameter.ndim < 2,  # and biases
    "embeddings": lambda module, parameter: isinstance(module, nn.Embedding),
}
"""Values of `optimizer.no_weight_decay`: predicates of a module and one of its own parameters."""


def decay_groups(model: nn.Module, config: Optimizer) -> list[dict[str, Any]]:
    """The model's parameters, those without weight decay (`optimizer.no_weight_decay`) in their own group, and those
    of other meshes too, which DTensor does not mix in one fused update. No group is empty."""
    meant = [WITHOUT_DECAY[name] for name in config.no_weight_decay]
    without = {
        parameter
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if any(is_meant(module, parameter) for is_meant in meant)
    }
    groups: dict[Any, dict[str, Any]] = {}
    for parameter in model.parameters():
        options = {"weight_decay": 0.0} if parameter in without else {}
        key = bool(options), getattr(parameter, "device_mesh", None)
        groups.setdefault(key, {"params": [], **options})["params"].append(parameter)
    return list(groups.values())


def build_optimizer(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], config: Optimizer, seed: int = 0
) -> torch.optim.Optimizer:
    """The optimizer for these parameters (this rank's), or for groups of them (`decay_groups`).

    If everything is float32, torch's AdamW or Adam (`implementation` chooses the for-loop, foreach or fused update);
    for smaller dtypes `LowBitAdamW`.

    Args:
        seed: for stochastic rounding.
    """
    given: list[Any] = list(parameters)
    all_parameters = [one for group in given for one in (group["params"] if isinstance(group, dict) else [group])]
    kind = OPTIMIZERS.get(config.name)
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    state_dtype = getattr(torch, config.state_dtype)
    if kind is torch.optim.AdamW and any(
        dtype != torch.float32 for dtype in (state_dtype, *(one.dtype for one in all_parameters))
    ):
        kind = LowBitAdamW
    if issubclass(kind, LowBitAdamW):
        root = config.second_moment == "sqrt_v"
        return kind(given, **options, state_dtype=state_dtype, root=root, seed=seed)
    implementation = config.implementation
    build: Callable[..., torch.optim.Optimizer] = kind
    return build(given, **options, fused=implementation == "fused", foreach=implementation == "foreach")


def bytes_of_state(config: Optimizer) -> float:
    """Minimum bytes per parameter of both moments together; 0 for a user's own optimizer."""
    if config.name in QUANTIZED_OPTIMIZERS:
        return 1 if config.name == "AdamW4bit" else 2
    of_torch: dict[str, float] = {"Adam": 8, "AdamW": 2 * getattr(torch, config.state_dtype).itemsize}
    return of_torch.get(config.name, 0)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the rate of the next update. A tensor is updated in place, as compiled optimizers such as torchao's need."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def optimizer_step(optimizer: torch.optim.Optimizer, skip: torch.Tensor | None) -> bool:
    """Runs the optimizer step unless `skip`, a scalar on the device, is above 0.

    torch's fused optimizers read it on the device (as `found_inf`, meant for gradient scaling). For the others the host
    must read it, which waits for the device.

    Returns:
        False if the host knows that the step was skipped.
    """
    if skip is None:
        optimizer.step()
    elif optimizer.defaults.get("fused"):
        fused_step(optimizer, skip)
    elif skip.item() > 0:
        return False
    else:
        optimizer.step()
    return True
