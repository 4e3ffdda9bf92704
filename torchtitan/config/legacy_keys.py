"""Keys and values of other torchtitan versions (2024 to early 2026), and their replacements here.

Files and flags that use them still load; each is reported in one line. What cannot be translated is refused, with the
reason. `legacy_checks.py` does so, for a start that has a key or a value that is not current.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config.fields import spelled
from torchtitan.config.manager import Values
from torchtitan.world import world

Lookup = Callable[[str], Any]  # the value of a current key in this run


@dataclass(frozen=True)
class LegacyKey:
    """A key of another version."""

    now: str  # its replacement, for messages
    # Maps its value to current keys and values. Raises a ValueError that says why a value cannot be translated.
    translate: Callable[[Any, Lookup], Values] = lambda *_: {}
    late: bool = False  # whether the translation depends on other keys; it then happens when all others are known
    adds: bool = False  # whether its result wins over a value of the current key too, since it adds to that
    ignored: bool = False  # whether it never has an effect

    def notice(self, value: Any, translated: Values) -> str:
        """What happened to a value."""
        requests_nothing = not translated and (not self.ignored or parse_text(value) in (False, None, "", []))
        return f"= {spelled(value)} changes nothing here" if requests_nothing else self.now


@dataclass(frozen=True)
class LegacyRule:
    """What a combination of current keys means in files of other versions."""

    when: Values  # values that the run must have
    now: str  # what they mean here, for the message
    sets: Values = field(default_factory=dict)  # values that replace the run's, or functions of the run's values
    defaults: Values = field(default_factory=dict)  # values of keys that are not set
    given: str = ""  # a key that must be set; "" if none must
    # The file must have one of these legacy keys, or values as in `key = value`; empty: it may be any file.
    seen: Collection[str] = ()
    unseen: Collection[str] = ()  # it must have none of these

    def apply(self, values: Values, lookup: Lookup, seen: Collection[str]) -> str | None:
        """Changes `values`. Returns a notice if it applies."""
        wanted = {key: value for key, value in self.defaults.items() if key not in values}
        wanted |= {key: value(lookup(key)) if callable(value) else value for key, value in self.sets.items()}
        if (
            any(lookup(key) != value for key, value in self.when.items())
            or (self.given and self.given not in values)
            or (self.seen and not {*self.seen} & {*seen})
            or {*self.unseen} & {*seen}
            or ((self.defaults or self.sets) and all(lookup(key) == value for key, value in wanted.items()))
        ):
            return None
        values.update(wanted)
        conditions = [f"{key} = {spelled(value)}" for key, value in self.when.items()] or [self.given]
        return f"{', '.join(conditions)}: {self.now}"


def renamed(*new: str) -> LegacyKey:
    return LegacyKey(f"is now {' and '.join(new)}", lambda value, _: dict.fromkeys(new, value))


def negated(new: str) -> LegacyKey:
    def translate(value: Any, _: Lookup) -> Values:
        given = parse_text(value)
        return {new: not given if isinstance(given, bool) else value}

    return LegacyKey(f"is now the opposite of {new}", translate)


def without_effect(why: str) -> LegacyKey:
    return LegacyKey(f"has no effect here: {why}", ignored=True)


def accept_only(harmless: list[Any], why: str) -> LegacyKey:
    """For a key of a feature that does not exist here: accepts only values that do not request it."""
    only = " or ".join(spelled(value) for value in harmless)
    return by_value(f"must be {only}: {why}", {repr(value): {} for value in harmless}, why)


def by_value(now: str, values: Mapping[str, Values], otherwise: str = "") -> LegacyKey:
    """For a key with few values: what each means here, by its `repr`."""

    def translate(value: Any, _: Lookup) -> Values:
        given = repr(parse_text(value))
        if given not in values:
            raise ValueError(otherwise or f"it must be one of {', '.join(values)}")
        return values[given]

    return LegacyKey(now, translate)


def second_switch(now: str, on: Callable[[Lookup], Values]) -> LegacyKey:
    """For a boolean that was beside a current key, and had its effect whatever that said."""

    def translate(value: Any, lookup: Lookup) -> Values:
        given = parse_text(value)
        if not isinstance(given, bool):
            raise ValueError("it must be true or false")
        return on(lookup) if given else {}

    return LegacyKey(now, translate, late=True, adds=True)


def moved(sections: str, new: str, names: str) -> dict[str, LegacyKey]:
    """Keys that only changed their section, or table."""
    return {f"{old}.{name}": renamed(f"{new}.{name}") for old in sections.split() for name in names.split()}


def ignored(sections: str, names: str, why: str) -> dict[str, LegacyKey]:
    return {f"{old}.{name}": without_effect(why) for old in sections.split() for name in names.split()}


def parse_text(value: Any) -> Any:
    """The value that a flag's text represents."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "none": None, "None": None}.get(value, value)


def from_modules_per_part(value: Any, _: Lookup) -> Values:
    """Each part starts at its first module, which here too must be a layer (or a module after the layers)."""
    stages = parse_text(value)
    if stages in (None, []):
        return {}
    if not (isinstance(stages, list) and all(isinstance(modules, list) and modules for modules in stages)):
        raise ValueError("it must be a list of lists of module names")
    return {"parallelism.pipeline_parallel_split_points": [modules[0] for modules in stages[1:]]}


def from_components(value: Any, _: Lookup) -> Values:
    names = parse_text(value)
    if not isinstance(names, list | str):
        raise ValueError("it must be a list, of model and loss")
    return {} if "model" in names else {"training.compile": False}


def from_microbatches(value: Any, lookup: Lookup) -> Values:
    count, rows = parse_text(value), lookup("training.local_batch_size")
    if count is None:
        return {}
    if not isinstance(count, int) or count < 1 or rows % count:
        raise ValueError(f"it must divide training.local_batch_size = {rows}")
    return {"parallelism.pipeline_parallel_microbatch_size": rows // count}


def from_warmup_share(value: Any, lookup: Lookup) -> Values:
    share = parse_text(value)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError("it must be a fraction of training.steps, from 0 to 1")
    return {"lr_scheduler.warmup_steps": int(share * lookup("training.steps"))}


def from_data_parallel_type(value: Any, lookup: Lookup) -> Values:
    """With "ddp", replicas of what "fsdp" shards; -1 is all processes that other degrees leave."""
    if value not in ("fsdp", "ddp"):
        raise ValueError("it must be fsdp or ddp")
    degree = lookup("parallelism.data_parallel_shard_degree")
    if value == "fsdp":
        return {}
    if degree == -1:
        processes = lookup("job.simulate_world_size") or world().size
        others = [lookup(f"parallelism.{name}_parallel_degree") for name in ("tensor", "pipeline", "context")]
        degree = max(processes // math.prod(others), 1)
    return {"parallelism.data_parallel_replicate_degree": degree, "parallelism.data_parallel_shard_degree": 1}


def from_initial_load_in_hf(value: Any, lookup: Lookup) -> Values:
    path = lookup("model.tokenizer_path")
    if parse_text(value) is not True or lookup("checkpoint.initial_load_path") is not None:
        return {}
    if path is None:
        raise ValueError("set checkpoint.initial_load_path (or model.hf_assets_path) to the folder of the weights")
    return {"checkpoint.initial_load_path": path}


# Tables of several months, with the keys of [float8] and [mx] of today.
LINEAR_TABLES = {
    "float8": "quantize.linear.float8 quantize.dense.float8 quantize.linear.fp8 quantize.float8.dense",
    "mx": "quantize.linear.mx quantize.dense.mx quantize.mx.dense",
}
EXPERT_TABLES = {
    "float8": "quantize.grouped_mm.float8 quantize.moe.float8 quantize.moe.fp8 quantize.float8.moe",
    "mx": "quantize.grouped_mm.mx quantize.moe.mx quantize.mx.moe",
}

DOCUMENT_MASK = {"training.document_mask": True}
# Legacy values of current keys; for a list, of its entries. None drops the entry, or leaves the key at its default. The
# type of each key refuses them, because only what is refused is looked up here.
LEGACY_VALUES: Mapping[str, Mapping[Any, tuple[Any, Values]]] = {
    "model.name": {"llama": ("llama2", {})},
    "model.flavor": {
        f"{size}_{mask}": (size, DOCUMENT_MASK)
        for size in ("debugmodel", "8B", "70B", "405B")
        for mask in ("flex_attn", "varlen_attn", "flex", "varlen")
    },
    "model.converters": {
        table: (name, {})
        for tables in (LINEAR_TABLES, EXPERT_TABLES)
        for name, names in tables.items()
        for table in names.split()
    },
    "mx.recipe_name": {
        "mxfp8_cublas": ("mxfp8", {"mx.scale_calculation_mode": "floor"}),
        "mxfp8_cublas_rceil": ("mxfp8", {"mx.scale_calculation_mode": "rceil"}),
        "mxfp8_emulated": ("mxfp8", {"mx.scale_calculation_mode": "floor", "mx.emulate": True}),
    },
    "training.dataset": dict.fromkeys(("c4_mini", "c4_test"), ("c4", {})),
    "validation.dataset": {"c4_test": ("c4_validation", {})},
    "training.seed": {"none": (0, {}), "None": (0, {})},
    "parallelism.pipeline_parallel_schedule": {"interleaved_1f1b": ("Interleaved1F1B", {})},
    "checkpoint.folder": {"": (None, {"checkpoint.enable_checkpoint": False})},
    "checkpoint.exclude_from_loading": {"lr_scheduler": (None, {})},
}
CONVERTS_EXPERTS = "converters take experts as they take linear layers; filter_fqns leaves layers out"
NO_RECOMPUTE = "torchao no longer has this choice either"
OWN_ROUNDING = "mx rounds with kernels of its own"
NO_TORCHFT = "TorchFT is not supported; torchrun or ./run_train.sh restarts a run"
ROUTED = "tokens always go to the experts that the router chooses"
IN_STEPS = accept_only(["steps", "step"], "the interval is always in steps; set checkpoint.interval")
FLOAT8: Values = {"model.converters": ["float8"]}
FLOAT8_ON = by_value("is now model.converters = [float8]", {"True": FLOAT8, "False": {}})
PLAN = second_switch("is now job.plan", lambda _: {"job.plan": True})
MICROBATCHES = LegacyKey(
    "is now parallelism.pipeline_parallel_microbatch_size: training.local_batch_size divided by this number",
    from_microbatches,
    late=True,
)
# Only in files of before March 2025.
UNTIL_MARCH_2025: Mapping[str, LegacyKey] = {
    "profiling.run_profiler": renamed("profiling.enable_profiling"),
    "profiling.profile_every_x_iter": renamed("profiling.profile_freq"),
    "metrics.enable_color_printing": negated("metrics.disable_color_printing"),
    "metrics.rank_0_only": negated("metrics.save_for_all_ranks"),
    "optimizer.fused": by_value(
        "is now optimizer.implementation (fused or foreach)",
        {"True": {"optimizer.implementation": "fused"}, "False": {"optimizer.implementation": "foreach"}},
    ),
    "training.warmup_steps": renamed("lr_scheduler.warmup_steps"),
    "training.warmup_pct": LegacyKey(
        "is now lr_scheduler.warmup_steps: this share of training.steps", from_warmup_share, late=True
    ),
    "training.data_parallel_degree": renamed("parallelism.data_parallel_shard_degree"),
    "training.data_parallel_type": LegacyKey(
        "is now parallelism.data_parallel_replicate_degree (ddp) or data_parallel_shard_degree (fsdp)",
        from_data_parallel_type,
        late=True,
    ),
    "training.sequence_parallel_degree": renamed("parallelism.tensor_parallel_degree"),
    **moved(
        "training",
        "parallelism",
        "data_parallel_shard_degree data_parallel_replicate_degree tensor_parallel_degree pipeline_parallel_degree "
        "disable_loss_parallel",
    ),
    "training.enable_loss_parallel": negated("parallelism.disable_loss_parallel"),
    "training.enable_selective_ac": by_value(
        "is now activation_checkpoint.mode",
        {
            "True": {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"},
            "False": {"activation_checkpoint.mode": "full"},
        },
    ),
    "training.fp8_linear": by_value(
        "is now model.converters = [float8]",
        {"'dynamic'": FLOAT8, "True": FLOAT8, "''": {}, "False": {}},
        "only dynamic scaling can be translated; set model.converters and [float8]",
    ),
    "training.enable_fp8_linear": FLOAT8_ON,
    "training.enable_float8_linear": FLOAT8_ON,
    "float8.enable_float8_linear": FLOAT8_ON,
    **moved("training", "float8", "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp"),
    "training.enable_fsdp_fp8_all_gather": renamed("float8.enable_fsdp_float8_all_gather"),
    "training.precompute_fp8_dynamic_scale_for_fsdp": renamed("float8.precompute_float8_dynamic_scale_for_fsdp"),
    **{
        f"{table}scaling_type_{operand}": renamed(f"float8.cast_{operand}")
        for table in ("float8.", "training.float8_")
        for operand in ("input", "weight", "grad_output")
    },
    "training.checkpoint_folder": LegacyKey(
        "is now checkpoint.enable_checkpoint and checkpoint.folder",
        lambda value, _: {"checkpoint.enable_checkpoint": True, "checkpoint.folder": value} if value else {},
    ),
    "training.checkpoint_interval": renamed("checkpoint.interval"),
    "training.checkpoint_interval_type": IN_STEPS,
    **moved(
        "experimental",
        "parallelism",
        "context_parallel_degree context_parallel_rotate_method pipeline_parallel_degree "
        "pipeline_parallel_split_points pipeline_parallel_schedule pipeline_parallel_schedule_csv",
    ),
    "experimental.pipeline_parallel_split_mode": accept_only(["manual"], "a pipeline is always split at modules"),
    "experimental.pipeline_parallel_microbatches": MICROBATCHES,
    "experimental.torch_spmd": accept_only([False], "there is one implementation of tensor parallelism"),
    "comm.timeout_seconds": renamed("comm.init_timeout_seconds", "comm.train_timeout_seconds"),
    "estimate.memory": PLAN,
    "estimate.mode": without_effect("a plan has no real tensors"),
}

# Only in files of since autumn 2025.
SINCE_AUTUMN_2025: Mapping[str, LegacyKey] = {
    "job.print_config": renamed("job.print_args"),
    "job.save_config_file": without_effect("config.toml is always written to job.dump_folder"),
    "job.custom_config_module": renamed("experimental.custom_args_module"),
    "model.hf_assets_path": renamed("model.tokenizer_path"),
    "lr_scheduler.min_lr_factor": renamed("lr_scheduler.lr_min"),
    "training.dtype": renamed("training.weight_dtype", "optimizer.state_dtype"),
    "parallelism.context_parallel_load_balancer": without_effect("the work of context parallelism is always balanced"),
    "parallelism.expert_parallel_comm_backend": without_effect("rows are exchanged with torch's all-to-all"),
    "parallelism.pipeline_parallel_expert_parallel_overlap": without_effect(
        "a pipeline does not overlap the exchange of rows with other micro-batches"
    ),
    "checkpoint.enable": renamed("checkpoint.enable_checkpoint"),
    "checkpoint.load_only": accept_only(
        [False], "a run that loads checkpoints also saves them; to keep the folder unchanged, copy it"
    ),
    "checkpoint.initial_load_in_hf_quantized": accept_only(
        [False], "only float32, bfloat16 and float16 weights can be loaded"
    ),
    "compile.enable": renamed("training.compile"),
    "compile.components": LegacyKey(
        "is now training.compile = false where it lacks model: the loss is never compiled", from_components, late=True
    ),
    "compile.backend": accept_only(["inductor"], "inductor is the only backend"),
    "compile.model_backend_override": accept_only([None], "inductor is the only backend"),
    **ignored("compile", "graph_passes joint_passes passes", "inductor's own passes are used"),
    **moved(
        LINEAR_TABLES["float8"],
        "float8",
        "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp recipe_name filter_fqns emulate",
    ),
    **ignored(LINEAR_TABLES["float8"], "force_recompute_fp8_weight_in_bwd", NO_RECOMPUTE),
    **moved(LINEAR_TABLES["mx"], "mx", "recipe_name filter_fqns"),
    **ignored(
        f"mx {LINEAR_TABLES['mx']}",
        "mxfp8_dim0_cast_kernel_choice mxfp8_dim1_cast_kernel_choice",
        OWN_ROUNDING,
    ),
    **ignored(" ".join(EXPERT_TABLES.values()), "fqns recipe_name", CONVERTS_EXPERTS),
    "memory_estimation.enable": PLAN,
    "validation.enable": renamed("validation.enabled"),
    **ignored(
        "training.dataloader validation.dataloader",
        "num_workers persistent_workers pin_memory prefetch_factor",
        "a thread prepares batches in advance",
    ),
    **moved("debug", "training", "seed deterministic"),
    "debug.deterministic_warn_only": without_effect(
        "with training.deterministic, a nondeterministic operation is always an error"
    ),
    "debug.moe_force_load_balance": accept_only([False], ROUTED),
}

LEGACY_KEYS: Mapping[str, LegacyKey] = {
    **UNTIL_MARCH_2025,
    **SINCE_AUTUMN_2025,
    "job.use_for_integration_test": without_effect("it is for torchtitan's own tests"),
    "job.save_config_folder": without_effect("config.toml is always written to job.dump_folder"),
    **ignored("profiling", "profiler_active profiler_warmup", "a trace always covers one step"),
    "metrics.enable_wandb": second_switch(
        "is now wandb in metrics.trackers",
        lambda lookup: {"metrics.trackers": [*dict.fromkeys([*lookup("metrics.trackers"), "wandb"])]},
    ),
    "metrics.disable_logging_from_checkpoint": without_effect("a save is always reported, in one line"),
    "model.norm_type": accept_only(
        ["rmsnorm", "compiled_rmsnorm", "fused_rmsnorm", ""],
        "Llama models use RMSNorm; another norm needs an experimental.custom_import",
    ),
    "model.use_flex_attn": without_effect("the attention kernel is chosen automatically, by the mask"),
    "model.attn_mask_type": by_value(
        "is now training.document_mask (true for block_causal)",
        {"'causal'": {"training.document_mask": False}, "'block_causal'": {"training.document_mask": True}},
    ),
    "precision.converters": renamed("model.converters"),
    "training.batch_size": renamed("training.local_batch_size"),
    "training.data.name": renamed("training.dataset"),
    **moved("training", "parallelism", "fsdp_reshard_after_forward"),
    "training.debug_moe_force_load_balance": accept_only([False], ROUTED),
    "experimental.enable_async_tensor_parallel": renamed("parallelism.enable_async_tensor_parallel"),
    **ignored("experimental parallelism", "enable_compiled_autograd", "backward passes are compiled block by block"),
    "experimental.custom_model_path": renamed("experimental.custom_import"),
    "parallelism.pipeline_parallel_microbatches": MICROBATCHES,
    "parallelism.module_fqns_per_model_part": LegacyKey(
        "is now parallelism.pipeline_parallel_split_points: the first module of each part but the first",
        from_modules_per_part,
    ),
    **ignored(
        "parallelism",
        "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers",
        "stages are balanced by the cost of their layers",
    ),
    "parallelism.expert_tensor_parallel_degree": accept_only(
        [1], "experts are spread over the ranks of tensor parallelism, but not divided"
    ),
    "checkpoint.interval_type": IN_STEPS,
    "checkpoint.model_weights_only": renamed("checkpoint.last_save_model_weights_only"),
    "checkpoint.last_save_model_only": renamed("checkpoint.last_save_model_weights_only"),
    "checkpoint.last_save_in_safetensors_format": renamed("checkpoint.last_save_in_hf"),
    "checkpoint.initial_load_model_only": renamed("checkpoint.initial_load_model_weights_only"),
    "checkpoint.initial_load_in_hf": LegacyKey(
        "is now checkpoint.initial_load_path = model.hf_assets_path where no path is set; the format is detected",
        from_initial_load_in_hf,
        late=True,
    ),
    "checkpoint.enable_ft_dataloader_checkpoints": without_effect(NO_TORCHFT),
    **ignored(
        "activation_checkpoint",
        "per_op_sac_force_recompute_mm_shapes_by_fqns early_stop memory_budget visualize_memory_budget_pareto "
        "preserve_rng_state determinism_check debug",
        "activation checkpointing has no such option",
    ),
    **ignored("float8 mx", "moe_fqns_prototype", CONVERTS_EXPERTS),
    "float8.force_recompute_fp8_weight_in_bwd": without_effect(NO_RECOMPUTE),
    "mx.use_fp8_dim1_cast_triton_kernel": without_effect(OWN_ROUNDING),
    "memory_estimation.enabled": PLAN,
    "memory_estimation.disable_fake_mode": without_effect(
        "a plan has no real tensors; to measure memory, train a few steps and see peak_memory_bytes in metrics.jsonl"
    ),
    **ignored(
        "comm",
        "save_traces_folder save_traces_file_prefix",
        "the flight recorder writes to comm_traces in job.dump_folder",
    ),
    "comm.mode": accept_only(["default"], "to simulate a large run, use job.plan"),
    "fault_tolerance.enable": accept_only([False], NO_TORCHFT),
    **ignored(
        "fault_tolerance",
        "process_group process_group_timeout_ms replica_id group_size min_replica_size semi_sync_method sync_steps "
        "should_quantize fragment_sync_delay fragment_update_alpha num_fragments module_fqns_per_model_fragment",
        NO_TORCHFT,
    ),
    "liger_kernel.enable_fused_linear_cross_entropy": without_effect("the loss is always computed in chunks"),
    "validation.seq_len": without_effect("validation uses training.seq_len"),
}
# Checkpoints were on where they had a folder.
UNTIL_APRIL_2024 = ("profiling.run_profiler", "profiling.profile_every_x_iter", "training.sequence_parallel_degree")


RULES = [
    *(
        LegacyRule(
            {"model.name": "qwen3", "model.flavor": old},
            "is now model.name = qwen3_moe",
            sets={"model.name": "qwen3_moe", "model.flavor": new},
        )
        for old, new in {"debugmodel_moe": "debugmodel", "30B-A3B": "30B-A3B", "235B-A22B": "235B-A22B"}.items()
    ),
    *(
        LegacyRule(
            {"model.name": "llama3", "model.flavor": size},
            "RoPE is not scaled, as in Llama 3; since October 2025, torchtitan scales it as in Llama 3.1: for that, "
            'set model.name = "llama3.1"',
            seen=SINCE_AUTUMN_2025,
        )
        for size in ("8B", "70B")
    ),
    LegacyRule(
        {"model.name": "llama3", "model.flavor": "405B"},
        "RoPE is scaled, as in Llama 3.1; torchtitan did not scale it before October 2025",
        seen=UNTIL_MARCH_2025,
    ),
    *(
        LegacyRule(
            {"model.name": "qwen3_moe", "model.converters": [name]},
            f"{layers} are not converted ({name}.filter_fqns has {pattern})",
            sets={f"{name}.filter_fqns": lambda entries, pattern=pattern: [*entries, pattern]},
            seen=[f"model.converters = {table}" for table in these[name].split()],
            unseen=[f"model.converters = {table}" for table in others[name].split()],
        )
        for name in ("float8", "mx")
        for layers, pattern, these, others in (
            ("experts", "moe.experts", LINEAR_TABLES, EXPERT_TABLES),
            ("other layers than experts", "attention", EXPERT_TABLES, LINEAR_TABLES),
        )
    ),
    LegacyRule(
        {"optimizer.early_step_in_backward": True},
        "gradients are not clipped (training.max_norm = inf), and no step is skipped (training.skip_nonfinite = false)",
        sets={"training.max_norm": math.inf},
        defaults={"training.skip_nonfinite": False},
    ),
    LegacyRule(
        {},
        "is now checkpoint.enable_checkpoint = true, as before May 2024",
        defaults={"checkpoint.enable_checkpoint": True},
        given="checkpoint.folder",
        seen=UNTIL_APRIL_2024,
    ),
    LegacyRule(
        {"checkpoint.enable_checkpoint": True},
        "all checkpoints are kept, as before March 2025 (checkpoint.keep_latest_k = 0)",
        defaults={"checkpoint.keep_latest_k": 0},
        seen=UNTIL_MARCH_2025,
    ),
]
