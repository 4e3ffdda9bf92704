"""Short runs in this process: their losses, and the operands of their GEMMs."""

import dataclasses
import json
from pathlib import Path

import torch

from torchtitan.config import JobConfig
from torchtitan.converters.numerics import capture_operands
from torchtitan.errors import ConfigError
from torchtitan.models.init import init_weights
from torchtitan.temporary_trainer import temporary_trainer


@dataclasses.dataclass(frozen=True)
class ShortRun:
    """
    Attributes:
        losses: of each step.
        operands: of each unconverted linear layer in the first micro-batch of the last step, by path
            (`converters.numerics.Operands`); empty unless captured.
    """

    losses: list[float]
    operands: dict[str, list[torch.Tensor]]


def short_run(config: JobConfig, capture: bool = False, weights_seed: int | None = None) -> ShortRun:
    """Trains in this process, uncompiled, without activation checkpointing, in a temporary folder.

    Args:
        weights_seed: draws other initial weights than the configuration's, for the same data.

    Raises:
        ConfigError: a loss is not finite; and what a run raises.
    """
    operands: dict[str, list[torch.Tensor]] = {}
    config = dataclasses.replace(
        config,
        activation_checkpoint=dataclasses.replace(config.activation_checkpoint, mode="none"),
        metrics=dataclasses.replace(config.metrics, log_freq=1),
        training=dataclasses.replace(config.training, compile=False),
    )
    with temporary_trainer(config) as trainer:
        engine = trainer.engine
        if capture:
            capture_operands(engine.model, operands, lambda: trainer.step == config.training.steps)
        if weights_seed is not None:
            init_weights(engine.model, engine.model.init_std, weights_seed, engine.init_factor)
        trainer.train()
        entries = map(json.loads, (Path(trainer.config.job.dump_folder) / "metrics.jsonl").read_text().splitlines())
        # Entries of a model with experts may hold only their load.
        losses = [entry["loss"] for entry in entries if "loss" in entry]
    if None in losses:
        what = ", ".join(config.model.converters) or "bf16"
        raise ConfigError(f"a short run in {what} has a loss that is not finite; lower optimizer.lr, or fix its data.")
    return ShortRun(losses, operands)
