"""Sections about a run's output: the job itself, metrics, profiling, checkpoints."""

from dataclasses import dataclass, field
from typing import Literal

from torchtitan.config.fields import Annotated, Doc, NonNegativeInt, NotEmpty, PositiveInt, WorldSize


@dataclass(frozen=True)
class Job:
    """The run as a whole."""

    config_file: Annotated[NotEmpty | None, Doc("TOML file to read; flags on the command line win over it.")] = None
    dump_folder: Annotated[NotEmpty, Doc("Folder for everything the run writes.")] = "./outputs"
    description: Annotated[str, Doc("One line for people; printed at start.")] = "default job"
    print_args: Annotated[bool, Doc("Print the resolved configuration at start.")] = False
    plan: Annotated[
        bool, Doc("Train nothing: say what each device would hold and send; plan.json and plan.png in dump_folder.")
    ] = False
    simulate_world_size: Annotated[
        WorldSize | None, Doc("For a plan: the number of processes; none: one for each GPU here, or one.")
    ] = None
    simulate_device: Annotated[
        str, Doc("For a plan: A100, H100, H200, B200, MI300X, cpu; auto: this machine's GPU, else H100 for a world.")
    ] = "auto"


@dataclass(frozen=True)
class Profiling:
    """Traces of time and memory."""

    enable_profiling: Annotated[bool, Doc("Write a Chrome trace of one step in every profile_freq.")] = False
    save_traces_folder: Annotated[NotEmpty, Doc("Folder for traces, inside dump_folder.")] = "profile_traces"
    profile_freq: Annotated[PositiveInt, Doc("Steps from one trace to the next.")] = 10
    enable_memory_snapshot: Annotated[bool, Doc("Write CUDA memory snapshots every profile_freq steps.")] = False
    save_memory_snapshot_folder: Annotated[NotEmpty, Doc("Folder for snapshots, inside dump_folder.")] = (
        "memory_snapshot"
    )


@dataclass(frozen=True)
class Metrics:
    """Numbers about the run. `metrics.jsonl` in the dump folder is always written."""

    log_freq: Annotated[PositiveInt, Doc("Steps from one report to the next.")] = 10
    enable_tensorboard: Annotated[bool, Doc("Also write TensorBoard event files.")] = False
    disable_color_printing: Annotated[bool, Doc("Plain text on the console.")] = False
    save_tb_folder: Annotated[NotEmpty, Doc("Folder for TensorBoard, inside dump_folder.")] = "tb"
    save_for_all_ranks: Annotated[bool, Doc("TensorBoard and wandb from every rank instead of rank 0 alone.")] = False
    enable_wandb: Annotated[bool, Doc("Also send the numbers to Weights & Biases (needs `pip install wandb`).")] = False
    report: Annotated[bool, Doc("Write report.html into dump_folder when the run ends: its curves, to look at.")] = (
        False
    )


@dataclass(frozen=True)
class Checkpoint:
    """State to disk and back. Running the same command again goes on from the newest checkpoint."""

    enable_checkpoint: Annotated[bool, Doc("Save checkpoints, and resume from the newest.")] = False
    folder: Annotated[NotEmpty, Doc("Folder for checkpoints, inside dump_folder.")] = "checkpoint"
    initial_load_path: Annotated[
        NotEmpty | None,
        Doc("To start from where `folder` holds none: a step-N folder, or one of Hugging Face's or Meta's form."),
    ] = None
    initial_load_model_weights_only: Annotated[
        bool, Doc("Take only the weights from initial_load_path, not optimizer, step and data position.")
    ] = True
    interval: Annotated[PositiveInt, Doc("Steps from one checkpoint to the next.")] = 500
    last_save_model_weights_only: Annotated[
        bool, Doc("Save only the weights, in export_dtype, after the last step; such a run cannot be extended.")
    ] = False
    export_dtype: Annotated[
        Literal["float16", "bfloat16", "float32"], Doc("dtype of a weights-only last checkpoint, and of an export.")
    ] = "float32"
    last_save_in_hf: Annotated[
        bool, Doc("Also export the weights for Hugging Face transformers, after the last step, into step-N-hf.")
    ] = False
    create_seed_checkpoint: Annotated[bool, Doc("Save the initial state as step 0 from one process, and stop.")] = False
    async_mode: Annotated[
        Literal["disabled", "async", "async_with_pinned_mem"], Doc("Write checkpoints while training goes on.")
    ] = "disabled"
    keep_latest_k: Annotated[NonNegativeInt, Doc("Checkpoints to keep; 0 keeps all, 1 is refused.")] = 10
    load_step: Annotated[int, Doc("Step to resume from at the first start of a command; -1: the newest.")] = -1
    exclude_from_loading: Annotated[
        list[str], Doc("Parts not to load then: model, optimizer, dataloader, train_state.")
    ] = field(default_factory=list)
    enable_first_step_checkpoint: Annotated[bool, Doc("Also save after step 1, to find a full disk early.")] = False
