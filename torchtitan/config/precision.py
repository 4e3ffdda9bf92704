"""Sections of the low-precision converters."""

from dataclasses import dataclass, field
from typing import Literal

from torchtitan.config.fields import Annotated, Doc

FILTER_DOC = Doc("Layers to leave alone: whole components of a module path, such as output or attention.wk; globs too.")


@dataclass(frozen=True)
class Float8:
    """Matrix products in float8 (converter float8)."""

    recipe_name: Annotated[
        Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None, Doc("Granularity of scales; none: tensorwise.")
    ] = None
    enable_fsdp_float8_all_gather: Annotated[bool, Doc("Gather sharded weights in float8 (tensorwise only).")] = False
    precompute_float8_dynamic_scale_for_fsdp: Annotated[
        bool, Doc("One reduction for all weight scales after each step (with the float8 all-gather).")
    ] = False
    force_recompute_fp8_weight_in_bwd: Annotated[bool, Doc("Deprecated in torchao; has no effect.")] = False
    filter_fqns: Annotated[list[str], FILTER_DOC] = field(default_factory=list)
    emulate: Annotated[bool, Doc("Compute in high precision with float8 rounding, where the device has none.")] = False


@dataclass(frozen=True)
class MX:
    """Matrix products in microscaling formats (converter mx)."""

    recipe_name: Annotated[Literal["mxfp8"], Doc("Element format.")] = "mxfp8"
    filter_fqns: Annotated[list[str], FILTER_DOC] = field(default_factory=lambda: ["output"])
    use_fp8_dim1_cast_triton_kernel: Annotated[bool, Doc("Use the Triton kernel for the cast along dim 1.")] = True
