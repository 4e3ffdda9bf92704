"""Averages of checkpoints' weights, one tensor at a time."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from torchtitan.checkpoint.folder import saved_steps
from torchtitan.checkpoint.tokenizer import COPY, copy_tokenizer, same_ids
from torchtitan.errors import CheckpointError
from torchtitan.interchange.convert import SavedModel, save_weights, saved_model

STATE = "optimizer.state."
"""Begins the names of optimizer state: STATE + weight + ".ema" is a moving average (`optimizer.ema_decay`)."""


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
        if model.tokenizer and first.tokenizer and not same_ids(model.tokenizer, first.tokenizer):
            raise CheckpointError(f"{model.checkpoint} was made with another tokenizer than {first.checkpoint}.")
    tensors = [_tensors(model, ema) for model in models]
    weights = {name: torch.empty(size, dtype=torch.float32, device="meta") for name, (_, size) in tensors[0].items()}
    step = max(model.manifest.step for model in models)
    state = {"weights_only": True, "identity": dataclasses.asdict(first.args), "step": step}
    if first.tokenizer is not None:
        state["tokenizer"] = first.tokenizer
    about = {
        "versions": {"torch": torch.__version__},
        "configuration": first.manifest.configuration,
        "average": {"of": [str(model.checkpoint) for model in models], "ema": ema},
    }
    if first.tokenizer is not None:
        copy_tokenizer(first.tokenizer_path(), out / COPY)
    return save_weights(out, step, state, about, weights, _Mean(models, tensors), "averaging")


def _tensors(model: SavedModel, ema: bool) -> dict[str, tuple[str, torch.Size]]:
    """The tensor to average for each weight and buffer, by name, and its size. Buffers have no moving average."""
    metadata = model.tensors.state_dict_metadata
    trained = {key.removeprefix(STATE).rpartition(".")[0] for key in metadata if key.startswith(STATE)}
    names = {
        name: f"{STATE}{name}.ema" if ema and name in trained else name
        for name in metadata
        if not name.startswith("optimizer.")
    }
    if ema and not (trained and metadata.keys() >= set(names.values())):
        raise CheckpointError(f"{model.checkpoint} has no moving average; it takes a run with optimizer.ema_decay.")
    return {name: (key, metadata[key].size) for name, key in names.items()}  # type: ignore[union-attr]


class _Mean(dcp.DefaultSavePlanner):
    """Computes each mean only when it is written."""

    def __init__(self, models: Sequence[SavedModel], tensors: Sequence[dict[str, tuple[str, torch.Size]]]) -> None:
        super().__init__()
        self.models, self.tensors = models, tensors

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        total = torch.zeros(self.state_dict[index.fqn].shape, dtype=torch.float64)
        for model, tensors in zip(self.models, self.tensors, strict=True):
            total += model.weight(tensors[index.fqn][0])
        return (total / len(self.models)).float()
