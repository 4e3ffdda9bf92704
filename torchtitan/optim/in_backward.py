"""Updates during the backward pass: a gradient is used as soon as it is whole, and freed."""

from collections.abc import Iterable

import torch
from torch import nn

from torchtitan.optim.clip import norm_over_ranks, squared_norm


class StepInBackward:
    """Updates each parameter when FSDP has summed its gradient over the ranks, instead of all after the backward pass.

    So no more gradients are held at a time than a block has. What must know the whole gradient before anything is
    updated cannot be had: clipping, leaving an update out, several backward passes in a step (`config_checks.check`).

    Args:
        parameters: of the optimizer; sharded, so that FSDP calls what waits for their gradients, once a backward pass.
        optimizer: to call for one parameter at a time.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        self._squares: list[torch.Tensor] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: torch.Tensor) -> None:
        self._squares.append(squared_norm([parameter]))
        groups, group = self.optimizer.param_groups, self._group_of[parameter]
        all_parameters, group["params"] = group["params"], [parameter]
        self.optimizer.param_groups = [group]
        try:
            self.optimizer.step()
        finally:
            group["params"], self.optimizer.param_groups = all_parameters, groups
        parameter.grad = None

    def grad_norm(self) -> torch.Tensor:
        """Of the whole model in the backward pass that is over, a float32 scalar. Collective."""
        squares, self._squares = self._squares, []
        return norm_over_ranks(torch.stack(squares).sum())
