"""Keys that have an effect only together with others. Set without these, they are reported, or refused.

A condition is written as messages show it: keys of which one must be set, or must be `above` a number or none, or must
have one of the values after ` = `.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from operator import attrgetter

from torchtitan.config import JobConfig
from torchtitan.config.fields import spelled
from torchtitan.converters import CONVERTERS
from torchtitan.models import MODELS
from torchtitan.optim.optimizer import optimizers_with

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


def refused_keys(config: JobConfig) -> list[str]:
    """One sentence for each key that is set without what it needs."""
    return [
        f"{key} has no effect without {condition}: set that, or unset {key}."
        for condition, keys in _unmet(REFUSED, config)
        for key in _changed(config, keys)
    ]


def unused_keys(config: JobConfig) -> list[str]:
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
