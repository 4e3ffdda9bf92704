"""Averages of checkpoints' weights, one tensor at a time."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from torchtitan.checkpoint.files import Writer, first_line, read_metadata
from torchtitan.checkpoint.folder import publish, saved_steps, step_folder, temporary_folder
from torchtitan.checkpoint.manifest import read_manifest
from torchtitan.errors import CheckpointError
from torchtitan.interchange.convert import SavedModel, saved_model

EMA = "optimizer.state.{}.ema"
"""Name of a weight's moving average (`optimizer.ema_decay`)."""


def average(checkpoints: Sequence[Path], out: Path, ema: bool = False) -> Path:
    """Creates a weights-only checkpoint with the mean of each weight, in float32: sums are in float64, so it is the
    exact mean, rounded once. Its step is the last one's.

    Args:
        checkpoints: as for `saved_model`, of the same model.
        ema: average the moving averages in the checkpoints, not the weights.

    Returns:
        The path of the new checkpoint, `out`/step-N.

    Raises:
        CheckpointError: a checkpoint is damaged, or of another model, or has no moving average; or `out` contains
            checkpoints.
    """
    if saved_steps(out):
        raise CheckpointError(f"{out} already holds checkpoints; choose another folder.")
    models = [saved_model(path) for path in checkpoints]
    first = models[0]
    for model in models[1:]:
        if model.args != first.args:
            raise CheckpointError(f"{model.checkpoint} is of another model than {first.checkpoint}.")
    names = _weights(first, ema)
    manifests = [read_manifest(model.checkpoint) for model in models]
    step = max(manifest.step for manifest in manifests)
    state = {"weights_only": True, "identity": dataclasses.asdict(first.args), "step": step}
    about = {
        "versions": {"torch": torch.__version__},
        "configuration": manifests[0].configuration,
        "average": {"of": [str(model.checkpoint) for model in models], "ema": ema},
    }
    out.mkdir(parents=True, exist_ok=True)
    writer = Writer(temporary_folder(out, step), lambda files: publish(out, step, state, about, files))
    try:
        dcp.save(names, storage_writer=writer, planner=_Mean(models, ema))
    except (CheckpointException, OSError, RuntimeError) as error:
        shutil.rmtree(temporary_folder(out, step), ignore_errors=True)
        raise CheckpointError(f"{out} could not be written ({first_line(error)}).") from error
    return step_folder(out, step)


def _weights(model: SavedModel, ema: bool) -> dict[str, torch.Tensor]:
    """Names and shapes of the weights, as empty tensors."""
    metadata = read_metadata(model.checkpoint, read_manifest(model.checkpoint).files).state_dict_metadata
    names = [name for name in metadata if not name.startswith("optimizer.")]
    if ema and any(EMA.format(name) not in metadata for name in names):
        raise CheckpointError(f"{model.checkpoint} has no moving average; it takes a run with optimizer.ema_decay.")
    return {
        name: torch.empty(metadata[name].size, dtype=torch.float32, device="meta")  # type: ignore[union-attr]
        for name in names
    }


class _Mean(dcp.DefaultSavePlanner):
    """Computes each mean only when it is written."""

    def __init__(self, models: Sequence[SavedModel], ema: bool) -> None:
        super().__init__()
        self.models, self.ema = models, ema

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        name = EMA.format(index.fqn) if self.ema else index.fqn
        total = torch.zeros(self.state_dict[index.fqn].shape, dtype=torch.float64)
        for model in self.models:
            total += model.weight(name)
        return (total / len(self.models)).float()
