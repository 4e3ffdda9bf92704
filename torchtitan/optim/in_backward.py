"""Optimizer updates during the backward pass: each gradient is used and freed as soon as it is complete."""

from collections.abc import Iterable

import torch
from torch import nn

from torchtitan.optim.clip import norm_over_ranks, squared_norm


class StepInBackward:
    """Updates each parameter once FSDP has reduced its gradient, instead of all after the backward pass.

    So only one block's gradients exist at a time. Features that need the full gradient before any update do not work:
    clipping, skipping the optimizer step, gradient accumulation (`config_checks.check`). The parameters are sharded, so
    that FSDP calls their post-accumulate-grad hooks once per backward pass.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        # A number finds the group: loading a checkpoint replaces the groups.
        self._group_of = {
            parameter: number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }
        self._squares: list[torch.Tensor] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._squares.append(squared_norm([parameter.grad]))
        groups = self.optimizer.param_groups
        group = groups[self._group_of[parameter]]
        all_parameters, group["params"] = group["params"], [parameter]
        self.optimizer.param_groups = [group]
        try:
            self.optimizer.step()
        finally:
            group["params"], self.optimizer.param_groups = all_parameters, groups
        parameter.grad = None

    def grad_norm(self) -> torch.Tensor:
        """Norm over the full model in the last backward pass, a float32 scalar. Collective."""
        squares, self._squares = self._squares, []
        return norm_over_ranks(torch.stack(squares).sum())
