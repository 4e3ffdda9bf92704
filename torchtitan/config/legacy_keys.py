"""Keys and values of other torchtitan versions (2024 to early 2026), and their replacements here.

Files and flags that use them still load; each is reported in one line. What cannot be translated is refused, with the
reason.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Values = dict[str, Any]  # "section.key" -> value


@dataclass(frozen=True)
class LegacyKey:
    """A key of another version.

    Attributes:
        now: its replacement, for messages.
        translate: maps its value to current keys and values. Raises a ValueError that says why a value cannot be
            translated.
    """

    now: str
    translate: Callable[[Any], Values]


def renamed(new: str) -> LegacyKey:
    return LegacyKey(f"is now {new}", lambda value: {new: value})


def negated(new: str) -> LegacyKey:
    def translate(value: Any) -> Values:
        given = parse_text(value)
        return {new: not given if isinstance(given, bool) else value}

    return LegacyKey(f"is now the opposite of {new}", translate)


def without_effect(why: str) -> LegacyKey:
    return LegacyKey(f"has no effect here: {why}", lambda _: {})


def accept_only(harmless: list[Any], why: str) -> LegacyKey:
    """For a key of a feature that does not exist here: accepts only values that do not request it."""

    def translate(value: Any) -> Values:
        if parse_text(value) not in harmless:
            raise ValueError(why)
        return {}

    return LegacyKey(f"has no effect here: {why}", translate)


def parse_text(value: Any) -> Any:
    """The value that a flag's text represents."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "none": None, "None": None}.get(value, value)


def as_list(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")]
    return value if isinstance(value, list) else [value]


def if_true(values: Values) -> Callable[[Any], Values]:
    return lambda value: values if parse_text(value) is True else {}


def from_components(value: Any) -> Values:
    if "model" not in as_list(value):
        raise ValueError("only the transformer blocks of the model are compiled; set training.compile = false")
    return {}


def from_modules_per_part(value: Any) -> Values:
    """Each part starts at its first module, which here too must be a layer (or a module after the layers)."""
    parts = parse_text(value)
    if parts in (None, []):
        return {}
    if not (isinstance(parts, list) and all(isinstance(part, list) and part for part in parts)):
        raise ValueError("it must be a list of lists of module names")
    return {"parallelism.pipeline_parallel_split_points": [part[0] for part in parts[1:]]}


def from_checkpoint_folder(value: str) -> Values:
    return {"checkpoint.enable_checkpoint": True, "checkpoint.folder": value} if value else {}


CONVERTS_EXPERTS = "converters take experts as they take linear layers; filter_fqns leaves layers out"
NO_TORCHFT = "TorchFT is not supported; torchrun or ./run_train.sh restarts a run"
RECOMPUTATION = "activation checkpointing has no such option"
IN_STEPS = accept_only(["steps", "step"], "the interval is always in steps; set checkpoint.interval")
NORM = accept_only(
    ["rmsnorm", "compiled_rmsnorm", "fused_rmsnorm", ""],
    "Llama models use RMSNorm; another norm needs an experimental.custom_import",
)
FLOAT8_ON = LegacyKey("is now model.converters = [float8]", if_true({"model.converters": ["float8"]}))

LEGACY_KEYS: Mapping[str, LegacyKey] = {
    "job.use_for_integration_test": without_effect("it is for torchtitan's own tests"),
    "job.print_config": renamed("job.print_args"),
    "job.save_config_file": without_effect("config.toml is always written to job.dump_folder"),
    "job.custom_config_module": renamed("experimental.custom_args_module"),
    "profiling.run_profiler": renamed("profiling.enable_profiling"),
    "profiling.profile_every_x_iter": renamed("profiling.profile_freq"),
    "profiling.profiler_active": without_effect("a trace always covers one step"),
    "profiling.profiler_warmup": without_effect("a trace always covers one step"),
    "metrics.enable_color_printing": negated("metrics.disable_color_printing"),
    "metrics.rank_0_only": negated("metrics.save_for_all_ranks"),
    "model.hf_assets_path": renamed("model.tokenizer_path"),
    "model.norm_type": NORM,
    "model.use_flex_attn": without_effect("the attention kernel is chosen automatically, by the mask"),
    "model.attn_mask_type": LegacyKey(
        "is now training.document_mask (true for block_causal)",
        lambda value: {"training.document_mask": value == "block_causal"},
    ),
    "optimizer.fused": LegacyKey(
        "is now optimizer.implementation (fused or foreach)",
        lambda value: {"optimizer.implementation": "fused" if parse_text(value) is True else "foreach"},
    ),
    "lr_scheduler.min_lr_factor": renamed("lr_scheduler.lr_min"),
    "training.batch_size": renamed("training.local_batch_size"),
    "training.warmup_steps": renamed("lr_scheduler.warmup_steps"),
    "training.dtype": renamed("training.weight_dtype"),
    "training.data_parallel_degree": renamed("parallelism.data_parallel_shard_degree"),
    "training.data_parallel_type": accept_only(["fsdp"], "for DDP set parallelism.data_parallel_replicate_degree"),
    "training.data_parallel_shard_degree": renamed("parallelism.data_parallel_shard_degree"),
    "training.data_parallel_replicate_degree": renamed("parallelism.data_parallel_replicate_degree"),
    "training.fsdp_reshard_after_forward": renamed("parallelism.fsdp_reshard_after_forward"),
    "training.sequence_parallel_degree": renamed("parallelism.tensor_parallel_degree"),
    "training.tensor_parallel_degree": renamed("parallelism.tensor_parallel_degree"),
    "training.pipeline_parallel_degree": renamed("parallelism.pipeline_parallel_degree"),
    "training.disable_loss_parallel": renamed("parallelism.disable_loss_parallel"),
    "training.enable_loss_parallel": negated("parallelism.disable_loss_parallel"),
    "training.enable_fp8_linear": FLOAT8_ON,
    "training.checkpoint_folder": LegacyKey(
        "is now checkpoint.enable_checkpoint and checkpoint.folder", from_checkpoint_folder
    ),
    "training.checkpoint_interval": renamed("checkpoint.interval"),
    "training.checkpoint_interval_type": IN_STEPS,
    "training.debug_moe_force_load_balance": accept_only(
        [False], "tokens always go to the experts that the router chooses"
    ),
    "experimental.enable_async_tensor_parallel": renamed("parallelism.enable_async_tensor_parallel"),
    "experimental.enable_compiled_autograd": renamed("parallelism.enable_compiled_autograd"),
    "experimental.context_parallel_degree": renamed("parallelism.context_parallel_degree"),
    "experimental.context_parallel_rotate_method": renamed("parallelism.context_parallel_rotate_method"),
    "experimental.pipeline_parallel_degree": renamed("parallelism.pipeline_parallel_degree"),
    "experimental.pipeline_parallel_split_points": renamed("parallelism.pipeline_parallel_split_points"),
    "experimental.pipeline_parallel_schedule": renamed("parallelism.pipeline_parallel_schedule"),
    "experimental.pipeline_parallel_schedule_csv": renamed("parallelism.pipeline_parallel_schedule_csv"),
    "experimental.pipeline_parallel_microbatches": accept_only(
        [None],
        "set parallelism.pipeline_parallel_microbatch_size to training.local_batch_size divided by this number",
    ),
    "experimental.custom_model_path": renamed("experimental.custom_import"),
    "parallelism.module_fqns_per_model_part": LegacyKey(
        "is now parallelism.pipeline_parallel_split_points: the first module of each part but the first",
        from_modules_per_part,
    ),
    "parallelism.pipeline_parallel_first_stage_less_layers": without_effect(
        "stages are balanced by the cost of their layers"
    ),
    "parallelism.pipeline_parallel_last_stage_less_layers": without_effect(
        "stages are balanced by the cost of their layers"
    ),
    "parallelism.pipeline_parallel_expert_parallel_overlap": without_effect(
        "a pipeline does not overlap the exchange of rows with other microbatches"
    ),
    "parallelism.expert_tensor_parallel_degree": accept_only(
        [1], "experts are spread over the ranks of tensor parallelism, but not divided"
    ),
    "parallelism.expert_parallel_comm_backend": without_effect("rows are exchanged with torch's all-to-all"),
    "checkpoint.enable": renamed("checkpoint.enable_checkpoint"),
    "checkpoint.interval_type": IN_STEPS,
    "checkpoint.model_weights_only": renamed("checkpoint.last_save_model_weights_only"),
    "checkpoint.last_save_model_only": renamed("checkpoint.last_save_model_weights_only"),
    "checkpoint.initial_load_model_only": renamed("checkpoint.initial_load_model_weights_only"),
    "checkpoint.initial_load_in_hf": without_effect("Hugging Face format is detected from the files"),
    "checkpoint.initial_load_in_hf_quantized": accept_only(
        [False], "only float32, bfloat16 and float16 weights can be loaded"
    ),
    "checkpoint.load_only": accept_only(
        [False], "a run that loads checkpoints also saves them; to keep the folder unchanged, copy it"
    ),
    "checkpoint.enable_ft_dataloader_checkpoints": without_effect(NO_TORCHFT),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": without_effect(RECOMPUTATION),
    "activation_checkpoint.early_stop": without_effect(RECOMPUTATION),
    "activation_checkpoint.memory_budget": without_effect(RECOMPUTATION),
    "activation_checkpoint.visualize_memory_budget_pareto": without_effect(RECOMPUTATION),
    "activation_checkpoint.preserve_rng_state": without_effect(RECOMPUTATION),
    "activation_checkpoint.determinism_check": without_effect(RECOMPUTATION),
    "activation_checkpoint.debug": without_effect(RECOMPUTATION),
    "compile.enable": renamed("training.compile"),
    "compile.components": LegacyKey("has no effect here: the transformer blocks are compiled", from_components),
    "compile.backend": accept_only(["inductor"], "inductor is the only backend"),
    "float8.enable_float8_linear": FLOAT8_ON,
    "float8.scaling_type_input": renamed("float8.cast_input"),
    "float8.scaling_type_weight": renamed("float8.cast_weight"),
    "float8.scaling_type_grad_output": renamed("float8.cast_grad_output"),
    "float8.moe_fqns_prototype": accept_only([[], ""], CONVERTS_EXPERTS),
    **{
        f"quantize.linear.float8.{name}": renamed(f"float8.{name}")
        for name in (
            "enable_fsdp_float8_all_gather",
            "precompute_float8_dynamic_scale_for_fsdp",
            "recipe_name",
            "filter_fqns",
            "emulate",
        )
    },
    "quantize.linear.mx.recipe_name": renamed("mx.recipe_name"),
    "quantize.linear.mx.filter_fqns": renamed("mx.filter_fqns"),
    "quantize.linear.mx.mxfp8_dim0_cast_kernel_choice": without_effect("torchao chooses the kernel"),
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": without_effect("torchao chooses the kernel"),
    "quantize.grouped_mm.float8.fqns": accept_only([[], ""], CONVERTS_EXPERTS),
    "quantize.grouped_mm.mx.fqns": accept_only([[], ""], CONVERTS_EXPERTS),
    "quantize.grouped_mm.mx.recipe_name": without_effect(CONVERTS_EXPERTS),
    "mx.mxfp8_dim1_cast_kernel_choice": without_effect("torchao chooses the kernel"),
    "mx.moe_fqns_prototype": accept_only([[], ""], CONVERTS_EXPERTS),
    "comm.save_traces_folder": without_effect("the flight recorder writes to comm_traces in job.dump_folder"),
    "comm.save_traces_file_prefix": without_effect("the flight recorder writes to comm_traces in job.dump_folder"),
    "comm.mode": accept_only(["default"], "to simulate a large run, use job.plan"),
    "memory_estimation.enable": renamed("memory_estimation.enabled"),
    "fault_tolerance.enable": accept_only([False], NO_TORCHFT),
    **{
        f"fault_tolerance.{name}": without_effect(NO_TORCHFT)
        for name in (
            "process_group",
            "process_group_timeout_ms",
            "replica_id",
            "group_size",
            "min_replica_size",
            "semi_sync_method",
            "sync_steps",
            "should_quantize",
            "fragment_sync_delay",
            "fragment_update_alpha",
            "module_fqns_per_model_fragment",
        )
    },
    "liger_kernel.enable_fused_linear_cross_entropy": without_effect("the loss is always computed in chunks"),
    "validation.enable": renamed("validation.enabled"),
    "validation.seq_len": without_effect("validation uses training.seq_len"),
    **{
        f"{section}.dataloader.{name}": without_effect("a thread prepares batches in advance")
        for section in ("training", "validation")
        for name in ("num_workers", "persistent_workers", "pin_memory", "prefetch_factor")
    },
    "debug.seed": renamed("training.seed"),
    "debug.deterministic": renamed("training.deterministic"),
    "debug.deterministic_warn_only": without_effect(
        "with training.deterministic, a nondeterministic operation is always an error"
    ),
    "debug.moe_force_load_balance": accept_only([False], "tokens always go to the experts that the router chooses"),
}

SECTIONS = {key.split(".", 1)[0] for key in LEGACY_KEYS}

DOCUMENT_MASK = {"training.document_mask": True}
# Legacy values of current keys; for a list, of its entries. None drops the entry, or leaves the key at its default.
LEGACY_VALUES: Mapping[str, Mapping[Any, tuple[Any, Values]]] = {
    "model.name": {"llama": ("llama2", {})},
    "model.flavor": {
        f"{size}_{kind}": (size, DOCUMENT_MASK)
        for size in ("debugmodel", "8B", "70B", "405B")
        for kind in ("flex_attn", "varlen_attn", "flex", "varlen")
    },
    "model.converters": {"quantize.linear.float8": ("float8", {}), "quantize.linear.mx": ("mx", {})},
    "mx.recipe_name": {
        "mxfp8_cublas": ("mxfp8", {"mx.scale_calculation_mode": "floor"}),
        "mxfp8_cublas_rceil": ("mxfp8", {"mx.scale_calculation_mode": "rceil"}),
        "mxfp8_emulated": ("mxfp8", {"mx.scale_calculation_mode": "floor", "mx.emulate": True}),
    },
    "training.dataset": {"c4_mini": ("c4_test", {})},
    "validation.steps": {"-1": (None, {})},
    "parallelism.pipeline_parallel_schedule": {"interleaved_1f1b": ("Interleaved1F1B", {})},
    "checkpoint.exclude_from_loading": {"lr_scheduler": (None, {})},
}


def translate_value(key: str, value: Any) -> tuple[Any, Values, list[str]]:
    """For a value of a current key: the current value, other keys that it sets, and notices for the user."""
    table = LEGACY_VALUES.get(key, {})
    others: Values = {}
    notices = []
    entries = []
    for entry in value if isinstance(value, list) else [value]:
        new, more = table.get(str(entry), (entry, {}))
        if str(entry) in table:
            others.update(more)
            shown = [f"{key} = {new}"] if new is not None else []
            shown += [f"{name} = {str(other).lower()}" for name, other in more.items()]
            notices.append(f"{key} = {entry} is now {', '.join(shown) or 'ignored'}")
        entries.append(new)
    if not notices:
        return value, {}, []
    entries = [entry for entry in entries if entry is not None]
    return (entries if isinstance(value, list) else next(iter(entries), None)), others, notices
