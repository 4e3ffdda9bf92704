"""Reports keys that were set but have no effect in this run."""

from dataclasses import dataclass, fields

from torchtitan.config import JobConfig
from torchtitan.config.keys import Section
from torchtitan.converters import CONVERTERS
from torchtitan.models import MODELS
from torchtitan.optim.optimizer import MUON_OPTIMIZERS


@dataclass(frozen=True)
class Group:
    """Keys of one section that only matter together with something else.

    Attributes:
        off: whether that is switched off.
        keys: names in the section; empty for all of them.
        remedy: what would make them matter.
    """

    off: bool
    section: str
    keys: tuple[str, ...]
    remedy: str


def unused_keys(config: JobConfig) -> list[str]:
    """One sentence per group of keys that are set to non-default values without effect."""
    sentences = []
    for group in _groups(config):
        changed = [key for key in _changed(getattr(config, group.section)) if key in group.keys or not group.keys]
        if group.off and changed:
            names = ", ".join(f"{group.section}.{key}" for key in changed)
            sentences.append(f"{names}: no effect in this run without {group.remedy}")
    return sentences


def _changed(section: Section) -> list[str]:
    default = type(section)()
    return [field.name for field in fields(section) if getattr(section, field.name) != getattr(default, field.name)]


def _groups(config: JobConfig) -> list[Group]:
    saving, metrics, parallelism = config.checkpoint, config.metrics, config.parallelism
    profiling = config.profiling.enable_profiling or config.profiling.enable_memory_snapshot
    used = {*config.model.converters, *(name for phase in config.precision.phase for name in phase.converters)}
    sections = {CONVERTERS.get(name).section: name for name in CONVERTERS.names()}
    used_sections = {CONVERTERS.get(name).section for name in used if name in CONVERTERS.names()}
    sparse = hasattr(MODELS.get(config.model.name).flavor(config.model.flavor), "moe")
    return [
        *(
            Group(section not in used_sections, section, (), f"{name} in model.converters")
            for section, name in sections.items()
            if section
        ),
        Group(config.model.parametrization != "mup", "model", ("mup_base_flavor",), "model.parametrization = mup"),
        Group(not config.validation.enabled, "validation", ("freq", "steps", "sample_prompts"), "validation.enabled"),
        Group(
            not config.validation.enabled and not config.evaluation.tasks,
            "validation",
            ("dataset", "dataset_path", "text_column", "local_batch_size"),
            "validation.enabled",
        ),
        Group(not config.evaluation.tasks, "evaluation", (), "evaluation.tasks"),
        Group(
            config.validation.enabled
            and not (config.validation.dataset or config.validation.dataset_path or config.evaluation.tasks),
            "validation",
            ("text_column",),
            "validation.dataset or dataset_path",
        ),
        Group(
            not saving.enable_checkpoint,
            "checkpoint",
            (
                "folder",
                "interval",
                "last_save_model_weights_only",
                "last_save_in_hf",
                "async_mode",
                "keep_latest_k",
                "enable_first_step_checkpoint",
            ),
            "checkpoint.enable_checkpoint",
        ),
        Group(
            not saving.enable_checkpoint and saving.initial_load_path is None,
            "checkpoint",
            ("exclude_from_loading",),
            "checkpoint.enable_checkpoint",
        ),
        Group(
            not (saving.last_save_model_weights_only or saving.last_save_in_hf),
            "checkpoint",
            ("export_dtype",),
            "checkpoint.last_save_model_weights_only or last_save_in_hf",
        ),
        Group(
            saving.initial_load_path is None,
            "checkpoint",
            ("initial_load_model_weights_only",),
            "checkpoint.initial_load_path",
        ),
        Group(not profiling, "profiling", (), "profiling.enable_profiling"),
        Group(
            profiling and not config.profiling.enable_memory_snapshot,
            "profiling",
            ("save_memory_snapshot_folder",),
            "profiling.enable_memory_snapshot",
        ),
        Group(not metrics.enable_tensorboard, "metrics", ("save_tb_folder",), "metrics.enable_tensorboard"),
        Group(
            not (metrics.enable_tensorboard or metrics.enable_wandb),
            "metrics",
            ("save_for_all_ranks",),
            "metrics.enable_tensorboard or enable_wandb",
        ),
        Group(
            parallelism.pipeline_parallel_degree == 1,
            "parallelism",
            tuple(key for key in vars(parallelism) if key.startswith("pipeline_parallel_")),
            "parallelism.pipeline_parallel_degree above 1",
        ),
        Group(
            parallelism.context_parallel_degree == 1,
            "parallelism",
            ("context_parallel_rotate_method",),
            "parallelism.context_parallel_degree above 1",
        ),
        Group(
            parallelism.tensor_parallel_degree == 1,
            "parallelism",
            ("disable_loss_parallel", "enable_async_tensor_parallel"),
            "parallelism.tensor_parallel_degree above 1",
        ),
        Group(
            config.optimizer.name not in MUON_OPTIMIZERS,
            "optimizer",
            tuple(key for key in vars(config.optimizer) if key.startswith("muon_")),
            "optimizer.name = Muon",
        ),
        Group(
            config.optimizer.name in MUON_OPTIMIZERS and config.optimizer.muon_polar_express,
            "optimizer",
            ("muon_coefficients",),
            "optimizer.muon_polar_express = false",
        ),
        Group(
            not (config.training.skip_nonfinite or config.training.skip_grad_norm_outliers),
            "training",
            ("max_skips_in_a_row",),
            "training.skip_nonfinite or skip_grad_norm_outliers",
        ),
        Group(
            config.lr_scheduler.decay_ratio == 0,
            "lr_scheduler",
            ("decay_type", "lr_min"),
            "lr_scheduler.decay_ratio above 0",
        ),
        Group(not sparse, "moe", (), "a model with experts, such as qwen3_moe"),
        Group(sparse and config.moe.balance != "bias", "moe", ("bias_update_speed",), 'moe.balance = "bias"'),
        Group(sparse and config.moe.balance != "loss", "moe", ("loss_coefficient",), 'moe.balance = "loss"'),
        Group(
            config.activation_checkpoint.mode != "selective",
            "activation_checkpoint",
            ("selective_ac_option",),
            "activation_checkpoint.mode = selective",
        ),
        Group(
            bool(config.training.dataset_mixture),
            "training",
            ("dataset", "dataset_path"),
            "an empty training.dataset_mixture, which overrides them",
        ),
    ]
