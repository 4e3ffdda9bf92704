"""Optimizers by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from torchtitan.compat.optimizers import fused_step
from torchtitan.config.training import Optimizer
from torchtitan.models.parametrization import Scaling
from torchtitan.optim.combined import CombinedOptimizer, parts_of
from torchtitan.optim.ema import WeightAverage
from torchtitan.optim.low_bit import LowBitOptimizer
from torchtitan.optim.low_bit_adamw import AdamW4bit, AdamW8bit, AdamWFp8, LowBitAdamW
from torchtitan.optim.muon import Muon, Muon8bit
from torchtitan.optim.parameters import NamedParameter, named_parameters, parameter_groups
from torchtitan.registry import Registry


@dataclass(frozen=True)
class OptimizerEntry:
    """A registered optimizer, and what is true of it.

    Attributes:
        build: from this rank's parameters and the content of `section` to the optimizer. The learning rates of its
            parameter groups are peaks, which the schedule scales.
        section: name of the configuration section passed to `build`.
        state_bytes: of the smallest states of a parameter, in bytes a number, if these are float32; None: unknown.
        state_dtypes: values of `optimizer.state_dtype` that it takes.
        bfloat16_weights: whether it rounds weights in bfloat16 stochastically.
        in_torch: whether torch updates float32 weights and states, so that `optimizer.implementation` applies.
        whole_matrices: whether it needs complete matrices, which the ranks divide among themselves.
        mup: whether muP knows learning rates for it.
    """

    build: Callable[[Sequence[NamedParameter], Any], torch.optim.Optimizer]
    section: str = "optimizer"
    state_bytes: float | None = None
    state_dtypes: tuple[str, ...] = ("float32",)
    bfloat16_weights: bool = False
    in_torch: bool = False
    whole_matrices: bool = False
    mup: bool = False


def build_adam(parameters: Sequence[NamedParameter], config: Optimizer) -> torch.optim.Optimizer:
    """Adam or AdamW. If everything is float32, torch's (`implementation` chooses the for-loop, foreach or fused
    update); for smaller dtypes `LowBitAdamW`."""
    groups = parameter_groups(parameters)
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    state_dtype = getattr(torch, config.state_dtype)
    if config.name == "Adam":
        kind: type[torch.optim.Adam] = torch.optim.Adam
    elif all(dtype == torch.float32 for dtype in (state_dtype, *(one.parameter.dtype for one in parameters))):
        kind = torch.optim.AdamW
    else:
        return _build_low_bit(LowBitAdamW, parameters, config)
    implementation = config.implementation
    return kind(groups, **options, fused=implementation == "fused", foreach=implementation == "foreach")


def _build_low_bit(
    kind: type[LowBitAdamW], parameters: Sequence[NamedParameter], config: Optimizer
) -> torch.optim.Optimizer:
    return kind(
        parameter_groups(parameters),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        state_dtype=getattr(torch, config.state_dtype),
        root=config.second_moment == "sqrt_v",
    )


def _build_muon(kind: type[Muon], parameters: Sequence[NamedParameter], config: Optimizer) -> torch.optim.Optimizer:
    """Muon for matrices in blocks, AdamW for the rest, or as `[[optimizer.group]]` says."""
    matrices = [one for one in parameters if _updated_by_muon(one, config)]
    others = [one for one in parameters if not _updated_by_muon(one, config)]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        muon = kind(
            [
                {**group, "beta2": group.pop("betas")[1]}
                for group in parameter_groups(matrices, "lr", "weight_decay", "betas")
            ],
            lr=config.lr,
            momentum=config.muon_momentum,
            nesterov=config.muon_nesterov,
            coefficients=tuple(config.muon_coefficients),  # type: ignore[arg-type]  # three
            steps=config.muon_steps,
            polar_express=config.muon_polar_express,
            row_normalization=config.muon_row_normalization,
            state_dtype=getattr(torch, config.state_dtype),
        )
        optimizers.append(muon)
    if others:
        name = "AdamW8bit" if kind.quantization else "AdamW"
        optimizers.append(OPTIMIZERS.get(name).build(others, replace(config, name=name)))
    return CombinedOptimizer(optimizers)


BOTH = ("float32", "bfloat16")
OPTIMIZERS: Registry[OptimizerEntry] = Registry(
    "optimizer",
    "optimizer.name",
    {
        "Adam": OptimizerEntry(build_adam, state_bytes=8, in_torch=True),
        "AdamW": OptimizerEntry(
            build_adam, state_bytes=8, state_dtypes=BOTH, bfloat16_weights=True, in_torch=True, mup=True
        ),
        "AdamW8bit": OptimizerEntry(partial(_build_low_bit, AdamW8bit), state_bytes=2, bfloat16_weights=True, mup=True),
        "AdamWFp8": OptimizerEntry(partial(_build_low_bit, AdamWFp8), state_bytes=2, bfloat16_weights=True, mup=True),
        "AdamW4bit": OptimizerEntry(partial(_build_low_bit, AdamW4bit), state_bytes=1, bfloat16_weights=True, mup=True),
        # Matrices in blocks; AdamW, with moments of the same kind, updates the rest.
        "Muon": OptimizerEntry(
            partial(_build_muon, Muon),
            state_bytes=4,
            state_dtypes=BOTH,
            bfloat16_weights=True,
            in_torch=True,
            whole_matrices=True,
            mup=True,
        ),
        "Muon8bit": OptimizerEntry(
            partial(_build_muon, Muon8bit), state_bytes=1, bfloat16_weights=True, whole_matrices=True, mup=True
        ),
    },
)


def optimizers_with(fact: Callable[[OptimizerEntry], object]) -> tuple[str, ...]:
    """Names of the optimizers of which it is true."""
    return tuple(name for name in OPTIMIZERS.names() if fact(OPTIMIZERS.get(name)))


def _updated_by_muon(one: NamedParameter, config: Optimizer) -> bool:
    usual = "Muon" if OPTIMIZERS.get(config.name).whole_matrices and one.role == "matrix" else "AdamW"
    return (one.algorithm or usual) == "Muon"


def _scaled(one: NamedParameter, config: Optimizer, scaling: Scaling) -> NamedParameter:
    """The settings of a parameter under muP. lr x weight_decay, the fraction that a step takes off a weight, stays."""
    factor = scaling.muon if _updated_by_muon(one, config) else scaling.adamw
    return replace(one, lr=one.lr * factor, weight_decay=one.weight_decay / factor, eps=one.eps * scaling.eps)


def build_optimizer(
    model: nn.Module,
    config: Optimizer,
    seed: int = 0,
    section_of: Callable[[str], Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    scalings: Mapping[str, Scaling] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer for this rank's parameters of the model. Muon's is collective.

    Args:
        seed: for stochastic rounding.
        section_of: from a section's name to its content; default: `config` for every name.
        dtype: in which Muon orthogonalizes.
        scalings: factors of each parameter, by name (`models.parametrization.mup`); None: no factors.
    """
    entry = OPTIMIZERS.get(config.name)
    section = section_of(entry.section) if section_of else config
    parameters = named_parameters(model, config)
    if scalings is not None:
        parameters = [_scaled(one, config, scalings[one.name]) for one in parameters]
    optimizer = entry.build(parameters, section)
    if config.ema_decay is not None:
        average = WeightAverage(model.parameters(), config.ema_decay, config.lr)
        optimizer = CombinedOptimizer([*parts_of(optimizer), average])
    for part in parts_of(optimizer):
        if isinstance(part, LowBitOptimizer):
            part.seed = seed
        if isinstance(part, Muon):
            part.dtype = dtype
    for group in optimizer.param_groups:
        group["lr_scale"] = float(group["lr"]) / config.lr
    return optimizer


def bytes_of_state(config: Optimizer) -> float:
    """Minimum bytes per parameter of all states together; those of a user's own optimizer are not counted."""
    average = 0 if config.ema_decay is None else 4
    size: int = getattr(torch, config.state_dtype).itemsize
    return average + (OPTIMIZERS.get(config.name).state_bytes or 0) * size / 4


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the rate of the next update: `lr`, or, in groups with a peak of their own, the same fraction of that. A
    tensor is updated in place, as compiled optimizers such as torchao's need."""
    for group in optimizer.param_groups:
        rate = lr * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def optimizer_step(optimizer: torch.optim.Optimizer, skip: torch.Tensor | None) -> bool:
    """Runs the optimizer step unless `skip`, a scalar on the device, is above 0.

    Fused optimizers, torch's and on GPUs our own, read it on the device (as `found_inf`, meant for gradient scaling).
    For the others the host must read it, which waits for the device.

    Returns:
        False if the host knows that the step was skipped.
    """
    if isinstance(optimizer, CombinedOptimizer):
        stepped = [optimizer_step(part, skip) for part in optimizer.parts]
        return all(stepped)
    if skip is None:
        optimizer.step()
    elif optimizer.defaults.get("fused"):
        # With CPU offload the update runs on the host, and this waits for the flag.
        device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
        fused_step(optimizer, skip.to(device))
    elif skip.item() > 0:
        return False
    else:
        optimizer.step()
    return True
