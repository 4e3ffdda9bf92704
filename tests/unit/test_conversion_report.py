"""The conversion report, and the checks that verify it."""

import dataclasses
import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import TINY, into, python, train_here
from torch import nn

from torchtitan.config import ConfigManager
from torchtitan.config.low_precision import FILTER_DOC, MX, Float8, Int8
from torchtitan.config.system import ActivationCheckpoint
from torchtitan.converters import Target, apply_converters
from torchtitan.converters.conversion_report import conversion_report, summary, to_table
from torchtitan.converters.filter import AUTO_FILTERS
from torchtitan.converters.gemm_check import checked_gemms
from torchtitan.converters.linear_converter import LinearConverter, relative_errors
from torchtitan.converters.recipes import FLOAT8_SECTION, MX_SECTION
from torchtitan.errors import ConfigError
from torchtitan.models import MODELS
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.parallel.activation_checkpoint import apply_activation_checkpoint
from torchtitan.protocols import Passes
from torchtitan.run.conversion_log import explain_conversion

ROOT = Path(__file__).parents[2]
CPU = Target("cpu", tokens=64)
SECTIONS: dict[str, Any] = {
    "float8": Float8(),
    "int8": Int8(),
    "mx": MX(emulate=True),
    "mx nvfp4": MX(emulate=True, recipe_name="nvfp4"),
    "float8 blockwise": Float8(recipe_name="blockwise"),
}


def explain(*flags: str) -> dict[str, tuple[bool, int, int]]:
    """fqn -> (converted, K, N)."""
    report = explain_conversion(ConfigManager().parse_args(flags))
    return {decision.fqn: (decision.converted, decision.k, decision.n) for decision in report}


def converted_of_8b(converter: str, recipe: str, tensor_parallel: int, flag: str = "") -> Counter[str]:
    """How many layers of each kind a Llama 3 8B converts: {"attention.wq": 32, ...}."""
    filter_fqns = f"--{converter}.filter_fqns={flag or 'auto_filter_small_kn'}"
    flags = [f"--{converter}.recipe_name={recipe}", filter_fqns, f"--model.converters={converter}"]
    tp = f"--parallelism.tensor_parallel_degree={tensor_parallel}"
    layers = explain(*flags, tp, "--model.name=llama3", "--model.flavor=8B")
    return Counter(".".join(fqn.split(".")[2:]) or fqn for fqn, (converted, _, _) in layers.items() if converted)


WIDE = {"feed_forward.w1": 32, "feed_forward.w2": 32, "feed_forward.w3": 32, "output": 1}
ALL_BUT_KV = {"attention.wq": 32, "attention.wo": 32, **WIDE}
ALL = {"attention.wk": 32, "attention.wv": 32, **ALL_BUT_KV}


@pytest.mark.parametrize(
    ("recipe", "tensor_parallel", "expected"),
    [
        # wk and wv have N = 1024: too small. With eight ranks every N of attention and feed-forward is an eighth.
        ("tensorwise", 1, ALL_BUT_KV),
        ("rowwise", 1, ALL_BUT_KV),
        ("rowwise_with_gw_hp", 1, ALL_BUT_KV),
        # per rank: wq N = 512, wo K = 512 and N = 4096, w1 N = 1792, w2 K = 1792 and N = 4096, output N = 16032
        ("tensorwise", 8, {"attention.wo": 32, **WIDE}),
        ("rowwise", 8, {"output": 1}),
        ("rowwise_with_gw_hp", 8, {"output": 1}),
    ],
)
def test_layers_of_llama3_8b_that_auto_filter_small_kn_converts(
    recipe: str, tensor_parallel: int, expected: dict[str, int]
) -> None:
    assert converted_of_8b("float8", recipe, tensor_parallel) == expected


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_full_sizes_are_judged_as_torchao_judges_them(recipe: str) -> None:
    """Of a Llama 3 70B on 8 tensor-parallel ranks, of which each has too little of most layers."""
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

    flags = ["--model.name=llama3", "--model.flavor=70B", "--parallelism.tensor_parallel_degree=8"]
    flags += ["--model.converters=float8", f"--float8.recipe_name={recipe}"]
    flags.append("--float8.filter_fqns=output,auto_filter_small_kn_full")
    ours = {fqn: converted for fqn, (converted, _, _) in explain(*flags).items()}
    converts = _auto_filter_for_recipe(recipe, ["output"])
    with torch.device("meta"):
        model = MODELS.get("llama3").build(MODELS.get("llama3").flavor("70B"))
    theirs = {fqn: converts(layer, fqn) for fqn, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    assert ours == theirs
    assert sum(ours.values()) == {"tensorwise": 560, "rowwise": 400}[recipe]


def test_the_help_of_filter_fqns_names_every_flag() -> None:
    assert all(flag in FILTER_DOC.documentation for flag in AUTO_FILTERS)


@pytest.mark.parametrize("flag", ["auto_filter_small_kn", "auto_filter_small_kn_full"])
@pytest.mark.parametrize(("converter", "recipe"), [("int8", "rowwise"), ("mx", "mxfp8")])
def test_recipes_without_thresholds_say_so_and_convert_all_of_llama3_8b_without_the_flag(
    converter: str, recipe: str, flag: str
) -> None:
    with pytest.raises(ConfigError, match=f"{flag} has no thresholds.*auto_filter_measured"):
        converted_of_8b(converter, recipe, 1, flag)
    assert converted_of_8b(converter, recipe, 8, "norm") == ALL


def test_shapes_on_one_device() -> None:
    flags = ("--model.flavor=8B", "--model.converters=float8", "--parallelism.tensor_parallel_degree=8")
    layers = explain(*flags)
    assert layers["layers.3.attention.wq"][1:] == (4096, 512)
    assert layers["layers.3.attention.wo"][1:] == (512, 4096)
    assert layers["layers.3.feed_forward.w2"][1:] == (1792, 4096)
    assert layers["output"][1:] == (4096, 16032)


@pytest.mark.full
def test_accuracy_of_mxfp8_is_known_without_its_kernels() -> None:
    layers = explain(
        "--model.flavor=debugmodel", "--model.converters=mx", "--mx.filter_fqns=output,auto_filter_numerics"
    )
    assert sum(converted for converted, *_ in layers.values()) > 30


@pytest.mark.full
def test_the_script_writes_what_the_library_says_and_needs_no_device(tmp_path: Path) -> None:
    flags = ["--model.flavor=8B", "--model.converters=float8", "--float8.filter_fqns=output,auto_filter_small_kn"]
    done = python("-m", "torchtitan.tools.explain", "--json", tmp_path / "out.json", *flags, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    entries = json.loads((tmp_path / "out.json").read_text())
    assert len(entries) == 225
    assert set(entries[0]) == {"fqn", "m", "k", "n", "converter", "recipe", "converted", "reason", "experts"}
    assert {entry["fqn"]: (entry["converted"], entry["k"], entry["n"]) for entry in entries} == explain(*flags)
    reasons = {entry["fqn"]: entry["reason"] for entry in entries}
    assert reasons["output"] == "float8.filter_fqns names output"
    assert reasons["layers.0.attention.wk"] == "auto_filter_small_kn: K = 4096 <= 4096 and N = 1024 <= 1024"
    assert "160 of 225 linear layers converted" in done.stdout


@pytest.mark.full
def test_a_wrong_entry_ends_the_script_with_status_2() -> None:
    done = python("-m", "torchtitan.tools.explain", "--model.converters=float8", "--float8.filter_fqns=atention.wk")
    assert done.returncode == 2
    assert "'atention.wk' matches no module of this model (did you mean attention.wk?)" in done.stderr


def tiny_llama() -> Llama:
    with torch.device("meta"):
        return Llama(LlamaArgs(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=256))


def test_converters_compose_and_each_layer_is_reported_once() -> None:
    model = tiny_llama()
    sections: dict[str, Any] = {
        "float8": Float8(filter_fqns=["attention", "output"]),
        "int8": Int8(filter_fqns=["output"]),
    }
    converters = apply_converters(model, ["float8", "int8"], sections.__getitem__, CPU)
    report = conversion_report(c.decisions for c in converters if isinstance(c, LinearConverter))
    by_name = {decision.fqn: decision for decision in report}
    assert len(report) == 15
    assert by_name["layers.0.feed_forward.w1"].converter == "float8"
    assert by_name["layers.1.attention.wo"].converter == "int8"
    assert by_name["output"].recipe == "bf16"
    assert by_name["output"].reason == "float8: float8.filter_fqns names output; int8: int8.filter_fqns names output"
    assert summary(report).startswith("14 of 15 linear layers converted (int8 rowwise 8, float8 tensorwise 6)")
    assert "layers.*.attention.wq (2)" in to_table(report)


@pytest.mark.parametrize("scale", ["rceil", "floor", "even", "ceil"])
def test_mx_errors_match_3_bits_after_the_point(scale: Any) -> None:
    errors = relative_errors(LinearConverter(MX_SECTION, MX(emulate=True, scale_calculation_mode=scale), CPU), "cpu")
    assert all(0.03 < error < 0.06 for error in errors.values()), errors


def test_mx_keeps_the_bias_and_the_weight_gradient_in_high_precision_where_asked() -> None:
    converter = LinearConverter(MX_SECTION, MX(emulate=True, wgrad_with_hp=True), CPU)
    assert relative_errors(converter, "cpu")["grad_weight"] < 0.004
    linear = nn.Linear(64, 32, dtype=torch.bfloat16)
    low = converter.swap(linear)
    assert low.bias is linear.bias and low.weight is linear.weight
    x = torch.zeros(32, 64, dtype=torch.bfloat16)
    assert torch.equal(low(x), linear.bias.expand(32, 32))


def test_mx_on_a_device_without_it_stops_unless_emulated() -> None:
    for target in (CPU, Target("cuda", compute_capability=(9, 0))):
        with pytest.raises(ConfigError, match=r"mx\.emulate"):
            LinearConverter(MX_SECTION, MX(), target)
        LinearConverter(MX_SECTION, MX(emulate=True), target)


class Sham(LinearConverter):
    """A converter whose layers do not change, or return noise."""

    noise = 0.0

    def swap(self, linear: nn.Linear) -> nn.Linear:
        new = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        new.weight = nn.Parameter(linear.weight.detach() * (1 + self.noise))
        return new


def test_layers_that_quantize_nothing_are_found_at_conversion() -> None:
    with pytest.raises(ConfigError, match="bit-identical to bf16"):
        Sham(FLOAT8_SECTION, Float8(), CPU).convert(tiny_llama())


def test_products_far_off_are_found_at_conversion() -> None:
    sham = Sham(FLOAT8_SECTION, Float8(), CPU)
    sham.noise = 0.5
    with pytest.raises(ConfigError, match=r"relative error of 0\.\d+ against bf16"):
        sham.convert(tiny_llama())


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("recomputation", ["none", "full", "op"])
def test_products_of_a_step_are_counted_and_missing_ones_found(name: str, recomputation: Any) -> None:
    """One layer of four must be detected, regardless of recomputation."""
    torch._dynamo.reset()
    section = dataclasses.replace(SECTIONS[name], filter_fqns=[])
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False)) for _ in range(4))).bfloat16()
    converters = apply_converters(model, [name.split()[0]], lambda _: section, CPU)
    if recomputation != "none":
        mode: Any = "full" if recomputation == "full" else "selective"
        apply_activation_checkpoint(
            dict(model.named_children()), ActivationCheckpoint(mode=mode, selective_ac_option="op")
        )

    def step() -> None:
        x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
        model(x).float().sum().backward()

    def counted(microbatches: int) -> Any:
        passes = {f"{i}.0": Passes(microbatches, microbatches) for i in range(4)}
        return checked_gemms(model, converters, passes, compiled=False, recomputed=recomputation != "none")

    with counted(2):
        step()
        step()
    model[1][0] = nn.Linear(64, 64, bias=False).bfloat16()  # taken out of low precision without the report's knowledge
    missing = r"should run 12 low-precision GEMMs in this step, but 9 ran \(forward pass of 1.0: 0 of 1\)"
    with pytest.raises(ConfigError, match=missing), counted(1):
        step()


@pytest.mark.parametrize("busy", [False, True])
def test_measured_filter_remembers_only_what_a_quiet_machine_measured(
    busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from torchtitan.converters import measured_filter

    ratios = {(64, 64, 128): 2.0}
    asked = []

    def speedup(converter: Any, m: int, k: int, n: int, experts: int) -> tuple[float, bool]:
        asked.append((m, k, n))
        return ratios.get((m, k, n), 0.5), busy

    monkeypatch.setattr(measured_filter, "speedup", speedup)
    section = Int8(filter_fqns=["auto_filter_measured"])
    for _ in range(2):  # the second time from the cache
        (converter,) = apply_converters(tiny_llama(), ["int8"], lambda _: section, CPU)
        assert isinstance(converter, LinearConverter)
        chosen = {decision.fqn.split(".")[-1] for decision in converter.decisions if decision.converted}
        assert chosen == {"w1", "w3"}
    assert len(asked) == len(set(asked)) == 5
    assert any(tmp_path.rglob("*.json")) == (not busy)
    assert any("the machine was busy" in line for line in log) == busy


@pytest.mark.parametrize("device", ["H100", ""])
def test_what_no_device_has_measured_counts_as_faster_and_is_not_remembered(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    from torchtitan.converters import measured_filter

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured_filter, "speedup", lambda *_: pytest.fail("measured on another device"))
    converter = LinearConverter(FLOAT8_SECTION, Float8(), Target("meta", device))
    assert measured_filter.measured_reason(converter, 64, 64, 64) is None
    assert any(
        f"has not been measured on {device or 'the device of a run'}; it counts as faster" in line for line in log
    )
    assert not list(tmp_path.rglob("*.json"))


def test_the_filter_compares_with_the_precision_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torchtitan.converters import measured_filter

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    dtypes: list[torch.dtype] = []

    def layer_seconds(*_: object, dtype: torch.dtype, **__: object) -> list[list[tuple[float, float]]]:
        dtypes.append(dtype)
        return [[(1.0, 1.0)], [(2.0, 2.0)]]

    monkeypatch.setattr(measured_filter, "layer_seconds", layer_seconds)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "float32")):
        converter = LinearConverter(FLOAT8_SECTION, Float8(), dataclasses.replace(CPU, dtype=dtype))
        assert (
            measured_filter.measured_reason(converter, 64, 64, 64)
            == f"0.50 x the speed of {name} at M = 64, K = 64, N = 64"
        )
    assert dtypes == [torch.bfloat16, torch.float32]


def test_emulated_float8_is_counted_beside_other_casts(tmp_path: Path) -> None:
    """Casts of kept activations and of the optimizer."""
    train_here(
        *TINY, "--training.steps=1", "--model.converters=float8", "--float8.recipe_name=rowwise", "--float8.emulate",
        "--activation_checkpoint.mode=none", "--activation_checkpoint.swiglu_dtype=float8",
        "--optimizer.name=AdamWFp8", "--training.mixed_precision_param=bfloat16", into(tmp_path),
    )  # fmt: skip


@pytest.mark.full
def test_each_size_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not measured in eager mode where the compiler has had eight of them."""
    from torchtitan.converters.measured_filter import layer_seconds

    widths: list[int] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        widths.append(max(input.shape[0] for input in inputs if isinstance(input, nn.Parameter)))
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=compiler))
    for n in range(64, 704, 64):
        layer_seconds([None, LinearConverter(FLOAT8_SECTION, Float8(), CPU)], 64, 64, n, rounds=1, compiled=True)
    assert widths == [n for n in range(64, 704, 64) for _ in range(2)]


def test_speedup_is_measured_for_real() -> None:
    from torchtitan.converters.measured_filter import speedup

    assert 0.01 < speedup(LinearConverter(FLOAT8_SECTION, Float8(), CPU), 64, 64, 64)[0] < 100


def test_a_run_without_converters_has_no_empty_table() -> None:
    assert python("-m", "torchtitan.tools.explain").stdout == "no converters\n"
