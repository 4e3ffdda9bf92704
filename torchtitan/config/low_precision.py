"""Sections of the low-precision converters, and the precision schedule."""

from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.config.fields import Annotated, Doc, Fraction, NonNegativeInt, PositiveInt

Cast = Literal["dynamic", "delayed"]
FILTER_DOC = Doc("Layers to leave alone: whole components of a module path, such as output or attention.wk; globs too.")


@dataclass(frozen=True)
class Float8:
    """GEMMs in float8 (converter float8)."""

    recipe_name: Annotated[
        Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"] | None,
        Doc("Granularity of scales; delayed: one for each tensor, from the steps before; none: tensorwise."),
    ] = None
    cast_input: Annotated[Cast | None, Doc("Whether inputs are scaled by their own numbers, or by those before.")] = (
        None
    )
    cast_weight: Annotated[Cast | None, Doc("The same for weights; none: as the recipe does it.")] = None
    cast_grad_output: Annotated[Cast | None, Doc("The same for gradients of outputs.")] = None
    delayed_history_len: Annotated[PositiveInt, Doc("Steps that the largest magnitudes (amax) are kept for.")] = 16
    delayed_amax: Annotated[
        Literal["max", "most_recent"], Doc("Which amax of the history makes the scale: the largest, or the last.")
    ] = "max"
    delayed_margin: Annotated[NonNegativeInt, Doc("Powers of two left free above that amax.")] = 0
    delayed_format: Annotated[
        Literal["hybrid", "e4m3"], Doc("Gradients of outputs in e5m2 and the rest in e4m3, or everything in e4m3.")
    ] = "hybrid"
    weight_scale: Annotated[
        Literal["measured", "bound"],
        Doc("Scales of the float8 all-gather: from the weights' amax, or from how far AdamW can have moved them."),
    ] = "measured"
    weight_scale_freq: Annotated[PositiveInt, Doc("With bound: steps between measurements of the weights.")] = 16
    enable_fsdp_float8_all_gather: Annotated[bool, Doc("Gather sharded weights in float8 (tensorwise only).")] = False
    precompute_float8_dynamic_scale_for_fsdp: Annotated[
        bool, Doc("One reduction for all weight scales after each step (with the float8 all-gather).")
    ] = False
    force_recompute_fp8_weight_in_bwd: Annotated[bool, Doc("Deprecated in torchao; has no effect.")] = False
    filter_fqns: Annotated[list[str], FILTER_DOC] = field(default_factory=list)
    emulate: Annotated[bool, Doc("Compute in high precision with float8 rounding, where the device has none.")] = False


@dataclass(frozen=True)
class Int8:
    """GEMMs in INT8 (converter int8)."""

    recipe_name: Annotated[Literal["rowwise", "tensorwise"], Doc("One scale for each row, or for each tensor.")] = (
        "rowwise"
    )
    output: Annotated[bool, Doc("Forward GEMM in int8.")] = True
    grad_input: Annotated[bool, Doc("GEMM of the input's gradient in int8.")] = True
    grad_weight: Annotated[bool, Doc("GEMM of the weight's gradient in int8.")] = True
    enable_fsdp_int8_all_gather: Annotated[bool, Doc("Gather sharded weights in int8, half the bytes of bf16.")] = False
    # The gradient of the logits spans many orders of magnitude within a row: in int8 nearly all of it would be 0
    # (docs/low_precision.md).
    filter_fqns: Annotated[list[str], FILTER_DOC] = field(default_factory=lambda: ["output"])
    emulate: Annotated[bool, Doc("Compute in high precision with int8 rounding, where the device has none.")] = False


@dataclass(frozen=True)
class MX:
    """GEMMs in microscaling formats (converter mx)."""

    recipe_name: Annotated[Literal["mxfp8", "nvfp4"], Doc("Element format; nvfp4 is refused, with the reason.")] = (
        "mxfp8"
    )
    scale_calculation_mode: Annotated[
        Literal["rceil", "floor", "even", "ceil"], Doc("How a block's scale is rounded to a power of two.")
    ] = "rceil"
    wgrad_with_hp: Annotated[bool, Doc("GEMM of the weight's gradient in high precision.")] = False
    filter_fqns: Annotated[list[str], FILTER_DOC] = field(default_factory=lambda: ["output"])
    emulate: Annotated[bool, Doc("Compute in high precision with MX rounding, where the device has none.")] = False
    use_fp8_dim1_cast_triton_kernel: Annotated[bool, Doc("No effect: torchao chooses the kernel now.")] = True


@dataclass(frozen=True)
class PrecisionPhase:
    """A stretch of a run with its own converters. In the file it may have tables of their sections, such as
    [precision.phase.float8], whose keys replace those of [float8] for this phase.

    Attributes:
        sections: these tables, by name.
    """

    until_step: Annotated[PositiveInt | None, Doc("Last step of the phase; the last phase may leave it out.")] = None
    until: Annotated[Fraction | None, Doc("The same as a share of training.steps.")] = None
    converters: Annotated[list[str], Doc("Converters, as in model.converters; none: bf16.")] = field(
        default_factory=list
    )
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Precision:
    """A precision schedule: converters that change while the run goes on."""

    phase: Annotated[list[PrecisionPhase], Doc("Phases, one after another, in place of model.converters.")] = field(
        default_factory=list
    )
