"""Several optimizers as one, such as Muon, AdamW, and a moving average of the weights; and what optimizers that are not
torch's share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class CombinedOptimizer(torch.optim.Optimizer):
    """Steps several optimizers one after the other. It has no state, so that each may replace its own when loading."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self.defaults = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers, not copied."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


def optimizers_in(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """The optimizers that it consists of: itself, unless it is combined."""
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]


class BaseOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is saved as it is: torch's functions would cast it to float32."""

    seed: int  # seeds the noise of stochastic rounding
    dtype: torch.dtype  # the type of the model's GEMMs

    def parameters(self) -> list[nn.Parameter]:
        """All parameters, by group."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def take_factor(self, factor: torch.Tensor) -> list[nn.Parameter]:
        """The parameters whose gradients the next `step` multiplies by `factor`, a scalar, as it reads them. By default
        none: gradients are multiplied before."""
        return []

    def state_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The state by name, initialized on first use. It is sharded like the parameter."""
        raise NotImplementedError


PAUSED = 1.0  # the decay in stages that leave a moving average as it is
