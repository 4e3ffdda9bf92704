"""Sections about devices: parallelism, activation checkpointing, communication, extension."""

from dataclasses import dataclass, field
from typing import Literal

from torchtitan.config.fields import (
    Annotated,
    Doc,
    Entries,
    EveryLayers,
    PathOrEmpty,
    PositiveInt,
    PositiveOrAll,
    Seconds,
    not_former,
)


@dataclass(frozen=True)
class Parallelism:
    """Parallelism degrees; their product is the number of processes."""

    data_parallel_replicate_degree: Annotated[PositiveInt, Doc("Number of replicas of the (sharded) model.")] = 1
    data_parallel_shard_degree: Annotated[
        PositiveOrAll, Doc("Number of ranks that each replica is sharded over; -1: all remaining ranks.")
    ] = -1
    fsdp_reshard_after_forward: Annotated[
        Literal["default", "always", "never"],
        Doc("Free all-gathered weights after the forward pass; default: yes, except with pipelines or one shard."),
    ] = "default"
    tensor_parallel_degree: Annotated[PositiveInt, Doc("Number of ranks that each GEMM is sharded over.")] = 1
    disable_loss_parallel: Annotated[
        bool, Doc("All-gather the logits instead of computing the loss on vocabulary shards (tensor parallelism).")
    ] = False
    enable_async_tensor_parallel: Annotated[
        bool, Doc("Overlap tensor-parallel communication with GEMMs; needs training.compile and CUDA.")
    ] = False
    pipeline_parallel_degree: Annotated[PositiveInt, Doc("Number of ranks in the pipeline.")] = 1
    pipeline_parallel_split_points: Annotated[
        list[str], Doc("First module of each stage but the first, such as layers.2,layers.4.")
    ] = field(default_factory=list)
    pipeline_parallel_layers_per_stage: Annotated[PositiveInt | None, Doc("Layers per stage.")] = None
    pipeline_parallel_schedule: Annotated[
        str, not_former("interleaved_1f1b"), Doc("Pipeline schedule, such as 1F1B or Interleaved1F1B.")
    ] = "1F1B"
    pipeline_parallel_schedule_csv: Annotated[PathOrEmpty | None, Doc("CSV file with a custom pipeline schedule.")] = ""
    pipeline_parallel_microbatch_size: Annotated[PositiveInt, Doc("Sequences per pipeline micro-batch.")] = 1
    context_parallel_degree: Annotated[PositiveInt, Doc("Number of ranks that each sequence is sharded over.")] = 1
    expert_parallel_degree: Annotated[
        PositiveInt,
        Doc("Number of ranks that the experts of a layer are spread over, among dp_shard x context x tensor ranks."),
    ] = 1
    context_parallel_rotate_method: Annotated[
        Literal["allgather", "alltoall"], Doc("Collective with which context parallelism exchanges keys and values.")
    ] = "allgather"


@dataclass(frozen=True)
class ActivationCheckpoint:
    """Recompute activations in the backward pass instead of storing them."""

    mode: Annotated[Literal["selective", "full", "none"], Doc("Which activations to recompute.")] = "selective"
    selective_ac_option: Annotated[
        EveryLayers,
        Doc(
            "For mode selective: checkpoint every n-th layer, or 'op' to save only the results of expensive operations."
        ),
    ] = "2"
    swiglu_dtype: Annotated[
        Literal["int8", "float8"] | None,
        Doc(
            "Keep the inputs of the SwiGLU activation for the backward pass in 8 bits, one scale per token; none: as "
            "they are."
        ),
    ] = None


@dataclass(frozen=True)
class Comm:
    """Communication between processes."""

    init_timeout_seconds: Annotated[Seconds, Doc("Timeout of collectives during startup and the first step.")] = 300
    train_timeout_seconds: Annotated[Seconds, Doc("Timeout of collectives after the first step.")] = 100
    save_timeout_seconds: Annotated[
        Seconds, Doc("How long ranks wait for each other to write a checkpoint or an export.")
    ] = 1800
    trace_buf_size: Annotated[Entries, Doc("Number of collectives that the flight recorder keeps; 0 turns it off.")] = (
        20000
    )


@dataclass(frozen=True)
class Experimental:
    """User modules."""

    custom_import: Annotated[
        str, Doc("Module to import at startup; it can register models, converters and data sets.")
    ] = ""
    custom_args_module: Annotated[str, Doc("Module with a JobConfig dataclass that adds sections and keys.")] = ""
