"""Checks across keys, before a process group or a model is built. All mistakes are reported at once."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

from torchtitan.checks.unused_keys import refused_keys, unused_keys
from torchtitan.config import JobConfig
from torchtitan.config.manager import read_toml
from torchtitan.config.system import Parallelism
from torchtitan.converters import CONVERTERS
from torchtitan.data.datasets import DATASETS
from torchtitan.engine.model_args import find_model_args, sizes_of
from torchtitan.engine.precision_phases import parse_phases
from torchtitan.errors import ConfigError, UserError, nearest
from torchtitan.logging import logger
from torchtitan.models import MODELS
from torchtitan.optim.optimizer import OPTIMIZERS, optimizers_with
from torchtitan.optim.parameters import WITHOUT_DECAY
from torchtitan.parallel.dims import ParallelDims, find_dims
from torchtitan.parallel.layout_checks import check_model, check_pipeline, check_schedule

PARTS_OF_CHECKPOINT = ["model", "optimizer", "dataloader", "train_state", "tokenizer"]


def check(config: JobConfig, world_size: int, device_type: str) -> ParallelDims:
    """Checks the configuration as a whole and returns its degrees of parallelism.

    Args:
        world_size: number of processes.
        device_type: "cuda" or "cpu".

    Raises:
        ConfigError: with one sentence per mistake.
    """
    problems: list[str] = []
    _collect(problems, lambda: sizes_of(config.model))
    _collect(problems, lambda: OPTIMIZERS.get(config.optimizer.name))
    for name in config.model.converters:
        _collect(problems, lambda name=name: CONVERTERS.get(name))  # type: ignore[misc]
    if config.precision.phase:
        _collect(problems, lambda: parse_phases(config))
    if len(set(config.model.converters)) < len(config.model.converters):
        problems.append("model.converters: a converter is listed twice; list it once.")
    # Names are checked even if unused: a typo in a disabled feature would fail once it is enabled.
    _collect(problems, lambda: DATASETS.get(config.training.dataset))
    _collect(problems, lambda: DATASETS.get(config.validation.dataset or "c4", "validation.dataset"))
    if config.parallelism.pipeline_parallel_schedule != Parallelism.pipeline_parallel_schedule:
        check_schedule(config.parallelism, problems)
    dims = find_dims(config.parallelism, world_size, problems)
    problems += refused_keys(config)
    if dims is not None:
        _check_batch(config, dims, problems)
        _check_parallel(config, dims, device_type, problems)
        _check_one_backward_pass(config, dims, problems)
    _check_parametrization(config, problems)
    _check_optimizer(config, problems)
    _check_checkpoint(config, world_size, device_type, problems)
    _check_plan(config, problems)
    _check_not_built(config, device_type, problems)
    _check_activation_checkpoint(config, problems)
    _check_dump_folder(config, problems)
    if problems or dims is None:
        raise ConfigError(*problems)
    for sentence in unused_keys(config):
        logger.info(sentence)
    return dims


def global_batch_size(config: JobConfig, dims: ParallelDims) -> int:
    """Sequences per optimizer step."""
    given = config.training.global_batch_size
    return config.training.local_batch_size * dims.dp if given == -1 else given


def _collect(problems: list[str], attempt: Callable[[], object]) -> None:
    try:
        attempt()
    except ConfigError as error:
        problems.extend(error.problems)


def _check_export(config: JobConfig) -> None:
    """Whether the model of the last step can be published; better now than after the run."""
    spec = MODELS.get(config.model.name)
    args = sizes_of(config.model)
    key = "checkpoint.last_save_in_hf"
    try:
        if spec.hf is not None:
            spec.hf.to_config(args)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}; unset it.") from None
    if args.moe is not None and config.moe.balance == "bias":
        raise ConfigError(
            f'{key}: with moe.balance = "bias", the router gets biases that transformers has no place for; set '
            'moe.balance to "loss" or "none", or unset it.'
        )


def _check_batch(config: JobConfig, dims: ParallelDims, problems: list[str]) -> None:
    rows, local = global_batch_size(config, dims), config.training.local_batch_size
    if rows < 1:
        problems.append(f"training.global_batch_size must be -1 or above 0, not {rows}.")
    elif rows < dims.dp:
        problems.append(
            f"training.global_batch_size = {rows} is smaller than the number of data-parallel ranks, {dims.dp}: "
            "some would have no sequences; raise it, or start fewer processes."
        )
    elif rows % (local * dims.dp):
        problems.append(
            f"training.global_batch_size = {rows} is not a multiple of training.local_batch_size x data-parallel "
            f"ranks = {local} x {dims.dp} = {local * dims.dp}; make it one."
        )


def _check_parallel(config: JobConfig, dims: ParallelDims, device_type: str, problems: list[str]) -> None:
    """Whether the model can be sharded this way. What prevents building it at all is reported elsewhere."""
    parallelism = config.parallelism
    if parallelism.enable_async_tensor_parallel and dims.tp > 1:
        _check_async_tensor_parallel(config.training.compile, device_type, problems)
    if dims.tp == dims.cp == dims.pp == dims.ep == 1:
        return
    try:
        args = find_model_args(config.model)
    except UserError:
        return
    check_model(args, dims, parallelism, config.training.seq_len, problems)
    if dims.pp > 1:
        from torchtitan.parallel.pipeline import splits_backward  # slow to import

        phases = config.precision.phase
        if (config.model.converters or any(phase.converters for phase in phases)) and splits_backward(parallelism):
            logger.warning(
                f"parallelism.pipeline_parallel_schedule = {parallelism.pipeline_parallel_schedule} computes the "
                "backward GEMMs of low-precision layers twice; 1F1B or Interleaved1F1B are faster with converters"
            )
        # Evaluation uses the pipeline of validation.
        validation = replace(config.validation, enabled=config.validation.enabled or bool(config.evaluation.tasks))
        check_pipeline(args.n_layers, dims, parallelism, config.training, validation, problems)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", dims.tp))
    if here % dims.tp:
        logger.warning(
            f"parallelism.tensor_parallel_degree = {dims.tp} spans several machines ({here} processes on this one): "
            "each block waits four times for the network between them; if possible, keep it within one machine."
        )


def _check_async_tensor_parallel(compiled: bool, device_type: str, problems: list[str]) -> None:
    key = "parallelism.enable_async_tensor_parallel"
    if not compiled:
        problems.append(f"{key} needs the compiler: set training.compile = true, or unset it.")
    if device_type != "cuda":
        problems.append(f"{key} needs symmetric memory of CUDA devices, but this run is on {device_type}; unset it.")


def _check_parametrization(config: JobConfig, problems: list[str]) -> None:
    model, optimizer = config.model, config.optimizer
    if model.parametrization == "standard":
        return
    _collect(problems, lambda: MODELS.get(model.name).flavor(model.mup_base_flavor, "model.mup_base_flavor"))
    known = optimizers_with(lambda entry: entry.mup)
    if optimizer.name not in known:
        problems.append(
            f"model.parametrization = mup has learning rates for {', '.join(known)} only; change optimizer.name = "
            f"{optimizer.name}, or unset it."
        )
    if config.float8.weight_scale == "bound":
        problems.append(
            "float8.weight_scale = bound assumes one learning rate for all weights, but model.parametrization = mup "
            "has several: use measured, or unset one of them."
        )


def _check_optimizer(config: JobConfig, problems: list[str]) -> None:
    optimizer, training = config.optimizer, config.training
    for name in optimizer.no_weight_decay:
        if name not in WITHOUT_DECAY:
            problems.append(
                f"optimizer.no_weight_decay: unknown group {name!r}{nearest(name, list(WITHOUT_DECAY))}; known: "
                f"{', '.join(WITHOUT_DECAY)}."
            )
    if optimizer.name not in OPTIMIZERS.names():
        return  # reported already
    entry = OPTIMIZERS.get(optimizer.name)
    if not hasattr(config, entry.section):
        problems.append(
            f"optimizer.name = {optimizer.name} reads the section [{entry.section}], which is not defined: set "
            "experimental.custom_args_module to the module that defines it."
        )
    for number, group in enumerate(optimizer.group, 1):
        if not group.parameters:
            problems.append(
                f"[[optimizer.group]] {number} names no parameters; set its key parameters to names or globs, such as "
                '["tok_embeddings"].'
            )
        if group.algorithm is not None and not entry.whole_matrices:
            problems.append(
                f"[[optimizer.group]] {number}: algorithm applies only to optimizer.name = Muon; remove it, or change "
                f"optimizer.name = {optimizer.name}."
            )
    if optimizer.group and config.float8.weight_scale == "bound":
        problems.append(
            "float8.weight_scale = bound assumes one learning rate and one pair of betas for all weights: remove "
            "[[optimizer.group]], or use measured."
        )
    smaller = optimizer.state_dtype != "float32" or training.weight_dtype != "float32"
    if smaller and config.float8.weight_scale == "bound":
        problems.append(
            "float8.weight_scale = bound needs float32 updates: with optimizer.state_dtype or training.weight_dtype "
            "in bfloat16, rounding could exceed the bound. Use measured, or float32."
        )
    if training.weight_dtype != "float32" and not entry.bfloat16_weights:
        problems.append(
            f"training.weight_dtype = {training.weight_dtype} needs an optimizer with stochastic rounding, since most "
            "updates are smaller than half the spacing of bfloat16 numbers: use one of "
            f"{', '.join(optimizers_with(lambda entry: entry.bfloat16_weights))}, not {optimizer.name}."
        )
    is_ours = entry.state_bytes is not None  # a user's own may read the key
    if optimizer.implementation != "fused" and is_ours and (smaller or not entry.in_torch):
        problems.append(
            f"optimizer.implementation = {optimizer.implementation} applies only to torch's float32 optimizers; "
            "unset it."
        )
    if not all(map(math.isfinite, optimizer.muon_coefficients)):
        found = ", ".join(f"{number:g}" for number in optimizer.muon_coefficients)
        problems.append(f"optimizer.muon_coefficients must be finite numbers, not {found}.")
    if not optimizer.early_step_in_backward:
        return
    if optimizer.ema_decay is not None:
        problems.append(
            "optimizer.early_step_in_backward updates one parameter at a time, but optimizer.ema_decay averages all "
            "weights after the update: unset one of them."
        )
    if entry.whole_matrices:
        problems.append(
            f"optimizer.early_step_in_backward updates one parameter at a time, but {optimizer.name} divides all "
            "matrices among the ranks, which orthogonalize theirs at the same time: unset it."
        )
    key = "optimizer.early_step_in_backward updates parameters before"
    if training.skip_nonfinite or training.skip_grad_norm_outliers is not None:
        problems.append(
            f"{key} the loss of all ranks and the gradient norm are known, so no update can be skipped: set "
            "training.skip_nonfinite = false and leave training.skip_grad_norm_outliers unset."
        )
    if training.enable_cpu_offload:
        problems.append(f"{key} gradients have been copied to CPU memory: unset training.enable_cpu_offload.")


def _check_one_backward_pass(config: JobConfig, dims: ParallelDims, problems: list[str]) -> None:
    """Rejects what does not work with several micro-batches per step."""
    rows, size = global_batch_size(config, dims), config.training.local_batch_size * dims.dp
    early, weight_dtype = config.optimizer.early_step_in_backward, config.training.weight_dtype
    if early and dims.pp > 1:
        problems.append(
            "optimizer.early_step_in_backward would update parameters after each microbatch of a pipeline: unset it, "
            "or set parallelism.pipeline_parallel_degree = 1."
        )
    if rows <= size:
        return
    remedy = f"set training.global_batch_size = {size} (local_batch_size x data-parallel ranks)"
    if early:
        problems.append(
            f"optimizer.early_step_in_backward would update parameters after each of {rows // size} microbatches: "
            f"{remedy}, or unset it."
        )
    if weight_dtype != "float32":
        problems.append(
            f"training.weight_dtype = {weight_dtype} also stores gradients in that dtype, and summing those of "
            f"{rows // size} microbatches in it would lose precision: {remedy}."
        )


def _check_checkpoint(config: JobConfig, world_size: int, device_type: str, problems: list[str]) -> None:
    checkpoint = config.checkpoint
    if checkpoint.keep_latest_k == 1:
        problems.append(
            "checkpoint.keep_latest_k = 1 would leave no checkpoint if the newest is damaged; use 2, or 0 to keep all."
        )
    if config.validation.steps < 1 and config.validation.steps != -1:
        problems.append(f"validation.steps must be -1 (the whole set) or above 0, not {config.validation.steps}.")
    if checkpoint.load_step < -1:
        problems.append(f"checkpoint.load_step must be -1 (the newest) or a step, not {checkpoint.load_step}.")
    for part in checkpoint.exclude_from_loading:
        if part not in PARTS_OF_CHECKPOINT:
            problems.append(
                f"checkpoint.exclude_from_loading: unknown part {part!r}{nearest(part, PARTS_OF_CHECKPOINT)}; "
                f"known: {', '.join(PARTS_OF_CHECKPOINT)}."
            )
    if checkpoint.async_mode == "async_with_pinned_mem" and device_type == "cpu":
        problems.append("checkpoint.async_mode = async_with_pinned_mem needs a GPU; use async.")
    if checkpoint.last_save_in_hf and MODELS.get(config.model.name).hf is None:
        problems.append(
            f"checkpoint.last_save_in_hf: the model family {config.model.name} has no Hugging Face weight names "
            "(ModelSpec.hf); unset it."
        )
    elif checkpoint.last_save_in_hf:
        _collect(problems, lambda: _check_export(config))
    if checkpoint.create_seed_checkpoint and world_size > 1:
        problems.append("checkpoint.create_seed_checkpoint needs one process (NGPU=1); any layout can load the result.")


def is_plan(config: JobConfig) -> bool:
    """Whether to plan the run instead of training."""
    return config.job.plan or config.memory_estimation.enabled


def _check_plan(config: JobConfig, problems: list[str]) -> None:
    if config.memory_estimation.disable_fake_mode:
        problems.append(
            "memory_estimation.disable_fake_mode: a plan has no real tensors; unset it. To measure memory, train a few "
            "steps and see peak_memory_bytes in metrics.jsonl."
        )
    load, degree = config.job.simulate_expert_load, config.parallelism.expert_parallel_degree
    if is_plan(config):
        if load > degree:
            problems.append(
                f"job.simulate_expert_load = {load:g}: a rank gets at most parallelism.expert_parallel_degree = "
                f"{degree} times the mean; lower it."
            )
        if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            problems.append(
                "job.plan needs one process, whatever the world size; start one (NGPU=1 or `python train.py`) and set "
                "--job.simulate_world_size."
            )


def _check_not_built(config: JobConfig, device_type: str, problems: list[str]) -> None:
    """A key that is switched on either works or stops the run; these do not work yet."""
    for key, on in {
        "parallelism.enable_compiled_autograd": config.parallelism.enable_compiled_autograd,
    }.items():
        if on:
            problems.append(f"{key} is not implemented; set it to false.")
    if config.training.enable_cpu_offload and "float8" in config.model.converters:
        precomputed = {
            "precompute_float8_dynamic_scale_for_fsdp": config.float8.precompute_float8_dynamic_scale_for_fsdp,
            "weight_scale = bound": config.float8.weight_scale == "bound",
        }
        problems += [
            f"float8.{key} has no effect with training.enable_cpu_offload: FSDP rounds a copy of each weight on the "
            "GPU, which has no scale; unset one of them."
            for key, is_set in precomputed.items()
            if is_set
        ]
    if config.training.enable_cpu_offload and device_type == "cpu":
        problems.append(
            "training.enable_cpu_offload needs a GPU: on CPU everything is already in CPU memory; unset it."
        )
    if config.profiling.enable_memory_snapshot and device_type == "cpu":
        problems.append(
            "profiling.enable_memory_snapshot needs a GPU; unset it (profiling.enable_profiling works on CPU too)."
        )


def _check_activation_checkpoint(config: JobConfig, problems: list[str]) -> None:
    option = config.activation_checkpoint.selective_ac_option
    if option != "op" and not (option.isdecimal() and int(option) > 0):
        problems.append(
            f"activation_checkpoint.selective_ac_option must be 'op' or a number of layers above 0, not {option!r}."
        )
    mode, dtype = config.activation_checkpoint.mode, config.activation_checkpoint.swiglu_dtype
    if dtype is not None and (mode == "full" or (mode == "selective" and option == "op")):
        problems.append(
            f"activation_checkpoint.swiglu_dtype = {dtype} is for layers that keep their activations, but mode = {mode}"
            f"{' with selective_ac_option = op' if mode == 'selective' else ''} recomputes those of all layers: unset "
            "it, or set activation_checkpoint.mode = none."
        )


def _check_dump_folder(config: JobConfig, problems: list[str]) -> None:
    folder = Path(config.job.dump_folder)
    for key, inside in {
        "checkpoint.folder": config.checkpoint.folder,
        "metrics.save_tb_folder": config.metrics.save_tb_folder,
        "profiling.save_traces_folder": config.profiling.save_traces_folder,
        "profiling.save_memory_snapshot_folder": config.profiling.save_memory_snapshot_folder,
    }.items():
        if ".." in Path(inside).parts:
            problems.append(
                f"{key} = {inside} points outside job.dump_folder; use a folder inside it, or an absolute path."
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        problems.append(f"job.dump_folder: {folder} cannot be written ({error.strerror}); choose another folder.")
        return
    saved = folder / "config.toml"
    if not saved.is_file():
        return
    try:
        theirs = read_toml(str(saved)).get("model", {})
    except ConfigError:
        return  # truncated by a crash; the run rewrites it
    mine = config.model
    sizes = ("none" if size is None else size for size in (mine.dim, mine.n_layers))
    if [theirs.get(key, "none") for key in ("dim", "n_layers")] != [*sizes]:
        problems.append(
            f"job.dump_folder: {folder} belongs to a run with another model.dim or model.n_layers; choose another "
            "--job.dump_folder."
        )
    if (theirs.get("name"), theirs.get("flavor")) != (mine.name, mine.flavor):
        problems.append(
            f"job.dump_folder: {folder} belongs to a run of {theirs.get('name')} {theirs.get('flavor')}, but this run "
            f"is {mine.name} {mine.flavor}; choose another --job.dump_folder."
        )
