"""How many rows experts get in a plan: fake tensors do not say what the router chooses."""

from torch import nn

from torchtitan.models.moe import mixtures
from torchtitan.parallel.expert import ExpertDispatch


def assume_load(model: nn.Module, load: float) -> None:
    """Lets this rank's experts get `load` times as many rows as the rank sends, in place."""
    for mixture in mixtures(model).values():
        if isinstance(mixture.dispatch, ExpertDispatch):
            mixture.dispatch.received_rows = lambda splits, sent: round(load * sent)  # type: ignore[method-assign]
