"""Float8 GEMMs with dynamic scales (`float8_linear.py`), those of blocks (`block_linear.py`), or delayed ones
(`float8_delayed.py`)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.torch_version import TorchVersion

from torchtitan.config.low_precision import Float8
from torchtitan.converters.amax import stage_group
from torchtitan.converters.block_linear import BlockGemms, BlockLinear, scaled
from torchtitan.converters.converter import LayerGemms, ProfilerOp
from torchtitan.converters.filter import FilterRules, names_own_layers, too_small_for_rowwise, too_small_for_tensorwise
from torchtitan.converters.float8_keys import casts, find_problems
from torchtitan.converters.float8_linear import RECIPES, Float8Linear, Float8Recipe
from torchtitan.converters.grouped_8bit import Grouped8BitLinear, GroupedGemms, grouped_op
from torchtitan.converters.grouped_blocks import GroupedBlockLinear
from torchtitan.converters.linear import LinearConverter, Scaled
from torchtitan.converters.measured_filter import measured_reason
from torchtitan.converters.numerics import Role
from torchtitan.converters.target import Target
from torchtitan.converters.weight_bounds import WeightBounds, float8_all_gather_weights, measure_amaxes, set_scales
from torchtitan.errors import ConfigError
from torchtitan.kernels import packed_blocks
from torchtitan.kernels.block_formats import FORMATS
from torchtitan.kernels.quantize import float8_scale, powers_of_two
from torchtitan.logging import logger
from torchtitan.models.moe import GroupedLinear

if TYPE_CHECKING:
    from torchtitan.converters.amax_history import Histories

# float8 tensor cores exist from Ada (8.9) on: NVIDIA's CUDA programming guide, table of capabilities.
FIRST_CAPABILITY = (8, 9)
GROUPED_CAPABILITIES = (9, 10)  # of torch._scaled_grouped_mm
# Scales of 1 x 128 and 128 x 128: only there, and with cuBLASLt 12.9 (torch's ScaledBlas.cpp).
BLOCKS_CAPABILITY, BLOCKS_CUDA = 9, "12.9"
# One scale for the tokens of all experts would be that of the expert with the largest numbers, and torch's grouped
# float8 GEMM takes one scale per row only.
NO_EXPERTS = "{recipe} has no grouped GEMMs; float8.recipe_name = rowwise converts experts"
MULTIPLE_OF = 16  # torch._scaled_mm on CUDA; the CPU kernel takes any shape, but the model must not differ

# Relative errors of output, input gradient and weight gradient on normally distributed data: tests/unit/test_float8.py
KNOWN_ERRORS = {
    "tensorwise": (0.037, 0.059, 0.059),
    "rowwise": (0.036, 0.036, 0.038),
    "rowwise_with_gw_hp": (0.036, 0.036, None),
    "delayed": (0.037, 0.059, 0.059),
}
# DeepSeek-V3 (arXiv 2412.19437), section 3.3: activations and gradients in 1 x 128 blocks, weights in 128 x 128.
ROWS, SQUARES = FORMATS["float8 1x128"].format, FORMATS["float8 128x128"].format
BLOCKWISE = BlockGemms(ROWS, SQUARES, ROWS)
E4M3_ERRORS = (0.037, 0.037, 0.037)  # one scale per tensor, gradients in e4m3 too


class Float8Converter(LinearConverter):
    """Replaces linear layers with `Float8Linear`, `BlockLinear` or `DelayedLinear`. Weights stay in high precision.

    Forward, input gradient and weight gradient are one float8 GEMM each (`kernels/matmul_8bit.py`);
    rowwise_with_gw_hp leaves the weight gradient in high precision, and blockwise is emulated on CPU.

    Attributes:
        scaling_state: computes the scales of the next step, for recipes whose scales have a history.

    Raises:
        ConfigError: the device has no float8 and `emulate` is not set, or keys contradict each other.
    """

    name = "float8"

    def __init__(self, config: Float8, target: Target) -> None:
        super().__init__(config.filter_fqns, target, explicit=names_own_layers(config))
        self.recipe = config.recipe_name or "tensorwise"
        self.all_gather = config.enable_fsdp_float8_all_gather
        self.precompute = config.precompute_float8_dynamic_scale_for_fsdp
        self.emulate = config.emulate
        self.config = config
        problems = find_problems(config, target.optimizer)
        if problems:
            raise ConfigError(*problems)
        self.delayed = tuple(cast == "delayed" for cast in casts(config))
        self.warms_up = self.recipe == "delayed"
        self.bound = config.weight_scale == "bound"
        self.scaling_state = self._build_scaling_state()
        self.group: dist.ProcessGroup | None = None
        if config.force_recompute_fp8_weight_in_bwd:
            logger.warning(
                "float8.force_recompute_fp8_weight_in_bwd no longer has an effect in torchao; remove the key"
            )
        capability = target.compute_capability
        if capability is not None and capability < FIRST_CAPABILITY and not config.emulate:
            raise ConfigError(
                f"model.converters: float8 needs a GPU of compute capability 8.9 or above, but this one has "
                f"{capability[0]}.{capability[1]}; remove float8, or set float8.emulate (same numerics, no speedup)."
            )
        self.one_scale = self.recipe in ("tensorwise", "delayed")
        self.e5m2_gradients = self.one_scale and not (self.recipe == "delayed" and config.delayed_format == "e4m3")
        if self.recipe == "blockwise":
            self._set_up_blocks()
            return
        errors = E4M3_ERRORS if self.one_scale and not self.e5m2_gradients else KNOWN_ERRORS[self.recipe]
        real = "torchtitan::float8_mm" if target.on_cpu else "aten::_scaled_mm"
        self.gemms = LayerGemms(ProfilerOp("torchtitan::emulated_float8_mm" if config.emulate else real), *errors)
        too_small = too_small_for_tensorwise if self.one_scale else too_small_for_rowwise
        no_experts = NO_EXPERTS.format(recipe=self.recipe) if self.one_scale else ""
        self.rules = FilterRules(MULTIPLE_OF, too_small, lambda *sizes: measured_reason(self, *sizes), no_experts)
        if not self.one_scale:
            on_gpu = not (target.on_cpu or config.emulate)
            op = ProfilerOp("aten::_scaled_grouped_mm") if on_gpu else grouped_op("c10::Float8_e4m3fn")
            self.grouped_gemms = LayerGemms(op, *errors)
            if on_gpu and capability is not None and capability[0] not in GROUPED_CAPABILITIES:
                self.cannot_group = (
                    f"float8 {self.recipe} computes experts only on GPUs of compute capability 9.0 and 10.0, but this "
                    f"one has {capability[0]}.{capability[1]}; add moe.experts to float8.filter_fqns, or set "
                    "float8.emulate (same numerics, no speedup)."
                )

    def _set_up_blocks(self) -> None:
        """Raises ConfigError if this GPU, or this build of torch for it, has no GEMMs with scales of blocks."""
        capability = self.target.compute_capability
        real = capability is not None and not self.emulate
        remedy = "set float8.emulate (same numerics, no speedup), or use rowwise."
        if capability is not None and real and capability[0] != BLOCKS_CAPABILITY:
            raise ConfigError(
                f"float8.recipe_name = blockwise needs a GPU of compute capability {BLOCKS_CAPABILITY}.0, but this one "
                f"has {capability[0]}.{capability[1]}; {remedy}"
            )
        cuda = torch.version.cuda or "none"
        if real and self.target.device_type == "cuda" and (cuda == "none" or TorchVersion(cuda) < BLOCKS_CUDA):
            raise ConfigError(
                f"float8.recipe_name = blockwise needs torch for CUDA {BLOCKS_CUDA} or later, but this one is for "
                f"{cuda}; install another, {remedy}"
            )
        self.block_gemms = BLOCKWISE._replace(emulate=not real)
        self.gemms = self.grouped_gemms = self.block_gemms.known()
        multiple_of = packed_blocks.MULTIPLE_OF["float32"] if real else MULTIPLE_OF
        self.rules = FilterRules(multiple_of, None, lambda *sizes: measured_reason(self, *sizes), "")
        if real:
            self.cannot_group = (
                "float8 blockwise computes experts only emulated; add moe.experts to float8.filter_fqns, or set "
                "float8.emulate (same numerics, no speedup)."
            )

    def _build_scaling_state(self) -> "Histories | WeightBounds | None":
        if self.recipe == "delayed":
            from torchtitan.converters.amax_history import Histories  # slow import

            return Histories(self.config.delayed_amax, self.config.delayed_margin)
        return WeightBounds(self.target.optimizer, self.config.weight_scale_freq) if self.bound else None

    @property
    def description(self) -> str:
        delayed = f" {self.delayed}" if self.recipe == "delayed" else ""
        return f"float8 {self.recipe}{delayed}{' emulated' if self.emulate else ''}"

    def swap(self, linear: nn.Linear, all_gather: bool = False) -> nn.Linear:
        if self.recipe == "delayed":
            return self._swap_delayed(linear)
        if self.recipe == "blockwise":
            return BlockLinear.of(linear, self.block_gemms)
        new = Float8Linear.of(linear, Float8Recipe(*RECIPES[self.recipe], self.emulate))
        if all_gather:
            from torchtitan.compat.torchao import LinearMMConfig, WeightWithDynamicFloat8CastTensor

            gathered = WeightWithDynamicFloat8CastTensor(new.weight, LinearMMConfig(), torch.float8_e4m3fn)
            new.weight = nn.Parameter(gathered)
        return new

    def swap_grouped(self, layer: GroupedLinear) -> GroupedLinear:
        if self.recipe == "blockwise":
            return GroupedBlockLinear.of(layer, BLOCKWISE)
        grad_weight = self.recipe != "rowwise_with_gw_hp"
        return Grouped8BitLinear.of(layer, GroupedGemms(torch.float8_e4m3fn, True, True, grad_weight, self.emulate))

    def _swap_delayed(self, linear: nn.Linear) -> nn.Linear:
        from torchtitan.converters.float8_delayed import Casts, DelayedLinear

        gradients = torch.float8_e5m2 if self.e5m2_gradients else torch.float8_e4m3fn
        settings = Casts(self.delayed, (torch.float8_e4m3fn, torch.float8_e4m3fn, gradients), self.emulate)
        device = linear.weight.device
        if device.type == "meta":  # the model is allocated later
            device = torch.device("cuda" if self.target.device_type == "cuda" else "cpu")
        new = DelayedLinear.of(linear, settings, self.config.delayed_history_len, device)
        new.has_scales = self.target.device_type == "meta"  # a plan simulates a step in the middle of a run
        return new

    def scaled(self, tensor: torch.Tensor, role: Role) -> Scaled:
        if self.recipe == "blockwise":
            return scaled(tensor, BLOCKWISE.form_of(role))
        # Gradients are e5m2 if a tensor has one scale, unless delayed_format = e4m3; everything else is e4m3.
        e5m2 = role == "out_grad" and self.e5m2_gradients
        dtype = torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn
        amax = tensor.abs().amax() if self.one_scale else tensor.abs().amax(1, keepdim=True)
        largest = torch.finfo(dtype).max
        scale = float8_scale(amax, dtype)
        exact = tensor * (scale if self.one_scale else powers_of_two(scale))
        return Scaled(exact, exact.clamp(-largest, largest).to(dtype).float(), largest)

    def swap_in_model(self, linear: nn.Linear, fqn: str) -> nn.Linear:
        return self.swap(linear, self.all_gather and self.shards_evenly(linear, fqn))

    def post_optimizer_hook(self, models: Sequence[nn.Module]) -> None:
        """With precomputed scales: computes those of all weights, in one reduction."""
        if self.precompute and (weights := float8_all_gather_weights(models)):
            set_scales(weights, measure_amaxes(weights, self.group))

    def connect(self, mesh: DeviceMesh) -> None:
        if self.precompute or self.scaling_state is not None:
            self.group = stage_group(mesh)

    def after_step(
        self, models: Sequence[nn.Module], learning_rate: float | None, skip: torch.Tensor | None = None
    ) -> None:
        """Computes the delayed scales or weight bounds of the next step."""
        if self.scaling_state is not None:
            self.scaling_state.after_step(models, learning_rate, self.group, skip)
        super().after_step(models, learning_rate, skip)

    def hidden_nonfinite(self, models: Sequence[nn.Module]) -> torch.Tensor | None:
        """Delayed scaling saturates infinities; a dynamic scale would turn them into NaN."""
        return self.scaling_state.nonfinite(models) if self.recipe == "delayed" else None  # type: ignore[union-attr]

    def state_dict(self, models: Sequence[nn.Module]) -> dict[str, Any] | None:
        return None if self.scaling_state is None else self.scaling_state.state_dict(models)

    def load_state_dict(self, models: Sequence[nn.Module], state: dict[str, Any], gradient_ratio: float = 1.0) -> None:
        if self.scaling_state is not None:
            self.scaling_state.load_state_dict(models, state, gradient_ratio)
