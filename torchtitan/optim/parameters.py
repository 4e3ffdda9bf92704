"""A model's parameters as optimizers see them: each with its name, its role, and its own learning rate and decay."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from torchtitan.config.training import Optimizer, OptimizerGroup
from torchtitan.converters.filter import matches, suffixes
from torchtitan.errors import ConfigError, nearest
from torchtitan.protocols import IN_BLOCKS

Role = Literal["matrix", "embedding", "output", "vector"]
"""matrix: in a block, with any leading dimensions (a stack of experts); embedding; output: any other matrix outside the
blocks; vector: norms, sinks and biases, also a stack of experts' biases."""

WITHOUT_DECAY: dict[str, Role] = {"norms": "vector", "embeddings": "embedding"}
"""Values of `optimizer.no_weight_decay`."""


@dataclass(frozen=True)
class NamedParameter:
    """A parameter of this rank and its settings, from `[optimizer]`, overridden by `[[optimizer.group]]`.

    Attributes:
        name: in the full model, such as "layers.0.attention.wq.weight".
        lr: peak learning rate.
        eps: of AdamW.
        algorithm: "Muon" or "AdamW" if `[[optimizer.group]]` says so, for optimizers that have several.
    """

    name: str
    parameter: nn.Parameter
    role: Role
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    algorithm: str | None = None


def named_parameters(model: nn.Module, config: Optimizer) -> list[NamedParameter]:
    """Each parameter of a model once, in its order. The model may be sharded, or a stage of a pipeline."""
    return [_with_settings(name, parameter, model, config) for name, parameter in model.named_parameters()]


def _with_settings(name: str, parameter: nn.Parameter, model: nn.Module, config: Optimizer) -> NamedParameter:
    role = _role_of(name, parameter, model)
    settings: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": 0.0 if role in map(WITHOUT_DECAY.get, config.no_weight_decay) else config.weight_decay,
        "beta1": config.beta1,
        "beta2": config.beta2,
        "algorithm": None,
    }
    for group in groups_of(name, config):
        settings |= {key: value for key in settings if (value := getattr(group, key)) is not None}
    betas = settings.pop("beta1"), settings.pop("beta2")
    return NamedParameter(name, parameter, role, betas=betas, eps=config.eps, **settings)


def _role_of(name: str, parameter: nn.Parameter, model: nn.Module) -> Role:
    if parameter.ndim < 2 or name.endswith(".bias"):
        return "vector"
    if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding):
        return "embedding"
    return "matrix" if name.startswith(IN_BLOCKS) else "output"


def groups_of(name: str, config: Optimizer) -> list[OptimizerGroup]:
    """The entries of `[[optimizer.group]]` that name this parameter, in order: keys of later ones win."""
    return [group for group in config.group if any(matches(glob, name) for glob in group.parameters)]


def check_groups(model: nn.Module, config: Optimizer) -> None:
    """Checks `[[optimizer.group]]` against the full model. Raises a ConfigError with a sentence per glob that matches
    nothing, and per group that assigns vectors to Muon."""
    names = [name for name, _ in model.named_parameters()]
    known = [name for name in suffixes([*names, *(name for name, _ in model.named_modules())]) if not name.isdecimal()]
    problems = [
        f"[[optimizer.group]] {number}: {glob!r} matches no parameter of this model{nearest(glob, known)}; "
        "--model.print_after_conversion shows its modules."
        for number, group in enumerate(config.group, 1)
        for glob in group.parameters
        if not any(matches(glob, name) for name in names)
    ]
    for number, group in enumerate(config.group, 1):
        vectors = [
            named.name
            for named in named_parameters(model, config)
            if named.role == "vector" and named.algorithm == "Muon" and groups_of(named.name, config)[-1] is group
        ]
        if vectors:
            problems.append(
                f"[[optimizer.group]] {number}: Muon updates matrices, but {vectors[0]} is a vector "
                f"({len(vectors)} in this group); name only matrices, such as layers.*.attention.w*, or use AdamW."
            )
    if problems:
        raise ConfigError(*problems)


def parameter_groups(parameters: Iterable[NamedParameter], *settings: str) -> list[dict[str, Any]]:
    """Groups of parameters with equal `settings`, such as "lr"; by default "lr", "weight_decay", "betas" and "eps"."""
    keys = settings or ("lr", "weight_decay", "betas", "eps")
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for named in parameters:
        values = tuple(getattr(named, key) for key in keys)
        mesh = getattr(named.parameter, "device_mesh", None)  # a fused update of DTensors of several meshes is an error
        group = groups.setdefault((mesh, *values), {"params": [], **dict(zip(keys, values, strict=True))})
        group["params"].append(named.parameter)
    return list(groups.values())
