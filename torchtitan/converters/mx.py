"""GEMMs in formats with a scale per block of 16 or 32 numbers: mxfp8, mxint8 (OCP MX specification 1.0) and nvfp4.

Layers are `BlockLinear` (`block_linear.py`), which also emulates them; experts' mxfp8 GEMMs are torchao's.
"""

import dataclasses
import math
import re

import torch
from torch import nn

from torchtitan.config.low_precision import MX
from torchtitan.converters.block_linear import BlockGemms, BlockLinear, scaled
from torchtitan.converters.converter import ProfilerOp
from torchtitan.converters.filter import Decision, FilterRules, matches, names_own_layers
from torchtitan.converters.grouped_blocks import GroupedBlockLinear
from torchtitan.converters.grouped_mx import GroupedMX, GroupedMXLinear
from torchtitan.converters.linear import LinearConverter, Scaled
from torchtitan.converters.measured_filter import measured_reason
from torchtitan.converters.numerics import Role
from torchtitan.converters.target import Target
from torchtitan.errors import ConfigError
from torchtitan.kernels import packed_blocks
from torchtitan.kernels.block_formats import FORMATS
from torchtitan.logging import logger
from torchtitan.models.moe import GroupedLinear

FIRST_CAPABILITY = (10, 0)  # Blackwell: NVIDIA's CUDA programming guide, table of capabilities
# M, K and N: whole blocks; of nvfp4, what a GPU takes.
MULTIPLE_OF = {"mxfp8": 32, "mxint8": 32, "nvfp4": packed_blocks.MULTIPLE_OF["e4m3"]}
GPU_SCALE_MODES = ("floor", "rceil")  # torchao 0.18, prototype/mx_formats/kernels.py
NVFP4_KEYS = (
    "keep_first_blocks_fraction",
    "keep_last_blocks_fraction",
    "weight_scales_2d",
    "random_hadamard",
    "stochastic_rounding",
)
# Keys that only some recipes have.
KEYS = {
    "scale_calculation_mode": ("mxfp8", "mxint8"),
    "symmetric_clipping": ("mxint8",),
    **dict.fromkeys(NVFP4_KEYS, ("nvfp4",)),
}


def block_gemms(config: MX) -> BlockGemms:
    """The formats of the recipe."""
    if config.recipe_name == "nvfp4":
        x = FORMATS["nvfp4"].format
        weight = FORMATS["nvfp4 weights"].format if config.weight_scales_2d else x
        out_grad = FORMATS["nvfp4 gradients"].format if config.stochastic_rounding else x
    else:
        known = FORMATS[config.recipe_name].format
        x = known._replace(scale_mode=config.scale_calculation_mode, symmetric=config.symmetric_clipping)
        weight = out_grad = x
    hadamard = config.recipe_name == "nvfp4" and config.random_hadamard
    output, grad_weight = not config.forward_with_hp, not config.wgrad_with_hp
    return BlockGemms(x, weight, out_grad, hadamard, output, grad_weight, config.emulate)


def kept_blocks(model: nn.Module, config: MX) -> dict[str, str]:
    """Paths of the transformer blocks that stay in high precision, with the reason. Fractions are rounded up."""
    blocks = [fqn for fqn, _ in model.named_modules() if re.fullmatch(r"layers\.\d+", fqn)]
    kept = {}
    for which in ("first", "last"):
        key = f"keep_{which}_blocks_fraction"
        fraction = getattr(config, key)
        number = math.ceil(round(fraction * len(blocks), 6))
        reason = f"one of the {which} blocks ({number}) that mx.{key} = {fraction} keeps"
        kept.update(dict.fromkeys(blocks[:number] if which == "first" else blocks[len(blocks) - number :], reason))
    return kept


class MXConverter(LinearConverter):
    """Replaces linear layers with `BlockLinear`.

    Raises:
        ConfigError: the device has no GEMMs of the recipe and `emulate` is not set, or a key does not apply.
    """

    name = "mx"

    def __init__(self, config: MX, target: Target) -> None:
        super().__init__(config.filter_fqns, target, explicit=names_own_layers(config))
        self.config = config
        self.recipe = config.recipe_name
        problems = [
            f"mx.{key} has no effect with mx.recipe_name = {self.recipe}, only with {' and '.join(recipes)}; unset it."
            for key, recipes in KEYS.items()
            if self.recipe not in recipes and getattr(config, key) != getattr(MX(), key)
        ]
        if problems:
            raise ConfigError(*problems)
        if not config.use_fp8_dim1_cast_triton_kernel:
            logger.warning(
                "mx.use_fp8_dim1_cast_triton_kernel has no effect: torchao chooses the kernel; remove the key"
            )
        capability = target.compute_capability
        if not config.emulate and target.device_type == "cpu":
            raise ConfigError("model.converters: a CPU has no mx GEMMs; remove mx, or set mx.emulate (same numerics).")
        if not config.emulate and self.recipe == "mxint8":
            raise ConfigError(
                "mx.recipe_name = mxint8 is only emulated so far; set mx.emulate (on any device, without speedup), or "
                "use mxfp8."
            )
        if not config.emulate and capability is not None and capability < FIRST_CAPABILITY:
            raise ConfigError(
                f"model.converters: mx needs a GPU of compute capability 10.0 or above, but this one has "
                f"{capability[0]}.{capability[1]}; remove mx, or set mx.emulate (same numerics, no speedup)."
            )
        on_gpu = self.recipe == "mxfp8" and target.device_type == "cuda" and not config.emulate
        if on_gpu and target.dtype != torch.bfloat16:
            raise ConfigError(
                "mx: a GPU's mxfp8 GEMMs return bfloat16 alone; set training.mixed_precision_param = bfloat16, or "
                "mx.emulate."
            )
        self.block_gemms = block_gemms(config)
        self.gemms = self.grouped_gemms = self.block_gemms.known()
        multiple_of = MULTIPLE_OF[self.recipe]
        self.rules = FilterRules(multiple_of, None, lambda *sizes: measured_reason(self, *sizes), "")
        if not config.emulate and self.recipe == "nvfp4":
            self.cannot_group = (
                "mx.recipe_name = nvfp4 computes experts only emulated; add moe.experts to mx.filter_fqns, or set "
                "mx.emulate (same numerics, no speedup)."
            )
        elif not config.emulate:
            self.grouped_gemms = dataclasses.replace(self.gemms, op=ProfilerOp("aten::_scaled_grouped_mm"))
            if config.forward_with_hp or config.scale_calculation_mode not in GPU_SCALE_MODES:
                self.cannot_group = (
                    "mx computes experts with torchao's kernels, which know neither mx.forward_with_hp nor a "
                    f"mx.scale_calculation_mode other than {' and '.join(GPU_SCALE_MODES)}; change these, add "
                    "moe.experts to mx.filter_fqns, or set mx.emulate (same numerics, no speedup)."
                )
            elif not _has_grouped_kernels():
                self.cannot_group = (
                    "mx computes experts with kernels that this build of torchao lacks; add moe.experts to "
                    "mx.filter_fqns, install torchao's build for this CUDA version, or set mx.emulate (same numerics, "
                    "no speedup)."
                )

    @property
    def description(self) -> str:
        return f"mx {self.recipe}{' emulated' if self.config.emulate else ''} {self.block_gemms}"

    def decide(self, model: nn.Module) -> list[Decision]:
        """As the filter decides, except that nvfp4 keeps the first and the last blocks, which lose the most
        (arXiv 2509.25149, section 3.2)."""
        kept = kept_blocks(model, self.config) if self.recipe == "nvfp4" else {}
        decisions = []
        for one in super().decide(model):
            reason = next((reason for block, reason in kept.items() if matches(block, one.fqn)), "")
            keeps = one.converted and reason
            decisions.append(dataclasses.replace(one, converted=False, reason=reason) if keeps else one)
        return decisions

    def scaled(self, tensor: torch.Tensor, role: Role) -> Scaled:
        return scaled(tensor, self.block_gemms.form_of(role))

    def emulated(self) -> "MXConverter":
        return MXConverter(dataclasses.replace(self.config, emulate=True), self.target)

    def swap(self, linear: nn.Linear) -> nn.Linear:
        return BlockLinear.of(linear, self.block_gemms)

    def swap_grouped(self, layer: GroupedLinear) -> GroupedLinear:
        if self.config.emulate:
            return GroupedBlockLinear.of(layer, self.block_gemms)
        from torchtitan.compat.torchao import ScaleCalculationMode

        mode = ScaleCalculationMode[self.config.scale_calculation_mode.upper()]
        return GroupedMXLinear.of(layer, GroupedMX(mode, self.config.wgrad_with_hp))


def _has_grouped_kernels() -> bool:
    from torchtitan.compat.torchao import HAS_GROUPED_KERNELS

    return bool(HAS_GROUPED_KERNELS)
