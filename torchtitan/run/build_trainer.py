"""Builds all parts of a run, in dependency order, and the trainer that drives them."""

import contextlib
import dataclasses
import functools
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.checkpoint import CheckpointManager
from torchtitan.checkpoint.tokenizer import COPY, identity_of
from torchtitan.config import JobConfig, to_toml
from torchtitan.config.output import Checkpoint
from torchtitan.data import build_loader, build_validation_loader, load_tokenizer
from torchtitan.data.fingerprints import fingerprints
from torchtitan.device import Device
from torchtitan.engine.engine import build_engine
from torchtitan.engine.model_args import describe_parametrization, find_model_args
from torchtitan.errors import ConfigError, DataError
from torchtitan.evaluation.evaluator import Evaluator
from torchtitan.evaluation.find_tasks import find_tasks
from torchtitan.evaluation.samples import Sampler
from torchtitan.evaluation.scoring import scorer_of_run
from torchtitan.interchange import Exchange, published
from torchtitan.interchange.tokenizer_files import tokenizer_files
from torchtitan.launcher.folder_lock import FolderLock
from torchtitan.launcher.signals import Stop
from torchtitan.logging import logger
from torchtitan.models import MODELS
from torchtitan.optim.skip_step import UpdateGuard
from torchtitan.parallel.dims import ParallelDims, build_meshes
from torchtitan.parallel.object_collectives import broadcast_from_rank_0, raise_on_all_ranks, refuse_differences
from torchtitan.parallel.process_group import init_process_group, on_one_machine, set_timeout, world_from_environment
from torchtitan.report.compare import flat
from torchtitan.run.compute_dtype import SLOW_BFLOAT16, decide_compute_dtype
from torchtitan.run.run_folder import RunFolder
from torchtitan.run.startup_log import log_conversion, log_cost_of_low_precision
from torchtitan.run.trainer import Trainer


def build_trainer(
    config: JobConfig,
    dims: ParallelDims,
    global_batch_size: int,
    device: Device,
    stop: Stop | None = None,
    lock: FolderLock | None = None,
) -> Trainer:
    """Builds the trainer, top to bottom. Collective.

    Args:
        config: checked configuration (`config_checks.check`).
        dims: degrees of parallelism.
        global_batch_size: sequences per optimizer step.
        device: this process's device.
        stop: says when the run is to save and exit.
        lock: the dump folder's lock, taken here; None where no other run can use the folder.

    Raises:
        UserError: data, tokenizer, model or checkpoint cannot be used as configured.
    """
    training, dump_folder = config.training, Path(config.job.dump_folder)
    stop = stop or Stop()
    if config.job.print_args:
        logger.info(f"configuration:\n{to_toml(config)}")
    closing = contextlib.ExitStack()
    if training.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    torch.manual_seed(training.seed)

    # Tokenizer first: a wrong path fails before anything expensive begins.
    spec, copy = MODELS.get(config.model.name), dump_folder / COPY
    try:
        tokenizer = load_tokenizer(config.model.tokenizer_path, training.add_bos, training.add_eos)
    except DataError as error:
        raise DataError(
            f"{error} That of the run in {dump_folder} is in {copy}." if copy.is_dir() else str(error)
        ) from None
    args = find_model_args(config.model, tokenizer.vocab_size)
    tasks = find_tasks(config.evaluation, config.validation, training)

    # Process group and mesh.
    init_process_group(device, config.comm, dump_folder, stop)
    closing.callback(dist.destroy_process_group)
    stop.connect()
    if lock is not None:
        take = functools.partial(take_locks, lock, dump_folder, config.checkpoint, closing)
        tokens = raise_on_all_ranks(take if dist.get_rank() == 0 else dict[str, str])
        if not on_one_machine():
            raise_on_all_ranks(functools.partial(check_folders, config, broadcast_from_rank_0(lambda: tokens)))
    config = decide_compute_dtype(config, device.type)
    if not on_one_machine():
        refuse_differences(_keys(config), "start all machines with the same configuration")
        files = {**fingerprints(training, config.validation), "model.tokenizer_path": tokenizer.fingerprint}
        of_machine = files if world_from_environment()[1] == 0 else {}
        refuse_differences(of_machine, "copy the same files to all machines")
    meshes = build_meshes(dims, device.type, args)
    set_timeout(config.comm.init_timeout_seconds)

    # Data: the loader starts prefetching.
    validation = config.validation
    loader = build_loader(
        training,
        tokenizer,
        dp_rank=meshes.dp_rank,
        dp_size=dims.dp,
        global_batch_size=global_batch_size,
        hold_out=validation.enabled and validation.dataset is None and validation.dataset_path is None,
        pin_memory=device.type == "cuda",
    )
    closing.callback(loader.close)
    identity = {f"training data: {key}": value for key, value in loader.identity.items()}
    refuse_differences(identity, "all machines need the same data, and Python for python_stdlib")
    validation_loader = None
    if validation.enabled:
        validation_loader = build_validation_loader(
            validation,
            training,
            tokenizer,
            dp_rank=meshes.dp_rank,
            dp_size=dims.dp,
            pin_memory=device.type == "cuda",
        )
        raise_on_all_ranks(validation_loader.prepare)

    # Model on the meta device, converters, parallelism, parameters, optimizer.
    engine = build_engine(config, meshes, device, args, global_batch_size)
    conversion = log_conversion(engine)
    log_cost_of_low_precision(engine)

    scorer = scorer_of_run(engine)
    prompts = validation.sample_prompts if validation.enabled else []

    # Checkpoint.
    boundaries = (training.add_bos, training.add_eos)
    if config.checkpoint.enable_checkpoint and config.checkpoint.last_save_in_hf:  # or it would fail at the end
        write = functools.partial(tokenizer_files, config.model.tokenizer_path, *boundaries)
        raise_on_all_ranks(write if dist.get_rank() == 0 else lambda: None)
    exchange = Exchange(
        published(spec, args, str(copy), training.seq_len, *boundaries),
        None if "tokenizer" in config.checkpoint.exclude_from_loading else tokenizer,
    )
    folder = RunFolder(dump_folder, config, conversion)
    checkpoints = CheckpointManager(
        config.checkpoint,
        dump_folder,
        engine.model,
        engine.optimizer,
        # Not only sizes: the moments of an optimizer are as large as the gradients of its parametrization.
        identity={**dataclasses.asdict(args), "parametrization": describe_parametrization(config.model)},
        about={
            "layout": {"processes": dist.get_world_size(), **dataclasses.asdict(dims)},
            "configuration": dataclasses.asdict(config),
        },
        exchange=exchange,
        tokenizer=identity_of(tokenizer),
        on_saved=lambda step: folder.record_event(step, "checkpoint"),
        last_step=training.steps,
        save_timeout_seconds=config.comm.save_timeout_seconds,
    )
    closing.callback(checkpoints.wait)
    float32_instead = training.mixed_precision_param == "auto" and config.training.mixed_precision_param == "float32"
    trainer = Trainer(
        config=config,
        engine=engine,
        loader=loader,
        validation_loader=validation_loader,
        checkpoints=checkpoints,
        guard=UpdateGuard(training, folder.record_skipped_update),
        folder=folder,
        stop=stop,
        closing=closing,
        global_batch_size=global_batch_size,
        dtype_reason=SLOW_BFLOAT16 if float32_instead else "",
        evaluator=Evaluator(tasks, tokenizer, scorer) if tasks else None,
        sampler=Sampler(prompts, tokenizer, scorer) if prompts else None,
    )
    trainer.load_checkpoint()
    stop.step_on_disk = lambda: checkpoints.step_on_disk
    return trainer


def take_locks(
    lock: FolderLock, dump_folder: Path, checkpoint: Checkpoint, closing: contextlib.ExitStack
) -> dict[str, str]:
    """Takes the dump folder's lock, and that of a checkpoint folder elsewhere, which another run may also use.

    Returns:
        The token of each, by the key that names the folder.
    """
    lock.take()
    tokens = {lock.key: lock.token}
    folder = dump_folder / checkpoint.folder
    if checkpoint.enable_checkpoint and not folder.resolve().is_relative_to(dump_folder.resolve()):
        other = closing.enter_context(FolderLock(folder, "checkpoint.folder"))
        other.take()
        tokens[other.key] = other.token
    return tokens


def check_folders(config: JobConfig, tokens: dict[str, str]) -> None:
    """Checks that this rank sees the folders that rank 0 has locked. Without checkpoints each machine may have its own.

    Raises:
        ConfigError: it does not: its part of a checkpoint would be written elsewhere.
    """
    dump_folder = Path(config.job.dump_folder)
    folders = {"job.dump_folder": dump_folder, "checkpoint.folder": dump_folder / config.checkpoint.folder}
    for key, token in tokens.items() if dist.get_rank() > 0 else ():
        if not FolderLock(folders[key], key).sees(token):
            problem = (
                f"{key}: {folders[key]} on {platform.node()} (rank {dist.get_rank()}) is not the folder that rank 0 "
                "writes to; choose one on storage that all machines share."
            )
            if config.checkpoint.enable_checkpoint:
                raise ConfigError(problem)
            logger.warning(problem)


def _keys(config: JobConfig) -> dict[str, Any]:
    """The keys that all machines must agree on: not where files lie."""
    values = flat({name: section for name, section in dataclasses.asdict(config).items() if name != "job"})
    places = {key for key, value in values.items() if key.endswith(("path", "folder")) and not isinstance(value, bool)}
    return {key: value for key, value in values.items() if key not in places}
