"""Several optimizers as one, such as Muon, AdamW, and an exponential moving average of the weights."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from torchtitan.optim.low_bit import LowBitOptimizer
from torchtitan.parallel.sharded_tensors import local_tensor, sharded_like


class CombinedOptimizer(torch.optim.Optimizer):
    """Steps several optimizers one after the other. It has no state of its own, so that each of them may replace its
    state and groups, as in `load_state_dict`."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = parts
        self.defaults = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all parts, not copied."""
        return [group for part in self.parts for group in part.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


def parts_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """The optimizers that it consists of: itself, unless it is combined."""
    return optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]


class WeightAverage(LowBitOptimizer):
    """Averages the weights after each update: average <- decay * average + (1 - decay) * weight, in float32. An
    optimizer that changes no weight, so that the average is sharded, saved (as `ema`), loaded and planned like other
    optimizer state. It starts as the weights after the first update."""

    moment_names = ()
    signed: ClassVar[set[str]] = set()

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float, lr: float) -> None:
        # "fused": a skipped update is left out on the device.
        super().__init__(parameters, {"lr": lr, "fused": True})
        self.decay = decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all averages, unless the attribute `found_inf`, a scalar on the device, is above 0."""
        skip = getattr(self, "found_inf", None)
        for parameter in self.parameters():
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
