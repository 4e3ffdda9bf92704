"""Your own optimizers, with sections of the configuration: see docs/extension.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt
from typing_extensions import Doc

from torchtitan.optim.optimizer import OPTIMIZERS, OptimizerEntry
from torchtitan.optim.parameters import NamedParameter, parameter_groups


@dataclass
class Momentum:
    """Optimizers with a momentum: SGD, TorchMuon, Lion."""

    momentum: Annotated[float, Ge(0), Lt(1), Doc("Decay rate of the momentum.")] = 0.9


@dataclass
class JobConfig:
    momentum: Momentum = field(default_factory=Momentum)


# torch's SGD. Not fused, since torch's fused SGD takes no DTensors.


def sgd(parameters: Sequence[NamedParameter], config: Momentum) -> torch.optim.Optimizer:
    groups = parameter_groups(parameters, "lr", "weight_decay")
    return torch.optim.SGD(groups, momentum=config.momentum, foreach=True)


OPTIMIZERS.register("SGD", OptimizerEntry(sgd, section="momentum"))


# torch's Muon, in one process. It takes only matrices: the rest of the model keeps its initial values.


def torch_muon(parameters: Sequence[NamedParameter], config: Momentum) -> torch.optim.Optimizer:
    matrices = [one for one in parameters if one.role == "matrix"]
    return torch.optim.Muon(parameter_groups(matrices, "lr", "weight_decay"), momentum=config.momentum)


OPTIMIZERS.register("TorchMuon", OptimizerEntry(torch_muon, section="momentum"))


# Your own class: Lion (arXiv 2302.06675).


class Lion(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                if not self.state[weight]:
                    self.state[weight]["exp_avg"] = torch.zeros_like(weight)
                momentum = self.state[weight]["exp_avg"]
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(group["lr"] * momentum.lerp(weight.grad, 1 - beta1).sign())
                momentum.lerp_(weight.grad, 1 - beta2)


def lion(parameters: Sequence[NamedParameter], config: Any) -> torch.optim.Optimizer:
    return Lion(parameter_groups(parameters), defaults={})


OPTIMIZERS.register("Lion", OptimizerEntry(lion))
