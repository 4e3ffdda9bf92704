"""What a checkpoint holds: the tensors of model and optimizer by name. Everything else is JSON beside them."""

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

# By parameter name and not by number: so that another layout, and another order, can load it.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
OPTIMIZER = "optimizer."


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights, under the names of the model's modules; DTensors where the model is sharded."""
    return dict(model.state_dict())


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state, as `optimizer.state.<parameter>.<name>`. Learning rates and the like are left out: they
    are the configuration's, and would bring old settings back."""
    full = get_optimizer_state_dict(model, optimizer, options=BY_NAME)
    tensors: dict[str, Any] = {key: value for key, value in full.items() if isinstance(value, torch.Tensor)}
    return {OPTIMIZER + key: tensor for key, tensor in tensors.items()}


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Any]) -> None:
    """Puts `optimizer_tensors`, read back, into the optimizer."""
    full = get_optimizer_state_dict(model, optimizer, options=BY_NAME)
    full.update({key.removeprefix(OPTIMIZER): value for key, value in tensors.items()})
    set_optimizer_state_dict(model, optimizer, full, options=BY_NAME)
