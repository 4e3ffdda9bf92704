"""Keys that have an effect only together with others. Set without these, they are reported, or refused."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.config.keys import Section
from torchtitan.converters import CONVERTERS
from torchtitan.models import MODELS
from torchtitan.optim.optimizer import optimizers_with


@dataclass(frozen=True)
class With:
    """Holds if one of `keys` is set, or has one of `values`, or is none or `above` a number.

    Attributes:
        keys: each "section.key", separated by blanks.
        values: or what returns them, for those that users may register.
    """

    keys: str
    values: tuple[Any, ...] | Callable[[], tuple[Any, ...]] | None = None
    above: float | None = None

    def holds(self, config: JobConfig) -> bool:
        return any(self._fits(attrgetter(key)(config)) for key in self.keys.split())

    def _fits(self, value: Any) -> bool:
        if (values := self._values()) is not None:
            return value in values
        return bool(value) if self.above is None else value is None or value > self.above

    def _values(self) -> tuple[Any, ...] | None:
        return self.values() if callable(self.values) else self.values

    def __str__(self) -> str:
        if self.values == ([],):
            return f"an empty {self.keys}, which overrides them"
        shown = [str(value).lower() if isinstance(value, bool) else str(value) for value in self._values() or ()]
        limit = "" if self.above is None else f" above {self.above}"
        return " or ".join(self.keys.split()) + (f" = {' or '.join(shown)}" if shown else limit)


CONDITIONS: list[tuple[str, str, With]] = [  # section; its keys, or "" for all; without this they are reported
    ("model", "mup_base_flavor", With("model.parametrization", ("mup",))),
    ("validation", "freq steps sample_prompts", With("validation.enabled")),
    (
        "validation",
        "dataset dataset_path text_column local_batch_size",
        With("validation.enabled evaluation.tasks"),
    ),
    ("validation", "text_column", With("validation.dataset validation.dataset_path evaluation.tasks")),
    ("evaluation", "", With("evaluation.tasks")),
    (
        "checkpoint",
        "folder interval last_save_model_weights_only last_save_in_hf async_mode keep_latest_k "
        "enable_first_step_checkpoint",
        With("checkpoint.enable_checkpoint"),
    ),
    ("checkpoint", "exclude_from_loading", With("checkpoint.enable_checkpoint checkpoint.initial_load_path")),
    ("checkpoint", "export_dtype", With("checkpoint.last_save_model_weights_only checkpoint.last_save_in_hf")),
    ("checkpoint", "initial_load_model_weights_only", With("checkpoint.initial_load_path")),
    ("profiling", "", With("profiling.enable_profiling profiling.enable_memory_snapshot")),
    ("profiling", "save_memory_snapshot_folder", With("profiling.enable_memory_snapshot")),
    ("metrics", "save_tb_folder", With("metrics.enable_tensorboard")),
    ("metrics", "save_for_all_ranks", With("metrics.enable_tensorboard metrics.enable_wandb")),
    (
        "parallelism",
        "pipeline_parallel_split_points pipeline_parallel_layers_per_stage pipeline_parallel_schedule "
        "pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size",
        With("parallelism.pipeline_parallel_degree", above=1),
    ),
    ("parallelism", "context_parallel_rotate_method", With("parallelism.context_parallel_degree", above=1)),
    (
        "parallelism",
        "disable_loss_parallel enable_async_tensor_parallel",
        With("parallelism.tensor_parallel_degree", above=1),
    ),
    (
        "optimizer",
        "muon_momentum muon_nesterov muon_steps muon_coefficients muon_polar_express muon_row_normalization",
        With("optimizer.name", partial(optimizers_with, lambda entry: entry.whole_matrices)),
    ),
    ("optimizer", "muon_coefficients", With("optimizer.muon_polar_express", (False,))),
    ("training", "max_skips_in_a_row", With("training.skip_nonfinite training.skip_grad_norm_outliers")),
    ("training", "dataset dataset_path", With("training.dataset_mixture", ([],))),
    ("lr_scheduler", "decay_type lr_min", With("lr_scheduler.decay_ratio", above=0)),
    ("moe", "bias_update_speed", With("moe.balance", ("bias",))),
    ("moe", "loss_coefficient", With("moe.balance", ("loss",))),
    ("activation_checkpoint", "selective_ac_option", With("activation_checkpoint.mode", ("selective",))),
]
REFUSED: list[tuple[str, str, With]] = [  # without this they are an error
    (
        "job",
        "plan_suggest simulate_world_size simulate_device simulate_expert_load",
        With("job.plan memory_estimation.enabled"),
    ),
    ("checkpoint", "load_step create_seed_checkpoint", With("checkpoint.enable_checkpoint")),
    ("moe", "all_to_all_dtype", With("parallelism.expert_parallel_degree", above=1)),
    (
        "optimizer",
        "state_dtype",
        With("optimizer.name", partial(optimizers_with, lambda entry: len(entry.state_dtypes) > 1)),
    ),
    ("optimizer", "second_moment", With("optimizer.name", ("AdamWFp8",))),
]


def refused_keys(config: JobConfig) -> list[str]:
    """One sentence for each key that is set without what it needs."""
    return [
        f"{section}.{key} has no effect without {condition}: set that, or unset {section}.{key}."
        for section, keys, condition in REFUSED
        if not condition.holds(config)
        for key in _changed(getattr(config, section), keys.split())
    ]


def unused_keys(config: JobConfig) -> list[str]:
    """One sentence per group of keys that are set to non-default values without effect."""
    sentences, reported = [], set()
    for section, keys, remedy in [*_unused_sections(config), *_unmet(config)]:
        changed = [f"{section}.{key}" for key in _changed(getattr(config, section), keys.split())]
        if left := [key for key in changed if key not in reported]:
            reported |= {*left}
            sentences.append(f"{', '.join(left)}: no effect in this run without {remedy}")
    return sentences


def _unmet(config: JobConfig) -> list[tuple[str, str, str]]:
    return [(section, keys, str(condition)) for section, keys, condition in CONDITIONS if not condition.holds(config)]


def _unused_sections(config: JobConfig) -> list[tuple[str, str, str]]:
    """Those of converters that the run does not use, and of experts that the model does not have."""
    used = {*config.model.converters, *(name for phase in config.precision.phase for name in phase.converters)}
    sections = {name: CONVERTERS.get(name).section for name in CONVERTERS.names()}
    in_use = {section for name, section in sections.items() if name in used}
    unused = [
        (section, "", f"{name} in model.converters") for name, section in sections.items() if section not in in_use
    ]
    if MODELS.get(config.model.name).flavor(config.model.flavor).moe is None:
        unused.append(("moe", "", "a model with experts, such as qwen3_moe"))
    return [entry for entry in unused if entry[0]]


def _changed(section: Section, keys: Sequence[str]) -> list[str]:
    """Of these keys, or of all, those that are not at their defaults."""
    default = type(section)()
    names = [field.name for field in fields(section) if not keys or field.name in keys]
    return [name for name in names if getattr(section, name) != getattr(default, name)]
