"""A user's own converter, which has nothing to do with linear layers and is no subclass of ours."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from runs import TINY, into, losses, train_here
from torch import Tensor, nn

from torchtitan.converters import CONVERTERS, ConverterEntry, Target
from torchtitan.models.norm import RMSNorm

FLAGS = (*TINY, "--training.local_batch_size=4", "--lr_scheduler.warmup_steps=0", "--lr_scheduler.decay_ratio=0")


class HalfNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class Halves:
    """Halves what the norms in front of the feed-forward layers return. Counts the steps."""

    built: ClassVar[list["Halves"]] = []

    def __init__(self, section: None, target: Target) -> None:
        self.steps = 0
        self.built.append(self)

    def convert(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if name.endswith("ffn_norm"):
                module.__class__ = HalfNorm

    def post_optimizer_hook(self, models: Sequence[nn.Module]) -> None:
        self.steps += 1

    def state_dict(self, models: Sequence[nn.Module]) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, models: Sequence[nn.Module], state: dict[str, int], gradient_ratio: float = 1.0) -> None:
        self.steps = state.get("steps", 0)


CONVERTERS.register("halves", ConverterEntry("", Halves))  # type: ignore[arg-type]  # no subclass


def test_its_state_is_in_checkpoints(tmp_path: Path) -> None:
    flags = (*FLAGS, "--model.converters=halves", "--checkpoint.enable_checkpoint", into(tmp_path))
    train_here(*flags, "--training.steps=2")
    train_here(*flags, "--training.steps=3")
    assert Halves.built[-1].steps == 3


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_it_may_belong_to_a_phase(recompute: str, tmp_path: Path) -> None:
    file = tmp_path / "phases.toml"
    file.write_text("[[precision.phase]]\nuntil_step = 1\n[[precision.phase]]\nconverters = ['halves']\n")
    flags = (*FLAGS, "--training.steps=2", f"--activation_checkpoint.mode={recompute}")
    train_here(*flags, into(tmp_path / "plain"))
    train_here(*flags, into(tmp_path / "phases"), f"--job.config_file={file}")
    plain, phases = losses(tmp_path / "plain"), losses(tmp_path / "phases")
    assert plain[1] == phases[1] and plain[2] != phases[2]
