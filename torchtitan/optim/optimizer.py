"""Optimizers by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchtitan.config.training import Optimizer
from torchtitan.optim.combined import BaseOptimizer, CombinedOptimizer, optimizers_in
from torchtitan.optim.parameters import NamedParameter, named_parameters, parameter_groups
from torchtitan.registry import Registry, deferred

if TYPE_CHECKING:
    from torchtitan.models.parametrization import ParameterScaling

_low_bit_adamw: Callable[..., torch.optim.Optimizer] = deferred("torchtitan.optim.low_bit_adamw:LowBitAdamW")
_muon: Callable[..., torch.optim.Optimizer] = deferred("torchtitan.optim.muon:Muon")
_weight_average: Callable[..., torch.optim.Optimizer] = deferred("torchtitan.optim.weight_average:WeightAverage")


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


def build_adam(
    parameters: Sequence[NamedParameter], config: Optimizer, quantization: str = ""
) -> torch.optim.Optimizer:
    """Adam or AdamW: torch's, by `implementation`, if everything is float32; for smaller dtypes `LowBitAdamW`."""
    state_dtype: torch.dtype = getattr(torch, config.state_dtype)
    groups = parameter_groups(parameters)
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    implementation: Any = {key: config.implementation == key for key in ("fused", "foreach")}
    if config.name == "Adam":
        return torch.optim.Adam(groups, **settings, **implementation)
    if not quantization and {state_dtype, *(named.parameter.dtype for named in parameters)} == {torch.float32}:
        return torch.optim.AdamW(groups, **settings, **implementation)
    second_moment = config.second_moment if quantization == "fp8" else "v"
    options: Any = {"state_dtype": state_dtype, "quantization": quantization, "second_moment": second_moment}
    return _low_bit_adamw(groups, **settings, **options)


def _build_muon(
    parameters: Sequence[NamedParameter], config: Optimizer, quantization: str = ""
) -> torch.optim.Optimizer:
    """Muon for matrices in blocks, AdamW for the rest, or as `[[optimizer.group]]` says."""
    matrices = [named for named in parameters if _updated_by_muon(named, config)]
    others = [named for named in parameters if not _updated_by_muon(named, config)]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        groups = parameter_groups(matrices, "lr", "weight_decay", "betas")
        muon = _muon(
            [{**group, "beta2": group.pop("betas")[1]} for group in groups],
            lr=config.lr,
            state_dtype=getattr(torch, config.state_dtype),
            quantization=quantization,
            **{key[len("muon_") :]: value for key, value in vars(config).items() if key.startswith("muon_")},
        )
        optimizers.append(muon)
    if others:
        optimizers.append(build_adam(others, config, quantization))
    return CombinedOptimizer(optimizers)


_unquantized = partial(
    OptimizerEntry, state_dtypes=("float32", "bfloat16"), bfloat16_weights=True, in_torch=True, mup=True
)
_quantized = partial(OptimizerEntry, bfloat16_weights=True, mup=True)

OPTIMIZERS: Registry[OptimizerEntry] = Registry(
    "optimizer",
    "optimizer.name",
    {
        "Adam": OptimizerEntry(build_adam, state_bytes=8, in_torch=True),
        "AdamW": _unquantized(build_adam, state_bytes=8),
        "AdamW8bit": _quantized(partial(build_adam, quantization="8bit"), state_bytes=2),
        "AdamWFp8": _quantized(partial(build_adam, quantization="fp8"), state_bytes=2),
        "AdamW4bit": _quantized(partial(build_adam, quantization="4bit"), state_bytes=1),
        # Matrices in blocks; AdamW, with moments of the same format, updates the rest.
        "Muon": _unquantized(_build_muon, state_bytes=4, whole_matrices=True),
        "Muon8bit": _quantized(partial(_build_muon, quantization="8bit"), state_bytes=1, whole_matrices=True),
    },
)


def optimizers_with(fact: Callable[[OptimizerEntry], object]) -> tuple[str, ...]:
    """Names of the optimizers for which the fact is true."""
    return tuple(name for name in OPTIMIZERS.names() if fact(OPTIMIZERS.get(name)))


def _updated_by_muon(named: NamedParameter, config: Optimizer) -> bool:
    usual = "Muon" if OPTIMIZERS.get(config.name).whole_matrices and named.role == "matrix" else "AdamW"
    return (named.algorithm or usual) == "Muon"


def _scaled(named: NamedParameter, config: Optimizer, scaling: "ParameterScaling") -> NamedParameter:
    """The settings of a parameter under muP. lr x weight_decay, the fraction that a step takes off a weight, stays."""
    factor = scaling.muon if _updated_by_muon(named, config) else scaling.adamw
    return replace(named, lr=named.lr * factor, weight_decay=named.weight_decay / factor, eps=named.eps * scaling.eps)


def build_optimizer(
    model: nn.Module,
    config: Optimizer,
    seed: int = 0,
    section_of: Callable[[str], Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    scalings: "Mapping[str, ParameterScaling] | None" = None,
) -> torch.optim.Optimizer:
    """The optimizer for this rank's parameters of the model. `section_of`: from a section's name to its content, or
    `config`. Muon orthogonalizes in `dtype`, and is collective. `scalings`: of each parameter, by name, for muP."""
    entry = OPTIMIZERS.get(config.name)
    section = section_of(entry.section) if section_of else config
    parameters = named_parameters(model, config)
    if scalings is not None:
        parameters = [_scaled(named, config, scalings[named.name]) for named in parameters]
    optimizer = entry.build(parameters, section)
    if config.ema_decay is not None:
        average = _weight_average(model.parameters(), config.ema_decay, config.lr)
        optimizer = CombinedOptimizer([*optimizers_in(optimizer), average])
    for each in optimizers_in(optimizer):
        if isinstance(each, BaseOptimizer):
            each.seed, each.dtype = seed, dtype
    for group in optimizer.param_groups:
        group["lr_scale"] = float(group["lr"]) / config.lr
    return optimizer


def bytes_of_state(config: Optimizer) -> float:
    """Minimum bytes per parameter of all states together; a user's own optimizer counts as 0."""
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
