"""Sections about what is trained and how: model, optimizer, learning rate, data and batch, validation, evaluation."""

from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.config.fields import (
    Annotated,
    AnyPath,
    BatchSize,
    BelowOne,
    Coefficients,
    DataPath,
    Decay,
    Doc,
    Fraction,
    Gigabytes,
    LearningRate,
    NonNegativeInt,
    NotEmpty,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    PositiveOrAll,
    RopeScalingTable,
    RopeTheta,
    SecondsOrNone,
    Seed,
    StageEnd,
    StageName,
    Steps,
    TimesMore,
    TokenOrNothing,
    batch_schedule,
    not_former,
)


@dataclass(frozen=True)
class Model:
    """The model."""

    name: Annotated[
        str,
        not_former("llama"),
        Doc(
            "Model family: llama2, llama3, llama3.1, llama3.2, qwen3, qwen3_moe, olmo3, glm4_moe, afmoe, "
            "gpt_oss, gemma3, deepseek_v3, or one registered by a custom_import."
        ),
    ] = "llama3"
    flavor: Annotated[
        str,
        not_former("(debugmodel|8B|70B|405B)_(flex|varlen)(_attn)?"),
        Doc(
            "Size within the family, such as debugmodel, 1B, 8B or 70B; auto: the size of the model in "
            "checkpoint.initial_load_path."
        ),
    ] = "debugmodel"
    dim: Annotated[
        PositiveInt | None,
        Doc("Width; heads and feed-forward grow in proportion, from the flavor's. none: the flavor's."),
    ] = None
    n_layers: Annotated[PositiveInt | None, Doc("Number of layers; none: the flavor's.")] = None
    rope_theta: Annotated[
        RopeTheta | None, Doc("Base of RoPE's wavelengths; larger for longer contexts. none: the flavor's.")
    ] = None
    rope_scaling: Annotated[
        RopeScalingTable | None,
        Doc(
            "Scaling of RoPE: its type (linear, llama3, yarn; default: no scaling) and the keys of the type. none: the "
            "flavor's."
        ),
    ] = None
    parametrization: Annotated[
        Literal["standard", "mup"],
        Doc(
            "mup: initial values and learning rates follow from mup_base_flavor, so that one optimizer.lr suits every "
            "width and depth."
        ),
    ] = "standard"
    mup_base_flavor: Annotated[
        str, Doc("The flavor for which mup changes nothing; the same for all sizes that share a learning rate.")
    ] = "debugmodel"
    tokenizer_path: Annotated[
        AnyPath | None,
        Doc(
            "Tokenizer file or its folder: sentencepiece, tokenizer.json, tiktoken, tekken.json or vocab.json; none: "
            "the tokenizer shipped here."
        ),
    ] = None
    converters: Annotated[
        list[str],
        not_former(
            r"quantize\.((linear|dense|grouped_mm|moe)\.(float8|mx)|(linear|moe)\.fp8|(float8|mx)\.(dense|moe))"
        ),
        Doc("Converters to apply before parallelization, in order, such as float8."),
    ] = field(default_factory=list)
    print_after_conversion: Annotated[bool, Doc("Log the model after conversion.")] = False


@dataclass(frozen=True)
class MoEKeys:
    """Mixtures of experts, for models that have them."""

    balance: Annotated[
        Literal["bias", "loss", "none"],
        Doc("What keeps the load of experts even: a bias on the router's scores, an additional loss, or nothing."),
    ] = "bias"
    bias_update_speed: Annotated[PositiveFloat, Doc("balance bias: change of an expert's bias in a step.")] = 1e-3
    loss_coefficient: Annotated[PositiveFloat, Doc("balance loss: factor on the loss for an even load.")] = 1e-3
    z_loss_coefficient: Annotated[
        PositiveFloat | None,
        Doc("Router z-loss: factor on the mean of logsumexp(logits)² of each layer's router; none: off."),
    ] = None
    all_to_all_dtype: Annotated[
        Literal["", "float8", "int8"],
        Doc("Precision of rows and gradients on their way to other ranks' experts; empty: as computed."),
    ] = ""


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters with their own settings; each key defaults to [optimizer]'s. If several entries name a parameter, keys
    of later entries win."""

    parameters: Annotated[
        list[str],
        Doc("Which: whole components of a parameter's name, such as tok_embeddings or layers.*.attention; or globs."),
    ] = field(default_factory=list)
    lr: Annotated[LearningRate | None, Doc("Peak learning rate.")] = None
    weight_decay: Annotated[Decay | None, Doc("Weight decay; overrides no_weight_decay.")] = None
    beta1: Annotated[BelowOne | None, Doc("Decay rate of the first moment.")] = None
    beta2: Annotated[BelowOne | None, Doc("Decay rate of the second moment.")] = None
    algorithm: Annotated[
        Literal["Muon", "AdamW"] | None,
        Doc("With optimizer.name = Muon: what updates them; none: Muon for matrices in blocks, AdamW for the rest."),
    ] = None


@dataclass(frozen=True)
class Optimizer:
    """The optimizer."""

    name: Annotated[
        str,
        Doc(
            "AdamW, Adam; Muon, with AdamW for embeddings, output and vectors; with 8-bit or 4-bit moments: AdamW8bit, "
            "AdamWFp8, AdamW4bit, Muon8bit."
        ),
    ] = "AdamW"
    lr: Annotated[LearningRate, Doc("Peak learning rate.")] = 8e-4
    beta1: Annotated[BelowOne, Doc("Decay rate of the first moment.")] = 0.9
    beta2: Annotated[BelowOne, Doc("Decay rate of the second moment.")] = 0.95
    eps: Annotated[PositiveFraction, Doc("Added to the square root of the second moment, in the denominator.")] = 1e-8
    weight_decay: Annotated[Decay, Doc("Weight decay: decoupled for AdamW, added to the gradient for Adam.")] = 0.1
    no_weight_decay: Annotated[
        list[str], Doc("Parameters without weight decay: norms (and biases), embeddings; empty: none.")
    ] = field(default_factory=lambda: ["norms"])
    implementation: Annotated[
        Literal["for-loop", "foreach", "fused"], Doc("Implementation of the update; fused is the fastest.")
    ] = "fused"
    state_dtype: Annotated[
        Literal["float32", "bfloat16"], Doc("dtype of AdamW's and Muon's moments; bfloat16 uses stochastic rounding.")
    ] = "float32"
    second_moment: Annotated[
        Literal["v", "sqrt_v", "v_e5m2", "sqrt_v_e5m2"],
        Doc(
            "What AdamWFp8 stores: the second moment, or its square root, which needs half the dynamic range; in e4m3, "
            "or in e5m2, which has more range and less precision."
        ),
    ] = "sqrt_v"
    muon_momentum: Annotated[BelowOne, Doc("Decay rate of Muon's momentum.")] = 0.95
    muon_nesterov: Annotated[bool, Doc("Nesterov's momentum for Muon.")] = True
    muon_steps: Annotated[PositiveInt, Doc("Newton-Schulz steps of Muon.")] = 5
    muon_coefficients: Annotated[
        Coefficients, Doc("a, b, c of a Newton-Schulz step, a X + b (XX')X + c (XX')(XX')X.")
    ] = field(default_factory=lambda: [3.4445, -4.7750, 2.0315])
    muon_polar_express: Annotated[
        bool, Doc("Use Polar Express, with coefficients of its own in each step, instead of muon_coefficients.")
    ] = False
    muon_row_normalization: Annotated[
        bool, Doc("NorMuon: divide each row of Muon's update by its root mean square, averaged with decay rate beta2.")
    ] = False
    early_step_in_backward: Annotated[
        bool, Doc("Update each parameter during the backward pass and free its gradient; excludes gradient clipping.")
    ] = False
    ema_decay: Annotated[
        BelowOne | None,
        Doc(
            "Keep a moving average of the weights with this decay, in the checkpoints; none: off, or, in a stage of a "
            "run that has one, paused. --ema of torchtitan.tools.convert, evaluate and generate uses it."
        ),
    ] = None
    group: Annotated[list[OptimizerGroup], Doc("Parameters with their own learning rate, decay or betas.")] = field(
        default_factory=list
    )


@dataclass(frozen=True)
class LRScheduler:
    """Learning-rate schedule: linear warm-up, stable, decay."""

    warmup_steps: Annotated[NonNegativeInt, Doc("Steps of linear warm-up.")] = 200
    total_steps: Annotated[
        PositiveInt | None,
        Doc(
            "Steps of the whole schedule, if the run ends before it, as the first part of a long one; none: the run's."
        ),
    ] = None
    decay_ratio: Annotated[
        Fraction | None,
        Doc("Fraction of the steps, at the end, in which the learning rate decays; none: all steps after warm-up."),
    ] = None
    decay_type: Annotated[
        Literal["linear", "sqrt", "cosine", "power"],
        Doc(
            "Shape of the decay; power: by the inverse square root of the schedule's step, which does not reach lr_min."
        ),
    ] = "linear"
    lr_min: Annotated[Fraction, Doc("Final learning rate, as a fraction of optimizer.lr.")] = 0.0


@dataclass(frozen=True)
class Training:
    """Data, batch, precision and length."""

    dataset: Annotated[
        NotEmpty,
        not_former("c4_mini|c4_test"),
        Doc("Data set by name: python_stdlib, c4, c4_validation, or one registered by a custom_import."),
    ] = "python_stdlib"
    dataset_path: Annotated[
        DataPath | None,
        Doc(
            "Overrides dataset: a JSONL, Parquet, Arrow, text or token file, a folder or pattern of them, a URI of "
            "these (s3://bucket/folder), or a Hub id."
        ),
    ] = None
    dataset_mixture: Annotated[
        list[str],
        Doc(
            "Weighted mixture, overrides both: entries `name or path:weight`, `path#column:weight` or "
            "`path@name:weight` (its name in logs and metrics); weights are fractions of tokens."
        ),
    ] = field(default_factory=list)
    text_column: Annotated[NotEmpty, Doc("Text column of JSON and Parquet files; a.b for field b of column a.")] = (
        "text"
    )
    train_on: Annotated[
        Literal["assistant", "completion", "all"] | None,
        Doc("Read conversations (messages, or prompt and completion), and count these of their tokens; none: text."),
    ] = None
    chat_template: Annotated[
        NotEmpty | None, Doc("Format of conversations: chatml, llama3 or a file; none: the tokenizer folder's own.")
    ] = None
    long_conversations: Annotated[
        Literal["truncate", "skip", "refuse"], Doc("What becomes of conversations longer than a sequence.")
    ] = "truncate"
    token_dtype: Annotated[
        Literal["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"] | None,
        Doc("dtype of tokens in raw shards (.bin, .npy), whose header does not say it; none: as their content tells."),
    ] = None
    token_separator: Annotated[
        TokenOrNothing | None,
        Doc(
            "Id between the documents of token shards without an index; none: the tokenizer's EOS or BOS; -1: nothing "
            "is between them, so a document ends after 2^20 tokens."
        ),
    ] = None
    cache_gb: Annotated[
        Gigabytes,
        Doc("GB of data from object stores that all runs of a machine keep in the cache folder; 0: in memory only."),
    ] = 20.0
    max_document_mb: Annotated[
        PositiveFloat,
        Doc(
            "MB of a line, or of the text or tokens of a record, above which it ends the run: what a small compressed "
            "file holds may be larger than the memory."
        ),
    ] = 100.0
    shuffle: Annotated[bool, Doc("Shuffle the documents, in a different order each epoch.")] = True
    add_bos: Annotated[
        bool | None, Doc("Begin each document with the tokenizer's BOS token; none: as the tokenizer's files declare.")
    ] = None
    add_eos: Annotated[bool, Doc("End each document with the tokenizer's EOS token.")] = True
    eod_mask_loss: Annotated[
        bool,
        Doc(
            "No loss after an EOS, where the first token of another document would be predicted (Megatron-LM's key): "
            "without a BOS, EOS is trained to begin it."
        ),
    ] = False
    document_mask: Annotated[bool, Doc("Mask attention across document boundaries within a packed sequence.")] = False
    packing: Annotated[
        Literal["concatenate", "best_fit"],
        Doc(
            "How documents fill sequences. concatenate: one after the other, cut where a sequence ends. best_fit: "
            "whole where they fit, with some padding."
        ),
    ] = "concatenate"
    skip_steps: Annotated[
        Steps,
        Doc(
            "Steps whose data are passed over, such as 1200-1250 after a spike of the loss: step 1200 then trains on "
            "what step 1251 would have read."
        ),
    ] = field(default_factory=list)
    retry_seconds: Annotated[
        SecondsOrNone,
        Doc("Read data again for this long after an error that is likely to pass, such as a lost connection; 0: off."),
    ] = 300
    record_sample_ids: Annotated[
        bool, Doc("For debugging: write the document ids of each batch to sample_ids/ in the dump folder.")
    ] = False
    local_batch_size: Annotated[PositiveInt, Doc("Sequences per forward pass on each data-parallel rank.")] = 8
    global_batch_size: Annotated[
        BatchSize,
        Doc(
            "Sequences per optimizer step over all ranks; -1: local_batch_size x data-parallel ranks. A text such as "
            "'64@0, 128@2B, 256@50000' sets sizes by tokens or steps of the run, with the same learning rate."
        ),
    ] = -1
    seq_len: Annotated[PositiveInt, Doc("Tokens per sequence.")] = 2048
    max_norm: Annotated[PositiveFloat, Doc("Clip gradients to this global norm; inf: no clipping.")] = 1.0
    z_loss_coefficient: Annotated[
        PositiveFloat | None,
        Doc("z-loss: factor on the mean of logsumexp(logits)², which is added to the loss, unreported; none: off."),
    ] = None
    mtp_layers: Annotated[
        NonNegativeInt, Doc("Multi-token prediction: layers that each predict one token further ahead; 0: off.")
    ] = 0
    mtp_loss_coefficient: Annotated[
        PositiveFloat, Doc("Factor on the mean of their losses, which is added to the loss and reported as mtp_loss.")
    ] = 0.1
    skip_nonfinite: Annotated[
        bool, Doc("Skip the optimizer step, on all ranks, if the loss or the gradient norm is not finite.")
    ] = True
    skip_grad_norm_outliers: Annotated[
        TimesMore | None,
        Doc("Also skip it if the gradient norm exceeds this multiple of the median of the last 100 norms; none: off."),
    ] = None
    max_skips_in_a_row: Annotated[
        PositiveInt,
        Doc("Stop the run, at the next report, after this many consecutive skipped steps; the error lists sample ids."),
    ] = 10
    steps: Annotated[PositiveInt, Doc("Number of optimizer steps.")] = 10000
    weight_dtype: Annotated[
        Literal["float32", "bfloat16"],
        Doc("dtype of weights and gradients in memory; bfloat16: weight updates use stochastic rounding."),
    ] = "float32"
    enable_cpu_offload: Annotated[bool, Doc("Keep parameters and optimizer state in CPU memory.")] = False
    mixed_precision_param: Annotated[
        Literal["auto", "bfloat16", "float32"],
        Doc(
            "Compute dtype of the forward and backward pass, whatever the parallelism. auto: bfloat16, or float32 on "
            "a CPU whose float32 GEMMs are faster; a resumed run keeps its dtype."
        ),
    ] = "auto"
    mixed_precision_reduce: Annotated[
        Literal["float32", "bfloat16"],
        Doc("dtype in which ranks sum a micro-batch's gradients; the sum over micro-batches is in weight_dtype."),
    ] = "float32"
    compile: Annotated[bool, Doc("Compile each transformer block with torch.compile.")] = False
    gc_freq: Annotated[PositiveInt, Doc("Steps between garbage collections, at the same step on every rank.")] = 50
    gc_debug: Annotated[bool, Doc("Collect garbage before every step and log the number of unreachable objects.")] = (
        False
    )
    seed: Annotated[Seed, Doc("Seed of the initial weights and the data order.")] = 0
    deterministic: Annotated[bool, Doc("Use only deterministic kernels; an operation without one is an error.")] = False

    @property
    def first_batch_size(self) -> int:
        """`global_batch_size`, or the first one of its schedule; it may be -1."""
        given = self.global_batch_size
        return batch_schedule(given)[0][0] if isinstance(given, str) else given

    def sequences_per_step(self, dp: int) -> int:
        """Sequences per optimizer step, at first, of all `dp` data-parallel ranks."""
        return self.local_batch_size * dp if self.first_batch_size == -1 else self.first_batch_size


@dataclass(frozen=True)
class Validation:
    """Validation on held-out text between training steps."""

    enabled: Annotated[bool, Doc("Compute the loss on held-out text every freq steps and after the last step.")] = False
    dataset: Annotated[
        Annotated[NotEmpty, not_former("c4_test")] | None,
        Doc("Data set by name; none: hold out 1% of the training documents."),
    ] = None
    dataset_path: Annotated[DataPath | None, Doc("File, folder, URI or Hub id to validate on.")] = None
    text_column: Annotated[NotEmpty, Doc("Text column of JSON and Parquet files; a.b for field b of column a.")] = (
        "text"
    )
    local_batch_size: Annotated[PositiveInt, Doc("Sequences per forward pass on each rank.")] = 8
    freq: Annotated[PositiveInt, Doc("Training steps between validations.")] = 100
    steps: Annotated[
        PositiveOrAll, Doc("Batches per validation, the same each time; -1: the whole set, each document once.")
    ] = 10
    sample_prompts: Annotated[
        list[str], Doc("Prompts for the model to continue greedily, by up to 64 tokens, after each validation.")
    ] = field(default_factory=list)


@dataclass(frozen=True)
class Evaluation:
    """Evaluation on tasks, between training steps and after the last step."""

    tasks: Annotated[
        list[str],
        Doc(
            "stdlib_identifiers, stdlib_brackets, stdlib_docstrings, stdlib_needle_short, stdlib_needle_long; JSONL "
            "files in the format of HellaSwag, ARC, PIQA or LAMBADA; held_out or text:PATH for bits per byte; "
            "lm_eval:TASK or lm_eval:FOLDER/TASK."
        ),
    ] = field(default_factory=list)
    freq: Annotated[PositiveInt, Doc("Training steps between evaluations.")] = 500
    at_start: Annotated[
        bool,
        Doc(
            "Also validate and evaluate before the first step, so that curves begin at step 0, and where a run "
            "resumes, unless that is recorded."
        ),
    ] = False
    num_fewshot: Annotated[
        NonNegativeInt | None,
        Doc("Solved examples in front of each example: the first others of its file. none: 0, or what lm_eval says."),
    ] = None
    limit: Annotated[
        PositiveInt | None,
        Doc("Use only the first N examples of each task; none: all, but of a text the first 1,000 documents."),
    ] = None


@dataclass(frozen=True)
class StageSection:
    """A part of the run with its own data, lengths, precision or learning rate. In the TOML file it may also have keys
    of other sections, such as training.seq_len = 32768."""

    name: Annotated[StageName, Doc("In logs, and in flags such as --stage.NAME.training.seq_len=32768.")] = "unnamed"
    until: Annotated[
        StageEnd | None,
        Doc("Its end: a step, a fraction of training.steps, or tokens such as '400B'; the last has none."),
    ] = None
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)  # these keys, by section


@dataclass(frozen=True)
class Stages:
    """Parts of the run, one after the other."""

    entries: Annotated[
        list[StageSection], Doc("Consecutive stages, each with the keys that it changes; see docs/stages.md.")
    ] = field(default_factory=list)
