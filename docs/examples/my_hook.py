"""Your own probe and schedule: see docs/extension.md."""

from torchtitan.protocols import Hook
from torchtitan.run.hooks import HOOKS, sum_over_parameters
from torchtitan.run.trainer import Trainer


class Plateau(Hook):
    """Halves the learning rate when the validation loss does not fall. Measures the norm of all weights."""

    best = float("inf")

    def after_step(self, run: Trainer) -> dict[str, float]:
        if not run.reporter.due(run.step):
            return {}
        squares = sum_over_parameters(run.engine.model, lambda name, weight: weight.square().sum())
        return {"weight_norm": squares**0.5}

    def after_validation(self, run: Trainer, loss: float) -> dict[str, float]:
        if loss >= self.best:
            self.lr_factor /= 2
        self.best = min(loss, self.best)
        return {"lr_factor": self.lr_factor}

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best = state["best"]


HOOKS.register("plateau", Plateau)
