"""Layers with emulated block-scaled GEMMs, and the recipes of mx that use them."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan.compat.torchao import KernelPreference, ScaleCalculationMode
from torchtitan.config.low_precision import MX, Float8
from torchtitan.converters import Target
from torchtitan.converters.conversion_report import conversion_report, to_table
from torchtitan.converters.linear_converter import LinearConverter, relative_errors
from torchtitan.converters.recipes import FLOAT8_SECTION, MX_SECTION
from torchtitan.errors import ConfigError
from torchtitan.kernels.block_formats import hadamard, quantize_blocks
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama

CPU = Target("cpu", tokens=64)
RECIPES: dict[str, dict[str, Any]] = {
    "mxfp8": {},
    "mxint8": {"recipe_name": "mxint8"},
    "mxint8 to -128": {"recipe_name": "mxint8", "symmetric_clipping": False, "scale_calculation_mode": "floor"},
    "nvfp4": {"recipe_name": "nvfp4"},
    "nvfp4, weight gradient in bf16": {"recipe_name": "nvfp4", "wgrad_with_hp": True},
    "nvfp4, output in bf16": {"recipe_name": "nvfp4", "forward_with_hp": True},
    "nvfp4 without its ingredients": {
        "recipe_name": "nvfp4",
        "weight_scales_2d": False,
        "random_hadamard": False,
        "stochastic_rounding": False,
    },
}


def converter(target: Target = CPU, **keys: Any) -> LinearConverter:
    return LinearConverter(MX_SECTION, MX(**{"emulate": True, **keys}), target)


def blockwise(target: Target = CPU, **keys: Any) -> LinearConverter:
    return LinearConverter(FLOAT8_SECTION, Float8(recipe_name="blockwise", **keys), target)


def gemms_of(layer: Any, x: torch.Tensor, out_grad: torch.Tensor) -> list[torch.Tensor]:
    """[output, input gradient, gradients of the parameters]"""
    x = x.clone().requires_grad_()
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], out_grad)]


@pytest.mark.parametrize("mode", ["rceil", "floor", "even", "ceil"])
@pytest.mark.parametrize("high", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_emulated_mxfp8_equals_torchaos_bit_for_bit(mode: Any, high: bool, dtype: torch.dtype) -> None:
    """Which is the layer on GPUs that have its GEMMs."""
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear

    torch.manual_seed(0)
    linear = nn.Linear(96, 64, dtype=dtype)
    reference = MXFP8Linear(
        96,
        64,
        device="meta",
        kernel_preference=KernelPreference.EMULATED,
        scale_calculation_mode=ScaleCalculationMode[mode.upper()],
        wgrad_with_hp=high,
    )
    reference.weight, reference.bias = linear.weight, linear.bias
    ours = converter(scale_calculation_mode=mode, wgrad_with_hp=high).swap(linear)
    x, out_grad = torch.randn(2, 64, 96, dtype=dtype), torch.randn(2, 64, 64, dtype=dtype)
    for actual, expected in zip(gemms_of(ours, x, out_grad), gemms_of(reference, x, out_grad), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("recipe", [*RECIPES, "blockwise"])
def test_errors_are_the_known_ones(recipe: str) -> None:
    low_precision: LinearConverter = blockwise() if recipe == "blockwise" else converter(**RECIPES[recipe])
    for gemm, error in relative_errors(low_precision, "cpu").items():
        known = getattr(low_precision.gemms, gemm)
        assert error == (0 if known is None else pytest.approx(known, rel=0.3)), gemm


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_layers_compute_the_same(recipe: str) -> None:
    torch.manual_seed(0)
    layer = converter(**RECIPES[recipe]).swap(nn.Linear(64, 32, bias=False).bfloat16())
    torch.compiler.reset()  # what earlier tests compiled counts towards a limit
    compiled = torch.compile(layer, fullgraph=True)
    x, out_grad = torch.randn(2, 32, 64).bfloat16(), torch.randn(2, 32, 32).bfloat16()
    for actual, expected in zip(gemms_of(layer, x, out_grad), gemms_of(compiled, x, out_grad), strict=True):
        assert torch.equal(actual, expected)


def test_nvfp4_computes_each_gemm_as_the_paper_says() -> None:
    """arXiv 2509.25149: 2D scales of weights; the transform for the weight gradient; noise for gradients."""
    torch.manual_seed(0)
    nvfp4 = converter(recipe_name="nvfp4")
    x_form, weight_form, grad_form = (blocks.form for blocks in nvfp4.layer[:3])
    assert not x_form.stochastic and not weight_form.stochastic and grad_form.stochastic
    assert [blocks.over_tokens.hadamard for blocks in nvfp4.layer[:3]] == [True, False, True]
    assert not any(form.hadamard for form in (x_form, weight_form, grad_form))
    weight = torch.randn(48, 32)
    forward, backward = (quantize_blocks(w, weight_form).dequantize() for w in (weight, weight.t()))
    assert torch.equal(forward, backward.t())
    layer = nvfp4.swap(nn.Linear(32, 48, bias=False))
    x, out_grad = torch.randn(64, 32), torch.randn(64, 48)
    _, _, weight_grad = gemms_of(layer, x, out_grad)
    left, right = (
        quantize_blocks(operand.t(), form._replace(hadamard=True)).dequantize(torch.float64)
        for operand, form in ((out_grad, grad_form), (x, x_form))
    )
    torch.testing.assert_close(weight_grad.double(), left @ right.t(), rtol=1e-4, atol=1e-4)
    assert (hadamard(x.t().contiguous()) - right).norm() < 0.12 * x.norm()  # it was rounded after the transform


def test_the_noise_repeats_with_the_same_gradients_and_differs_with_others() -> None:
    """Ranks of tensor parallelism have the same ones, data-parallel ranks, layers and micro-batches others."""
    torch.manual_seed(0)
    layer = converter(recipe_name="nvfp4").swap(nn.Linear(64, 32, bias=False))
    x, out_grad = torch.randn(64, 64), torch.randn(64, 32)
    first, again = gemms_of(layer, x, out_grad), gemms_of(layer, x, out_grad)
    assert all(map(torch.equal, first, again))
    nearly = out_grad.clone()
    nearly[0, 0] += 1e-3
    other = gemms_of(layer, x, nearly)
    assert torch.equal(other[0], first[0])
    assert (other[1] - first[1]).norm() > 0.1 * first[1].norm()


def llama(layers: int) -> Llama:
    with torch.device("meta"):
        return Llama(LlamaArgs(dim=64, n_layers=layers, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=256))


@pytest.mark.parametrize(
    ("layers", "fraction", "kept"), [(2, 0.15, 1), (20, 0.15, 3), (21, 0.15, 4), (4, 0.0, 0), (10, 0.3, 3)]
)
def test_nvfp4_leaves_the_last_blocks_in_high_precision(layers: int, fraction: float, kept: int) -> None:
    mx = converter(recipe_name="nvfp4", keep_last_blocks_fraction=fraction)
    mx.convert(llama(layers))
    converted = {int(decision.fqn.split(".")[1]) for decision in mx.decisions if decision.converted}
    assert converted == set(range(layers - kept))
    if kept:
        expected = f"one of the last blocks ({kept}) that mx.keep_last_blocks_fraction = {fraction} keeps"
        assert expected in to_table(conversion_report([mx.decisions]))


def test_nvfp4_leaves_the_first_blocks_in_high_precision_too() -> None:
    """2 and 8 of 62, as the paper does for 12 billion parameters."""
    mx = converter(recipe_name="nvfp4", keep_first_blocks_fraction=0.03, keep_last_blocks_fraction=0.12)
    mx.convert(llama(62))
    converted = {int(decision.fqn.split(".")[1]) for decision in mx.decisions if decision.converted}
    assert converted == set(range(2, 54))
    expected = "one of the first blocks (2) that mx.keep_first_blocks_fraction = 0.03 keeps"
    assert expected in to_table(conversion_report([mx.decisions]))


def test_other_recipes_convert_all_blocks() -> None:
    mx = converter(recipe_name="mxint8")
    mx.convert(llama(3))
    assert all(decision.converted for decision in mx.decisions if decision.fqn != "output")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"stochastic_rounding": False}, "mx.stochastic_rounding has no effect with mx.recipe_name = mxfp8, only with"),
        ({"recipe_name": "nvfp4", "scale_calculation_mode": "floor"}, "only with mxfp8 and mxint8; unset it"),
        ({"recipe_name": "mxint8", "keep_last_blocks_fraction": 0.5}, "only with nvfp4"),
        ({"recipe_name": "nvfp4", "symmetric_clipping": False}, "only with mxint8"),
    ],
)
def test_keys_of_other_recipes_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        converter(**keys)


def test_a_recipe_without_kernels_says_so() -> None:
    target = Target("cuda", compute_capability=(10, 0))
    with pytest.raises(ConfigError, match=r"mx\.recipe_name = mxint8 is only emulated so far; set mx\.emulate"):
        converter(target, recipe_name="mxint8", emulate=False)
    converter(target, recipe_name="mxint8")


def test_a_gpu_computes_mxfp8_in_bfloat16_alone() -> None:
    blackwell = Target("cuda", compute_capability=(10, 0))
    converter(blackwell, scale_calculation_mode="even", emulate=False)
    with pytest.raises(ConfigError, match=r"mixed_precision_param = bfloat16, or mx\.emulate"):
        converter(dataclasses.replace(blackwell, dtype=torch.float32), emulate=False)
    converter(dataclasses.replace(blackwell, dtype=torch.float32), scale_calculation_mode="even")


def test_the_forward_pass_alone_may_stay_in_high_precision() -> None:
    linear = nn.Linear(64, 32, bias=False).bfloat16()
    x = torch.randn(32, 64).bfloat16()
    assert torch.equal(converter(forward_with_hp=True).swap(linear)(x), linear(x))


def test_blockwise_float8_has_one_scale_per_128_numbers_and_per_128_by_128_weights() -> None:
    """Unlike in rowwise, an outlier costs no precision in other blocks of its row."""
    torch.manual_seed(0)
    x, weight = torch.randn(128, 256), torch.randn(128, 256)
    x[0, 0] = weight[0, 0] = 1e4
    for role, lost in (("x", 1), ("weight", 128)):
        rounded = blockwise().scaled(x if role == "x" else weight, role)  # type: ignore[arg-type]
        small = (rounded.exact.abs() < 10).float().mean(1)  # of 448
        assert (small[:lost] > 0.49).all() and (small[lost:] < 0.1).all()


def test_blockwise_float8_has_no_low_precision_all_gather_and_no_thresholds() -> None:
    with pytest.raises(ConfigError, match=r"needs float8\.recipe_name = tensorwise, not blockwise"):
        blockwise(enable_fsdp_float8_all_gather=True)
    with pytest.raises(ConfigError, match="auto_filter_small_kn has no thresholds for float8 blockwise"):
        blockwise(filter_fqns=["auto_filter_small_kn"]).convert(llama(2))
