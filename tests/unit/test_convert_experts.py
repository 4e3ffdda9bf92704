"""Converting models with experts: which layers, what the report says, and the checks that notice failed conversion."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from runs import python
from tiny import SPARSE

from torchtitan.config.low_precision import MX, Float8, Int8
from torchtitan.config.system import ActivationCheckpoint
from torchtitan.converters import Decision, Target, apply_converters
from torchtitan.converters.conversion_report import summary, to_table
from torchtitan.converters.filter import AUTO_FILTER_MEASURED, AUTO_FILTER_SMALL_KN
from torchtitan.converters.formats import EightBit, Gemms
from torchtitan.converters.gather import ShardedWeight
from torchtitan.converters.gemm_check import checked_gemms
from torchtitan.converters.linear import LowPrecisionExperts
from torchtitan.converters.linear_converter import LinearConverter, Recipe, RecipeSection, relative_errors
from torchtitan.converters.recipes import FLOAT8_SECTION
from torchtitan.errors import ConfigError
from torchtitan.logging import logger
from torchtitan.models.moe import GroupedLinear, SparseTransformer
from torchtitan.parallel.activation_checkpoint import apply_activation_checkpoint
from torchtitan.protocols import Passes

CPU = Target("cpu", tokens=512)
ROWWISE = Float8(recipe_name="rowwise")
SECTIONS: dict[str, Any] = {"float8": ROWWISE, "int8": Int8(), "mx": MX(emulate=True)}
ARGS = dataclasses.replace(SPARSE, vocab_size=256)
SHARED = dataclasses.replace(ARGS, moe=dataclasses.replace(ARGS.moe, n_shared_experts=1))


def sparse_model(args: Any = ARGS) -> SparseTransformer:
    with torch.device("meta"):
        return SparseTransformer(args)


def decisions_on(section: Any, name: str = "float8", target: Target = CPU, args: Any = ARGS) -> dict[str, Decision]:
    (converter,) = apply_converters(sparse_model(args), [name], lambda _: section, target)
    assert isinstance(converter, LinearConverter)
    return {decision.fqn: decision for decision in converter.decisions}


@pytest.mark.parametrize("name", SECTIONS)
def test_experts_are_converted_with_their_mean_number_of_rows(name: str) -> None:
    decisions = decisions_on(SECTIONS[name], name, args=SHARED)
    w2 = decisions["layers.1.moe.experts.w2"]
    assert (w2.m, w2.k, w2.n, w2.experts, w2.converted) == (128, 32, 64, 8, True)  # 512 tokens, 2 of 8 experts
    shared = decisions["layers.1.moe.shared_experts.w2"]
    assert (shared.m, shared.experts, shared.converted) == (512, 0, True)


def test_sizes_on_one_device() -> None:
    target = Target("cpu", tokens=512, tensor_parallel=2, expert_parallel=4)
    w1 = decisions_on(ROWWISE, target=target)["layers.0.moe.experts.w1"]
    assert (w1.m, w1.k, w1.n, w1.experts) == (256, 64, 32, 2)  # rows of 4 ranks with 256 tokens each


@pytest.mark.parametrize("name", SECTIONS)
def test_the_router_stays_in_high_precision_whatever_the_filter(name: str) -> None:
    gate = decisions_on(dataclasses.replace(SECTIONS[name], filter_fqns=[]), name)["layers.0.moe.router.gate"]
    assert not gate.converted and gate.reason == "the router stays in high precision"


@pytest.mark.parametrize("entry", ["moe.experts", "experts", "moe", "layers.*.moe.experts.w?"])
def test_experts_are_left_out_by_name(entry: str) -> None:
    decisions = decisions_on(dataclasses.replace(ROWWISE, filter_fqns=[entry]))
    experts = [decision for decision in decisions.values() if decision.experts]
    assert len(experts) == 6
    assert {decision.reason for decision in experts} == {f"float8.filter_fqns names {entry}"}
    assert decisions["layers.0.attention.wq"].converted


@pytest.mark.parametrize(
    ("name", "section", "reason"),
    [
        ("float8", Float8(), "tensorwise has no grouped GEMMs; float8.recipe_name = rowwise converts experts"),
        ("float8", Float8(recipe_name="delayed"), "delayed has no grouped GEMMs"),
        ("int8", Int8(recipe_name="tensorwise"), "int8.recipe_name = rowwise converts experts"),
    ],
)
def test_recipes_without_grouped_gemms_say_so(name: str, section: Any, reason: str) -> None:
    decisions = decisions_on(section, name)
    assert not decisions["layers.0.moe.experts.w1"].converted
    assert reason in decisions["layers.0.moe.experts.w1"].reason
    assert decisions["layers.0.attention.wq"].converted


def test_thresholds_and_sizes_judge_an_expert() -> None:
    section = dataclasses.replace(ROWWISE, filter_fqns=[AUTO_FILTER_SMALL_KN])
    with pytest.raises(ConfigError, match=r"6 x auto_filter_small_kn: N = 32 <= 2048|N = 64 <= 2048"):
        decisions_on(section)
    odd = dataclasses.replace(ARGS, moe=dataclasses.replace(ARGS.moe, ffn_dim=24))
    assert decisions_on(ROWWISE, args=odd)["layers.0.moe.experts.w1"].reason == "N = 24 is not a multiple of 16"
    # A mean of 3 rows for each expert is no obstacle, since grouped GEMMs take any number.
    assert decisions_on(ROWWISE, target=Target("cpu", tokens=16))["layers.0.moe.experts.w1"].converted


def test_measured_filter_times_a_layer_of_experts(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from torchtitan.converters import measured_filter

    real, asked = measured_filter.speedup, []

    def speedup(converter: LinearConverter, m: int, k: int, n: int, experts: int = 0) -> tuple[float, bool]:
        asked.append((m, k, n, experts))
        assert 0.001 < real(converter, 16, k, n, experts)[0] < 1000
        return 0.5 if experts else 2.0, False

    monkeypatch.setattr(measured_filter, "speedup", speedup)
    decisions = decisions_on(dataclasses.replace(ROWWISE, filter_fqns=[AUTO_FILTER_MEASURED]))
    assert decisions["layers.0.attention.wq"].converted
    reason = decisions["layers.0.moe.experts.w1"].reason
    assert reason == "auto_filter_measured: 0.50 x the speed of bf16 at M = 128, K = 64, N = 32, 8 experts"
    assert (128, 64, 32, 8) in asked


def test_the_report_shows_experts_and_counts_their_weights() -> None:
    report = list(decisions_on(dataclasses.replace(ROWWISE, filter_fqns=["attention", "output"])).values())
    table = to_table(report)
    assert "layers.*.moe.experts.w1 (2) 128 64 32 x 8 experts float8 rowwise" in " ".join(table.split())
    assert "the router stays in high precision" in table
    experts = 2 * 3 * 8 * 64 * 32
    others = 2 * (2 * 64 * 128 + 2 * 64 * 64 + 64 * 8) + 64 * 256
    assert summary(report).endswith(f"{experts / (experts + others):.0%} of their weights")


def test_explain_conversion_covers_experts() -> None:
    flags = ["--experimental.custom_import=tiny", "--model.name=sparse", "--model.flavor=deep"]
    done = python("-m", "torchtitan.tools.explain", *flags, "--model.converters=int8")
    assert done.returncode == 0, done.stderr
    assert "layers.*.moe.experts.w1 (3)" in done.stdout and "32 x 8 experts" in done.stdout
    assert "layers.*.moe.shared_experts.w1 (3)" in done.stdout
    assert done.stdout.count("the router stays in high precision") == 1


class Sham(LinearConverter):
    """A converter whose layers of experts stay as they are; its others are real."""

    def swap_grouped(self, layer: GroupedLinear) -> GroupedLinear:
        return GroupedLinear.with_weight_of(layer)


def test_experts_that_quantize_nothing_are_found_at_conversion() -> None:
    with pytest.raises(ConfigError, match=r"a layer of experts converted to float8 rowwise is bit-identical to bf16"):
        Sham(FLOAT8_SECTION, ROWWISE, CPU).convert(sparse_model())


def counted_step(model: SparseTransformer, converters: Sequence[Any], recomputed: bool) -> None:
    tokens = torch.randint(256, (2, 32))
    assert model.norm is not None and model.output is not None
    passes = {fqn: Passes(1, 1) for fqn, _ in model.named_modules()}
    with checked_gemms(model, converters, passes, compiled=False, recomputed=recomputed):
        model.output(model.norm(hidden_of(model, tokens))).float().sum().backward()


def hidden_of(model: SparseTransformer, tokens: torch.Tensor) -> torch.Tensor:
    hidden = []
    handle = model.norm.register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0]))
    model(tokens)
    handle.remove()
    return hidden[0]


@pytest.mark.full
@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("recomputation", ["none", "op"])
def test_experts_that_run_in_high_precision_are_found_in_the_first_step(name: str, recomputation: str) -> None:
    model = sparse_model().to_empty(device="cpu").bfloat16()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for module in model.modules():
        if hasattr(module, "expert_bias"):
            module.expert_bias.zero_()
    section = dataclasses.replace(SECTIONS[name], filter_fqns=["output"])
    converters = apply_converters(model, [name], lambda _: section, CPU)
    if recomputation == "op":
        config = ActivationCheckpoint(mode="selective", selective_ac_option="op")
        apply_activation_checkpoint(dict(model.layers.items()), config)
    counted_step(model, converters, recomputation != "none")
    experts = model.layers["1"].moe.experts
    low = experts.w1
    assert isinstance(low, LowPrecisionExperts)
    experts.w1 = GroupedLinear.with_weight_of(low)  # taken out of low precision without the report's knowledge
    with pytest.raises(ConfigError, match=r"low-precision GEMMs in this step.*layers.1.moe.experts.w1: 0 of 1"):
        counted_step(model, converters, recomputation != "none")


@pytest.mark.parametrize(
    ("name", "section", "capability", "sentence"),
    [
        ("float8", ROWWISE, (8, 9), r"float8 computes experts on a GPU with Triton.*moe.experts to float8.filter_fqns"),
        ("mx", MX(), (12, 0), r"need a GPU of compute capability 10, but this one has 12\.0; add moe.experts to"),
        ("int8", Int8(), (8, 0), r"int8 computes experts on a GPU with Triton.*moe.experts to int8.filter_fqns"),
        (
            "mx",
            MX(),
            (10, 0),
            r"mx computes experts with kernels that this build of torchao lacks.*moe.experts to mx.filter_fqns",
        ),
    ],
)
def test_a_gpu_that_cannot_compute_experts_stops_the_run(
    name: str, section: Any, capability: tuple[int, int], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan.converters.recipes.HAS_TRITON", False)
    target = Target("cuda", compute_capability=capability, tokens=512)
    with pytest.raises(ConfigError, match=sentence):
        decisions_on(section, name, target)


@pytest.mark.parametrize(
    ("target", "uneven"),
    [
        (Target("cpu", shards=8), ""),
        (Target("cpu", shards=8, expert_parallel=4), ""),  # two ranks for the weights of two experts
        (Target("cpu", shards=16, expert_parallel=8), "6 x the weight is all-gathered in high precision"),
        (Target("cpu", shards=2, tensor_parallel=8, expert_parallel=4), "2 experts of layers.0.moe.experts.w1 over 4"),
        (Target("cpu", shards=16), "8 experts of layers.0.moe.experts.w1 over 16"),
    ],
)
def test_experts_that_the_ranks_divide_evenly_are_gathered_in_int8(
    target: Target, uneven: str, caplog: pytest.LogCaptureFixture
) -> None:
    section = Int8(enable_fsdp_int8_all_gather=True)
    model = sparse_model()
    with caplog.at_level("INFO", logger.name):
        apply_converters(model, ["int8"], lambda _: section, target)
    assert isinstance(model.layers["0"].moe.experts.w1.weight.data, ShardedWeight) == (not uneven)
    assert uneven in caplog.text and ("divide evenly" in caplog.text) == bool(uneven)


@dataclasses.dataclass(frozen=True)
class Mine:
    """A section of a user's own."""

    recipe_name: str = "wide gradients"
    filter_fqns: list[str] = dataclasses.field(default_factory=lambda: ["output"])
    emulate: bool = False


def test_a_recipe_is_added_by_a_row_and_converts_experts_too() -> None:
    row, gradients = EightBit(torch.float8_e4m3fn, "rowwise"), EightBit(torch.float8_e5m2, "rowwise")
    section = RecipeSection("mine", {"wide gradients": Recipe(Gemms(row, row, gradients), multiple_of=16)})
    converter = LinearConverter(section, Mine(), CPU)
    with pytest.raises(
        ConfigError, match=r"mine\.recipe_name: unknown recipe 'wide_gradients'.*; known: wide gradients\."
    ):
        LinearConverter(section, Mine("wide_gradients"), CPU)
    model = sparse_model()
    converter.convert(model)  # which compares the error of each GEMM with the formats' known ones
    assert isinstance(model.layers["0"].moe.experts.w1, LowPrecisionExperts)
    assert summary(converter.decisions).startswith("14 of 17 linear layers converted (mine wide gradients 14)")
    for experts in (0, 4):
        errors = relative_errors(converter, "cpu", experts)
        known = converter.grouped_gemms if experts else converter.gemms
        assert errors == pytest.approx({gemm: getattr(known, gemm) for gemm in errors}, rel=0.1)
