"""GEMMs in microscaling formats: blocks of 32 numbers share a power-of-two scale (OCP MX specification 1.0).

The layer is torchao's `MXFP8Linear`. (torchao's weight wrapper is not used: it drops the bias and silently stops
quantizing under tensor parallelism.)
"""

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchtitan.config.low_precision import MX
from torchtitan.converters.filter import FilterRules, names_own_layers
from torchtitan.converters.grouped_mx import BLOCK, GroupedMX, GroupedMXLinear
from torchtitan.converters.linear import EMULATED_FLOAT8, LayerGemms, LinearConverter, ProfilerOp, Role, Scaled
from torchtitan.converters.measured_filter import measured_reason
from torchtitan.converters.target import Target
from torchtitan.errors import ConfigError
from torchtitan.logging import logger
from torchtitan.models.moe import GroupedLinear

if TYPE_CHECKING:
    from torchtitan.compat.torchao_mx import ScaleCalculationMode

FIRST_CAPABILITY = (10, 0)  # Blackwell: NVIDIA's CUDA programming guide, table of capabilities

# Relative errors of output, input gradient and weight gradient against float32 on normally distributed data, by
# rounding mode of the scales: tests/unit/test_conversion_report.py.
KNOWN_ERRORS = {
    "rceil": (0.036, 0.036, 0.038),
    "ceil": (0.036, 0.036, 0.038),
    "even": (0.040, 0.040, 0.039),
    "floor": (0.056, 0.056, 0.042),
}


class MXConverter(LinearConverter):
    """Replaces linear layers with torchao's `MXFP8Linear`.

    Raises:
        ConfigError: the device has no MX GEMMs and `emulate` is not set.
    """

    name = "mx"

    def __init__(self, config: MX, target: Target) -> None:
        super().__init__(config.filter_fqns, target, explicit=names_own_layers(config))
        if config.recipe_name == "nvfp4":
            raise ConfigError(
                "mx.recipe_name = nvfp4 is not supported: torchao's layer for it needs Triton on a Blackwell GPU, has "
                "no emulation with which it could be tested elsewhere, and stores random signs in the model's state, "
                "so checkpoints would not load in another precision. Use mxfp8."
            )
        if not config.use_fp8_dim1_cast_triton_kernel:
            logger.warning(
                "mx.use_fp8_dim1_cast_triton_kernel has no effect: torchao chooses the kernel; remove the key"
            )
        capability = target.compute_capability
        if not config.emulate and target.device_type == "cpu":
            raise ConfigError("model.converters: a CPU has no mx GEMMs; remove mx, or set mx.emulate (same numerics).")
        if not config.emulate and capability is not None and capability < FIRST_CAPABILITY:
            raise ConfigError(
                f"model.converters: mx needs a GPU of compute capability 10.0 or above, but this one has "
                f"{capability[0]}.{capability[1]}; remove mx, or set mx.emulate (same numerics, no speedup)."
            )
        self.config = config
        self.recipe = config.recipe_name
        output, grad_input, grad_weight = KNOWN_ERRORS[config.scale_calculation_mode]
        self.gemms = LayerGemms(
            EMULATED_FLOAT8 if config.emulate else ProfilerOp("aten::_scaled_mm"),
            output,
            grad_input,
            None if config.wgrad_with_hp else grad_weight,
        )
        self.rules = FilterRules(BLOCK, None, lambda *sizes: measured_reason(self, *sizes), "")
        self.grouped_gemms = self.gemms
        if not config.emulate:
            self.grouped_gemms = dataclasses.replace(self.gemms, op=ProfilerOp("aten::_scaled_grouped_mm"))
            if not _has_grouped_kernels():
                self.cannot_group = (
                    "mx computes experts with kernels that this build of torchao lacks; add moe.experts to "
                    "mx.filter_fqns, install torchao's build for this CUDA version, or set mx.emulate (same numerics, "
                    "no speedup)."
                )

    @property
    def description(self) -> str:
        return f"mx {self.config.recipe_name} {self.config.scale_calculation_mode} {self.config.wgrad_with_hp}"

    def scaled(self, tensor: torch.Tensor, role: Role) -> Scaled:
        from torchtitan.compat.torchao_mx import MXTensor

        mx = MXTensor.to_mx(tensor.contiguous(), torch.float8_e4m3fn, BLOCK, self._scale_mode())
        scale = torch.exp2(mx.scale.view(torch.uint8).float() - 127)  # e8m0: a biased exponent
        exact = tensor / scale.repeat_interleave(BLOCK, 1)
        return Scaled(exact, mx.qdata.float(), torch.finfo(torch.float8_e4m3fn).max)

    def _scale_mode(self) -> "ScaleCalculationMode":
        from torchtitan.compat.torchao_mx import ScaleCalculationMode

        return ScaleCalculationMode[self.config.scale_calculation_mode.upper()]

    def swap(self, linear: nn.Linear) -> nn.Linear:
        from torchtitan.compat.torchao_mx import KernelPreference, MXFP8Linear

        new: nn.Linear = MXFP8Linear(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            device="meta",
            kernel_preference=KernelPreference.EMULATED if self.config.emulate else KernelPreference.AUTO,
            scale_calculation_mode=self._scale_mode(),
            wgrad_with_hp=self.config.wgrad_with_hp,
        )
        new.weight, new.bias = linear.weight, linear.bias
        return new

    def swap_grouped(self, layer: GroupedLinear) -> GroupedLinear:
        return GroupedMXLinear.of(layer, GroupedMX(self._scale_mode(), self.config.wgrad_with_hp, self.config.emulate))


def _has_grouped_kernels() -> bool:
    from torchtitan.compat.torchao_mx import HAS_GROUPED_KERNELS

    return bool(HAS_GROUPED_KERNELS)
