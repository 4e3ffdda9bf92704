"""Sections of the low-precision converters, and the precision schedule."""

from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.config.fields import Annotated, Doc, Fraction, NonNegativeInt, PositiveInt

Cast = Literal["dynamic", "delayed"]
FILTER_DOC = Doc(
    "Layers not to convert: whole components of a module path, such as output or attention.wk; globs; or flags: "
    "auto_filter_small_kn (too small on a rank, by torchao's thresholds), auto_filter_small_kn_full (the same before "
    "tensor parallelism divides layers, as torchao judges), auto_filter_measured (not faster on this device), "
    "auto_filter_numerics (too inaccurate)."
)


@dataclass(frozen=True)
class Float8:
    """GEMMs in float8 (converter float8)."""

    recipe_name: Annotated[
        Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "delayed"] | None,
        Doc(
            "Scaling granularity; blockwise: one scale per 1 x 128 activations or gradients and 128 x 128 weights; "
            "delayed: one per tensor, from previous steps; none: tensorwise."
        ),
    ] = None
    cast_input: Annotated[
        Cast | None, Doc("Scaling of inputs: from their current values (dynamic) or from previous steps (delayed).")
    ] = None
    cast_weight: Annotated[Cast | None, Doc("The same for weights; none: as recipe_name implies.")] = None
    cast_grad_output: Annotated[Cast | None, Doc("The same for output gradients.")] = None
    delayed_history_len: Annotated[PositiveInt, Doc("Number of steps in the history of largest magnitudes (amax).")] = (
        16
    )
    delayed_amax: Annotated[
        Literal["max", "most_recent"], Doc("Which amax of the history sets the scale: the largest, or the most recent.")
    ] = "max"
    delayed_margin: Annotated[NonNegativeInt, Doc("Headroom above that amax, in powers of two.")] = 0
    delayed_format: Annotated[
        Literal["hybrid", "e4m3"], Doc("hybrid: e5m2 for output gradients, e4m3 for the rest; e4m3: e4m3 for all.")
    ] = "hybrid"
    weight_scale: Annotated[
        Literal["measured", "bound"],
        Doc(
            "Scales of the float8 all-gather: from the measured amax of the weights, or from a bound on AdamW's "
            "updates."
        ),
    ] = "measured"
    weight_scale_freq: Annotated[
        PositiveInt, Doc("With weight_scale = bound: steps between measurements of the weights.")
    ] = 16
    enable_fsdp_float8_all_gather: Annotated[bool, Doc("All-gather sharded weights in float8 (tensorwise only).")] = (
        False
    )
    precompute_float8_dynamic_scale_for_fsdp: Annotated[
        bool, Doc("With the float8 all-gather: compute all weight scales with one all-reduce after each step.")
    ] = False
    filter_fqns: Annotated[list[str], FILTER_DOC] = field(default_factory=lambda: ["output"])
    emulate: Annotated[
        bool, Doc("Emulate float8: round the operands, but compute the GEMMs in high precision; runs on any device.")
    ] = False


@dataclass(frozen=True)
class Int8:
    """GEMMs in INT8 (converter int8)."""

    recipe_name: Annotated[Literal["rowwise", "tensorwise"], Doc("One scale per row, or one per tensor.")] = "rowwise"
    output: Annotated[bool, Doc("Compute the forward GEMM in int8.")] = True
    grad_input: Annotated[bool, Doc("Compute the input-gradient GEMM in int8.")] = True
    grad_weight: Annotated[bool, Doc("Compute the weight-gradient GEMM in int8.")] = True
    enable_fsdp_int8_all_gather: Annotated[
        bool,
        Doc(
            "All-gather sharded weights in int8: half the bytes of bf16. Weights that are not sharded, as on one GPU, "
            "are quantized once a step."
        ),
    ] = False
    # The logits' gradient spans many orders of magnitude in a row: nearly all 0 in int8 (docs/low_precision.md).
    filter_fqns: Annotated[list[str], FILTER_DOC] = field(default_factory=lambda: ["output"])
    emulate: Annotated[
        bool, Doc("Emulate int8: round the operands, but compute the GEMMs in high precision; runs on any device.")
    ] = False


@dataclass(frozen=True)
class MX:
    """GEMMs in formats with a scale per block of 16 or 32 numbers (converter mx)."""

    recipe_name: Annotated[
        Literal["mxfp8", "mxint8", "nvfp4"], Doc("Element format; mxint8 is only emulated so far.")
    ] = "mxfp8"
    scale_calculation_mode: Annotated[
        Literal["rceil", "floor", "even", "ceil"],
        Doc("How a block's scale is rounded to a power of two (mxfp8, mxint8)."),
    ] = "rceil"
    symmetric_clipping: Annotated[
        bool, Doc("mxint8: codes from -127 to 127; false: from -128, which some blocks reach with floor scales.")
    ] = True
    keep_first_blocks_fraction: Annotated[
        Fraction, Doc("nvfp4: leave this fraction of the transformer blocks, the first ones, in high precision.")
    ] = 0.0
    keep_last_blocks_fraction: Annotated[
        Fraction, Doc("nvfp4: leave this fraction of the transformer blocks, the last ones, in high precision.")
    ] = 0.15
    weight_scales_2d: Annotated[
        bool, Doc("nvfp4: a weight scale per 16 x 16 numbers, the same forward and backward; false: per 1 x 16.")
    ] = True
    random_hadamard: Annotated[
        bool, Doc("nvfp4: spread outliers with a random Hadamard transform before the weight-gradient GEMM.")
    ] = True
    stochastic_rounding: Annotated[bool, Doc("nvfp4: round output gradients stochastically.")] = True
    forward_with_hp: Annotated[bool, Doc("Compute the forward GEMM in high precision.")] = False
    wgrad_with_hp: Annotated[bool, Doc("Compute the weight-gradient GEMM in high precision.")] = False
    filter_fqns: Annotated[list[str], FILTER_DOC] = field(default_factory=lambda: ["output"])
    emulate: Annotated[
        bool, Doc("Emulate MX: round the operands, but compute the GEMMs in high precision; runs on any device.")
    ] = False


@dataclass(frozen=True)
class PrecisionPhase:
    """A phase of the run with its own converters. In the TOML file it may contain tables such as
    [precision.phase.float8], whose keys override [float8]'s in this phase."""

    until_step: Annotated[PositiveInt | None, Doc("Last step of the phase; optional for the last phase.")] = None
    until: Annotated[
        Fraction | None, Doc("End of the phase as a fraction of training.steps, instead of until_step.")
    ] = None
    converters: Annotated[list[str], Doc("Converters, as in model.converters; none: bf16.")] = field(
        default_factory=list
    )
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)  # these tables, by name


@dataclass(frozen=True)
class Precision:
    """A precision schedule: converters that change during the run."""

    phase: Annotated[list[PrecisionPhase], Doc("Consecutive phases, which replace model.converters.")] = field(
        default_factory=list
    )
