"""An exponential moving average of the weights."""

from collections.abc import Iterable

import torch
from torch import nn

from torchtitan.optim.combined import PAUSED, BaseOptimizer, optimizers_in
from torchtitan.parallel.sharded_tensors import local_tensor, sharded_like


class WeightAverage(BaseOptimizer):
    """Averages the weights after each update: average <- decay * average + (1 - decay) * weight, in float32. It
    starts as the first updated weights; a paused one neither starts nor changes. An optimizer, so that it is sharded,
    saved (as `ema`), loaded and planned."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float, lr: float) -> None:
        # "fused": a skipped update is left out on the device.
        super().__init__(parameters, {"lr": lr, "fused": True})
        self.decay = decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all averages, unless the attribute `found_inf`, a scalar on the device, is above 0."""
        skip = getattr(self, "found_inf", None)
        for parameter in self.parameters() if self.decay < PAUSED else ():
            weight = local_tensor(parameter).float()
            share = torch.full((), 1 - self.decay, device=weight.device)
            local_tensor(self.state_of(parameter)["ema"]).lerp_(weight, share if skip is None else share * (skip <= 0))

    def state_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The average, initialized to the weights. Counting steps is left to the optimizer that updates these."""
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            weight = local_tensor(parameter).to(torch.float32, copy=True)
            state["ema"] = sharded_like(parameter, weight, tuple(parameter.shape))
        return state


@torch.no_grad()
def begin_averages(optimizer: torch.optim.Optimizer, paused: bool = False) -> bool:
    """Lets moving averages that have no value yet begin as the weights; with `paused`, also those that are. Returns
    whether one began."""
    averages = [single for single in optimizers_in(optimizer) if isinstance(single, WeightAverage) and not single.state]
    begun = [average for average in averages if paused or average.decay < PAUSED]
    for average in begun:
        for parameter in average.parameters():
            average.state_of(parameter)
    return bool(begun)
