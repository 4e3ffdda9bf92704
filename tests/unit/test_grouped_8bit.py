"""Experts' linear layers in low precision: what each expert computes, whatever its number of tokens."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from torchtitan.compat.dispatch import FakeTensor, FakeTensorMode
from torchtitan.config.low_precision import MX, Float8, Int8
from torchtitan.converters import CONVERTERS, Target
from torchtitan.converters.linear import TorchaoExperts
from torchtitan.converters.linear_converter import SAMPLE_EXPERTS, LinearConverter, relative_errors
from torchtitan.device import HAS_TRITON
from torchtitan.kernels.dispatch import KERNELS, Kernel
from torchtitan.kernels.grouped_8bit import (
    RoundedBoth,
    expert_of_rows,
    pad_groups,
    round_columns,
    round_columns_of_rows,
    round_experts,
    round_weight,
)
from torchtitan.kernels.matmul_8bit import as_right, column_major
from torchtitan.kernels.simulated_device import simulated_device
from torchtitan.models.moe import GroupedLinear

K, N = 64, 96
COUNTS = [3, 0, 1, 33, 0]  # rows of each expert

RECIPES = {
    "float8 rowwise": ("float8", Float8(recipe_name="rowwise")),
    "float8 rowwise emulated": ("float8", Float8(recipe_name="rowwise", emulate=True)),
    "float8 rowwise_with_gw_hp": ("float8", Float8(recipe_name="rowwise_with_gw_hp")),
    "float8 blockwise": ("float8", Float8(recipe_name="blockwise")),
    "int8": ("int8", Int8()),
    "int8 emulated": ("int8", Int8(emulate=True)),
    "int8, output in bf16": ("int8", Int8(output=False)),
    "int8, gradients in bf16": ("int8", Int8(grad_input=False, grad_weight=False)),
    "mx": ("mx", MX(emulate=True)),
    "mx, weight gradient in bf16": ("mx", MX(emulate=True, wgrad_with_hp=True)),
    "mx mxint8": ("mx", MX(recipe_name="mxint8", emulate=True)),
    "mx nvfp4": ("mx", MX(recipe_name="nvfp4", emulate=True)),
    "mx nvfp4, to nearest": ("mx", MX(recipe_name="nvfp4", emulate=True, stochastic_rounding=False)),
    "mx nvfp4, output in bf16": ("mx", MX(recipe_name="nvfp4", emulate=True, forward_with_hp=True)),
}


def converter_of(recipe: str) -> LinearConverter:
    name, section = RECIPES[recipe]
    converter = CONVERTERS.get(name).build(section, Target("cpu"))
    assert isinstance(converter, LinearConverter)
    return converter


def experts_layer(experts: int, dtype: torch.dtype = torch.bfloat16) -> GroupedLinear:
    layer = GroupedLinear(experts, K, N).to(dtype)
    nn.init.normal_(layer.weight)
    return layer


def ends_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def gemms_of(module: Any, x: torch.Tensor, out_grad: torch.Tensor, *more: torch.Tensor) -> list[torch.Tensor]:
    """[output, input gradient, weight gradient]"""
    x = x.clone().requires_grad_()
    out = module(x, *more)
    return [out.detach(), *torch.autograd.grad(out, [x, module.weight], out_grad)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_errors_are_the_known_ones(recipe: str) -> None:
    converter = converter_of(recipe)
    for gemm, error in relative_errors(converter, "cpu", SAMPLE_EXPERTS).items():
        known = getattr(converter.grouped_gemms, gemm)
        assert error == (0 if known is None else pytest.approx(known, rel=0.2)), gemm


# nvfp4 has one scale for the rows of all experts, and its noise depends on all of them.
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if "gw_hp" not in recipe and "nvfp4" not in recipe])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_expert_computes_what_a_converted_linear_layer_does(recipe: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    converter, experts = converter_of(recipe), experts_layer(len(COUNTS), dtype)
    # mx blocks of 32 tokens cannot be compared with a linear layer's, which needs a multiple of 32.
    counts = [32 * (count > 1) for count in COUNTS] if recipe in ("mx", "mx mxint8") else COUNTS
    x, out_grad = torch.randn(sum(counts), K, dtype=dtype), torch.randn(sum(counts), N, dtype=dtype)
    out, x_grad, weight_grad = gemms_of(converter.swap_grouped(experts), x, out_grad, ends_of(counts))
    start = 0
    for expert, count in enumerate(counts):
        rows = slice(start, start := start + count)
        if not count:
            assert not weight_grad[expert].any()
            continue
        linear = nn.Linear(K, N, bias=False, dtype=dtype)
        with torch.no_grad():
            linear.weight.copy_(experts.weight[expert])
        of_expert = out[rows], x_grad[rows], weight_grad[expert]
        for here, alone in zip(of_expert, gemms_of(converter.swap(linear), x[rows], out_grad[rows]), strict=True):
            in_blocks = "mx" in recipe or "blockwise" in recipe  # their GEMMs sum in another order
            assert (here - alone).norm() <= (0.004 if in_blocks else 1e-5) * alone.norm()


@pytest.mark.parametrize("hp_weight_grad", [False, True])
def test_emulated_mx_equals_torchaos(hp_weight_grad: bool) -> None:
    """Whose kernels compute it on a GPU."""
    torch.manual_seed(0)
    experts = experts_layer(len(COUNTS))
    section = MX(wgrad_with_hp=hp_weight_grad, emulate=True)
    ours: Any = CONVERTERS.get("mx").build(section, Target("cpu")).swap_grouped(experts)  # type: ignore[attr-defined]
    torchaos, weight = TorchaoExperts.of(experts, "rceil", hp_weight_grad), experts.weight
    torchaos.kernels = "EMULATED"
    results = []
    x, out_grad = torch.randn(sum(COUNTS), K).bfloat16().requires_grad_(), torch.randn(sum(COUNTS), N).bfloat16()
    ends = ends_of(COUNTS)
    for out in (ours(x, ends), torchaos(x, ends)):
        results.append([out, *torch.autograd.grad(out, [x, weight], out_grad)])
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("recipe", ["float8 rowwise", "int8", "mx", "mx nvfp4"])
def test_no_tokens_at_all(recipe: str) -> None:
    low = converter_of(recipe).swap_grouped(experts_layer(2))
    x = torch.randn(0, K, dtype=torch.bfloat16)
    out, x_grad, weight_grad = gemms_of(low, x, torch.randn(0, N, dtype=torch.bfloat16), ends_of([0, 0]))
    assert out.shape == (0, N) and x_grad.shape == (0, K)
    assert not weight_grad.any()


@pytest.mark.full
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, marks=[pytest.mark.full] * (recipe != "int8"))
        for recipe in ("float8 rowwise", "int8", "mx", "mx nvfp4, to nearest")
    ],
)
def test_compiles_into_one_graph_for_any_number_of_tokens(recipe: str) -> None:
    low = converter_of(recipe).swap_grouped(experts_layer(3))
    torch.compiler.reset()  # what earlier tests compiled counts towards a limit
    compiled = torch.compile(low, fullgraph=True, dynamic=True)
    for counts in ([5, 0, 12], [30, 1, 2], [0, 0, 64]):
        x, out_grad = torch.randn(sum(counts), K).bfloat16(), torch.randn(sum(counts), N).bfloat16()
        results = [gemms_of(module, x, out_grad, ends_of(counts)) for module in (compiled, low)]
        for a, b in zip(*results, strict=True):
            assert (a - b).float().norm() <= 0.004 * b.float().norm()


def test_an_expert_with_large_numbers_costs_another_no_precision() -> None:
    torch.manual_seed(0)
    experts = experts_layer(2)
    x, out_grad = torch.randn(64, K).bfloat16(), torch.randn(64, N).bfloat16()
    x[:32] *= 1e6
    ends = ends_of([32, 32])
    high, low = (gemms_of(m, x, out_grad, ends) for m in (experts, converter_of("int8").swap_grouped(experts)))
    for a, b in zip((high[0][32:], high[1][32:], high[2][1]), (low[0][32:], low[1][32:], low[2][1]), strict=True):
        assert 0 < (a - b).float().norm() < 0.02 * a.float().norm()


@settings(deadline=None, max_examples=30)
@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=6), multiple=st.sampled_from([16, 32]))
def test_padded_groups_are_those_rows_and_zeros(counts: list[int], multiple: int) -> None:
    ends = ends_of(counts)
    x = torch.randn(sum(counts), 8)
    padded, padded_ends = pad_groups(x, ends, multiple)
    assert len(padded) % multiple == 0 and len(padded) >= padded_ends[-1] and not (padded_ends % multiple).any()
    start = 0
    for rows, end, count in zip(x.split(counts), padded_ends.tolist(), counts, strict=True):
        assert torch.equal(padded[start : start + count], rows)
        assert not padded[start + count : end].any()
        start = end
    assert not padded[start:].any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_the_columns_of_a_gpu_equal_a_cpus(dtype: torch.dtype) -> None:
    x, ends = torch.randn(sum(COUNTS), K).bfloat16(), ends_of(COUNTS)
    on_cpu = round_columns_of_rows(x, ends, dtype)
    padded, padded_ends = pad_groups(x, ends, 16)
    with simulated_device("cuda", FakeTensor, {}):
        on_gpu = round_columns_of_rows(padded, padded_ends, dtype)
    some = torch.tensor(COUNTS) > 0
    assert torch.equal(on_cpu.scale_inverse[some], on_gpu.scale_inverse[some])
    starts = [end - -(-count // 16) * 16 for end, count in zip(padded_ends.tolist(), COUNTS, strict=True)]
    kept = [on_gpu.data[start : start + count].float() for start, count in zip(starts, COUNTS, strict=True)]
    assert torch.equal(on_cpu.data.float(), torch.cat(kept))
    assert expert_of_rows(ends, sum(COUNTS)).tolist() == [0] * 3 + [2] + [3] * 33


@pytest.mark.parametrize("of_a_gpu", [False, True])
def test_weights_are_rounded_at_once_as_one_by_one(of_a_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU writes columns transposed, those of all experts side by side, and has memory for rows that fill them up."""
    operation = "rounding of experts' rows and columns"

    def transposed(*arguments: Any) -> RoundedBoth:
        rows, row_scales, columns, *more = KERNELS[operation][-1].run(*arguments)
        return rows, row_scales, column_major(columns), *more

    weight = torch.randn(5, N, K) * torch.logspace(0, -3, 5).view(-1, 1, 1)
    expected = round_weight(weight, torch.int8)[0], round_columns(weight, torch.int8)
    if of_a_gpu:
        kernel = Kernel("transposed", transposed)
        monkeypatch.setitem(KERNELS, operation, [kernel, KERNELS[operation][-1]])
    for rounded, other in zip(round_experts(weight, torch.int8), expected, strict=True):
        assert torch.equal(rounded.data, other.data) and torch.equal(rounded.scale_inverse, other.scale_inverse)
    laid_out = column_major(rounded.data)
    assert torch.equal(laid_out, rounded.data) and laid_out.mT.is_contiguous()
    assert as_right(rounded) is rounded  # a CPU takes any layout


@pytest.mark.parametrize(
    "operand, gathers, scales",
    [
        (lambda x, places, factor: x[places], True, False),
        (lambda x, places, factor: x[places] * factor.unsqueeze(1), True, True),
        (lambda x, places, factor: (x * 2)[places], True, False),
        (lambda x, places, factor: x[places].relu(), False, False),
        (lambda x, places, factor: x[places] * factor[:32], False, False),  # a factor for each column
        (lambda x, places, factor: x[places, :1].expand(-1, 32), False, False),
        (lambda x, places, factor: x[places] * factor.float().unsqueeze(1), False, False),  # in another dtype
    ],
    ids=["gather", "times a factor", "of a result", "other", "columns", "elements", "float32"],
)
def test_compiled_for_a_gpu_rows_are_rounded_where_they_come_from(operand: Any, gathers: bool, scales: bool) -> None:
    from torchtitan.kernels.compiler_passes import FuseGathers  # imports the compiler

    rounding = torch.ops.torchtitan.round_rows_and_columns.default

    def program(*inputs: torch.Tensor) -> list[torch.Tensor]:
        x, places, factor, ends = inputs
        return list(rounding(operand(x, places, factor), ends, torch.int8))

    with FakeTensorMode():
        x, factor = torch.empty(16, 32, dtype=torch.bfloat16), torch.empty(64, dtype=torch.bfloat16)
        places, ends = torch.zeros(64, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
        module = make_fx(program, tracing_mode="real")(x, places, factor, ends)
        expected = [out.shape for out in module(x, places, factor, ends)]
        FuseGathers()(module.graph)
        module.recompile()
        assert [out.shape for out in module(x, places, factor, ends)] == expected
    (node,) = module.graph.find_nodes(op="call_function", target=rounding)
    more = node.args[3:]
    if gathers:
        assert more[0] is module.graph.find_nodes(op="placeholder")[1] and (more[1] is not None) == scales
    else:
        assert not more


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_what_float8_sums_at_once_is_not_chosen_by_timing() -> None:
    """It decides the bits of experts' results, which would differ between a run and its resume."""
    from torchtitan.kernels.gemm_triton import CONFIGS, fitting

    for fast in (False, True):
        configs = fitting(CONFIGS, {"a": torch.empty(0, dtype=torch.float8_e4m3fn)}, fast)
        assert len(configs) > 1 and len({config.kwargs["BLOCK_K"] for config in configs}) == 1
    assert fitting(CONFIGS, {"a": torch.empty(0, dtype=torch.int8)}) == CONFIGS  # its sums are exact
