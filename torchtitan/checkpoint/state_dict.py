"""The tensors in a checkpoint: model and optimizer, by name. Everything else is JSON beside them."""

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from torchtitan.errors import CheckpointError
from torchtitan.logging import logger
from torchtitan.optim.combined import BaseOptimizer, optimizers_in
from torchtitan.optim.weight_average import WeightAverage
from torchtitan.parallel.sharded_tensors import local_tensor, sharded_like, unwrapped
from torchtitan.protocols import MTP

# Names instead of numbers let another layout or parameter order load the state.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
OPTIMIZER = "optimizer."


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights under their module names, without copying; DTensors where the model is sharded. They are in plain
    high precision, whatever dtype the run computes or all-gathers in, so any other run can load them."""
    return {name: _plain(tensor) for name, tensor in model.state_dict().items()}


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Removes the subclass that makes FSDP gather a sharded weight in low precision. Shares memory with it."""
    if not isinstance(tensor, DTensor) or (local := unwrapped(tensor._local_tensor)) is tensor._local_tensor:
        return tensor
    return sharded_like(tensor, local, tensor.shape)


def names_not_finite(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> list[str]:
    """Names of tensors with numbers, on this rank, that are not finite in `dtype` (None: their own)."""
    local = ((name, local_tensor(tensor)) for name, tensor in tensors.items() if tensor.is_floating_point())
    return [name for name, tensor in local if not tensor.to(dtype or tensor.dtype).isfinite().all()]


def refuse_not_finite(path: Path, names: Sequence[str], remedy: str) -> None:
    """Raises a CheckpointError if there are `names` of weights that were read there and are not finite."""
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise CheckpointError(
            f"{path} is refused: it has weights with numbers that are not finite (NaN or infinity), in "
            f"{', '.join(names[:3])}{more}. {remedy}"
        )


def not_finite(name: str, dtype: torch.dtype) -> str:
    """Why a weight is not saved in `dtype`."""
    return (
        f"{name} has numbers that are not finite in {str(dtype)[6:]}: NaN, or too large (float16 ends at 65,504); use "
        "bfloat16 or float32 (checkpoint.export_dtype, --dtype), or an earlier checkpoint"
    )


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, averages: bool | None = None
) -> dict[str, torch.Tensor]:
    """The optimizer's state, as `optimizer.state.<parameter>.<name>`. Learning rates and other settings are left out:
    they come from the configuration. Quantized moments are saved as they are. `averages`: whether moving averages of
    weights are among them, which begin here if they have not; None: those that have begun."""
    singles = [
        single
        for single in optimizers_in(optimizer)
        if not isinstance(single, WeightAverage) or (bool(single.state) if averages is None else averages)
    ]
    return {key: tensor for single in singles for key, tensor in _tensors_of(model, single).items()}


def has_averages(tensors: Iterable[str]) -> bool:
    """Whether moving averages of weights are among the tensors of a checkpoint with these names."""
    return any(name.startswith(OPTIMIZER) and name.endswith(".ema") for name in tensors)


def _tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    if isinstance(optimizer, BaseOptimizer):
        own = set(optimizer.parameters())
        return {
            f"{OPTIMIZER}state.{name}.{key}": tensor
            for name, parameter in model.named_parameters()
            if parameter in own
            for key, tensor in optimizer.state_of(parameter).items()
        }
    full = get_optimizer_state_dict(model, optimizer, options=BY_NAME)
    tensors: dict[str, Any] = {key: value for key, value in full.items() if isinstance(value, torch.Tensor)}
    return {OPTIMIZER + key: tensor for key, tensor in tensors.items()}


@contextlib.contextmanager
def second_moments_as_saved(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Container[str]
) -> Iterator[None]:
    """Inside, AdamWFp8 stores second moments as the checkpoint with the tensors `saved` does. At its end, what was
    loaded meanwhile is stored as what `optimizer.second_moment` says."""
    singles: Sequence[Any] = [single for single in optimizers_in(optimizer) if hasattr(single, "second_moments")]
    configured = {single: single.stored for single in singles if single.quantization == "fp8"}
    for single, own in configured.items():
        for stored in (own, *single.second_moments, own):
            single.convert_second_moments(stored)
            if all(name in saved for name in _names_of_moments(model, single)):
                break
        if single.stored != own:
            logger.info(f"the checkpoint has second moments as {single.stored}: storing them as {own}")
    yield
    for single, own in configured.items():
        single.convert_second_moments(own)


def _names_of_moments(model: nn.Module, optimizer: Any) -> list[str]:
    own = set(optimizer.parameters())
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter in own]
    return [f"{OPTIMIZER}state.{name}.{key}" for name, it in parameters for key in optimizer.names_of_moments(it)]


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Any]) -> None:
    """Loads `optimizer_tensors`, read back, into the optimizer."""
    for single in optimizers_in(optimizer):
        if isinstance(single, BaseOptimizer):
            continue  # the tensors are the optimizer's own, and were loaded in place
        full = get_optimizer_state_dict(model, single, options=BY_NAME)
        full.update({key: tensors[OPTIMIZER + key] for key in full if OPTIMIZER + key in tensors})
        set_optimizer_state_dict(model, single, full, options=BY_NAME)


def without_mtp(names: Iterable[str], folder: Path) -> list[str]:
    """The names of weights but for layers of multi-token prediction, if there are any; logs that these are left out."""
    names = list(names)
    others = [name for name in names if not name.startswith(MTP)]
    if len(others) < len(names):
        logger.info(f"{folder}: its layers of multi-token prediction are left out; only training uses them")
    return others
