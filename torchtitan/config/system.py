"""Sections about devices: parallelism, activation checkpointing, communication, memory estimation, extension."""

from dataclasses import dataclass, field
from typing import Literal

from torchtitan.config.fields import Annotated, Doc, Entries, PositiveInt, Seconds


@dataclass(frozen=True)
class Parallelism:
    """How the work is divided; the degrees multiply to the number of processes."""

    data_parallel_replicate_degree: Annotated[PositiveInt, Doc("Copies of the (sharded) model.")] = 1
    data_parallel_shard_degree: Annotated[int, Doc("Ranks one copy is sharded over; -1: all that are left.")] = -1
    fsdp_reshard_after_forward: Annotated[
        Literal["default", "always", "never"],
        Doc("Free gathered weights after the forward pass; default: yes, except with pipeline parallelism."),
    ] = "default"
    tensor_parallel_degree: Annotated[PositiveInt, Doc("Ranks that share each GEMM.")] = 1
    disable_loss_parallel: Annotated[bool, Doc("Gather the logits under tensor parallelism.")] = False
    enable_async_tensor_parallel: Annotated[bool, Doc("Overlap tensor-parallel communication (needs compile).")] = False
    pipeline_parallel_degree: Annotated[PositiveInt, Doc("Stages of the pipeline, in ranks.")] = 1
    pipeline_parallel_split_points: Annotated[
        list[str], Doc("Modules that begin a stage, such as layers.2,layers.4.")
    ] = field(default_factory=list)
    pipeline_parallel_layers_per_stage: Annotated[PositiveInt | None, Doc("Layers in a stage.")] = None
    pipeline_parallel_schedule: Annotated[str, Doc("Pipeline schedule.")] = "1F1B"
    pipeline_parallel_schedule_csv: Annotated[str | None, Doc("CSV file with a schedule of your own.")] = ""
    pipeline_parallel_microbatch_size: Annotated[PositiveInt, Doc("Sequences in a microbatch.")] = 1
    context_parallel_degree: Annotated[PositiveInt, Doc("Ranks that share each sequence.")] = 1
    context_parallel_rotate_method: Annotated[
        Literal["allgather", "alltoall"], Doc("How keys and values travel between them.")
    ] = "allgather"
    enable_compiled_autograd: Annotated[bool, Doc("Compile the backward pass as a whole.")] = False


@dataclass(frozen=True)
class ActivationCheckpoint:
    """Compute activations again in the backward pass instead of keeping them."""

    mode: Annotated[Literal["selective", "full", "none"], Doc("How much to compute again.")] = "selective"
    selective_ac_option: Annotated[
        str, Doc("For selective: every how many layers, or 'op' to keep only expensive operations.")
    ] = "2"


@dataclass(frozen=True)
class Comm:
    """Communication between processes."""

    init_timeout_seconds: Annotated[Seconds, Doc("Patience for start-up and the first step.")] = 300
    train_timeout_seconds: Annotated[Seconds, Doc("Patience afterwards.")] = 100
    trace_buf_size: Annotated[Entries, Doc("Collectives that the flight recorder keeps; 0 is off.")] = 20000


@dataclass(frozen=True)
class MemoryEstimation:
    """Memory of a run without running it."""

    enabled: Annotated[bool, Doc("Estimate instead of training: the same as job.plan.")] = False
    disable_fake_mode: Annotated[bool, Doc("Refused: a plan has no real tensors; train some steps to measure.")] = False


@dataclass(frozen=True)
class Experimental:
    """Your own code."""

    custom_import: Annotated[str, Doc("Module to import first; it may register models, converters, data sets.")] = ""
    custom_args_module: Annotated[str, Doc("Module whose JobConfig dataclass adds sections and keys.")] = ""
