"""Sections about what is trained and how: model, optimizer, learning rate, data and batch, validation, evaluation."""

from dataclasses import dataclass, field
from typing import Literal

from torchtitan.config.fields import (
    Annotated,
    BelowOne,
    Decay,
    Doc,
    Fraction,
    LearningRate,
    NonNegativeInt,
    NotEmpty,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Seed,
    TimesMore,
)


@dataclass(frozen=True)
class Model:
    """Which model."""

    name: Annotated[
        str, Doc("Model family: llama2, llama3, llama3.1, llama3.2, or one that a custom_import registered.")
    ] = "llama3"
    flavor: Annotated[str, Doc("Size within the family, such as debugmodel, 1B, 8B, 70B.")] = "debugmodel"
    tokenizer_path: Annotated[
        NotEmpty | None,
        Doc("Tokenizer file or its folder: sentencepiece, tokenizer.json or tiktoken; none: the one shipped here."),
    ] = None
    converters: Annotated[list[str], Doc("Converters to apply before parallelization, in order, such as float8.")] = (
        field(default_factory=list)
    )
    print_after_conversion: Annotated[bool, Doc("Print the model once the converters have run.")] = False


@dataclass(frozen=True)
class Optimizer:
    """The update rule."""

    name: Annotated[str, Doc("AdamW, Adam, or AdamW with moments in 8 or 4 bits: AdamW8bit, AdamWFp8, AdamW4bit.")] = (
        "AdamW"
    )
    lr: Annotated[LearningRate, Doc("Peak learning rate.")] = 8e-4
    beta1: Annotated[BelowOne, Doc("Decay of the first moment.")] = 0.9
    beta2: Annotated[BelowOne, Doc("Decay of the second moment.")] = 0.95
    eps: Annotated[PositiveFraction, Doc("Added to the root of the second moment.")] = 1e-8
    weight_decay: Annotated[Decay, Doc("Decoupled for AdamW, added to the gradient for Adam.")] = 0.1
    no_weight_decay: Annotated[
        list[str], Doc("What weight decay leaves alone: norms (and biases), embeddings; empty: nothing.")
    ] = field(default_factory=lambda: ["norms"])
    implementation: Annotated[
        Literal["for-loop", "foreach", "fused"], Doc("How the update runs; fused is fastest.")
    ] = "fused"
    state_dtype: Annotated[
        Literal["float32", "bfloat16"], Doc("dtype of AdamW's moments; bfloat16 is rounded stochastically.")
    ] = "float32"
    second_moment: Annotated[
        Literal["v", "sqrt_v"], Doc("What AdamWFp8 holds: the second moment, or its root, of half the dynamic range.")
    ] = "v"
    early_step_in_backward: Annotated[
        bool, Doc("Update each parameter during the backward pass, and free its gradient; without clipping.")
    ] = False


@dataclass(frozen=True)
class LRScheduler:
    """Learning rate over the steps: linear warm-up, stable, decay."""

    warmup_steps: Annotated[NonNegativeInt, Doc("Steps of linear warm-up.")] = 200
    decay_ratio: Annotated[
        Fraction | None, Doc("Share of the steps spent decaying at the end; none decays right after warm-up.")
    ] = None
    decay_type: Annotated[Literal["linear", "sqrt", "cosine"], Doc("Shape of the decay.")] = "linear"
    lr_min: Annotated[Fraction, Doc("Learning rate at the last step, as a ratio of optimizer.lr.")] = 0.0


@dataclass(frozen=True)
class Training:
    """Data, batch, precision and length."""

    dataset: Annotated[
        NotEmpty,
        Doc("Data set by name: python_stdlib, c4, c4_validation, c4_test, or one that a custom_import registered."),
    ] = "python_stdlib"
    dataset_path: Annotated[
        NotEmpty | None, Doc("Read this instead: a JSONL, Parquet or text file, a folder of them, or a hub id.")
    ] = None
    dataset_mixture: Annotated[
        list[str],
        Doc("Weighted mixture instead, each entry `name or path:weight`, or `path#column:weight`; shares of tokens."),
    ] = field(default_factory=list)
    text_column: Annotated[NotEmpty, Doc("Column of a JSON or Parquet file that holds the text; a.b for b in a.")] = (
        "text"
    )
    shuffle: Annotated[bool, Doc("Shuffle the documents anew in each epoch.")] = True
    document_mask: Annotated[bool, Doc("Keep attention within each document of a packed sequence.")] = False
    record_sample_ids: Annotated[
        bool, Doc("Debugging: write the ids of the documents in each batch to sample_ids/ in the dump folder.")
    ] = False
    local_batch_size: Annotated[PositiveInt, Doc("Sequences in one forward pass of one data-parallel rank.")] = 8
    global_batch_size: Annotated[
        int, Doc("Sequences in one optimizer step over all ranks; -1: local_batch_size times the ranks.")
    ] = -1
    seq_len: Annotated[PositiveInt, Doc("Tokens in a sequence.")] = 2048
    max_norm: Annotated[PositiveFloat, Doc("Gradients are scaled down to this total norm; inf: never.")] = 1.0
    skip_nonfinite: Annotated[
        bool, Doc("Skip the optimizer step, on all ranks, where the loss or the gradient norm is not finite.")
    ] = True
    skip_grad_norm_outliers: Annotated[
        TimesMore | None,
        Doc("Also skip it where the gradient norm is above this many times the median of the last 100; none: off."),
    ] = None
    max_skips_in_a_row: Annotated[
        PositiveInt,
        PositiveFraction,
        Doc("Stop the run, at the next report, with the ids of the samples, after this many skipped steps in a row."),
    ] = 10
    steps: Annotated[PositiveInt, Doc("Optimizer steps.")] = 10000
    weight_dtype: Annotated[
        Literal["float32", "bfloat16"],
        Doc("dtype of weights and gradients in memory; bfloat16: updated weights are rounded stochastically."),
    ] = "float32"
    enable_cpu_offload: Annotated[bool, Doc("Keep parameters and optimizer state in host memory.")] = False
    mixed_precision_param: Annotated[
        Literal["auto", "bfloat16", "float32"],
        Doc(
            "dtype of the forward and backward computation, whatever the layout. auto: bfloat16, or float32 on a CPU "
            "that multiplies float32 faster; a resumed run stays in what it began with."
        ),
    ] = "auto"
    mixed_precision_reduce: Annotated[Literal["float32"], Doc("dtype in which gradients are summed.")] = "float32"
    compile: Annotated[bool, Doc("Compile each transformer block with torch.compile.")] = False
    gc_freq: Annotated[PositiveInt, Doc("Steps between garbage collections (at the same step on every rank).")] = 50
    gc_debug: Annotated[bool, Doc("Collect garbage before every step and log what it found.")] = False
    seed: Annotated[Seed, Doc("Seed of weights and data order.")] = 0
    deterministic: Annotated[bool, Doc("Refuse kernels whose result may differ from run to run.")] = False


@dataclass(frozen=True)
class Validation:
    """A loop over held-out text, between training steps."""

    enabled: Annotated[bool, Doc("Measure the loss on held-out text every freq steps and after the last.")] = False
    dataset: Annotated[
        NotEmpty | None, Doc("Data set by name; none: hold out one document in a hundred of the training data.")
    ] = None
    dataset_path: Annotated[NotEmpty | None, Doc("File, folder or hub id to validate on.")] = None
    text_column: Annotated[NotEmpty, Doc("Column of a JSON or Parquet file that holds the text; a.b for b in a.")] = (
        "text"
    )
    local_batch_size: Annotated[PositiveInt, Doc("Sequences in one forward pass of one rank.")] = 8
    freq: Annotated[PositiveInt, Doc("Training steps from one validation to the next.")] = 100
    steps: Annotated[PositiveInt, Doc("Batches in one validation; the same ones each time.")] = 10
    sample_prompts: Annotated[
        list[str], Doc("Texts for the model to continue greedily, by up to 64 tokens, after each validation.")
    ] = field(default_factory=list)


@dataclass(frozen=True)
class Evaluation:
    """Tasks for the model, between training steps and after the last."""

    tasks: Annotated[
        list[str],
        Doc(
            "stdlib_identifiers, stdlib_brackets, stdlib_docstrings; JSONL files like HellaSwag's, ARC's, PIQA's or "
            "LAMBADA's; held_out or text:PATH for bits per byte."
        ),
    ] = field(default_factory=list)
    freq: Annotated[PositiveInt, Doc("Training steps from one evaluation to the next.")] = 500
    num_fewshot: Annotated[NonNegativeInt, Doc("Solved examples before each one: the first others of its file.")] = 0
    limit: Annotated[PositiveInt | None, Doc("Take only the first so many examples of each task; none: all.")] = None
