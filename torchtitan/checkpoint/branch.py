"""Branches of a run with the schedule warm-up, stable, decay: from a stable checkpoint into a decay of its own."""

import json
import shutil
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from torchtitan.checkpoint.folder import saved_steps, step_folder
from torchtitan.checkpoint.manifest import damage, read_manifest
from torchtitan.checkpoint.tokenizer import COPY, copy_tokenizer, find_tokenizer
from torchtitan.config.manager import tables_to_toml
from torchtitan.config.output import Checkpoint
from torchtitan.config.training import LRScheduler
from torchtitan.errors import CheckpointError
from torchtitan.optim.schedule import lr_factor

BRANCH = "branch.toml"


def make_branch(checkpoint: Path, decay_steps: int, folder: Path | None = None) -> Path:
    """Prepares a run that continues from a checkpoint and decays the learning rate over the next `decay_steps` updates:
    the checkpoint, and a configuration that differs from the run's only in its length, decay and dump folder.

    Args:
        checkpoint: a step-N folder.
        folder: dump folder of the branch, which must not exist; default: beside the run's.

    Returns:
        The configuration, in that folder.

    Raises:
        CheckpointError: the checkpoint is damaged, holds only weights, or is not of the stable phase; or the folder
            exists.
    """
    checkpoint = checkpoint.resolve()
    if found := damage(checkpoint):
        there = saved_steps(checkpoint)
        hint = f" It contains checkpoints: use {step_folder(checkpoint, there[-1])}." if there else ""
        raise CheckpointError(f"{checkpoint} is not a checkpoint, or is damaged: {'; '.join(found[:3])}.{hint}")
    manifest = read_manifest(checkpoint)
    step, tables = manifest.step, manifest.configuration
    try:
        state = json.loads((checkpoint / "train_state.json").read_bytes())
        if state["weights_only"]:
            raise CheckpointError(f"{checkpoint} holds only weights, so training cannot continue from it.")
        steps: int = tables["training"]["steps"]
        schedule = TypeAdapter(LRScheduler).validate_python(tables["lr_scheduler"])
        run = Path(tables["job"]["dump_folder"])
        saved_in: str = tables["checkpoint"]["folder"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} does not record its run's configuration ({error!r}).") from None
    _check_stable(checkpoint, step, steps, schedule)
    folder = (folder or run.parent / f"{run.name}_step{step}_decay{decay_steps}").resolve()
    if folder.exists():
        raise CheckpointError(f"{folder} exists; choose another folder with --folder.")
    total = step + decay_steps
    branch: dict[str, Any] = {**tables}
    branch["training"] = {**tables["training"], "steps": total}
    branch["lr_scheduler"] = {**tables["lr_scheduler"], "decay_ratio": decay_steps / total}
    branch["job"] = {**tables["job"], "dump_folder": str(folder)}
    # These were for the start of the run; the branch takes its checkpoint as it is.
    branch["checkpoint"] = {**tables["checkpoint"], "load_step": -1, "exclude_from_loading": []}
    if not (folder / saved_in).resolve().is_relative_to(folder):  # it would be the run's own
        saved_in = Checkpoint.folder
        branch["checkpoint"]["folder"] = saved_in
    if "tokenizer" in state and tables["model"]["tokenizer_path"] is not None:  # which may be relative, or gone
        copy_tokenizer(find_tokenizer(checkpoint, state["tokenizer"], tables), folder / COPY)
        branch["model"] = {**tables["model"], "tokenizer_path": str(folder / COPY)}
    shutil.copytree(checkpoint, folder / saved_in / checkpoint.name)
    (folder / BRANCH).write_text(tables_to_toml(branch), encoding="utf-8")
    return folder / BRANCH


def _check_stable(checkpoint: Path, step: int, steps: int, schedule: LRScheduler) -> None:
    """Whether the peak learning rate was reached by `step`, and not left."""
    if step < min(schedule.warmup_steps, steps):
        raise CheckpointError(f"{checkpoint} is of the warm-up, which ends with step {schedule.warmup_steps}.")
    factor = lr_factor(step, steps, schedule)
    if factor < 1:
        stable = next((earlier for earlier in range(step, 0, -1) if lr_factor(earlier, steps, schedule) == 1), 0)
        raise CheckpointError(
            f"{checkpoint} is of the decay: its learning rate was {factor:.0%} of the peak. Branch from a checkpoint "
            f"of step {stable} or earlier."
        )
