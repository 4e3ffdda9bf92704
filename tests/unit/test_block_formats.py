"""Block-scaled formats: properties that hold for any numbers, worked examples, and torchao as the judge."""

import itertools
import math
from fractions import Fraction
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.prototype.mx_formats.mx_tensor import MXTensor

from torchtitan.compat.torchao import ScaleCalculationMode
from torchtitan.kernels import block_formats, block_rounding
from torchtitan.kernels.block_formats import (
    BLOCK_FORMATS,
    ELEMENTS,
    BlockFormat,
    ScaleMode,
    hadamard,
    noise_from,
    quantize_blocks,
    round_to_blocks,
)

MODES = get_args(ScaleMode)
ALL = {name: known.format for name, known in BLOCK_FORMATS.items()}
ALL |= {f"mxfp8 {mode}": ALL["mxfp8"]._replace(scale_mode=mode) for mode in MODES}
ALL |= {f"mxint8 {mode}": ALL["mxint8"]._replace(scale_mode=mode) for mode in MODES}
ALL |= {"mxint8 to -128": ALL["mxint8 floor"]._replace(symmetric=False)}
ALL |= {"e5m2": BlockFormat("e5m2", 1, 32, "e8m0"), "mxfp4": BlockFormat("e2m1", 1, 32, "e8m0")}
every_format = pytest.mark.parametrize("name", ALL)

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
USUAL = st.floats(-100, 100, width=32)


def tensor(numbers: list[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)[None]


def rounded(x: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    return quantize_blocks(x, form).dequantize()


@every_format
@settings(max_examples=25, deadline=None)
@given(numbers=st.lists(FLOATS, min_size=1, max_size=70))
def test_errors_are_at_most_half_a_step_unless_the_scale_lets_numbers_saturate(name: str, numbers: list[float]) -> None:
    form, x = ALL[name], tensor(numbers)
    element, blocks = ELEMENTS[form.element], quantize_blocks(x, form)
    assert (blocks.data.abs() <= max(element.largest, -form.smallest)).all()
    assert (blocks.scale > 0).all()
    scaled = x * blocks.factor.repeat_interleave(form.columns, 1)[:, : x.shape[1]]
    exact = scaled.clamp(form.smallest, element.largest)
    exponent = torch.frexp(exact)[1] - 1
    step = torch.ldexp(torch.ones_like(x), exponent.clamp_min(element.smallest_exponent) - element.mantissa_bits)
    assert ((blocks.data - exact).abs() <= step * (1 if form.stochastic else 0.5)).all()
    assert (blocks.data / step == (blocks.data / step).round()).all()
    if form.scale_mode == "rceil" and form.scale == "e8m0" and x.abs().max() < 2.0**127:
        assert torch.equal(exact, scaled)


# Except for int8 with -128, which would have twice the scale the second time.
@pytest.mark.parametrize("name", [name for name, form in ALL.items() if form.scale == "e8m0" and form.symmetric])
@settings(max_examples=25, deadline=None)
@given(numbers=st.lists(FLOATS, min_size=1, max_size=70))
def test_rounding_twice_changes_nothing_with_scales_that_are_powers_of_two(name: str, numbers: list[float]) -> None:
    once = rounded(tensor(numbers), ALL[name])
    if once.isfinite().all():  # 1.9 * 2^127 is rounded to 2^128
        assert torch.equal(rounded(once, ALL[name]), once)


@pytest.mark.parametrize("name", [name for name, form in ALL.items() if form.scale != "e8m0"])
@settings(max_examples=25, deadline=None)
@given(numbers=st.lists(USUAL, min_size=1, max_size=70))
def test_rounding_twice_changes_little_with_other_scales(name: str, numbers: list[float]) -> None:
    """The scale is the same up to a rounding error in float32; for nvfp4 if it is no subnormal E4M3 number."""
    form = ALL[name]
    blocks = quantize_blocks(tensor(numbers), form)
    if form.scale == "float32" or (blocks.scale >= 2.0**-6).all():
        again = quantize_blocks(blocks.dequantize(), form)
        torch.testing.assert_close(again.dequantize(), blocks.dequantize(), rtol=1e-6, atol=0)
        assert torch.equal(again.data, blocks.data) or form.scale == "float32"


@pytest.mark.parametrize("name", [name for name, form in ALL.items() if not form.stochastic])
@settings(max_examples=25, deadline=None)
@given(numbers=st.lists(FLOATS, min_size=2, max_size=16))
def test_larger_numbers_of_a_block_are_not_rounded_to_smaller_ones(name: str, numbers: list[float]) -> None:
    out = rounded(tensor(sorted(numbers)), ALL[name])
    assert (out[:, 1:] >= out[:, :-1]).all()  # not diff: above 2^127 there may be infinities


@pytest.mark.parametrize("name", [name for name, form in ALL.items() if not form.stochastic and form.symmetric])
@settings(max_examples=25, deadline=None)
@given(numbers=st.lists(FLOATS, min_size=1, max_size=40))
def test_signs_do_not_matter(name: str, numbers: list[float]) -> None:
    assert torch.equal(rounded(-tensor(numbers), ALL[name]), -rounded(tensor(numbers), ALL[name]))


@every_format
@settings(max_examples=25, deadline=None)
@given(numbers=st.lists(st.floats(-(2.0**-126), 2.0**-126, width=32), min_size=1, max_size=40))
def test_denormals_and_zeros_stay_small_and_finite(name: str, numbers: list[float]) -> None:
    out = rounded(tensor(numbers), ALL[name])
    assert (out.abs() <= 2.0**-125).all()
    assert not rounded(torch.zeros(3, 50), ALL[name]).any()


@every_format
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_infinities_and_nan_make_their_block_nan(name: str, wrong: float) -> None:
    form = ALL[name]
    x = torch.ones(2 * form.rows, 2 * form.columns)
    x[-1, -1] = wrong
    out = rounded(x, form)
    assert out[-form.rows :, -form.columns :].isnan().all()
    assert out.isnan().all() if form.tensor_scale else not out[:, : form.columns].isnan().any()


@every_format
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 150))
def test_short_blocks_compute_as_if_filled_up_with_zeros(name: str, rows: int, columns: int) -> None:
    form = ALL[name]._replace(stochastic=False)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    padded = torch.zeros(-(-rows // form.rows) * form.rows, -(-columns // form.columns) * form.columns)
    padded[:rows, :columns] = x
    assert torch.equal(rounded(x, form), rounded(padded, form)[:rows, :columns])
    stacked = torch.stack([x, 3 * x])
    assert torch.equal(rounded(stacked, form)[0], rounded(x, form))


def numbers_of(element: str) -> list[float]:
    """The positive numbers of a type, by its definition in the MX specification, 5.3."""
    mantissa_bits, smallest_exponent, largest = ELEMENTS[element]
    if element == "int8":
        return [code / 64 for code in range(128)]
    numbers = [code * 2.0 ** (smallest_exponent - mantissa_bits) for code in range(2**mantissa_bits)]
    for exponent in range(smallest_exponent, math.floor(math.log2(largest)) + 1):
        numbers += [2.0**exponent * (1 + code / 2**mantissa_bits) for code in range(2**mantissa_bits)]
    return [number for number in numbers if number <= largest]


@pytest.mark.parametrize(
    ("element", "count", "smallest", "smallest_normal", "largest"),
    [  # tables of 5.3.1, 5.3.3, 5.3.4
        ("e4m3", 127, 2.0**-9, 2.0**-6, 448),
        ("e5m2", 124, 2.0**-16, 2.0**-14, 57344),
        ("e2m1", 8, 0.5, 1.0, 6),
        ("int8", 128, 1 / 64, 1.0, 1 + 63 / 64),
    ],
)
def test_elements_follow_the_mx_specification(
    element: str, count: int, smallest: float, smallest_normal: float, largest: float
) -> None:
    grid = numbers_of(element)
    assert (len(grid), grid[1], grid[-1]) == (count, smallest, largest)
    assert 2.0 ** ELEMENTS[element].smallest_exponent == smallest_normal
    # Rounds every number between them to the nearest, ties to the one with an even code. The scale is 1.
    form = BlockFormat(element, 1, 10_000, "e8m0")
    for code, (low, high) in enumerate(itertools.pairwise(grid)):
        middle = (low + high) / 2
        x = tensor([low, middle - (high - low) / 64, middle, middle + (high - low) / 64, high, largest])
        assert rounded(x, form)[0].tolist() == [low, low, high if code % 2 else low, high, high, largest]


@pytest.mark.parametrize(
    ("element", "mode", "numbers", "scale", "data"),
    [
        # 6.3: the scale is the largest power of two not above the amax, divided by the largest one of the element type.
        ("e4m3", "floor", [500.0, 1.0, -(2.0**-9), 2.0**-10], 1.0, [448, 1, -(2.0**-9), 0]),
        ("e4m3", "floor", [1000.0, -3.0], 2.0, [448, -1.5]),
        ("e2m1", "floor", [7.9, 2.6, -0.2, 0.75], 1.0, [6, 3, 0, 1]),
        ("int8", "floor", [1.0, -0.5, 1 / 128, 3 / 128], 1.0, [1, -0.5, 0, 2 / 64]),
        ("int8", "floor", [127.9, -127.9], 64.0, [127 / 64, -127 / 64]),
        ("e4m3", "rceil", [500.0, 1.0], 2.0, [256, 0.5]),  # 500 / 2 = 250, and e4m3 has 240 and 256
        ("e4m3", "rceil", [448.0], 1.0, [448]),
        ("e4m3", "ceil", [448.0], 2.0, [224]),
        ("e4m3", "even", [495.0], 1.0, [448]),  # 495 = 1.93 * 2^8, less than 1 + 15/16
        ("e4m3", "even", [496.0], 2.0, [256]),
    ],
)
def test_worked_examples(element: str, mode: Any, numbers: list[float], scale: float, data: list[float]) -> None:
    blocks = quantize_blocks(tensor(numbers), BlockFormat(element, 1, 32, "e8m0", mode))
    assert blocks.scale.item() == scale
    assert blocks.data[0].tolist() == data


def test_int8_has_minus_128_unless_it_is_symmetric() -> None:
    x = tensor([-127.9])
    assert quantize_blocks(x, ALL["mxint8 floor"]).data.item() == -127 / 64
    assert quantize_blocks(x, ALL["mxint8 to -128"]).data.item() == -2
    assert quantize_blocks(-x, ALL["mxint8 to -128"]).data.item() == 127 / 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", MODES)
def test_mxfp8_equals_torchaos_bit_for_bit(mode: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(512, 256) * torch.exp2(torch.randint(-100, 100, (512, 1)))).to(dtype)
    x[0] = 0
    x[1, ::3] = math.nan
    form = ALL[f"mxfp8 {mode}"]
    reference = MXTensor.to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode[mode.upper()])
    ours = quantize_blocks(x, form)
    exponents = (ours.scale.log2() + 127).nan_to_num(255)
    assert torch.equal(exponents, reference.scale.view(torch.uint8).float())
    assert torch.equal(ours.data[2:], reference.qdata.float()[2:])
    expected = reference.dequantize(dtype)
    assert torch.equal(round_to_blocks(x, form).nan_to_num(7), expected.nan_to_num(7))


def test_nvfp4_equals_torchaos_bit_for_bit() -> None:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    torch.manual_seed(0)
    x = torch.randn(256, 512) * torch.exp2(torch.randint(-6, 6, (256, 32)).repeat_interleave(16, 1))
    reference = NVFP4Tensor.to_nvfp4(x, 16, per_tensor_amax_to_scale(x.abs().amax()))
    ours = quantize_blocks(x, ALL["nvfp4"])
    assert torch.equal(ours.scale, reference.scale.float())
    assert torch.equal(ours.dequantize(), reference.dequantize(torch.float32))


def test_blockwise_float8_equals_torchaos_bit_for_bit() -> None:
    from torchao.prototype.blockwise_fp8_training import kernels

    torch.manual_seed(0)
    x = torch.randn(256, 512) * torch.exp2(torch.randint(-6, 6, (256, 512)))
    for name, judge in (
        ("float8 1x128", kernels.torch_blockwise_scale_act_quant_lhs),
        ("float8 128x128", kernels.torch_blockwise_scale_weight_quant),
    ):
        ours, (data, scale) = quantize_blocks(x, ALL[name]), judge(x)
        assert torch.equal(ours.data, data.float()) and torch.equal(ours.scale, scale), name


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_rounding_errors_are_the_known_ones(name: str) -> None:
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    form, error = BLOCK_FORMATS[name]
    assert float((rounded(x, form) - x).norm() / x.norm()) == pytest.approx(error, rel=0.05)


def multiply(left: block_formats.BlockScaledTensor, right: block_formats.BlockScaledTensor) -> torch.Tensor:
    """left @ right.T in float32: the float64 product of the dequantized operands, rounded once. float64's own rounding
    errors, 2^-53 of the largest term, are far below the last bit of the result, unless the terms cancel to less than
    2^-29 of it."""
    return (left.dequantize(torch.float64) @ right.dequantize(torch.float64).transpose(-1, -2)).float()


@pytest.mark.parametrize(
    ("left", "right"), [("mxfp8", "mxfp8"), ("mxint8", "mxint8"), ("nvfp4", "nvfp4 weights"), ("e5m2", "mxfp8")]
)
def test_products_equal_the_definition_to_the_last_bit(left: str, right: str) -> None:
    torch.manual_seed(0)
    a, b = (quantize_blocks(torch.randn(9, 70) * torch.randn(9, 1).exp(), ALL[name]) for name in (left, right))
    out = multiply(a, b)

    def exact(blocks: Any, row: int) -> list[Fraction]:
        form = blocks.format
        factors = [Fraction(1) if blocks.tensor_scale is None else Fraction(blocks.tensor_scale.item())]
        scales = blocks.scale[row // form.rows].repeat_interleave(form.columns)
        return [
            Fraction(x) * Fraction(scale) * factors[0]
            for x, scale in zip(blocks.data[row].tolist(), scales.tolist(), strict=False)
        ]

    for i, j in itertools.product(range(9), range(9)):
        total = sum(x * y for x, y in zip(exact(a, i), exact(b, j), strict=True))
        assert out[i, j].item() == torch.tensor(float(total)).item()  # float() rounds once, to float64's nearest


def test_stochastic_rounding_is_unbiased_reproducible_and_its_own_for_each_tensor() -> None:
    form = ALL["nvfp4 gradients"]
    x = torch.full((1024, 1024), 3.25)
    x[:, ::16] = 6.0
    out = rounded(x, form)[:, 1::16] / 6 * 6
    assert set(out.unique().tolist()) == {3.0, 4.0}
    assert out.mean().item() == pytest.approx(3.25, abs=5 * 0.5 / math.sqrt(out.numel()))
    assert torch.equal(rounded(x, form), rounded(x, form))
    other = x.clone()
    other[0, 0] = 6.0 + 2.0**-20  # another rank's, layer's or micro-batch's
    assert ((rounded(other, form)[:, 1::16] > 3.5) != (out > 3.5)).float().mean() > 0.3


def test_noise_is_uniform_and_independent() -> None:
    noise = noise_from(torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)))
    assert noise.min() >= 0 and noise.max() < 1
    counts = torch.histc(noise, 64, 0, 1)
    assert (counts / noise.numel() * 64 - 1).abs().max() < 5 * math.sqrt(64 / noise.numel())
    for shifted, other in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1]), (noise[::2], noise[1::2])):
        assert torch.corrcoef(torch.stack([shifted.flatten(), other.flatten()]))[0, 1].abs() < 5e-3


def test_the_transform_leaves_products_alone_and_spreads_outliers() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(8, 70), torch.randn(8, 70)
    torch.testing.assert_close(hadamard(a) @ hadamard(b).T, a @ b.T, rtol=1e-4, atol=1e-4)
    outlier = torch.zeros(1, 16)
    outlier[0, 3] = 8
    assert hadamard(outlier).abs().tolist() == [[2.0] * 16]
    assert round_to_blocks(a, ALL["nvfp4"]._replace(hadamard=True)).shape == (8, 80)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("transformed", [False, True])
def test_the_operator_is_one_for_the_compiler(name: str, transformed: bool) -> None:
    form = ALL[name]._replace(hadamard=transformed)
    for x in (torch.randn(3, 5, 33), torch.randn(4, 32).bfloat16().t(), torch.randn(0, 32)):
        torch.library.opcheck(torch.ops.torchtitan.round_to_blocks.default, (x, *form))


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16])
@pytest.mark.parametrize("transform", [False, True], ids=["", "transformed"])
@every_format
def test_kernels_for_cpus_find_the_numbers_of_the_definition(
    name: str, transform: bool, dtype: torch.dtype, two_threads: None
) -> None:
    assert block_rounding.block_rounding_library() is not None  # else both would be the definition
    form = ALL[name]._replace(hadamard=transform)
    torch.manual_seed(0)
    for shape in ((33, 70), (128, 256), (3, 20, 48), (1, 1)):
        x = torch.randn(shape) * torch.exp(3 * torch.randn(shape))
        x[x.abs() < 0.01] = 0
        extreme = x * torch.tensor([1e-41, 1e-38, 1, 1e38])[torch.randint(4, shape)]
        spoilt = x.clone()
        spoilt.view(-1)[::2000] = torch.tensor([math.inf])
        spoilt.view(-1)[1000::3000] = math.nan
        for numbers in (x, -x.abs(), extreme, spoilt, torch.zeros(shape), (8 * x).round() / 8):
            numbers = numbers.to(dtype)
            for matrix in (numbers, numbers.transpose(-1, -2)):
                actual, expected = round_to_blocks(matrix, form), quantize_blocks(matrix, form).dequantize(dtype)
                assert actual.dtype == dtype and actual.is_contiguous()
                assert torch.equal(actual.isnan(), expected.isnan())
                assert torch.equal(actual.nan_to_num(), expected.nan_to_num())
                assert torch.equal(actual.signbit()[~actual.isnan()], expected.signbit()[~actual.isnan()])
