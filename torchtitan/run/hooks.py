"""What a run calls between its steps: its own hooks, and those of users, with their registry, their factors on the
learning rate, and their state, which `resume.py` loads."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.errors import TrainingError, UserError
from torchtitan.parallel.sharded_tensors import local_tensor, replicas_of
from torchtitan.protocols import Hook
from torchtitan.registry import Registry

HOOKS: Registry[Callable[[], Hook]] = Registry("hook", "experimental.custom_import", {})
"""What makes each hook. All of them are part of the run, in the order of their names."""


@contextlib.contextmanager
def naming_hook(name: str, method: str) -> Iterator[None]:
    """Names the hook whose code has an error."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise RuntimeError(f"{method} of the hook {name!r} failed: {error!r}") from error


def make_hooks() -> dict[str, Hook]:
    hooks = {}
    for name in HOOKS.names():
        with naming_hook(name, "__init__"):
            hooks[name] = HOOKS.get(name)()
    return hooks


@dataclasses.dataclass
class Hooks:
    """The hooks of a run, called in this order: the users', by name, and its own.

    Attributes:
        former: states in the checkpoint; kept also if this run lacks the hook.
    """

    own: list[Hook]
    users: dict[str, Hook] = dataclasses.field(default_factory=make_hooks)
    former: dict[str, Any] = dataclasses.field(default_factory=dict)

    def call(self, run: Any, method: str, *arguments: Any) -> None:
        """Calls a method of all hooks, and reports the metrics that the users' return."""
        for name, hook in self.users.items():
            with naming_hook(name, method):
                metrics = getattr(hook, method)(run, *arguments) or {}
                metrics = {f"{name}/{key}": float(value) for key, value in metrics.items()}
            if metrics:
                run.reporter.metrics(run.step, metrics)
        for hook in self.own:
            getattr(hook, method)(run, *arguments)

    def states(self) -> dict[str, Any]:
        """The factor and the state of each, which `resume.load_states` loads."""
        states = dict(self.former)
        for name, hook in self.users.items():
            with naming_hook(name, "state_dict"):
                state = json.loads(json.dumps(hook.state_dict()))
            states[name] = {"lr_factor": float(hook.lr_factor), "state": state}
        return states


def factor_on_learning_rate(hooks: Mapping[str, Hook], group: dist.ProcessGroup | None) -> float:
    """The product of all factors on rank 0. Collective if there are hooks; `group` connects the hosts."""
    if not hooks:
        return 1.0
    factors = []
    for name, hook in hooks.items():
        with naming_hook(name, "lr_factor"):
            factors.append(float(hook.lr_factor))
    factor = torch.tensor(math.prod(factors), dtype=torch.float64)
    dist.broadcast(factor, 0, group)
    if not 0 <= factor < math.inf:
        raise TrainingError(f"hooks {', '.join(hooks)}: lr_factor must be a finite number of at least 0.")
    return factor.item()


@torch.no_grad()
def sum_over_parameters(model: nn.Module, function: Callable[[str, torch.Tensor], torch.Tensor | float]) -> float:
    """Sum of `function(name, numbers)` over the parameters of the full model, each number counted once under every
    layout: `numbers` are a rank's shard of a parameter, perhaps none. Collective: each rank passes its `run.model`."""
    sums = [function(name, local_tensor(weight)) / replicas_of(weight) for name, weight in model.named_parameters()]
    total = torch.tensor(sum(map(float, sums)), dtype=torch.float64, device=next(model.parameters()).device)
    dist.all_reduce(total)
    return total.item()
