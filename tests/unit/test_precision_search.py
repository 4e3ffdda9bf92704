"""The precision search: errors of layers, the assignment within a budget, and the configuration that it becomes."""

import dataclasses
import itertools
import math
import random
from typing import Any

import pytest
import tiny  # registers its models
import torch
from torch import nn

from torchtitan.config import JobConfig
from torchtitan.config.low_precision import MX, Float8, Int8
from torchtitan.converters import CONVERTERS, Target, apply_converters
from torchtitan.converters.filter import AUTO_FILTER_NUMERICS
from torchtitan.converters.numerics import layer_errors, noise_of
from torchtitan.converters.numerics_filter import inaccurate_layers
from torchtitan.engine.explain import explain_conversion
from torchtitan.errors import ConfigError
from torchtitan.models.init import init_weights
from torchtitan.models.llama.model import Llama
from torchtitan.plan.step_model import DATA_SHEET_RATES, RATES
from torchtitan.precision_search import fragment
from torchtitan.precision_search.assignment import Option, choose
from torchtitan.precision_search.candidates import find_candidates
from torchtitan.precision_search.search import LossModel, Table

TARGET = Target("cpu", tokens=128)
CONFIG = dataclasses.replace(JobConfig(), model=dataclasses.replace(JobConfig().model, name="tiny", flavor="deep"))
GEMMS_ONLY = dataclasses.replace(RATES["H100"], bandwidth=math.inf)
PLANTED = "layers.2.feed_forward.w1"
ARGS = dataclasses.replace(tiny.TINY, vocab_size=512)


def test_the_knapsack_agrees_with_trying_everything() -> None:
    numbers = random.Random(0)
    for _ in range(50):
        layers = [[Option(numbers.random(), numbers.random()) for _ in range(3)] for _ in range(5)]
        limit = 5 * numbers.random()
        every = [
            (sum(one.value for one in chosen), chosen)
            for chosen in itertools.product(*layers)
            if sum(one.weight for one in chosen) <= limit
        ]
        found = choose(layers, limit)
        assert (found is None) == (not every)
        if found is not None:
            chosen = [options[index] for options, index in zip(layers, found, strict=True)]
            assert sum(one.weight for one in chosen) <= limit
            assert sum(one.value for one in chosen) <= min(every)[0] + 0.05  # weights are rounded up


def operands_of(k: int, n: int, outliers: bool = False) -> list[torch.Tensor]:
    x, weight, out_grad = torch.randn(128, k), torch.randn(n, k), torch.randn(128, n)
    if outliers:  # one huge channel, which the layer ignores, leaves nothing of the others in 8 bits
        x[:, 0], weight[:, 0] = 1e8, 0
    return [x.bfloat16(), weight.bfloat16(), out_grad.bfloat16()]


@pytest.fixture(scope="module")
def table() -> Table:
    torch.manual_seed(0)
    candidates = find_candidates(CONFIG, TARGET)
    decisions = candidates[0].decisions.values()
    operands = {one.fqn: operands_of(one.k, one.n, one.fqn == PLANTED) for one in decisions}
    return Table.of(candidates, operands, GEMMS_ONLY, momentum=0.9)


def test_recipes_come_from_the_converters(table: Table) -> None:
    names = [candidate.name for candidate in table.candidates]
    assert {"float8 tensorwise", "float8 rowwise", "int8 rowwise", "int8 tensorwise", "mx mxfp8"} <= set(names)
    emulated = {candidate.name for candidate in table.candidates if candidate.keys.get("emulate")}
    assert "mx mxfp8" in emulated and "int8 rowwise" not in emulated


def test_a_layer_with_outliers_stays_in_bf16_within_a_budget_that_converts_all_others(table: Table) -> None:
    int8 = next(index for index, one in enumerate(table.candidates) if one.name == "int8 rowwise")
    others = table.noise(table.throughout(int8, [PLANTED]))
    assignment = table.fastest(2 * others)
    assert [fqn for fqn, index in assignment.items() if index is None] == [PLANTED]
    # Of recipes that are equally fast, the one with the least noise.
    assert table.noise(assignment) == pytest.approx(others)
    assert {table.candidates[index].name for index in assignment.values() if index is not None} == {"int8 rowwise"}


def test_a_budget_of_zero_converts_nothing(table: Table) -> None:
    assert set(table.fastest(LossModel.fit([1.0], [2.0], 0.1).noise(0.0)).values()) == {None}
    assert set(table.fastest(LossModel.fit([], [], 0.1).noise(0.5)).values()) == {None}


def test_with_the_time_of_all_layers_in_one_recipe_the_search_has_less_noise(table: Table) -> None:
    for index, candidate in enumerate(table.candidates):
        everywhere = table.throughout(index)
        if math.isfinite(table.seconds(everywhere)):
            found = table.quietest(table.seconds(everywhere))
            assert table.seconds(found) <= table.seconds(everywhere) * (1 + 1e-6), candidate.name
            assert table.noise(found) <= table.noise(everywhere), candidate.name


def test_layers_that_do_not_gain_are_not_converted(table: Table) -> None:
    operands = {"layers.0.attention.wq": operands_of(256, 256)}
    # Rounding a small layer's operands takes longer than its GEMMs save.
    of_device = Table.of(table.candidates, operands, RATES["H100"], momentum=0.9)
    assert not of_device.gains() and of_device.fastest(math.inf) == {"layers.0.attention.wq": None}


def test_the_configuration_converts_exactly_the_chosen_layers(table: Table) -> None:
    numbers = random.Random(1)
    names = [candidate.name for candidate in table.candidates]
    choices = [None, names.index("float8 rowwise"), names.index("int8 tensorwise"), names.index("mx nvfp4")]
    scattered = {fqn: numbers.choice(choices) for fqn in table.cells}
    kinds = dict(zip(("wo", "wq", "w1", "w2"), choices, strict=True))
    by_kind = {fqn: kinds.get(fqn.rsplit(".", 1)[-1]) for fqn in table.cells}
    for assignment in (scattered, by_kind):
        tables = fragment.tables_of(table.candidates, assignment)
        sections: dict[str, Any] = {
            name: dataclasses.replace(getattr(CONFIG, name), **keys) for name, keys in tables.items()
        }
        found = explain_conversion(dataclasses.replace(CONFIG, **sections))
        assert {one.fqn: f"{one.converter} {one.recipe}" for one in found if one.converted} == {
            fqn: names[index] for fqn, index in assignment.items() if index is not None
        }
    assert "layers.*.attention.wk" in tables["float8"]["filter_fqns"]  # a pattern for all blocks


def test_a_b200_has_recipes_of_4_and_of_8_bits(table: Table) -> None:
    b200 = dataclasses.replace(DATA_SHEET_RATES["B200"], bandwidth=math.inf)
    wide = {"layers.0.attention.wq": operands_of(64, 64)}
    found = Table.of(table.candidates, wide, b200, momentum=0.9)
    (seconds,), (row,) = found.bf16_seconds.values(), found.cells.values()
    gains = {one.name: seconds / cell.seconds for one, cell in zip(table.candidates, row, strict=True) if cell}
    assert gains["mx nvfp4"] == pytest.approx(4) and gains["mx mxfp8"] == gains["int8 rowwise"] == pytest.approx(2)
    assert gains["mx mxint8"] == gains["float8 blockwise"] == 0
    # With time for nothing faster than 8 bits, nothing needs 4.
    (chosen,) = found.quietest(seconds / 2).values()
    assert chosen is not None and table.candidates[chosen].name == "int8 rowwise"


def test_lasting_errors_count_more_with_more_momentum() -> None:
    torch.manual_seed(0)
    # All but the first gradient of each token become 0.
    x, weight, out_grad = 1 + torch.randn(128, 64), torch.randn(64, 64), torch.full((128, 64), 1e-3)
    out_grad[:, 0] = 1
    converter: Any = CONVERTERS.get("int8").build(Int8("tensorwise"), TARGET)
    errors, sizes = layer_errors(converter, [x, weight, out_grad]), {"layers.0.wq": 64 * 64, "output": 64 * 64}
    little, much = (noise_of("layers.0.wq", errors, sizes, momentum) for momentum in (0.5, 0.9))
    assert little < much / 2
    # All gradients come through the output layer.
    assert noise_of("output", errors, sizes, 0.9) > much


def test_the_loss_model_is_a_line_through_zero_that_no_run_resolves_better_than_the_spread() -> None:
    assert LossModel.fit([10.0, 100.0], [0.6, 6.0], 0.0).percent(50.0) == pytest.approx(3.0)
    # Low precision did no harm, so it is expected to cost as much as one run can resolve.
    assert LossModel.fit([10.0], [-0.3], 0.2).percent(10.0) == pytest.approx(0.2)


def test_systematic_errors_are_told_from_random_ones() -> None:
    torch.manual_seed(0)
    x, weight, out_grad = 1 + torch.randn(512, 64), torch.randn(128, 64), 1e-3 * torch.rand(512, 128)
    out_grad[:, :8] = torch.randn(512, 8)
    float8, int8 = (
        layer_errors(CONVERTERS.get(name).build(section, TARGET), [x, weight, out_grad])["grad_weight"]  # type: ignore[arg-type]
        for name, section in (("float8", Float8()), ("int8", Int8("tensorwise")))
    )
    # int8 rounds all small gradients to 0.
    assert int8["flushed"] > 0.9 and int8["update_error"] > 0.9 and int8["update_bias"] > 0.7
    assert float8["update_bias"] < float8["update_error"] / 2


def meta_model() -> Llama:
    with torch.device("meta"):
        return Llama(ARGS)


def test_the_flag_leaves_out_the_output_layer_in_int8_and_nvfp4_and_nothing_in_float8() -> None:
    nvfp4 = MX("nvfp4", filter_fqns=[AUTO_FILTER_NUMERICS], keep_last_blocks_fraction=0, emulate=True)
    for name, section, excluded in (
        ("int8", Int8(filter_fqns=[AUTO_FILTER_NUMERICS]), {"output"}),
        ("mx", nvfp4, {"output"}),
        ("float8", Float8(filter_fqns=[AUTO_FILTER_NUMERICS]), set()),
    ):
        for _ in range(2):  # as a resumed run would
            (converter,) = apply_converters(meta_model(), [name], lambda _, section=section: section, TARGET)  # type: ignore[misc]
            against = {one.fqn: one.reason for one in converter.decisions if not one.converted}  # type: ignore[attr-defined]
            assert set(against) == excluded
            assert all(AUTO_FILTER_NUMERICS in reason for reason in against.values())


def test_the_flag_leaves_out_a_layer_with_outliers() -> None:
    model = Llama(ARGS)
    init_weights(model, model.init_std, seed=1)
    block: Any = model.layers["1"]
    takes = (block.feed_forward.w1, block.feed_forward.w3)
    with torch.no_grad():
        block.ffn_norm.weight[0] = 1e8
        for linear in takes:
            linear.weight[:, 0] = 0
    converter: Any = CONVERTERS.get("float8").build(Float8("rowwise", filter_fqns=[]), TARGET)
    linears = [fqn for fqn, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert set(inaccurate_layers(converter, model, linears)) >= {"layers.1.feed_forward.w1", "layers.1.feed_forward.w3"}
    assert not any(fqn.startswith("layers.0") for fqn in inaccurate_layers(converter, model, linears))


def test_a_model_that_does_not_fit_on_one_device_is_refused() -> None:
    with torch.device("meta"):
        model = Llama(dataclasses.replace(ARGS, dim=2**17, ffn_dim=2**19))
    converter: Any = CONVERTERS.get("int8").build(Int8(filter_fqns=[AUTO_FILTER_NUMERICS]), TARGET)
    with pytest.raises(ConfigError, match=r"int8\.filter_fqns: auto_filter_numerics .*search_precision"):
        converter.decide(model)


def test_a_model_that_takes_no_tokens_is_refused() -> None:
    model = nn.ModuleDict({"layer": nn.Linear(64, 64, bias=False)})
    converter: Any = CONVERTERS.get("int8").build(Int8(filter_fqns=[AUTO_FILTER_NUMERICS]), TARGET)
    with pytest.raises(ConfigError, match=r"int8\.filter_fqns: auto_filter_numerics .*ModuleDict has no embedding"):
        converter.decide(model)
