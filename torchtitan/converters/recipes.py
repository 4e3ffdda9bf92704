"""The recipes of the sections [float8], [int8] and [mx]: a row each.

Sources: torchao's recipes of the same names (float8 tensorwise, rowwise, rowwise_with_gw_hp); DeepSeek-V3, arXiv
2412.19437, section 3.3 (blockwise); NVIDIA's Transformer Engine (delayed); SwitchBack, arXiv 2304.13013, and Jetfire,
arXiv 2403.12422 (int8); the OCP MX specification 1.0 (mxfp8, mxint8); arXiv 2509.25149 (nvfp4).
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from torchtitan.compat import torchao
from torchtitan.config.low_precision import MX, Cast, Float8, Int8
from torchtitan.converters.converter import Decision, ModelConverter, Target
from torchtitan.converters.formats import Blocks, EightBit, Gemms
from torchtitan.converters.gather import ShardedWeight
from torchtitan.converters.linear import AmaxHistory, TorchaoExperts
from torchtitan.converters.linear_converter import LinearConverter, Need, Recipe, RecipeSection
from torchtitan.converters.numerics import GEMMS
from torchtitan.converters.scaling import Histories, MeasuredFloat8, MeasuredInt8, WeightBounds, largest_adam_ratio
from torchtitan.device import HAS_TRITON
from torchtitan.kernels import packed_blocks
from torchtitan.kernels.block_formats import BLOCK_FORMATS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def no_gpu_before(section: str, first: tuple[int, int]) -> Need:
    """First compute capabilities with tensor cores for a format: NVIDIA's CUDA programming guide."""
    return Need(
        lambda target, config: target.compute_capability is not None and target.compute_capability < first,
        f"model.converters: {section} needs a GPU of compute capability {first[0]}.{first[1]} or above, but this one "
        f"has {{has}}; remove {section}, or set {section}.emulate (same numerics, no speedup).",
    )


def no_amd_gpu_but(section: str, *architectures: str) -> Need:
    """AMD's GPUs with OCP's formats: gfx942 has e4m3fnuz instead of e4m3fn (ROCm's precision support)."""
    return Need(
        lambda target, config: bool(target.amd) and not target.amd.startswith(architectures),
        f"model.converters: {section} has no kernels for {{has}}, whose formats are others; remove {section}, or set "
        f"{section}.emulate (same numerics, no speedup).",
    )


def only_emulated(recipe: str, section: str) -> Need:
    """Of experts."""
    return Need(
        lambda target, config: True,
        f"{recipe} computes experts only emulated; add moe.experts to {section}.filter_fqns, or set {section}.emulate "
        "(same numerics, no speedup).",
    )


def experts_need_triton(section: str) -> Need:
    return Need(
        lambda target, config: not (target.on_cpu or HAS_TRITON),
        f"{section} computes experts on a GPU with Triton, which is not installed; install it, or add moe.experts to "
        f"{section}.filter_fqns.",
    )


def blocks_of(name: str, hadamard: bool = False) -> Blocks:
    form = BLOCK_FORMATS[name].format
    return Blocks(form, form._replace(hadamard=hadamard))


def all_in(form: EightBit | Blocks) -> Gemms:
    return Gemms(form, form, form)


# ---- float8


# Thresholds of torchao's `_auto_filter_for_recipe` (torchao/float8/float8_linear_utils.py) for tensorwise and rowwise,
# measured on an H100. delayed and rowwise_with_gw_hp, which torchao has no thresholds for, take the same by assumption.
def too_small_for_tensorwise(m: int, k: int, n: int) -> str | None:
    return f"K = {k} <= 4096 and N = {n} <= 1024" if k <= 4096 and n <= 1024 else None


def too_small_for_rowwise(m: int, k: int, n: int) -> str | None:
    if n <= 2048:
        return f"N = {n} <= 2048"
    if k <= 1024:
        return f"K = {k} <= 1024"
    if n <= 4096 and k <= 2048:
        return f"N = {n} <= 4096 and K = {k} <= 2048"
    return None


def casts(config: Float8) -> tuple[Cast, Cast, Cast]:
    """Whether x, weight and grad_output have delayed or dynamic scales."""
    usual: Cast = "delayed" if FLOAT8_SECTION.recipes[config.recipe_name].history else "dynamic"
    return config.cast_input or usual, config.cast_weight or usual, config.cast_grad_output or usual


def _history(config: Float8, device: torch.device, known: bool) -> AmaxHistory:
    delayed = tuple(cast == "delayed" for cast in casts(config))
    return AmaxHistory(delayed, config.delayed_history_len, device, known)


def _grad_output_dtype(config: Float8) -> torch.dtype:
    return E4M3 if config.delayed_format == "e4m3" else E5M2


def _scales_of_gathers(config: Float8, target: Target) -> ModelConverter | None:
    if config.weight_scale == "bound":
        return WeightBounds(target.optimizer, config.weight_scale_freq)
    return MeasuredFloat8() if config.precompute_float8_dynamic_scale_for_fsdp else None


def _float8_keys(gemms: Gemms, config: Float8) -> Gemms:
    if config.delayed_format == "hybrid":
        return gemms
    return gemms._replace(grad_output=EightBit(_grad_output_dtype(config), "tensorwise"))


def _float8_gather(config: Float8) -> Callable[[nn.Parameter], torch.Tensor] | None:
    if not config.enable_fsdp_float8_all_gather:
        return None
    return lambda weight: torchao.WeightWithDynamicFloat8CastTensor(weight, torchao.LinearMMConfig(), E4M3)


DELAYED_KEYS = ("delayed_history_len", "delayed_amax", "delayed_margin", "delayed_format")
CAST_KEYS = ("cast_input", "cast_weight", "cast_grad_output")


def _float8_problems(config: Float8, target: Target) -> Iterator[str]:
    """Keys that contradict each other or have no effect."""
    row, default, optimizer = FLOAT8_SECTION.recipes[config.recipe_name], type(config)(), target.optimizer
    delayed, bound = row.history is not None, config.weight_scale == "bound"
    gather, precompute = config.enable_fsdp_float8_all_gather, config.precompute_float8_dynamic_scale_for_fsdp
    if gather and delayed:
        yield (
            "float8.enable_fsdp_float8_all_gather does not support delayed scales: unset it, or use float8.recipe_name "
            "= tensorwise, where float8.weight_scale = bound needs no collective either."
        )
    if gather and not (isinstance(row.gemms.x, EightBit) and row.gemms.x.scales == "tensorwise"):
        yield (
            f"float8.enable_fsdp_float8_all_gather needs float8.recipe_name = tensorwise, not {config.recipe_name}, "
            "which has more than one scale for a weight. Unset one of them."
        )
    if precompute and not gather:
        yield (
            "float8.precompute_float8_dynamic_scale_for_fsdp computes the scales of the float8 all-gather: set "
            "float8.enable_fsdp_float8_all_gather too, or unset it."
        )
    if delayed and "delayed" not in casts(config):
        yield (
            "float8.recipe_name = delayed, with cast_input, cast_weight and cast_grad_output all dynamic, has no "
            "delayed scales; use tensorwise."
        )
    if not delayed:
        changed = [key for key in DELAYED_KEYS if getattr(config, key) != getattr(default, key)]
        for key in changed + [key for key in CAST_KEYS if getattr(config, key) == "delayed"]:
            yield f"float8.{key} applies only to delayed scaling: set float8.recipe_name = delayed, or unset it."
    if not bound and config.weight_scale_freq != default.weight_scale_freq:
        yield "float8.weight_scale_freq applies only to float8.weight_scale = bound; set that too, or unset it."
    if bound and not gather:
        yield (
            "float8.weight_scale = bound computes the scales of the float8 all-gather: set "
            "float8.enable_fsdp_float8_all_gather too, or unset it."
        )
    if bound and precompute:
        yield (
            "float8.precompute_float8_dynamic_scale_for_fsdp measures the weights after each step, which "
            "float8.weight_scale = bound avoids; unset one of them."
        )
    if bound and optimizer.name not in ("Adam", "AdamW"):
        yield (
            "float8.weight_scale = bound supports only AdamW and Adam, whose updates are bounded, not "
            f"{optimizer.name}; use measured."
        )
    elif bound and math.isinf(largest_adam_ratio(optimizer.beta1, optimizer.beta2)):
        yield (
            f"float8.weight_scale = bound: with optimizer.beta1 = {optimizer.beta1} and optimizer.beta2 = "
            f"{optimizer.beta2} updates have no bound; a bound needs beta1^2 < beta2 < 1. Use measured."
        )


# Scales of 1 x 128 and 128 x 128: only with compute capability 9, and with cuBLASLt 12.9 (torch's ScaledBlas.cpp).
BLOCKS_CAPABILITY, BLOCKS_CUDA = 9, "12.9"
_USE_ROWWISE = "set float8.emulate (same numerics, no speedup), or use rowwise."
# torch._scaled_mm on CUDA; the CPU kernel takes any shape, but the model must not differ.
GEMM_MULTIPLE = 16
_ADA, _CDNA4 = no_gpu_before("float8", (8, 9)), no_amd_gpu_but("float8", "gfx95", "gfx12")
# The expert with the largest numbers would determine a scale for the tokens of all experts.
_ROWS_ONLY = "{} has no grouped GEMMs; float8.recipe_name = rowwise converts experts"
_TENSOR, _ROW = EightBit(E4M3, "tensorwise"), EightBit(E4M3, "rowwise")
_ROWS, _SQUARES = blocks_of("float8 1x128"), blocks_of("float8 128x128")
TENSORWISE = Recipe(
    Gemms(_TENSOR, _TENSOR, EightBit(E5M2, "tensorwise")),
    GEMM_MULTIPLE,
    small_kn=too_small_for_tensorwise,
    against_experts=_ROWS_ONLY.format("tensorwise"),
    needs=[_ADA, _CDNA4],
    scaling=_scales_of_gathers,
)
ROWWISE = Recipe(
    all_in(_ROW),
    GEMM_MULTIPLE,
    small_kn=too_small_for_rowwise,
    needs=[_ADA, _CDNA4],
    experts_need=[experts_need_triton("float8")],
)
FLOAT8_SECTION = RecipeSection(
    "float8",
    {
        None: TENSORWISE,
        "tensorwise": TENSORWISE,
        "rowwise": ROWWISE,
        "rowwise_with_gw_hp": replace(
            ROWWISE,
            gemms=Gemms(_ROW, EightBit(E4M3, "rowwise", "tensorwise power of two"), _ROW, grad_weight=False),
        ),
        "blockwise": Recipe(
            Gemms(_ROWS, _SQUARES, _ROWS),
            GEMM_MULTIPLE,
            multiple_of_on_gpu=packed_blocks.MULTIPLE_OF["float32"],
            needs=[
                _ADA,
                _CDNA4,
                Need(
                    lambda target, config: (
                        target.compute_capability is not None and target.compute_capability[0] != BLOCKS_CAPABILITY
                    ),
                    f"float8.recipe_name = blockwise needs a GPU of compute capability {BLOCKS_CAPABILITY}.0, but this "
                    f"one has {{has}}; {_USE_ROWWISE}",
                ),
                Need(
                    lambda target, config: (
                        target.device_type == "cuda" and TorchVersion(torch.version.cuda or "0") < BLOCKS_CUDA
                    ),
                    f"float8.recipe_name = blockwise needs torch for CUDA {BLOCKS_CUDA} or later, but this one is for "
                    f"{{cuda}}; install another, {_USE_ROWWISE}",
                ),
            ],
            experts_need=[only_emulated("float8 blockwise", "float8")],
            on_cpu="emulated",
        ),
        "delayed": replace(
            TENSORWISE,
            against_experts=_ROWS_ONLY.format("delayed"),
            history=_history,
            scaling=lambda config, target: Histories(
                config.delayed_amax, config.delayed_margin, (E4M3, E4M3, _grad_output_dtype(config))
            ),
        ),
    },
    _float8_keys,
    _float8_problems,
    gather=_float8_gather,
)


# ---- int8


def _int8_problems(config: Int8, target: Target) -> list[str]:
    if any(getattr(config, gemm) for gemm in GEMMS):
        return []
    return ["int8: output, grad_input and grad_weight are all false; set one to true, or remove int8."]


def _int8_remarks(config: Int8, converted: Sequence[Decision]) -> list[str]:
    if not (config.grad_input or config.grad_weight) or all(decision.fqn != "output" for decision in converted):
        return []
    return [
        "int8 converts the output layer: nearly all of its gradient is rounded to 0, and the loss suffers "
        "(docs/low_precision.md); add output to int8.filter_fqns"
    ]


def _int8_gather(config: Int8) -> Callable[[nn.Parameter], torch.Tensor] | None:
    if not config.enable_fsdp_int8_all_gather:
        return None
    return lambda weight: ShardedWeight(weight.data, config.recipe_name)


_TURING = no_gpu_before("int8", (7, 5))  # torch._int_mm
INT8_SECTION = RecipeSection(
    "int8",
    {  # on CUDA, torch._int_mm requires K and N to be multiples of 8; cuBLASLt is fast with 16
        "rowwise": Recipe(
            all_in(EightBit(torch.int8, "rowwise")),
            GEMM_MULTIPLE,
            needs=[_TURING],
            experts_need=[experts_need_triton("int8")],
        ),
        "tensorwise": Recipe(
            all_in(EightBit(torch.int8, "tensorwise")),
            GEMM_MULTIPLE,
            against_experts="tensorwise has no grouped GEMMs; int8.recipe_name = rowwise converts experts",
            needs=[_TURING],
            scaling=lambda config, target: MeasuredInt8() if config.enable_fsdp_int8_all_gather else None,
        ),
    },
    lambda gemms, config: gemms._replace(**{gemm: getattr(config, gemm) for gemm in GEMMS}),
    _int8_problems,
    _int8_remarks,
    _int8_gather,
)


# ---- mx


def _mx_keys(gemms: Gemms, config: MX) -> Gemms:
    """Keys that a recipe does not have are at their defaults (`_mx_problems`), which change nothing."""
    chosen = gemms._replace(
        weight=gemms.weight if config.weight_scales_2d else gemms.x,
        grad_output=gemms.grad_output if config.stochastic_rounding else gemms.x,
        output=not config.forward_with_hp,
        grad_weight=not config.wgrad_with_hp,
    )
    choices: dict[str, Any] = {"scale_mode": config.scale_calculation_mode, "symmetric": config.symmetric_clipping}

    def changed(blocks: Any) -> Blocks:
        form = blocks.form._replace(**choices)
        return Blocks(form, form._replace(hadamard=blocks.over_tokens.hadamard and config.random_hadamard))

    return chosen._replace(x=changed(chosen.x), weight=changed(chosen.weight), grad_output=changed(chosen.grad_output))


# Keys that only some recipes have.
MX_KEYS = {
    "scale_calculation_mode": ("mxfp8", "mxint8"),
    "symmetric_clipping": ("mxint8",),
    "keep_first_blocks_fraction": ("nvfp4",),
    "keep_last_blocks_fraction": ("nvfp4",),
    "weight_scales_2d": ("nvfp4",),
    "random_hadamard": ("nvfp4",),
    "stochastic_rounding": ("nvfp4",),
}


def _mx_problems(config: MX, target: Target) -> list[str]:
    default, recipe = type(config)(), config.recipe_name
    return [
        f"mx.{key} has no effect with mx.recipe_name = {recipe}, only with {' and '.join(recipes)}; unset it."
        for key, recipes in MX_KEYS.items()
        if recipe not in recipes and getattr(config, key) != getattr(default, key)
    ]


def kept_blocks(model: nn.Module, config: MX) -> dict[str, str]:
    """Paths of the first and last transformer blocks, which lose the most in nvfp4 (arXiv 2509.25149, section 3.2).
    Fractions are rounded up."""
    blocks = [fqn for fqn, _ in model.named_modules() if re.fullmatch(r"layers\.\d+", fqn)]
    kept = {}
    for which in ("first", "last"):
        key = f"keep_{which}_blocks_fraction"
        fraction = getattr(config, key)
        number = math.ceil(round(fraction * len(blocks), 6))
        reason = f"one of the {which} blocks ({number}) that mx.{key} = {fraction} keeps"
        kept.update(dict.fromkeys(blocks[:number] if which == "first" else blocks[len(blocks) - number :], reason))
    return kept


_NO_CPU = Need(
    lambda target, config: target.device_type == "cpu",
    "model.converters: a CPU has no mx GEMMs; remove mx, or set mx.emulate (same numerics).",
)
_BLACKWELL, _NVIDIA = no_gpu_before("mx", (10, 0)), no_amd_gpu_but("mx")
GPU_SCALE_MODES = ("floor", "rceil")  # torchao 0.18, prototype/mx_formats/kernels.py


MX_SECTION = RecipeSection(
    "mx",
    {
        "mxfp8": Recipe(
            all_in(blocks_of("mxfp8")),
            32,
            needs=[
                _NO_CPU,
                _BLACKWELL,
                _NVIDIA,
                Need(
                    lambda target, config: target.device_type == "cuda" and target.dtype != torch.bfloat16,
                    "mx: a GPU's mxfp8 GEMMs return bfloat16 alone; set training.mixed_precision_param = bfloat16, or "
                    "mx.emulate.",
                ),
            ],
            experts_need=[
                Need(
                    lambda target, config: (
                        config.forward_with_hp or config.scale_calculation_mode not in GPU_SCALE_MODES
                    ),
                    "mx computes experts with torchao's kernels, which know neither mx.forward_with_hp nor a "
                    f"mx.scale_calculation_mode other than {' and '.join(GPU_SCALE_MODES)}; change these, add "
                    "moe.experts to mx.filter_fqns, or set mx.emulate (same numerics, no speedup).",
                ),
                Need(
                    lambda target, config: target.compute_capability is not None and target.compute_capability[0] != 10,
                    "mx computes experts with torchao's kernels, which need a GPU of compute capability 10, but this "
                    "one has {has}; add moe.experts to mx.filter_fqns, or set mx.emulate (same numerics, no speedup).",
                ),
                Need(
                    lambda target, config: not torchao.HAS_GROUPED_KERNELS,
                    "mx computes experts with kernels that this build of torchao lacks; add moe.experts to "
                    "mx.filter_fqns, install torchao's build for this CUDA version, or set mx.emulate (same numerics, "
                    "no speedup).",
                ),
            ],
            on_cpu="",
            gpu_experts=lambda layer, config: TorchaoExperts.of(
                layer, config.scale_calculation_mode, config.wgrad_with_hp
            ),
        ),
        "mxint8": Recipe(
            all_in(blocks_of("mxint8")),
            32,
            needs=[
                _NO_CPU,
                Need(
                    lambda target, config: True,
                    "mx.recipe_name = mxint8 is only emulated so far; set mx.emulate (on any device, without speedup), "
                    "or use mxfp8.",
                ),
            ],
            on_cpu="",
        ),
        "nvfp4": Recipe(
            Gemms(blocks_of("nvfp4", True), blocks_of("nvfp4 weights"), blocks_of("nvfp4 gradients", True)),
            packed_blocks.MULTIPLE_OF["e4m3"],
            needs=[_NO_CPU, _BLACKWELL, _NVIDIA],
            experts_need=[only_emulated("mx.recipe_name = nvfp4", "mx")],
            on_cpu="",
            kept=kept_blocks,
        ),
    },
    _mx_keys,
    _mx_problems,
)

float8, int8, mx = (partial(LinearConverter, section) for section in (FLOAT8_SECTION, INT8_SECTION, MX_SECTION))
"""What `CONVERTERS` builds, from (section, target)."""
