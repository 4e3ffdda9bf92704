"""Runs one training run: builds all its parts, in dependency order, with those of each stage, and the trainer that
drives them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.checkpoint.base import Checkpoints
from torchtitan.checkpoint.tokenizer_copy import COPY
from torchtitan.checks.config_checks import check_run
from torchtitan.config import JobConfig, to_toml
from torchtitan.config.output import Checkpoint
from torchtitan.converters import Decision, ModelConverter
from torchtitan.data import Loader, Tokenizer, build_loader, load_tokenizer
from torchtitan.data.datasets import DataOfRun, places_of_sources
from torchtitan.data.hashes import HASHES
from torchtitan.device import Device, find_device
from torchtitan.engine.conversion import build_converted_model, conversion_target, decisions_of
from torchtitan.engine.engine import Engine, build_engine
from torchtitan.engine.model_args import find_model_args, register_models
from torchtitan.engine.stages import Stage, sizes_without_steps
from torchtitan.errors import CheckpointError, ConfigError, DataError, UserError, public
from torchtitan.files import PathError, is_remote, joined
from torchtitan.launcher.folder_lock import FolderLock
from torchtitan.launcher.monitor import watching
from torchtitan.launcher.processes import refuse_lone_tasks
from torchtitan.launcher.signals import Stop
from torchtitan.logging import init_logging, logger
from torchtitan.models import MODELS
from torchtitan.optim.parameters import check_groups
from torchtitan.parallel.dims import Meshes, ParallelDims, build_meshes
from torchtitan.parallel.object_collectives import from_rank_0, raise_on_all_ranks, refuse_differences
from torchtitan.parallel.process_group import init_process_group, named_failures, on_one_machine, set_timeout
from torchtitan.registry import deferred, load
from torchtitan.run.compute_dtype import decide_compute_dtype
from torchtitan.run.hooks import Hooks
from torchtitan.run.reports import Report, validate
from torchtitan.run.run_folder import RunFolder
from torchtitan.run.trainer import Trainer
from torchtitan.run.watchdog import watch_progress
from torchtitan.world import world

if TYPE_CHECKING:
    from torchtitan.data import ValidationLoader

_plan = deferred("torchtitan.tools.plan.planner:plan")
_log_conversion: Callable[..., tuple[str, str]] = deferred("torchtitan.run.conversion_log:log_conversion")
_log_cost_of_low_precision = deferred("torchtitan.run.conversion_log:log_cost_of_low_precision")
_object_lock: Callable[..., FolderLock] = deferred("torchtitan.launcher.object_lock:ObjectLock")


def train_or_plan(config: JobConfig, stop: Stop | None = None, notices: Sequence[str] = ()) -> None:
    """One run from its configuration to its end, or its plan; see `torchtitan.train.run`."""
    place, folder = world(), Path(config.job.dump_folder)
    init_logging(place.rank, place.size, color=not config.metrics.disable_color_printing)
    for notice in notices:
        logger.info(notice)
    register_models(config)
    device = find_device(place.local_rank)
    if config.job.plan:
        _plan(config, device)
        return
    refuse_lone_tasks()
    dims, stages = check_run(config, place.size, device.type)
    stop = stop or Stop(place.rank)
    with (
        watching(watch_progress(stop.progress, place.rank)),
        named_failures(config.comm, folder),
        FolderLock(folder) as lock,
        build_trainer(config, dims, stages, device, stop, lock) as trainer,
    ):
        trainer.train()


def build_trainer(
    config: JobConfig,
    dims: ParallelDims,
    stages: Sequence[Stage],
    device: Device,
    stop: Stop | None = None,
    lock: FolderLock | None = None,
) -> Trainer:
    """Builds the trainer, top to bottom, from a checked configuration (`config_checks.check_run`). Collective.

    Args:
        stop: says when the run is to save and exit.
        lock: the dump folder's lock, taken here; None where no other run can use the folder.

    Raises:
        UserError: data, tokenizer, model or checkpoint cannot be used as configured.
    """
    training, dump_folder = config.training, Path(config.job.dump_folder)
    stop = stop or Stop()
    if config.job.print_args:
        logger.info(f"configuration:\n{to_toml(config, public)}")
    if training.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    torch.manual_seed(training.seed)
    HASHES.forget()

    # Tokenizer first: a wrong path fails before anything expensive begins.
    tokenizer = _load_tokenizer(config)
    args = find_model_args(stages[0].config.model, tokenizer.vocab_size)

    # Process group and mesh.
    _check_memory_of_stages(stages, dims, device)
    init_process_group(device, config.comm, dump_folder, stop)
    stop.connect()
    if lock is not None:
        _lock_folders(config, lock)
    config = decide_compute_dtype(config, device.type)
    dtype = {"mixed_precision_param": config.training.mixed_precision_param}
    stages = [dataclasses.replace(stage, config=stage.config.changed(training=dtype)) for stage in stages]
    if not on_one_machine():
        load("torchtitan.run.machines:refuse_other_machines")(config, tokenizer)
    meshes = build_meshes(dims, device.type, args)
    set_timeout(config.comm.init_timeout_seconds)

    for sentence in sizes_without_steps(config, stages) if dist.get_rank() == 0 else ():
        logger.warning(sentence)
    builder = StageBuilder(tokenizer, meshes, device, _data_of_run(stages, tokenizer, dims))
    conversions = _open_stages(stages, builder)
    with stages[0].named_in_errors():
        engine, loader, reports = builder.build(stages[0])
    decisions = conversions or [decisions_of(engine.converters)]
    folder = RunFolder(dump_folder, config, *(_log_conversion(stages, decisions) if any(decisions) else ()))
    if engine.full.text:
        logger.info(f"after conversion:\n{engine.full.text}")
    if engine.converters:
        _log_cost_of_low_precision(engine)

    checkpoints = _build_checkpoints(stages, engine, tokenizer, folder, config)
    trainer = Trainer(stages, builder, engine, loader, checkpoints, folder, stop, Hooks([*reports]))
    del engine, loader, reports  # otherwise a resume in a later stage would hold two models at a time
    trainer.load_checkpoint()
    stop.step_on_disk = checkpoints.newest_on_disk
    return trainer


def _load_tokenizer(config: JobConfig) -> Tokenizer:
    copy = Path(config.job.dump_folder) / COPY
    try:
        return load_tokenizer(config.model.tokenizer_path, config.training.add_bos, config.training.add_eos)
    except DataError as error:
        hint = f" The tokenizer of the run in {copy.parent} is in {copy}." if copy.is_dir() else ""
        raise DataError(f"{error}{hint}") from None


def _check_memory_of_stages(stages: Sequence[Stage], dims: ParallelDims, device: Device) -> None:
    """On a GPU, by rank 0, and before there is a process group: a plan simulates one."""
    if world().rank > 0 or device.type != "cuda" or not stages[0].title:
        return
    this_device = load("torchtitan.tools.plan.devices:this_device")
    load("torchtitan.tools.plan.planner:check_memory_of_stages")(stages, dims, this_device(device))


def _lock_folders(config: JobConfig, lock: FolderLock) -> None:
    take = functools.partial(take_locks, lock, Path(config.job.dump_folder), config.checkpoint)
    tokens = raise_on_all_ranks(take if dist.get_rank() == 0 else dict[str, str])
    if not on_one_machine():
        check_folders = load("torchtitan.run.machines:check_folders")
        raise_on_all_ranks(functools.partial(check_folders, config, from_rank_0(lambda: tokens)))


def _data_of_run(stages: Sequence[Stage], tokenizer: Tokenizer, dims: ParallelDims) -> DataOfRun:
    """Opens the training data of all stages."""
    trainings, validations = zip(*((stage.config.training, stage.config.validation) for stage in stages), strict=True)
    hold_out = any(own.enabled and own.dataset is None and own.dataset_path is None for own in validations)
    try:
        places = places_of_sources(trainings, tokenizer, hold_out) if len(stages) > 1 else None
    except UserError:
        for stage in stages:
            with stage.named_in_errors():
                places_of_sources([stage.config.training], tokenizer, hold_out)
        raise
    return DataOfRun(
        rows=math.lcm(*(stage.config.training.sequences_per_step(dims.dp) for stage in stages)),
        seq_len=trainings[0].seq_len,
        hold_out=hold_out,
        places=places,
    )


def _open_stages(stages: Sequence[Stage], builder: "StageBuilder") -> list[list[Decision]]:
    """Opens the stages of a run that has several, so that no mistake in a later one stops the run when it begins.
    Returns what each decided of its layers. Collective.

    Raises:
        UserError: a stage's data cannot be read, or its model differs from the first one's in parameters or buffers.
    """
    if len(stages) == 1:
        return []
    models = [_converted(stage, builder) for stage in stages]
    first, *shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()} for model, _ in models]
    for stage, own in zip(stages[1:], shapes, strict=True):
        if different := sorted(dict(own.items() ^ first.items())):
            raise ConfigError(
                f"{stage.title}: {different[0]} is not the same in all stages, whose weights go from one to the next; "
                "list the converter that changes it in model.converters, for the whole run."
            )
    for stage in stages[1:]:
        with stage.named_in_errors():
            builder.read_first_batches(stage.config)
    return [decisions_of(converters) for _, converters in models]


def _converted(stage: Stage, builder: "StageBuilder") -> tuple[nn.Module, list[ModelConverter]]:
    """The converted model of a stage, on the meta device."""
    config, dims, device = stage.config, builder.meshes.dims, builder.device
    with stage.named_in_errors():
        args = find_model_args(config.model, builder.tokenizer.vocab_size)
        target = conversion_target(config, MODELS.get(config.model.name), device, shards=dims.fsdp)
        model, converters = build_converted_model(config, args, target)
        check_groups(model, config.optimizer)
        if config.evaluation.tasks:
            find_tasks = load("torchtitan.tools.evaluation.find_tasks:find_tasks")
            raise_on_all_ranks(lambda: find_tasks(config.evaluation, config.validation, config.training))
    return model, converters


def _build_checkpoints(
    stages: Sequence[Stage], engine: Engine, tokenizer: Tokenizer, folder: RunFolder, config: JobConfig
) -> Checkpoints:
    if config.checkpoint.enable_checkpoint or config.checkpoint.initial_load_path or len(stages) > 1:
        manager: Checkpoints = load("torchtitan.run.checkpoints:build_manager")(engine, tokenizer, folder, config)
        return manager
    return Checkpoints(joined(folder.path, config.checkpoint.folder))


def take_locks(lock: FolderLock, dump_folder: Path, checkpoint: Checkpoint) -> dict[str, str]:
    """Locks the dump folder, and a checkpoint folder elsewhere, which another run may also use. Returns the token of
    each lock, by the key that names the folder."""
    lock.take()
    tokens = {lock.key: lock.token}
    key = "checkpoint.folder"
    try:
        folder = joined(dump_folder, checkpoint.folder)
    except PathError as error:
        raise ConfigError(f"{key}: {error}") from None
    if checkpoint.enable_checkpoint and (
        is_remote(folder) or not folder.resolve().is_relative_to(dump_folder.resolve())
    ):
        other = lock.others.enter_context(
            _object_lock(folder, key, dump_folder) if is_remote(folder) else FolderLock(folder, key)
        )
        other.take()
        tokens[other.key] = other.token
    return tokens


@dataclasses.dataclass(frozen=True)
class StageBuilder:
    """Builds what a run trains with in each stage, from what all of them have in common."""

    tokenizer: Tokenizer
    meshes: Meshes
    device: Device
    data: DataOfRun

    def build(self, stage: Stage) -> tuple[Engine, Loader, list[Report]]:
        """Builds a stage, whose weights are uninitialized. Collective.

        Raises:
            UserError: data, tasks or model cannot be used as configured.
        """
        config = stage.config
        args = find_model_args(config.model, self.tokenizer.vocab_size)
        loader = self._loader(config)  # starts prefetching
        validation_loader = self._validation_loader(config)
        # Model on the meta device, converters, parallelism, parameters, optimizer.
        rows = config.training.sequences_per_step(self.meshes.dims.dp)
        engine = build_engine(config, self.meshes, self.device, args, rows)
        return engine, loader, self._reports(config, engine, validation_loader)

    def read_first_batches(self, config: JobConfig) -> None:
        """Reads the first batches of a later stage, and forgets them. Collective.

        Raises:
            UserError: they cannot be read.
        """
        loader = self._loader(config)
        raise_on_all_ranks(loader.wait)
        loader.close()
        self._validation_loader(config)

    def reads_as(self, config: JobConfig, state: Mapping[str, Any]) -> bool:
        """Whether a stage reads the data that a loader's state is of. Collective."""
        loader = self._loader(config)
        try:
            loader.load_state_dict(state)
        except CheckpointError:
            return False
        finally:
            loader.close()
        return True

    def with_rows(self, rows: int) -> "StageBuilder":
        """With documents dealt to so many rows, as in a checkpoint."""
        return dataclasses.replace(self, data=self.data._replace(rows=rows))

    def _loader(self, config: JobConfig) -> Loader:
        loader = build_loader(
            config.training,
            self.tokenizer,
            global_batch_size=config.training.sequences_per_step(self.meshes.dims.dp),
            hold_out=self.data.hold_out,
            run=self.data,
            **self._place,
        )
        identity = {f"training data: {key}": value for key, value in loader.identity.items()}
        refuse_differences(identity, "all machines need the same data, and Python for python_stdlib")
        return loader

    def _validation_loader(self, config: JobConfig) -> "ValidationLoader | None":
        """The validation data, of which the first batch is read; None without validation. Collective."""
        validation = config.validation
        if not validation.enabled:
            return None
        # The other ranks are in a collective meanwhile.
        patience = min(config.training.retry_seconds, config.comm.train_timeout_seconds // 2)
        loader: ValidationLoader = load("torchtitan.data:build_validation_loader")(
            validation, config.training, self.tokenizer, **self._place, retry_seconds=patience
        )
        raise_on_all_ranks(loader.prepare)
        return loader

    @property
    def _place(self) -> dict[str, Any]:
        return {
            "dp_rank": self.meshes.dp_rank,
            "dp_size": self.meshes.dims.dp,
            "pin_memory": self.device.type == "cuda",
        }

    def _reports(self, config: JobConfig, engine: Engine, validation_loader: "ValidationLoader | None") -> list[Report]:
        validation = config.validation
        reports = [Report("validation_loss", validation.freq, validate, validation_loader)] if validation_loader else []
        if config.evaluation.tasks or (validation.enabled and validation.sample_prompts):
            reports += load("torchtitan.tools.evaluation.reports:build_reports")(engine, self.tokenizer)
        return reports
