"""Several optimizers as one."""

from collections.abc import Sequence
from typing import Any

import torch


class CombinedOptimizer(torch.optim.Optimizer):
    """Steps several optimizers one after the other. It has no state of its own, so that each of them may replace its
    state and groups, as in `load_state_dict`.

    Args:
        parts: stepped in this order.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = parts
        self.defaults = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of all parts, not copied."""
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
