"""Which checkpoint a run resumes from, and whether it fits. Collective; every rank gets the same answer."""

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from torchtitan.checkpoint.files import differences
from torchtitan.checkpoint.folder import checkpoint_folders, refuse_foreign, saved_steps, step_folder
from torchtitan.checkpoint.manifest import MANIFEST, METADATA, TRAIN_STATE, Unreachable, damage, read_manifest
from torchtitan.checkpoint.others import TORCHTITAN, program_of, refuse_other_programs
from torchtitan.checkpoint.state_dict import OPTIMIZER, without_mtp
from torchtitan.checkpoint.store import os_errors, store_of
from torchtitan.errors import CheckpointError, counted
from torchtitan.files import is_remote
from torchtitan.logging import logger
from torchtitan.models.rope import ROPE, read_scaling
from torchtitan.parallel.object_collectives import all_gather_object, from_rank_0, raise_on_all_ranks

NAMED = 3  # damaged files or differences listed in a message


def choose_step(folder: Path, steps: list[int], wanted: int, dump_folder: Path) -> int | None:
    """The step to resume from, of the folder's ascending `steps`: `wanted`, or for -1 the newest intact one; None for a
    new run. Raises a CheckpointError if the wanted one or all are damaged, or only signs of an earlier run exist."""
    if wanted != -1 and wanted not in steps:
        known = f"it has steps {', '.join(map(str, steps))}" if steps else "it has no checkpoints"
        raise CheckpointError(
            f"checkpoint.load_step: no checkpoint of step {wanted} in {folder}; {known}. Use -1 for the newest."
        )
    if not steps:
        raise_on_all_ranks(lambda: refuse_foreign(folder, dump_folder))
        return None
    newest = step_folder(folder, steps[-1] if wanted == -1 else wanted)
    if from_rank_0(lambda: _holds_none_of_ours(folder, steps) and program_of(newest) is TORCHTITAN):
        raise CheckpointError(
            f"checkpoint.folder: {newest} is a checkpoint of torchtitan. To go on from it, add "
            f"--checkpoint.initial_load_path={newest} --checkpoint.continue_from_path and another --job.dump_folder."
        )
    step, damaged = newest_intact(folder, steps if wanted == -1 else [wanted])
    if step is not None:
        if damaged and dist.get_rank() == 0:
            logger.warning(f"resuming from step {step}, the newest intact checkpoint")
        return step
    if wanted != -1:
        raise CheckpointError(
            f"{damaged[0]}. Choose another step with --checkpoint.load_step, or -1 for the newest intact one."
        )
    raise CheckpointError(
        f"{folder} holds {counted(len(steps), 'checkpoint')}, but none is intact: {'; '.join(damaged[:NAMED])}. To "
        "start a new run anyway, choose another --job.dump_folder, or move the folder away."
    )


def newest_intact(folder: Path, steps: list[int]) -> tuple[int | None, list[str]]:
    """The last of `steps` with an intact checkpoint, or None; and what is wrong with the later ones."""
    damaged: list[str] = []
    for step in reversed(steps):
        path = step_folder(folder, step)
        faults = damage_over_ranks(path)
        if not faults:
            return step, damaged
        damaged.append(f"{path} is damaged: {first_faults(faults)}")
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.error(damaged[-1])
    return None, damaged


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint that a command's argument means: a step-N folder itself; or the newest intact one in a folder of
    them, or in a run's dump folder; None if there is no checkpoint. Raises a CheckpointError if the path does not
    exist, or the checkpoint is damaged, or none is intact."""
    if not (is_remote(path) or path.is_dir()):
        raise CheckpointError(f"{path} {'is a file, not a folder' if path.exists() else 'does not exist'}.")
    with os_errors(f"{path} cannot be read"):
        names = set(store_of(path).names(path))
        if is_remote(path) and not names:
            raise CheckpointError(f"{path} does not exist.")
        refuse_other_programs(path)
        if not names.isdisjoint((MANIFEST, METADATA, TRAIN_STATE)):
            if faults := damage_over_ranks(path):
                raise CheckpointError(f"{path} is damaged: {first_faults(faults)}.")
            return path
        for folder in (path, *checkpoint_folders(path)):
            if steps := saved_steps(folder):
                if _holds_none_of_ours(folder, steps):
                    refuse_other_programs(step_folder(folder, steps[-1]))
                step, damaged = newest_intact(folder, steps)
                if step is None:
                    raise CheckpointError(
                        f"{folder} holds {len(steps)} checkpoint(s), but none is intact: {'; '.join(damaged[:NAMED])}."
                    )
                if damaged:
                    logger.warning(f"using {step_folder(folder, step)}, the newest intact checkpoint")
                return step_folder(folder, step)
    return None


def _holds_none_of_ours(folder: Path, steps: list[int]) -> bool:
    """Whether no step has a manifest. Where some have, another without it is damaged or unfinished."""
    return not any((step_folder(folder, step) / MANIFEST).exists() for step in steps)


def newest_of_same_command(folder: Path, steps: list[int], configuration: Mapping[str, Any] | None) -> int | None:
    """The step of the newest intact checkpoint saved by this same command; None if there is none. `load_step` and
    `exclude_from_loading` apply only to a command's first start: on a restart they would discard its progress."""
    step, _ = newest_intact(folder, from_rank_0(lambda: _steps_of_same_command(folder, steps, configuration)))
    if step is not None:
        logger.info(
            f"resuming from step {step}, which this same command saved; checkpoint.load_step and exclude_from_loading "
            "apply only to its first start (to apply them again, move its checkpoints away)"
        )
    return step


def _steps_of_same_command(folder: Path, steps: list[int], configuration: Mapping[str, Any] | None) -> list[int]:
    """The `steps` saved under the same configuration, except for [job] and the number of training steps."""

    def command(configuration: Mapping[str, Any]) -> dict[str, Any]:
        sections = {name: section for name, section in configuration.items() if name != "job"}
        return {**sections, "training": {**sections["training"], "steps": None}}

    def is_own(step: int) -> bool:
        try:
            return command(read_manifest(step_folder(folder, step)).configuration) == this_run
        except Unreachable:
            raise
        except (CheckpointError, AttributeError, KeyError, TypeError):  # damaged or foreign
            return False

    this_run = command(json.loads(json.dumps(configuration, default=str)))
    return [step for step in steps if is_own(step)]


def check_start(path: Path) -> None:
    """Raises a CheckpointError if the checkpoint that a run starts from is damaged. torchtitan's have no hashes."""
    faults = [] if from_rank_0(lambda: program_of(path) is TORCHTITAN) else damage_over_ranks(path)
    if faults:
        places = ((folder, saved_steps(folder)) for folder in (path, *checkpoint_folders(path)))
        newest = next((step_folder(folder, steps[-1]) for folder, steps in places if steps), None)
        hint = f" It contains checkpoints: use {newest}." if newest else ""
        raise CheckpointError(
            f"checkpoint.initial_load_path: {path} is not a checkpoint of this program, or is damaged: "
            f"{first_faults(faults)}.{hint}"
        )


def damage_over_ranks(path: Path) -> list[str]:
    """What is wrong with a checkpoint. The ranks, if there is a process group, divide the reading."""
    if not dist.is_initialized():
        return damage(path)
    of_ranks = all_gather_object(raise_on_all_ranks(lambda: damage(path, dist.get_rank(), dist.get_world_size())))
    return sorted(set().union(*of_ranks))


def check_model_identity(path: Path, saved: dict[str, Any], this_run: dict[str, Any]) -> None:
    """Raises a CheckpointError if the checkpoint is of another model."""
    saved = {"parametrization": "standard", **saved}  # checkpoints of earlier versions do not say
    for key, value in this_run.items():
        if key not in ROPE and saved.get(key) != value:
            raise CheckpointError(
                f"{path} is a checkpoint of another model: its {key} is {saved.get(key)}, this run's is {value}. Use "
                "that model, or another --job.dump_folder."
            )


def log_other_rope(path: Path, saved: Mapping[str, Any], this_run: Mapping[str, Any]) -> None:
    """Logs a change of RoPE, which makes contexts longer. Raises a CheckpointError if the checkpoint's is wrong."""
    for key in ROPE & saved.keys() & this_run.keys():
        try:
            before, now = read_scaling(saved[key]), read_scaling(this_run[key])
        except ValueError as error:
            raise CheckpointError(f"{path} cannot be loaded: its {key} is wrong ({error}).") from None
        if before != now:
            logger.info(f"{key} is {now} from here on; {path} was trained with {before}")


def check_tensors(
    path: Path, metadata: Metadata, model: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor]
) -> None:
    """Raises a CheckpointError with the first differences unless the checkpoint has every rank's tensors in the right
    shapes, and no other weight. `model` and `optimizer`: this rank's tensors; empty on all ranks if not loaded."""
    for title, tensors, remedy in (
        ("the model", model, "Use the model of the checkpoint, or another checkpoint."),
        ("the optimizer", optimizer, "Set --checkpoint.exclude_from_loading=optimizer to restart the optimizer."),
    ):
        faults = list(dict.fromkeys(chain.from_iterable(all_gather_object(differences(metadata, tensors)))))
        if faults:
            raise CheckpointError(f"{path} does not match {title} of this run: {first_faults(faults)}. {remedy}")
    weights = {name for name in metadata.state_dict_metadata if not name.startswith(OPTIMIZER)}
    unknown = set.intersection(*all_gather_object(weights - model.keys()))
    others = [] if unknown == weights else without_mtp(sorted(unknown), path)  # all, if the model is not loaded
    if others:
        raise CheckpointError(
            f"{path} is a checkpoint of another model: it has {first_faults(others)}, which this model lacks. "
            "Use the model of the checkpoint, or another checkpoint."
        )


def first_faults(faults: list[str]) -> str:
    """The first few faults, and how many more there are."""
    more = len(faults) - NAMED
    return "; ".join(faults[:NAMED]) + (f"; and {more} more" if more > 0 else "")
