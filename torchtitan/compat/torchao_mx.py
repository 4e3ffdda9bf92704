"""torchao's MX formats, prototypes in 0.18.

- `prototype.moe_training.mxfp8_grouped_mm`: the GEMMs of experts, `_to_mxfp8_then_scaled_grouped_mm`, and whether this
  build has their kernels, `_SM100_KERNELS_AVAILABLE`
- `prototype.mx_formats`: `MXTensor`, `ScaleCalculationMode`: round one tensor, for reports
- `quantization.quantize_.common.kernel_preference.KernelPreference`: emulation
"""

from torchao.prototype.moe_training.mxfp8_grouped_mm import _SM100_KERNELS_AVAILABLE as HAS_GROUPED_KERNELS
from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm as grouped_mxfp8_mm
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

__all__ = [
    "HAS_GROUPED_KERNELS",
    "KernelPreference",
    "MXTensor",
    "ScaleCalculationMode",
    "grouped_mxfp8_mm",
]
