"""The checkpoint folder: `step-N` folders, each of them complete or absent (`store.py`). Others are never read."""

import contextlib
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.files import CheckpointWriter
from torchtitan.checkpoint.manifest import (
    MANIFEST,
    TRAIN_STATE,
    FileRecord,
    manifest_if_complete,
    require_file,
    write_json,
    write_manifest,
)
from torchtitan.checkpoint.store import os_errors, store_of
from torchtitan.checkpoint.tokenizer_copy import COPY
from torchtitan.config.manager import read_toml
from torchtitan.config.output import Checkpoint
from torchtitan.errors import CheckpointError, UserError
from torchtitan.files import joined
from torchtitan.logging import logger

EXPORTED = "-hf"  # ends the names of exports


def step_folder(folder: Path, step: int, suffix: str = "") -> Path:
    return folder / f"step-{step}{suffix}"


def saved_steps(folder: Path, suffix: str = "") -> list[int]:
    """Steps N of the published folders step-N + suffix, ascending."""
    matches = (re.fullmatch(rf"step-(0|[1-9]\d*){suffix}", name) for name in store_of(folder).published(folder))
    return sorted(int(match[1]) for match in matches if match)


def run_steps(folder: Path) -> list[int]:
    """As `saved_steps`, of a run's `checkpoint.folder`. Raises a CheckpointError if it cannot be read."""
    with os_errors(f"checkpoint.folder: {folder} cannot be read"):
        return saved_steps(folder)


def checkpoint_folders(dump_folder: Path) -> list[Path]:
    """Where a run may have saved checkpoints: as its configuration says, and the default."""
    folders = [Checkpoint.folder]
    for name in ("config.toml", "branch.toml"):
        # The folder may be no run's, or damaged.
        with contextlib.suppress(OSError, UserError, KeyError, TypeError, RecursionError):
            require_file(dump_folder / name)
            folders.insert(0, read_toml(str(dump_folder / name))["checkpoint"]["folder"])
    return [joined(dump_folder, folder) for folder in folders if isinstance(folder, str)]


def step_writer(folder: Path, step: int, train_state: dict[str, Any], about: Mapping[str, Any]) -> CheckpointWriter:
    """Writes the tensors of the checkpoint of `step`, and publishes it with the rest, as for `publish`."""
    store, final = store_of(folder), step_folder(folder, step)
    return CheckpointWriter(
        store.staging(final),
        lambda files: publish(folder, step, train_state, about, files),
        lambda: store.begin(final, set_checkpoint_aside),
    )


def publish(
    folder: Path, step: int, train_state: dict[str, Any], about: Mapping[str, Any], files: dict[str, FileRecord]
) -> None:
    """Adds the JSON parts, with `about` in the manifest, to a checkpoint whose tensors are in `files`, and makes it one
    (`store.py`). Only on rank 0.

    Existing checkpoints and exports of this step and later ones belong to an abandoned branch: they were damaged, or
    `load_step` went back. They are renamed, so that the next start does not take them for the newest.
    """
    store, final = store_of(folder), step_folder(folder, step)
    train_state_file = write_json(store.staging(final) / TRAIN_STATE, train_state)

    def finish(staging: Path) -> None:
        write_manifest(staging, {"step": step, **about}, {**files, TRAIN_STATE: train_state_file})

    def set_later_aside() -> None:
        for suffix in ("", EXPORTED):
            for later in saved_steps(folder, suffix):
                if later >= step:
                    set_checkpoint_aside(step_folder(folder, later, suffix))

    store.publish(final, finish, set_later_aside)


def set_checkpoint_aside(checkpoint: Path) -> None:
    store = store_of(checkpoint)
    names = (checkpoint.with_name(f"{checkpoint.name}.abandoned-{number}") for number in itertools.count(1))
    aside = next(path for path in names if not store.exists(path))
    store.rename(checkpoint, aside)
    logger.info(f"{checkpoint} is from an abandoned branch of this run; renamed to {aside.name}, which may be deleted")


def make_folder(folder: Path) -> None:
    """Creates a folder for checkpoints, or removes what interrupted saves and removals have left there."""
    store = store_of(folder)
    store.make(folder)
    for path in store.left_overs(folder):
        logger.info(f"removing {path.name}, left by an interrupted save or removal")
        with contextlib.suppress(OSError):
            store.remove(path)


def keep_latest(folder: Path, keep: int, newest: int, permanent: set[int]) -> None:
    """Removes all but the `keep` newest complete checkpoints up to step `newest`; 0 keeps all.

    Not counted and not removed are checkpoints with missing or truncated files, and those kept for good: of step 0, and
    those whose manifest says so, whatever the configuration is now. Their steps are added to `permanent`, and their
    manifests not read again.
    """
    if keep == 0:
        return
    try:
        steps = [step for step in saved_steps(folder) if step <= newest and step not in permanent]
        manifests = {step: manifest_if_complete(step_folder(folder, step)) for step in steps}
        complete = {step: manifest for step, manifest in manifests.items() if manifest}
        permanent |= {step for step, manifest in complete.items() if manifest.keep or step == 0}
        for step in [step for step in complete if step not in permanent][:-keep]:
            store_of(folder).remove(step_folder(folder, step))
    except OSError as error:
        logger.warning(f"old checkpoints in {folder} could not be removed ({error.strerror})")


def refuse_foreign(folder: Path, dump_folder: Path) -> None:
    """Call if no checkpoint is found: refuses to start a new run if the folder holds other things, or another folder in
    the dump folder holds checkpoints."""
    names = [] if folder.resolve() == dump_folder.resolve() else sorted(store_of(folder).names(folder))
    foreign = [name for name in names if not (name.startswith((".", "lost+found", COPY)) or name.endswith(".tmp"))]
    remedy = "To start a new run, choose another --job.dump_folder."
    if foreign:
        raise CheckpointError(
            f"checkpoint.folder: {folder} holds {', '.join(foreign[:4])}{', ...' if len(foreign) > 4 else ''}, but no "
            f"checkpoint named step-N, so there is nothing to resume from. {remedy}"
        )
    others = sorted({path.parents[1] for path in dump_folder.glob(f"*/step-*/{MANIFEST}")} - {folder})
    if others:
        raise CheckpointError(
            f"checkpoint.folder: {folder} holds no checkpoint, but {others[0]} does. Use "
            f"--checkpoint.folder={others[0].name} to resume from it. {remedy}"
        )
