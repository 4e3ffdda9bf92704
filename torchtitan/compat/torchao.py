"""torchao's private names (0.18). Each is imported on first use, because importing all of them takes seconds."""

import pkgutil
from typing import Any

_PLACES = {
    # An input that tensor parallelism gathers in float8.
    "Float8TrainingTensor": "float8.float8_training_tensor:Float8TrainingTensor",
    "GemmInputRole": "float8.float8_training_tensor:GemmInputRole",
    "LinearMMConfig": "float8.float8_training_tensor:LinearMMConfig",
    # A weight that FSDP gathers in float8; its `_tensor` and `_precomputed_scale` are used too.
    "WeightWithDynamicFloat8CastTensor": "float8.fsdp_utils:WeightWithDynamicFloat8CastTensor",
    # Scales of weights and of layers with delayed scaling.
    "amax_to_scale": "float8.float8_utils:amax_to_scale",
    # The GEMMs of experts in MX formats, and whether this build has their kernels.
    "grouped_mxfp8_mm": "prototype.moe_training.mxfp8_grouped_mm:_to_mxfp8_then_scaled_grouped_mm",
    "HAS_GROUPED_KERNELS": "prototype.moe_training.mxfp8_grouped_mm:_SM100_KERNELS_AVAILABLE",
    # Needed to emulate MX formats.
    "KernelPreference": "quantization.quantize_.common.kernel_preference:KernelPreference",
    "ScaleCalculationMode": "prototype.mx_formats.config:ScaleCalculationMode",
    # The numbers that 8-bit and 4-bit optimizer states can represent.
    "create_dynamic_map": "optim.quant_utils:create_dynamic_map",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return pkgutil.resolve_name(f"torchao.{_PLACES[name]}")


def allow_float8_weights() -> None:
    """Lets torch's weights-only loading read weights that FSDP gathers in float8, as torchao's own runs save them: it
    lists its classes when it is imported."""
    __getattr__("WeightWithDynamicFloat8CastTensor")
