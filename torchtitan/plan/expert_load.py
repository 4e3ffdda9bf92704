"""How many rows experts get in a plan: fake tensors do not say what the router chooses."""

from collections.abc import Callable

import torch
from torch import nn

from torchtitan.models.moe import mixtures
from torchtitan.parallel.expert import ExpertDispatch


def assume_load(model: nn.Module, load: float) -> None:
    """Lets this rank's experts get `load` times as many rows as the rank sends, in place."""
    for mixture in mixtures(model).values():
        if isinstance(mixture.dispatch, ExpertDispatch):
            mixture.dispatch = _AssumedLoad(mixture.dispatch, load)


class _AssumedLoad:
    """A `models.moe.Dispatch`."""

    def __init__(self, dispatch: ExpertDispatch, load: float) -> None:
        self.dispatch = dispatch
        self.load = load

    def __call__(
        self,
        experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        rows: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        received = round(self.load * rows.shape[0])
        self.dispatch.received_rows = lambda splits: received  # type: ignore[method-assign]
        return self.dispatch(experts, rows, counts)
