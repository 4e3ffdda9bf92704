"""`JobConfig`: every section of the TOML file."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan.config.low_precision import MX, Float8, Int8, Precision
from torchtitan.config.output import Checkpoint, Job, Metrics, Profiling
from torchtitan.config.system import ActivationCheckpoint, Comm, Experimental, MemoryEstimation, Parallelism
from torchtitan.config.training import Evaluation, LRScheduler, Model, MoEKeys, Optimizer, Stages, Training, Validation


@dataclass(frozen=True)
class JobConfig:
    """One resolved run. Each part of the code gets the section it needs and never changes it."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    moe: MoEKeys = field(default_factory=MoEKeys)
    training: Training = field(default_factory=Training)
    validation: Validation = field(default_factory=Validation)
    evaluation: Evaluation = field(default_factory=Evaluation)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    float8: Float8 = field(default_factory=Float8)
    int8: Int8 = field(default_factory=Int8)
    mx: MX = field(default_factory=MX)
    precision: Precision = field(default_factory=Precision)
    stage: Stages = field(default_factory=Stages)
    comm: Comm = field(default_factory=Comm)
    memory_estimation: MemoryEstimation = field(default_factory=MemoryEstimation)
    experimental: Experimental = field(default_factory=Experimental)

    def changed(self, **sections: Mapping[str, Any]) -> "JobConfig":
        """This configuration with other values for some keys, by section."""
        return replace(self, **{name: replace(getattr(self, name), **keys) for name, keys in sections.items()})
