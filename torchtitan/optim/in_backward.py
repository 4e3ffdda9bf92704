"""Optimizer updates during the backward pass: each gradient is used and freed as soon as it is complete."""

from collections.abc import Iterable

import torch
from torch import nn

from torchtitan.optim.clip import norm_over_ranks, squared_norm
from torchtitan.optim.combined import optimizers_in
from torchtitan.optim.weight_average import WeightAverage


class StepInBackward:
    """Updates each parameter once FSDP has reduced its gradient, instead of all after the backward pass.

    So only one block's gradients exist at a time. Features that need the full gradient before any update do not work:
    clipping, skipping the optimizer step, gradient accumulation (`config_checks.check`). The parameters are sharded, so
    that FSDP calls their post-accumulate-grad hooks once per backward pass.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        singles = optimizers_in(optimizer)
        self._averages = [single for single in singles if isinstance(single, WeightAverage)]
        # A number finds the group: loading a checkpoint replaces the groups.
        self._group_of = {
            parameter: (single, number)
            for single in singles
            if single not in self._averages
            for number, group in enumerate(single.param_groups)
            for parameter in group["params"]
        }
        self._squares: list[torch.Tensor] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._squares.append(squared_norm([parameter.grad]))
        optimizer, number = self._group_of[parameter]
        groups = optimizer.param_groups
        group = groups[number]
        all_parameters, group["params"] = group["params"], [parameter]
        optimizer.param_groups = [group]
        try:
            optimizer.step()
        finally:
            group["params"], optimizer.param_groups = all_parameters, groups
        parameter.grad = None

    def update_averages(self) -> None:
        """Updates the moving averages of all weights, also of those that had no gradient. It needs no gradients, so it
        can wait for the end of the backward pass."""
        for average in self._averages:
            average.step()

    def grad_norm(self) -> torch.Tensor:
        """Norm over the full model in the last backward pass, a float32 scalar. Collective."""
        squares, self._squares = self._squares, []
        return norm_over_ranks(torch.stack(squares).sum())
