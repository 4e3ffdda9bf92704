"""Checks across keys, before a process group or a model is built. All mistakes are reported at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryFile

from torchtitan.config import JobConfig
from torchtitan.config.fields import spelled
from torchtitan.config.manager import read_toml
from torchtitan.config.system import Parallelism
from torchtitan.config.training import Model
from torchtitan.converters import CONVERTERS
from torchtitan.data.datasets import DATASETS
from torchtitan.engine.model_args import find_model_args, sizes_of
from torchtitan.engine.stages import Stage, parse_stages
from torchtitan.errors import ConfigError, UserError, counted, nearest
from torchtitan.logging import logger
from torchtitan.models import MODELS
from torchtitan.optim.optimizer import OPTIMIZERS, optimizers_with
from torchtitan.optim.parameters import WITHOUT_DECAY
from torchtitan.parallel.dims import ParallelDims, find_dims
from torchtitan.registry import deferred, load
from torchtitan.world import number_in, world

Conflicts = Callable[..., Iterator[str]]
_model_conflicts: Conflicts = deferred("torchtitan.parallel.layout_checks:model_conflicts")
_schedule_conflicts: Conflicts = deferred("torchtitan.parallel.pipeline:schedule_conflicts")
_pipeline_conflicts: Conflicts = deferred("torchtitan.parallel.pipeline:pipeline_conflicts")

PARTS_OF_CHECKPOINT = ["model", "optimizer", "dataloader", "train_state", "tokenizer"]
# Keys that have an effect only together with others. A condition is written as messages show it: keys of which one must
# be set, or must be `above` a number or none, or must have one of the values after ` = `.
REFUSED = {  # a condition: the section and its keys that are an error without it
    "job.plan": "job.plan_suggest simulate_world_size simulate_device simulate_expert_load",
    "checkpoint.enable_checkpoint": "checkpoint.load_step create_seed_checkpoint",
    "checkpoint.initial_load_path": "checkpoint.continue_from_path",
    "parallelism.expert_parallel_degree above 1": "moe.all_to_all_dtype",
    "optimizer.name = {small_states}": "optimizer.state_dtype",
    "optimizer.name = AdamWFp8": "optimizer.second_moment",
    "training.train_on": "training.chat_template long_conversations",
}
REPORTED = {  # a condition: the section, or some of its keys, that are reported without it
    "model.parametrization = mup": "model.mup_base_flavor",
    "validation.enabled": "validation.freq steps sample_prompts",
    "validation.enabled or evaluation.tasks": "validation.dataset dataset_path text_column local_batch_size",
    "validation.dataset or validation.dataset_path or evaluation.tasks": "validation.text_column",
    "evaluation.tasks": "evaluation.tasks freq num_fewshot limit",
    "evaluation.tasks or validation.enabled": "evaluation.at_start",
    "checkpoint.enable_checkpoint": "checkpoint.folder interval last_save_model_weights_only last_save_in_hf "
    "async_mode keep_latest_k keep_every enable_first_step_checkpoint",
    "checkpoint.enable_checkpoint or checkpoint.initial_load_path": "checkpoint.exclude_from_loading",
    "checkpoint.last_save_model_weights_only or checkpoint.last_save_in_hf": "checkpoint.export_dtype",
    "checkpoint.initial_load_path": "checkpoint.initial_load_model_weights_only",
    "profiling.enable_profiling or profiling.enable_memory_snapshot": "profiling",
    "profiling.enable_memory_snapshot": "profiling.save_memory_snapshot_folder",
    "metrics.enable_tensorboard": "metrics.save_tb_folder",
    "metrics.enable_tensorboard or metrics.trackers": "metrics.save_for_all_ranks",
    "parallelism.pipeline_parallel_degree above 1": "parallelism.pipeline_parallel_split_points "
    "pipeline_parallel_layers_per_stage pipeline_parallel_schedule pipeline_parallel_schedule_csv "
    "pipeline_parallel_microbatch_size",
    "parallelism.context_parallel_degree above 1": "parallelism.context_parallel_rotate_method",
    "parallelism.tensor_parallel_degree above 1": "parallelism.disable_loss_parallel enable_async_tensor_parallel",
    "optimizer.name = {whole_matrices}": "optimizer.muon_momentum muon_nesterov muon_steps muon_coefficients "
    "muon_polar_express muon_row_normalization",
    "optimizer.muon_polar_express = false": "optimizer.muon_coefficients",
    "training.mtp_layers above 0": "training.mtp_loss_coefficient",
    "training.skip_nonfinite or training.skip_grad_norm_outliers": "training.max_skips_in_a_row",
    "training.dataset_path or training.dataset_mixture or validation.dataset_path": "training.cache_gb "
    "max_document_mb token_dtype token_separator",
    "training.dataset_mixture = []": "training.dataset dataset_path",
    "lr_scheduler.decay_ratio above 0": "lr_scheduler.decay_type lr_min",
    "moe.balance = bias": "moe.bias_update_speed",
    "moe.balance = loss": "moe.loss_coefficient",
    "activation_checkpoint.mode = selective": "activation_checkpoint.selective_ac_option",
}


def check(config: JobConfig, world_size: int, device_type: str) -> ParallelDims:
    """The degrees of parallelism of `check_run`, for code that needs no stages."""
    return check_run(config, world_size, device_type)[0]


def check_run(config: JobConfig, world_size: int, device_type: str) -> tuple[ParallelDims, list[Stage]]:
    """Checks the configuration as a whole. Returns its degrees of parallelism for so many processes, and its stages.
    Raises a ConfigError with one sentence per mistake."""
    problems: list[str] = []
    dims = find_dims(config.parallelism, world_size, problems)
    parsed: list[Stage] = []
    try:
        parsed = parse_stages(config, dims.dp if dims else 1)
    except ConfigError as error:
        problems += error.problems
    stages = [(stage.title, stage.config) for stage in parsed] or [("", config)]
    by_stage = [_problems(own, dims, world_size, device_type) for _, own in stages]
    for (title, _), sentences in zip(stages, by_stage, strict=True):
        for sentence in sentences:
            of_run = not title or (len(stages) > 1 and all(sentence in others for others in by_stage))
            problems.append(sentence if of_run else f"{title}: {sentence.removeprefix('model.converters: ')}")
    problems += _folder_problems(Path(config.job.dump_folder), config.model)
    if problems or dims is None:
        raise ConfigError(*dict.fromkeys(problems))
    for sentence in _without_effect(config, {title: _unused_keys(own) for title, own in stages}):
        logger.info(sentence)
    return dims, parsed


def _without_effect(config: JobConfig, unused: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The sentences of `unused` (by title of a stage) to log: on keys unused in every stage, or set by the stage."""
    first, *others = unused.values()
    of_run = [sentence for sentence in first if all(sentence in other for other in others)]
    yield from of_run
    for entry in config.stage.entries:
        keys = {f"{section}.{key}" for section, values in entry.sections.items() for key in values}
        for sentence in unused.get(title := f"stage {entry.name}", ()):
            if sentence not in of_run and keys & {*sentence.partition(":")[0].split(", ")}:
                yield f"{title}: {sentence}"


def _problems(config: JobConfig, dims: ParallelDims | None, world_size: int, device_type: str) -> list[str]:
    """One sentence per mistake in the configuration of a stage."""
    problems: list[str] = []
    for attempt in _lookups(config):
        try:
            attempt()
        except ConfigError as error:
            problems += error.problems
    problems += _refused_keys(config)
    if config.parallelism.pipeline_parallel_schedule != Parallelism.pipeline_parallel_schedule:
        problems += _schedule_conflicts(config.parallelism)
    problems += _conflicts(config, world_size, device_type)
    if config.optimizer.name in OPTIMIZERS.names():
        problems += _optimizer_conflicts(config)
    if dims is not None:
        problems += [*_batch_conflicts(config, dims), *_layout_conflicts(config, dims)]
    return problems


def _lookups(config: JobConfig) -> Iterator[Callable[[], object]]:
    """Calls that raise a ConfigError if a name is unknown, or the thing it names does not fit."""
    model = config.model
    yield partial(sizes_of, model)
    yield partial(OPTIMIZERS.get, config.optimizer.name)
    yield from (partial(CONVERTERS.get, name) for name in model.converters)
    for name in config.metrics.trackers:
        yield partial(load("torchtitan.metrics.trackers:TRACKERS").get, name)
    # Names are checked even if unused: a typo in a disabled feature would fail once it is enabled.
    yield partial(DATASETS.get, config.training.dataset)
    yield partial(DATASETS.get, config.validation.dataset or "c4", "validation.dataset")
    if model.parametrization != "standard":
        yield lambda: MODELS.get(model.name).flavor(model.mup_base_flavor, "model.mup_base_flavor")
    if config.checkpoint.last_save_in_hf:
        yield partial(_check_export, config)


def _check_export(config: JobConfig) -> None:
    """Whether the model of the last step can be published; better now than after the run."""
    key = "checkpoint.last_save_in_hf"
    spec, args = MODELS.get(config.model.name), sizes_of(config.model).with_vocab_size(1)
    if spec.naming is None:
        raise ConfigError(
            f"{key}: the model family {config.model.name} has no Hugging Face weight names (ModelSpec.hf); unset it."
        )
    try:
        spec.naming.config(args)
    except ValueError as error:
        raise ConfigError(f"{key}: {str(error).removesuffix('.')}; unset it.") from None
    if args.moe is not None and config.moe.balance == "bias" and not spec.naming.publishes_expert_bias:
        raise ConfigError(
            f'{key}: with moe.balance = "bias", the router gets biases that transformers has no place for; set '
            'moe.balance to "loss" or "none", or unset it.'
        )


def _conflicts(config: JobConfig, world_size: int, device_type: str) -> Iterator[str]:
    checkpoint, job, parallelism, float8 = config.checkpoint, config.job, config.parallelism, config.float8
    converters, cpu, bound = config.model.converters, device_type == "cpu", float8.weight_scale == "bound"
    for key, noun, names, known in (
        ("optimizer.no_weight_decay", "group", config.optimizer.no_weight_decay, [*WITHOUT_DECAY]),
        ("checkpoint.exclude_from_loading", "part", checkpoint.exclude_from_loading, PARTS_OF_CHECKPOINT),
    ):
        for name in names:
            if name not in known:
                yield f"{key}: unknown {noun} {name!r}{nearest(name, known)}; known: {', '.join(known)}."
    if len({*converters}) < len(converters):
        yield "model.converters: a converter is listed twice; list it once."
    if bound and config.model.parametrization == "mup":
        yield (
            "float8.weight_scale = bound assumes one learning rate for all weights, but model.parametrization = mup "
            "has several: use measured, or unset one of them."
        )
    if config.training.enable_cpu_offload and "float8" in converters:
        for key, is_set in (
            ("weight_scale = bound", bound),
            ("precompute_float8_dynamic_scale_for_fsdp", float8.precompute_float8_dynamic_scale_for_fsdp),
        ):
            if is_set:
                yield (
                    f"float8.{key} has no effect with training.enable_cpu_offload: FSDP rounds a copy of each weight "
                    "on the GPU, which has no scale; unset one of them."
                )
    rounds = config.training.mixed_precision_reduce != "float32" and config.training.mixed_precision_param == "float32"
    if rounds and not cpu:
        yield (
            "training.mixed_precision_reduce = bfloat16 is for gradients that are computed in bfloat16: set it to "
            "float32, or training.mixed_precision_param = bfloat16."
        )
    if cpu and config.training.enable_cpu_offload:
        yield "training.enable_cpu_offload needs a GPU: on CPU everything is already in CPU memory; unset it."
    if cpu and config.profiling.enable_memory_snapshot:
        yield "profiling.enable_memory_snapshot needs a GPU; unset it (profiling.enable_profiling works on CPU too)."
    if parallelism.enable_async_tensor_parallel and parallelism.tensor_parallel_degree > 1:
        needs = "parallelism.enable_async_tensor_parallel needs"
        if not config.training.compile:
            yield f"{needs} the compiler: set training.compile = true, or unset it."
        if device_type != "cuda":
            yield f"{needs} symmetric memory of CUDA devices, but this run is on {device_type}; unset it."
    if checkpoint.keep_latest_k == 1:
        yield (
            "checkpoint.keep_latest_k = 1 would leave no checkpoint if the newest is damaged; use 2, or 0 to keep all."
        )
    if cpu and checkpoint.async_mode == "async_with_pinned_mem":
        yield "checkpoint.async_mode = async_with_pinned_mem needs a GPU; use async."
    if world_size > 1 and checkpoint.create_seed_checkpoint:
        yield "checkpoint.create_seed_checkpoint needs one process (NGPU=1); any layout can load the result."
    if job.plan and job.simulate_expert_load > parallelism.expert_parallel_degree:
        yield (
            f"job.simulate_expert_load = {job.simulate_expert_load:g}: a rank gets at most "
            f"parallelism.expert_parallel_degree = {parallelism.expert_parallel_degree} times the mean; lower it."
        )
    if job.plan and world().size > 1:
        yield (
            "job.plan needs one process, whatever the world size; start one (NGPU=1 or `python train.py`) and set "
            "--job.simulate_world_size."
        )
    recompute = config.activation_checkpoint
    op = recompute.mode == "selective" and recompute.selective_ac_option == "op"
    if recompute.swiglu_dtype is not None and (recompute.mode == "full" or op):
        yield (
            f"activation_checkpoint.swiglu_dtype = {recompute.swiglu_dtype} is for layers that keep their activations, "
            f"but mode = {recompute.mode}{' with selective_ac_option = op' if op else ''} recomputes all layers: unset "
            "it, or set activation_checkpoint.mode = none."
        )


def _optimizer_conflicts(config: JobConfig) -> Iterator[str]:
    optimizer, training, bound = config.optimizer, config.training, config.float8.weight_scale == "bound"
    name, entry = optimizer.name, OPTIMIZERS.get(optimizer.name)
    smaller = optimizer.state_dtype != "float32" or training.weight_dtype != "float32"
    groups = [(f"[[optimizer.group]] {number}", group) for number, group in enumerate(optimizer.group, 1)]
    for title, group in groups:
        if not group.parameters:
            yield (
                f'{title} names no parameters; set its key parameters to names or globs, such as ["tok_embeddings"].'
            )
    for title, group in groups:
        if group.algorithm is not None and not entry.whole_matrices:
            yield (
                f"{title}: algorithm applies only to optimizer.name = Muon; remove it, or change optimizer.name = "
                f"{name}."
            )
    if config.model.parametrization == "mup" and not entry.mup:
        yield (
            f"model.parametrization = mup has learning rates for {', '.join(optimizers_with(lambda entry: entry.mup))} "
            f"only; change optimizer.name = {name}, or unset it."
        )
    if not hasattr(config, entry.section):
        yield (
            f"optimizer.name = {name} reads the section [{entry.section}], which is not defined: set "
            "experimental.custom_args_module to the module that defines it."
        )
    if bound and optimizer.group:
        yield (
            "float8.weight_scale = bound assumes one learning rate and one pair of betas for all weights: remove "
            "[[optimizer.group]], or use measured."
        )
    if bound and smaller:
        yield (
            "float8.weight_scale = bound needs float32 updates: with optimizer.state_dtype or training.weight_dtype in "
            "bfloat16, rounding could exceed the bound. Use measured, or float32."
        )
    if training.weight_dtype != "float32" and not entry.bfloat16_weights:
        yield (
            f"training.weight_dtype = {training.weight_dtype} needs an optimizer with stochastic rounding, since most "
            "updates are smaller than half the spacing of bfloat16 numbers: use one of "
            f"{', '.join(optimizers_with(lambda entry: entry.bfloat16_weights))}, not {name}."
        )
    ours = entry.state_bytes is not None  # a user's own may read optimizer.implementation
    if optimizer.implementation != "fused" and ours and (smaller or not entry.in_torch):
        yield (
            f"optimizer.implementation = {optimizer.implementation} applies only to torch's float32 optimizers; "
            "unset it."
        )
    if optimizer.early_step_in_backward:
        yield from _early_step_conflicts(config)


def _early_step_conflicts(config: JobConfig) -> Iterator[str]:
    """What cannot be done if each parameter is updated in the backward pass."""
    optimizer, training = config.optimizer, config.training
    before = "optimizer.early_step_in_backward updates parameters before"
    if OPTIMIZERS.get(optimizer.name).whole_matrices:
        yield (
            f"optimizer.early_step_in_backward updates one parameter at a time, but {optimizer.name} divides all "
            "matrices among the ranks, which orthogonalize theirs at the same time: unset it."
        )
    if training.skip_nonfinite or training.skip_grad_norm_outliers is not None:
        yield (
            f"{before} the loss of all ranks and the gradient norm are known, so no update can be skipped: set "
            "training.skip_nonfinite = false and leave training.skip_grad_norm_outliers unset."
        )
    if training.enable_cpu_offload:
        yield f"{before} gradients have been copied to CPU memory: unset training.enable_cpu_offload."


def _batch_conflicts(config: JobConfig, dims: ParallelDims) -> Iterator[str]:
    training, early = config.training, config.optimizer.early_step_in_backward
    rows, local = training.sequences_per_step(dims.dp), training.local_batch_size
    size = local * dims.dp
    after = "optimizer.early_step_in_backward would update parameters after"
    remedy = f"set training.global_batch_size = {size} (local_batch_size x data-parallel ranks)"
    if rows < dims.dp:
        yield (
            f"training.global_batch_size = {rows} is smaller than the number of data-parallel ranks, {dims.dp}: some "
            "would have no sequences; raise it, or start fewer processes."
        )
    elif rows % size:
        yield (
            f"training.global_batch_size = {rows} is not a multiple of training.local_batch_size x data-parallel ranks "
            f"= {local} x {dims.dp} = {size}; make it one."
        )
    if training.mtp_layers >= training.seq_len:
        yield f"training.mtp_layers = {training.mtp_layers} is not less than training.seq_len; lower it."
    if early and dims.pp > 1:
        yield f"{after} each pipeline micro-batch: unset it, or set parallelism.pipeline_parallel_degree = 1."
    if early and rows > size:
        yield f"{after} each of {rows // size} micro-batches: {remedy}, or unset it."
    if training.weight_dtype != "float32" and rows > size:
        yield (
            f"training.weight_dtype = {training.weight_dtype} also stores gradients in that dtype, and summing "
            f"{rows // size} micro-batches in it would lose precision: {remedy}."
        )
    if training.mixed_precision_reduce != "float32":
        reduce = f"training.mixed_precision_reduce = {training.mixed_precision_reduce}"
        if dims.pp > 1:
            yield (
                f"{reduce} would also sum the micro-batches of a pipeline in that dtype: set it to float32, or "
                "parallelism.pipeline_parallel_degree = 1."
            )
        if dims.dp_replicate > 1 and rows > size:
            yield (
                f"{reduce} would also sum {rows // size} micro-batches in that dtype, before replicas sum theirs: set "
                f"it to float32, or {remedy}, or parallelism.data_parallel_replicate_degree = 1."
            )


def _layout_conflicts(config: JobConfig, dims: ParallelDims) -> Iterator[str]:
    """Whether the model can be sharded this way. What prevents building it at all is reported elsewhere."""
    if dims.tp == dims.cp == dims.pp == dims.ep == 1:
        return
    try:
        args = find_model_args(config.model)
    except UserError:
        return
    here = number_in("LOCAL_WORLD_SIZE", dims.tp)
    if here % dims.tp:
        logger.warning(
            f"parallelism.tensor_parallel_degree = {dims.tp} spans several machines ({counted(here, 'process')} on "
            "this one): each block waits four times for the network between them; if possible, keep it within one "
            "machine."
        )
    parallelism, training = config.parallelism, config.training
    yield from _model_conflicts(args, dims, training.seq_len, parallelism.context_parallel_rotate_method)
    if dims.pp > 1:
        # Evaluation uses the pipeline of validation.
        validation = config.validation if config.validation.enabled or config.evaluation.tasks else None
        yield from _pipeline_conflicts(args.n_layers, parallelism, training, validation, bool(config.model.converters))


def _folder_problems(folder: Path, model: Model) -> Iterator[str]:
    """Whether the dump folder can be written, and does not belong to a run of another model."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield f"job.dump_folder: {folder} cannot be written ({error.strerror}); choose another folder."
        return
    try:
        saved = read_toml(str(folder / "config.toml")).get("model")
    except ConfigError:
        return  # missing, or truncated by a crash; the run rewrites it
    if isinstance(saved, dict) and saved and _described(saved) != _described(vars(model)):
        yield (
            f"job.dump_folder: {folder} belongs to a run of {_described(saved)}, but this run is "
            f"{_described(vars(model))}; choose another --job.dump_folder."
        )


def _described(model: Mapping[str, object]) -> str:
    """Such as "llama3 8B", or "llama3 8B with model.dim = 512"."""
    sizes = [f"model.{key} = {size}" for key in ("dim", "n_layers") if (size := model.get(key)) not in (None, "none")]
    return f"{model.get('name')} {model.get('flavor')}{' with ' if sizes else ''}{' and '.join(sizes)}"


def _refused_keys(config: JobConfig) -> list[str]:
    """One sentence for each key that is set without what it needs."""
    return [
        f"{key} has no effect without {condition}: set that, or unset {key}."
        for condition, keys in _unmet(REFUSED, config)
        for key in _changed(config, keys)
    ]


def _unused_keys(config: JobConfig) -> list[str]:
    """One sentence per group of keys that are set to non-default values without effect."""
    sentences, reported = [], set()
    for condition, keys in [*_unused_sections(config), *_unmet(REPORTED, config)]:
        if left := [key for key in _changed(config, keys) if key not in reported]:
            reported |= {*left}
            sentences.append(f"{', '.join(left)}: no effect in this run without {condition}")
    return sentences


def _unused_sections(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Sections of converters that the run does not use, and of experts if the model has none, after what they need."""
    sections = {name: CONVERTERS.get(name).section for name in CONVERTERS.names()}
    in_use = {"", *(sections[name] for name in config.model.converters)}
    unused = {section: f"{name} in model.converters" for name, section in sections.items() if section not in in_use}
    if MODELS.get(config.model.name).flavor(config.model.flavor).moe is None:
        unused["moe"] = "a model with experts, such as qwen3_moe"
    return ((condition, section) for section, condition in unused.items())


def _unmet(rules: Mapping[str, str], config: JobConfig) -> Iterator[tuple[str, str]]:
    optimizers = {
        "whole_matrices": " or ".join(optimizers_with(lambda entry: entry.whole_matrices)),
        "small_states": " or ".join(optimizers_with(lambda entry: len(entry.state_dtypes) > 1)),
    }
    filled = ((condition.format(**optimizers), keys) for condition, keys in rules.items())
    return ((condition, keys) for condition, keys in filled if not _holds(condition, config))


def _holds(condition: str, config: JobConfig) -> bool:
    keys, _, accepted = condition.partition(" = ")
    keys, _, limit = keys.partition(" above ")
    values = [attrgetter(key)(config) for key in keys.split(" or ")]
    if accepted:
        return any(spelled(value) in accepted.split(" or ") for value in values)
    return any(value is None or value > float(limit) if limit else value for value in values)


def _changed(config: JobConfig, keys: str) -> list[str]:
    """The keys among these, or in the whole section, that are not at their defaults."""
    section, _, names = keys.partition(".")
    content, default = getattr(config, section), type(getattr(config, section))()
    changed = [field.name for field in fields(content) if getattr(content, field.name) != getattr(default, field.name)]
    return [f"{section}.{name}" for name in changed if not names or name in names.split()]
