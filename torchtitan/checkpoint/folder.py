"""Where checkpoints lie: `step-N` folders that exist whole or not at all.

A checkpoint is written as `step-N.tmp` and renamed when everything is on disk. What bears another name than `step-N`
is never read.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from torchtitan.errors import CheckpointError
from torchtitan.logging import logger

TRAIN_STATE = "train_state.json"


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def saved_steps(folder: Path) -> list[int]:
    """Steps of the published checkpoints, in rising order."""
    if not folder.is_dir():
        return []
    found = (re.fullmatch(r"step-(\d+)", entry.name) for entry in folder.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in found if match)


def temporary_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written to before it is published."""
    return folder / f"step-{step}.tmp"


def publish(folder: Path, step: int, train_state: dict[str, Any]) -> None:
    """Adds the JSON part to a checkpoint whose tensors are written, and gives it its name. Rank 0 alone does this."""
    temporary, final = temporary_folder(folder, step), step_folder(folder, step)
    with open(temporary / TRAIN_STATE, "w", encoding="utf-8") as file:
        json.dump(train_state, file)
    for path in [*temporary.iterdir(), temporary]:
        _sync(path)
    if final.exists():  # an earlier run, started over from a step before this one
        shutil.rmtree(final)
    temporary.rename(final)
    _sync(folder)


def _sync(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_train_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        state = json.loads((checkpoint / TRAIN_STATE).read_text(encoding="utf-8"))
        if not (isinstance(state, dict) and {"identity", "weights_only", "step"} <= state.keys()):
            raise ValueError("parts are missing")
        return state
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint of this program, or is damaged ({TRAIN_STATE}: {error}); "
            "choose another with --checkpoint.load_step, or move the folder away."
        ) from None


def remove_left_overs(folder: Path) -> None:
    """Removes what saves that never finished have left."""
    for path in folder.glob("step-*.tmp"):
        logger.info(f"removing {path.name}, a save that was interrupted")
        shutil.rmtree(path, ignore_errors=True)


def keep_latest(folder: Path, keep: int) -> None:
    """Removes all but the `keep` newest; 0 keeps all."""
    for step in saved_steps(folder)[:-keep] if keep else []:
        shutil.rmtree(step_folder(folder, step), ignore_errors=True)
