"""int8 GEMMs: whether they run and how accurate they are, alone and in a compiled graph."""

import gc
import itertools
from typing import Any, Literal, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchtitan.config.low_precision import MX, Float8, Int8
from torchtitan.converters import Target, apply_converters
from torchtitan.converters.linear import LowPrecisionLinear
from torchtitan.converters.linear_converter import LinearConverter, relative_errors
from torchtitan.converters.recipes import FLOAT8_SECTION, INT8_SECTION, MX_SECTION
from torchtitan.errors import ConfigError
from torchtitan.kernels.quantize import (
    LARGEST,
    quantize,
    quantize_both,
    quantize_columns,
    quantize_rows,
    quantize_with,
)

CPU = Target("cpu", tokens=64)
Recipe = Literal["rowwise", "tensorwise"]
RECIPES = get_args(Recipe)
Data = tuple[torch.Tensor, torch.Tensor]  # input and gradient of the output


def gemms_of(module: Any, x: torch.Tensor, out_grad: torch.Tensor) -> list[torch.Tensor]:
    """[output, input gradient, weight gradient]"""
    x = x.clone().requires_grad_()
    out = module(x)
    return [out.detach(), *torch.autograd.grad(out, [x, module.weight], out_grad)]


def count_int_mm(module: Any, x: torch.Tensor, out_grad: torch.Tensor) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=False) as recorded:
        gemms_of(module, x, out_grad)
    return sum(event.name == "torchtitan::int8_mm" for event in recorded.events())


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 160, bias=False, dtype=torch.bfloat16)


@pytest.fixture
def data() -> Data:
    torch.manual_seed(1)
    return torch.randn(2, 32, 96).bfloat16(), torch.randn(2, 32, 160).bfloat16()


@pytest.mark.parametrize("recipe", RECIPES)
def test_errors_match_8_bits_and_are_not_zero(recipe: Recipe) -> None:
    errors = relative_errors(LinearConverter(INT8_SECTION, Int8(recipe_name=recipe), CPU), "cpu")
    highest = {"rowwise": 0.013, "tensorwise": 0.020}[recipe]
    assert all(0.004 < error < highest for error in errors.values()), errors


def test_a_layer_computes_what_torchaos_does(linear: nn.Linear, data: Data) -> None:
    # In float32, because torchao's scales have the dtype of what is rounded.
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    linear, (x, out_grad) = linear.float(), tuple(tensor.float() for tensor in data)
    low = LinearConverter(INT8_SECTION, Int8(), CPU).swap(linear)
    quantize_(linear, Int8MixedPrecisionTrainingConfig(module_swap=True))
    for ours, torchaos in zip(gemms_of(low, x, out_grad), gemms_of(linear, x, out_grad), strict=True):
        torch.testing.assert_close(ours, torchaos, rtol=1e-6, atol=0)


@pytest.mark.parametrize("output, grad_input, grad_weight", list(itertools.product([True, False], repeat=3))[:-1])
def test_each_product_is_switched_by_its_key(
    output: bool, grad_input: bool, grad_weight: bool, linear: nn.Linear, data: Data
) -> None:
    config = Int8(output=output, grad_input=grad_input, grad_weight=grad_weight)
    low = LinearConverter(INT8_SECTION, config, CPU).swap(linear)
    gemms_of(low, *data)  # compiles the casts
    for is_low, high_result, low_result in zip(
        (output, grad_input, grad_weight), gemms_of(linear, *data), gemms_of(low, *data), strict=True
    ):
        assert torch.equal(high_result, low_result) != is_low
    assert count_int_mm(low, *data) == output + grad_input + grad_weight


def test_inductor_has_nothing_to_compile_on_cpu(linear: nn.Linear, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would silently take minutes."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("torch.compile was called")

    monkeypatch.setattr(torch, "compile", refuse)
    gemms_of(LinearConverter(INT8_SECTION, Int8(), CPU).swap(linear), *data)


@pytest.mark.parametrize("recipe", RECIPES)
def test_emulated_products_are_the_real_ones(recipe: Recipe, linear: nn.Linear, data: Data) -> None:
    real, emulated = (
        LinearConverter(INT8_SECTION, Int8(recipe_name=recipe, emulate=e), CPU).swap(linear) for e in (False, True)
    )
    for a, b in zip(gemms_of(real, *data), gemms_of(emulated, *data), strict=True):
        assert torch.equal(a, b)
    assert count_int_mm(emulated, *data) == 0


def test_an_input_that_changes_in_place_is_rounded_again(linear: nn.Linear, data: Data) -> None:
    """Layers with the same input share its rounded copy, while it is the same."""
    first, second = (LinearConverter(INT8_SECTION, Int8(), CPU).swap(linear) for _ in range(2))
    x = data[0].clone()
    before = first(x)
    assert torch.equal(second(x), before)
    x.mul_(3)
    assert torch.equal(second(x), first(x.clone())) and not torch.equal(second(x), before)


def test_nothing_rounded_outlives_the_backward_pass(linear: nn.Linear, data: Data) -> None:
    """The optimizer's update, and validation, have that memory."""

    def rounded() -> set[int]:
        gc.collect()
        return {id(x) for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.dtype == torch.int8}

    low = LinearConverter(INT8_SECTION, Int8(), CPU).swap(linear)
    before = rounded()
    x, out_grad = (tensor.clone().requires_grad_() for tensor in data)
    out = low(x)
    assert rounded() > before
    out.backward(out_grad)
    del x, out
    assert rounded() <= before


def test_transposed_input_and_bias(data: Data) -> None:
    linear = nn.Linear(96, 160, dtype=torch.bfloat16)
    low = LinearConverter(INT8_SECTION, Int8(), CPU).swap(linear)
    x = data[0].transpose(0, 1)
    difference = (low(x) - linear(x)).float().norm() / linear(x).float().norm()
    assert low.weight is linear.weight and low.bias is linear.bias
    assert 0 < difference < 0.02


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_code_keeps_no_rounded_weight_for_the_backward_pass(
    linear: nn.Linear, data: Data, recipe: Recipe
) -> None:
    """It would take memory even after FSDP has freed the gathered weight."""
    low = torch.compile(LinearConverter(INT8_SECTION, Int8(recipe_name=recipe), CPU).swap(linear))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        low(data[0].requires_grad_())
    assert [tensor.shape for tensor in saved if tensor.dtype == torch.int8] == [(64, 96)]  # the input


@pytest.mark.full
def test_compiles_into_one_graph(linear: nn.Linear, data: Data) -> None:
    low = LinearConverter(INT8_SECTION, Int8(), CPU).swap(linear)
    torch.compiler.reset()  # what earlier tests compiled counts towards a limit
    compiled = torch.compile(low, fullgraph=True)
    for a, b in zip(gemms_of(compiled, *data), gemms_of(low, *data), strict=True):
        assert (a - b).float().norm() <= 0.004 * b.float().norm()  # different order of rounding to bfloat16
    assert count_int_mm(compiled, *data) == 3


@settings(deadline=None, max_examples=50)
@given(
    scale=st.floats(1e-20, 1e20),
    zero_rows=st.sets(st.integers(0, 3)),
    recipe=st.sampled_from(RECIPES),
    seed=st.integers(0, 1000),
)
def test_quantizing_is_within_half_a_step_and_finite(
    scale: float, zero_rows: set[int], recipe: Recipe, seed: int
) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) * scale
    x[list(zero_rows)] = 0
    data, scales = quantize(x, recipe)
    assert torch.isfinite(scales).all() and (scales > 0).all()
    for codes, matrix in zip(*((data, x) if recipe == "rowwise" else (data[None], x[None])), strict=True):
        assert codes.abs().max() == (LARGEST if matrix.any() else 0)  # the whole range is used
    assert ((data.float() * scales - x).abs() <= 0.5001 * scales).all()
    columns = quantize_columns(x, recipe)
    assert ((columns.dequantize() - x).abs() <= 0.5001 * columns.scale_inverse).all()
    for once, both in zip(((data, scales), columns), quantize_both(x, recipe), strict=True):
        assert torch.equal(once[0], both.data) and torch.equal(once[1], both.scale_inverse)
    rows, column_scale_inverse = quantize_rows(x, recipe)
    assert torch.equal(rows.data, data) and torch.equal(rows.scale_inverse, scales)
    assert column_scale_inverse is not None and torch.equal(column_scale_inverse, columns.scale_inverse)
    assert torch.equal(quantize_with(x, column_scale_inverse), columns.data)


def test_dimensions_that_are_no_multiples_of_16_stay_in_bf16() -> None:
    model = nn.ModuleDict({"odd": nn.Linear(24, 32), "even": nn.Linear(32, 32)})
    (converter,) = apply_converters(model, ["int8"], lambda _: Int8(), CPU)
    assert type(model["odd"]) is nn.Linear and isinstance(model["even"], LowPrecisionLinear)
    assert [d.reason for d in converter.decisions if d.fqn == "odd"] == ["K = 24 is not a multiple of 16"]


def test_no_product_left_on_is_an_error() -> None:
    with pytest.raises(ConfigError, match="all false"):
        LinearConverter(INT8_SECTION, Int8(output=False, grad_input=False, grad_weight=False), CPU)


def test_old_gpus_are_refused_unless_emulated() -> None:
    old = Target("cuda", compute_capability=(7, 0))
    with pytest.raises(ConfigError, match=r"int8\.emulate"):
        LinearConverter(INT8_SECTION, Int8(), old)
    LinearConverter(INT8_SECTION, Int8(emulate=True), old)


@pytest.mark.parametrize(
    "section, recipe", [(FLOAT8_SECTION, "rowwise"), (FLOAT8_SECTION, "blockwise"), (MX_SECTION, "mxfp8")]
)
def test_gpus_with_other_formats_are_refused_unless_emulated(section: Any, recipe: str) -> None:
    """AMD's gfx942 counts as capability 9.4, and has e4m3fnuz."""
    keys, of_amd = {"float8": Float8, "mx": MX}[section.name], Target("cuda", amd="gfx942")
    with pytest.raises(ConfigError, match=rf"gfx942.*{section.name}\.emulate"):
        LinearConverter(section, keys(recipe_name=recipe), of_amd)
    LinearConverter(section, keys(recipe_name=recipe, emulate=True), of_amd)
    if recipe == "rowwise":
        LinearConverter(section, keys(recipe_name=recipe), Target("cuda", amd="gfx950"))


def test_a_converted_output_layer_is_warned_of(log: list[str]) -> None:
    def warnings(**keys: object) -> list[str]:
        model = nn.Module()
        model.wq, model.output = nn.Linear(64, 64), nn.Linear(64, 64)
        log.clear()
        apply_converters(model, ["int8"], lambda _: Int8(**keys), CPU)  # type: ignore[arg-type]
        return [line for line in log if "add output to int8.filter_fqns" in line]

    assert len(warnings(filter_fqns=[])) == 1
    assert not warnings()
    assert not warnings(filter_fqns=[], grad_input=False, grad_weight=False)
