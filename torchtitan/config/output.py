"""Sections about a run's output: the job itself, metrics, profiling, checkpoints."""

from dataclasses import dataclass, field
from typing import Literal

from torchtitan.config.fields import (
    Annotated,
    AnyFolder,
    AnyPath,
    Doc,
    DumpFolder,
    ExpertLoad,
    InnerFolder,
    LocalPath,
    NonNegativeInt,
    PositiveInt,
    StepOrNewest,
    TokenCount,
    WorldSize,
    not_former,
)


@dataclass(frozen=True)
class Job:
    """The run as a whole."""

    config_file: Annotated[
        LocalPath | None, Doc("TOML file, or the name of one in train_configs; flags override it.")
    ] = None
    dump_folder: Annotated[DumpFolder, Doc("Folder for all output of the run.")] = "./outputs"
    description: Annotated[str, Doc("Description of the run; logged at startup.")] = "default job"
    print_args: Annotated[bool, Doc("Log the resolved configuration at startup.")] = False
    plan: Annotated[
        bool,
        Doc(
            "Do not train: estimate memory and communication per device; writes plan.json and plan.png to dump_folder."
        ),
    ] = False
    plan_suggest: Annotated[
        bool,
        Doc(
            "Plan only: also print the fastest settings that fit, for the same devices and global batch: degrees, "
            "recomputation, fsdp_reshard_after_forward, local_batch_size."
        ),
    ] = False
    simulate_world_size: Annotated[
        WorldSize | None,
        Doc("Plan only: number of processes to simulate; none: the number of GPUs of this machine, at least one."),
    ] = None
    simulate_device: Annotated[
        str,
        Doc(
            "Plan only: A100, H100, H100 500W, H200, B200, MI300X or cpu; auto: the GPU of this machine; without one, "
            "H100 if simulate_world_size is set, else cpu."
        ),
    ] = "auto"
    simulate_expert_load: Annotated[
        ExpertLoad,
        Doc("Plan only, with expert parallelism: rows of the rank whose experts get most, over the mean of ranks."),
    ] = 1.0


@dataclass(frozen=True)
class Profiling:
    """Profiler traces and memory snapshots."""

    enable_profiling: Annotated[bool, Doc("Write a Chrome trace of one step in every profile_freq.")] = False
    save_traces_folder: Annotated[InnerFolder, Doc("Folder for traces, inside dump_folder.")] = "profile_traces"
    profile_freq: Annotated[PositiveInt, Doc("Steps between traces.")] = 10
    enable_memory_snapshot: Annotated[bool, Doc("Write a CUDA memory snapshot every profile_freq steps.")] = False
    save_memory_snapshot_folder: Annotated[InnerFolder, Doc("Folder for memory snapshots, inside dump_folder.")] = (
        "memory_snapshot"
    )


@dataclass(frozen=True)
class Metrics:
    """Metrics of the run. `metrics.jsonl` in the dump folder is always written."""

    log_freq: Annotated[PositiveInt, Doc("Steps between reports.")] = 10
    enable_tensorboard: Annotated[bool, Doc("Also write TensorBoard event files.")] = False
    disable_color_printing: Annotated[bool, Doc("Disable colors in console output.")] = False
    save_tb_folder: Annotated[InnerFolder, Doc("Folder for TensorBoard files, inside dump_folder.")] = "tb"
    save_for_all_ranks: Annotated[
        bool, Doc("Write TensorBoard files, and to trackers, from every rank, not only rank 0.")
    ] = False
    trackers: Annotated[
        list[str], Doc("Also log metrics to these: wandb, mlflow, trackio, or one registered by a custom_import.")
    ] = field(default_factory=list)
    report: Annotated[bool, Doc("Write report.html, with the curves of the run, to dump_folder when the run ends.")] = (
        False
    )


@dataclass(frozen=True)
class Checkpoint:
    """Saving and loading checkpoints. Running the same command again resumes from the newest."""

    enable_checkpoint: Annotated[bool, Doc("Save checkpoints, and resume from the newest.")] = False
    folder: Annotated[
        AnyFolder, Doc("Folder for checkpoints, inside dump_folder unless absolute or a URI, such as s3://bucket/run.")
    ] = "checkpoint"
    initial_load_path: Annotated[
        AnyPath | None,
        Doc(
            "Checkpoint to start from if `folder` has none: a step-N folder, also of torchtitan, or one in Hugging "
            "Face or Meta format; or its URI."
        ),
    ] = None
    initial_load_model_weights_only: Annotated[
        bool, Doc("Load only the weights from initial_load_path, not the optimizer, step and data position.")
    ] = True
    continue_from_path: Annotated[
        bool,
        Doc(
            "Go on from initial_load_path with its optimizer and step, and its data position, unless it is torchtitan: "
            "the same as initial_load_model_weights_only = false."
        ),
    ] = False
    interval: Annotated[PositiveInt, Doc("Steps between checkpoints.")] = 500
    last_save_model_weights_only: Annotated[
        bool, Doc("Save only the weights, in export_dtype, after the last step; the run cannot be resumed from them.")
    ] = False
    export_dtype: Annotated[
        Literal["float16", "bfloat16", "float32"],
        Doc("dtype of a weights-only last checkpoint and of exported weights."),
    ] = "float32"
    last_save_in_hf: Annotated[
        bool, Doc("After the last step, also export the weights for Hugging Face transformers, to step-N-hf.")
    ] = False
    create_seed_checkpoint: Annotated[bool, Doc("Save the initial state as step 0, from one process, then exit.")] = (
        False
    )
    async_mode: Annotated[
        Literal["disabled", "async", "async_with_pinned_mem"],
        Doc("Write checkpoints in the background while training continues."),
    ] = "disabled"
    keep_latest_k: Annotated[NonNegativeInt, Doc("Number of checkpoints to keep; 0 keeps all, 1 is refused.")] = 10
    keep_every: Annotated[
        PositiveInt | TokenCount | None,
        Doc(
            "Also save at each multiple of so many steps, or at the first step that reaches each multiple of so many "
            "tokens, such as 10B, and keep these for good, beside keep_latest_k; none: off."
        ),
    ] = None
    load_step: Annotated[StepOrNewest, Doc("Step to resume from when a command is first started; -1: the newest.")] = -1
    exclude_from_loading: Annotated[
        list[str],
        not_former("lr_scheduler"),
        Doc(
            "Parts not to load when a command is first started: model, optimizer, dataloader, train_state; tokenizer: "
            "do not compare it."
        ),
    ] = field(default_factory=list)
    enable_first_step_checkpoint: Annotated[bool, Doc("Also save after step 1, to detect a full disk early.")] = False
