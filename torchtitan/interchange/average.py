"""Averages of checkpoints' weights, one tensor at a time."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from torchtitan.checkpoint.folder import saved_steps
from torchtitan.checkpoint.state_dict import OPTIMIZER
from torchtitan.checkpoint.tokenizer import COPY, copy_tokenizer, same_ids
from torchtitan.errors import CheckpointError
from torchtitan.interchange.convert import save_weights, saved_model


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
    models = [saved_model(path, ema) for path in checkpoints]
    first = models[0]
    for model in models[1:]:
        if model.args != first.args:
            raise CheckpointError(f"{model.checkpoint} is of another model than {first.checkpoint}.")
        if model.tokenizer and first.tokenizer and not same_ids(model.tokenizer, first.tokenizer):
            raise CheckpointError(f"{model.checkpoint} was made with another tokenizer than {first.checkpoint}.")
    weights = {
        name: torch.empty(saved.size, dtype=torch.float32, device="meta")  # type: ignore[union-attr]  # a tensor
        for name, saved in first.tensors.state_dict_metadata.items()
        if not name.startswith(OPTIMIZER)
    }
    step = max(model.manifest.step for model in models)
    state = {"weights_only": True, "identity": dataclasses.asdict(first.args), "step": step}
    if first.tokenizer is not None:
        state["tokenizer"] = first.tokenizer
        copy_tokenizer(first.tokenizer_path(), out / COPY)
    about = {
        "configuration": first.manifest.configuration,
        "average": {"of": [str(model.checkpoint) for model in models], "ema": ema},
    }

    def mean(name: str) -> torch.Tensor:
        total = torch.zeros(weights[name].shape, dtype=torch.float64)
        for model in models:
            total += model.weight(name)
        return (total / len(models)).float()

    return save_weights(out, state, about, weights, mean, "averaging")
