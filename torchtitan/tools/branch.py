"""Branches of a run with the schedule warm-up, stable, decay: from a stable checkpoint into a decay."""

import shutil
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from torchtitan.checkpoint.choose import find_checkpoint
from torchtitan.checkpoint.folder import checkpoint_folders
from torchtitan.checkpoint.manifest import read_manifest
from torchtitan.checkpoint.store import copy_tree
from torchtitan.checkpoint.tokenizer import find_tokenizer
from torchtitan.checkpoint.tokenizer_copy import COPY, copy_tokenizer
from torchtitan.checkpoint.train_state import read_train_state
from torchtitan.config.fields import PositiveInt
from torchtitan.config.legacy_keys import LEGACY_KEYS
from torchtitan.config.manager import ConfigManager, tables_to_toml
from torchtitan.config.output import Checkpoint
from torchtitan.config.system import Experimental
from torchtitan.config.training import LRScheduler, Stages, StageSection
from torchtitan.errors import CheckpointError, ConfigError
from torchtitan.files import is_uri
from torchtitan.optim.schedule import lr_factor
from torchtitan.strict_json import first_fault

BRANCH = "branch.toml"
PATHS = (("job", "dump_folder"), ("checkpoint", "folder"))


def make_branch(checkpoint: Path, decay_steps: int, folder: Path | None = None, flags: Sequence[str] = ()) -> Path:
    """Prepares a run that continues from a checkpoint and decays the learning rate over the next `decay_steps` updates:
    the checkpoint, and a configuration that differs from the run's only in its length, dump folder and stages, which
    are the trained ones, and one named decay with the keys of the last trained one.

    Args:
        checkpoint: as for `find_checkpoint`.
        folder: dump folder of the branch, which must not exist; default: beside the run's. The result is a file in it.
        flags: of the run, as the user wrote them. Only they name modules: what the checkpoint names is not imported.

    Raises a CheckpointError if the checkpoint is damaged, holds only weights, or is not of the stable phase; or the
    folder exists; or the run imported a module that `flags` do not name. Raises a ConfigError if the branch could not
    start with `flags`.
    """
    path = checkpoint.resolve()
    newest = find_checkpoint(path)
    if newest is None:
        raise CheckpointError(f"{path} holds no checkpoint.")
    checkpoint, manifest = newest, read_manifest(newest)
    try:
        state = read_train_state(checkpoint, manifest.step)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint} cannot be read: {error}.") from None
    if state.weights_only:
        raise CheckpointError(f"{checkpoint} holds only weights, so training cannot continue from it.")
    try:
        tables = TypeAdapter(dict[str, dict[str, Any]]).validate_python(manifest.configuration)
        steps = TypeAdapter(PositiveInt).validate_python(tables["training"]["steps"])
        entries = TypeAdapter(Stages).validate_python(tables.get("stage", {})).entries or [StageSection("stable")]
        saved = TypeAdapter(list[tuple[int, str]]).validate_python(state.stages or [])
        last_steps = {title: last for last, title in saved}
        ends = sorted(last_steps.get(f"stage {entry.name}", steps) for entry in entries)
        place = bisect_left(ends, manifest.step)
        sections = entries[place].sections  # the checkpoint's own stage
        own = sections.get("lr_scheduler", {})
        schedule = TypeAdapter(LRScheduler).validate_python(tables["lr_scheduler"] | own)
        phases = tables.get("precision", {}).get("phase")
        run, saved_in = TypeAdapter(tuple[Path, str]).validate_python(tuple(tables[s][k] for s, k in PATHS))
        modules = TypeAdapter(Experimental).validate_python(tables.get("experimental", {}))
    except (LookupError, OSError, TypeError, ValueError) as error:
        reason = first_fault(error) if isinstance(error, ValidationError) else f"{error!r:.200}"
        raise CheckpointError(f"{checkpoint} does not record its run's configuration ({reason}).") from None
    for key, module in asdict(modules).items():
        if module and not any(flag.split("=")[0] == f"--experimental.{key}" for flag in flags):
            raise CheckpointError(
                f"{checkpoint} is of a run that imported the module {module!r}, which is not imported because a "
                f"checkpoint says so; if you trust it, add --experimental.{key}={module}."
            )
    step = manifest.step
    begin = ends[place - 1] if own and place else 0
    _check_stable(checkpoint, step, schedule, begin, ends[place] if own else steps)
    if folder is None and checkpoint.parent not in (place.resolve() for place in checkpoint_folders(run)):
        raise CheckpointError(
            f"{checkpoint} is not where its run, {run}, saves checkpoints: say where the branch goes with --folder."
        )
    folder = (folder or run.parent / f"{run.name}_step{step}_decay{decay_steps}").resolve()
    if folder.exists():
        raise CheckpointError(f"{folder} exists; choose another folder with --folder.")
    total = step + decay_steps
    # Some keys of other versions name modules. A resolved configuration has none of them but second switches.
    former = {key for key, legacy in LEGACY_KEYS.items() if not legacy.adds}
    branch = {
        section: {key: value for key, value in keys.items() if f"{section}.{key}" not in former}
        for section, keys in tables.items()
    }
    branch["training"]["steps"] = total
    branch["lr_scheduler"]["decay_ratio"] = decay_steps / total if phases else 0.0
    if not phases:
        until = [*ends[:place], step] if step else []
        trained = [replace(entry, until=end) for entry, end in zip(entries, until, strict=False)]
        name = f"decay_{step}" if any(entry.name == "decay" for entry in trained) else "decay"
        decay = StageSection(name, None, sections | {"lr_scheduler": own | {"warmup_steps": 0, "decay_ratio": 1.0}})
        branch["stage"] = asdict(Stages([*trained, decay]))
    branch["job"]["dump_folder"] = str(folder)
    # These were for the start of the run; the branch takes its checkpoint as it is.
    branch["checkpoint"] |= {"load_step": -1, "exclude_from_loading": []}
    branch["experimental"] = asdict(Experimental())
    if is_uri(saved_in) or not (folder / saved_in).resolve().is_relative_to(folder):  # it would be the run's own
        branch["checkpoint"]["folder"] = saved_in = Checkpoint.folder
    temporary = folder.with_name(f"{folder.name}.tmp")  # so that a kill leaves nothing under the final name
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        if state.tokenizer is not None and branch["model"]["tokenizer_path"] is not None:  # it may be relative, or gone
            copy_tokenizer(find_tokenizer(checkpoint, state.tokenizer, tables), temporary / COPY)
            branch["model"]["tokenizer_path"] = str(folder / COPY)
        copy_tree(checkpoint, temporary / saved_in / checkpoint.name)
        (temporary / BRANCH).write_text(tables_to_toml(branch), encoding="utf-8")
        ConfigManager().parse_args([f"--job.config_file={temporary / BRANCH}", *flags])
        temporary.rename(folder)
    except ConfigError:
        shutil.rmtree(temporary)
        raise
    except (TypeError, ValueError) as error:  # what TOML cannot say
        raise CheckpointError(f"{checkpoint} does not record its run's configuration ({error}).") from None
    except OSError as error:
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        raise CheckpointError(f"{checkpoint} could not be copied to {folder} ({why}).") from None
    return folder / BRANCH


def _check_stable(checkpoint: Path, step: int, schedule: LRScheduler, begin: int, end: int) -> None:
    """Raises a CheckpointError unless `step` has the peak learning rate of a schedule from step `begin` to `end`."""
    steps = end - begin
    warmup = min(schedule.warmup_steps, steps)
    if step - begin < warmup:
        raise CheckpointError(f"{checkpoint} is of the warm-up, which ends with step {begin + schedule.warmup_steps}.")
    factor = lr_factor(step - begin, steps, schedule)
    if factor < 1:
        decays_at = bisect_left(range(steps + 1), 1, warmup, key=lambda at: lr_factor(at, steps, schedule) < 1)
        raise CheckpointError(
            f"{checkpoint} is of the decay: its learning rate was {factor:.0%} of the peak. Branch from a checkpoint "
            f"of step {begin + decays_at - 1} or earlier."
        )
