"""The precision schedule: valid config files, the steps of each phase, and what a switch changes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import all_equal, python
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function
from torchtitan.engine.precision_phases import parse_phases, phase_of

from torchtitan.checks.config_checks import check
from torchtitan.config import ConfigManager, JobConfig, to_toml
from torchtitan.config.low_precision import MX, Float8, Int8
from torchtitan.converters import (
    CONVERTERS,
    LinearConverter,
    Target,
    apply_converters,
    apply_variants,
    checked_gemms,
    gemm_check,
    layer_variants,
)
from torchtitan.converters.converter import ProfilerOp
from torchtitan.converters.linear import LowPrecisionLinear
from torchtitan.converters.recipes import INT8_SECTION
from torchtitan.errors import ConfigError
from torchtitan.metrics.profiling import trace_schedule

ROOT = Path(__file__).parents[2]
CPU = Target("cpu", tokens=64)
SCHEDULE = """
[float8]
filter_fqns = ["output"]

[[precision.phase]]
until_step = 300
converters = ["float8"]

[precision.phase.float8]
recipe_name = "rowwise"

[[precision.phase]]
until = 0.9
converters = ["float8", "int8"]

[precision.phase.float8]
filter_fqns = ["attention", "output"]

[[precision.phase]]
"""


def parse(folder: Path, text: str, *flags: str) -> JobConfig:
    (folder / "run.toml").write_text(text)
    return ConfigManager().parse_args([f"--job.config_file={folder / 'run.toml'}", *flags])


def test_phases_of_a_file(tmp_path: Path) -> None:
    phases = parse_phases(parse(tmp_path, SCHEDULE, "--training.steps=1000", "--float8.emulate"))
    assert [phase.last_step for phase in phases] == [300, 900, None]
    assert [phase.config.model.converters for phase in phases] == [["float8"], ["float8", "int8"], []]
    # A phase's table overrides only the keys that it names.
    assert phases[0].config.float8 == Float8(recipe_name="rowwise", filter_fqns=["output"], emulate=True)
    assert phases[1].config.float8 == Float8(filter_fqns=["attention", "output"], emulate=True)
    assert [phase_of(step, phases) for step in (1, 300, 301, 900, 901, 1000, 5000)] == [0, 0, 1, 1, 2, 2, 2]


def test_a_share_follows_the_steps(tmp_path: Path) -> None:
    assert parse_phases(parse(tmp_path, SCHEDULE, "--training.steps=5000"))[1].last_step == 4500


def test_the_resolved_configuration_loads_to_an_equal_one(tmp_path: Path) -> None:
    config = parse(tmp_path, SCHEDULE)
    again = parse(tmp_path, to_toml(config))
    assert again.precision == config.precision and len(config.precision.phase) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[precision.phase]]\nuntill = 0.9", "[[precision.phase]] 1: unknown key untill (did you mean until?)."),
        (
            "[[precision.phase]]\nuntil = 2.0",
            "[[precision.phase]] 1: until must be a number of at least 0 and at most 1, or none, not 2.0.",
        ),
        (
            "[[precision.phase]]\n[[precision.phase]]\nconverters = 'float8'",
            "[[precision.phase]] 2: converters must be a list of strings, not 'float8'.",
        ),
        (
            "[[precision.phase]]\n[precision.phase.float8]\nrecipe = 'rowwise'",
            "[[precision.phase]] 1: unknown key float8.recipe (did you mean float8.recipe_name?).",
        ),
        (
            "[[precision.phase]]\n[precision.phase.float8]\nemulate = 1",
            "[[precision.phase]] 1: float8.emulate must be true or false, not 1.",
        ),
        ("[[precision.phase]]\nsections = 1", "[[precision.phase]] 1: unknown key sections."),
        (
            "[precision.phase]\nuntil = 0.9",
            "precision.phase must be a list of tables, each headed [[precision.phase]], not {'until': 0.9}.",
        ),
    ],
)
def test_mistakes_in_the_file_name_the_entry(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, text)
    assert caught.value.problems == (f"{tmp_path / 'run.toml'}: {message}",)


def test_a_schedule_has_no_flag() -> None:
    with pytest.raises(
        ConfigError, match=r"--precision\.phase is a list of tables and cannot be set by a flag; write \[\[pre"
    ):
        ConfigManager().parse_args(["--precision.phase=float8"])


def test_the_example_in_the_docs(tmp_path: Path) -> None:
    file = ROOT / "docs" / "examples" / "precision_schedule.toml"
    config = ConfigManager().parse_args([f"--job.config_file={file}", f"--job.dump_folder={tmp_path}"])
    check(config, 1, "cpu")
    assert [phase.last_step for phase in parse_phases(config)] == [50, 90, None]


PHASE, FLOAT8 = "[[precision.phase]]\n", "[[precision.phase]]\nconverters = ['float8']\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"[model]\nconverters = ['int8']\n{FLOAT8}",
            r"model\.converters and \[\[precision\.phase\]\] exclude each other",
        ),
        (FLOAT8 + PHASE, r"1: it has no end; set until_step, or until"),
        (f"{PHASE}until = 0.5\nuntil_step = 50\n{PHASE}", r"1: until and until_step are both set"),
        (f"{PHASE}until = 0.001\n{PHASE}", r"1: it ends at step 0 of 100, but the phase before it ends at step 0"),
        (
            f"{PHASE}until = 0.5\n{PHASE}until_step = 50\n{PHASE}",
            r"2: it ends at step 50 .*; raise its until_step",
        ),
        (
            f"{PHASE}until = 0.5\n{PHASE}until = 0.9",
            r"2: the last phase ends at step 90 of 100; remove its",
        ),
        (f"{PHASE}converters = ['flot8']", r"1: converters: unknown converter 'flot8' \(did you mean float8\?\)"),
        (f"{PHASE}converters = ['mx', 'mx']", r"1: converters: a converter is listed twice"),
        (
            f"{FLOAT8}[precision.phase.int8]\nemulate = true",
            r"1: the table \[precision\.phase\.int8\] belongs to no",
        ),
        (
            f"{FLOAT8}[precision.phase.training]\nsteps = 3",
            r"1: the table \[precision\.phase\.training\] belongs to no",
        ),
        (
            f"[float8]\nenable_fsdp_float8_all_gather = true\n{FLOAT8}",
            r"1: float8\.enable_fsdp_float8_all_gather",
        ),
        (
            f"{PHASE}converters = ['int8']\n[precision.phase.int8]\nenable_fsdp_int8_all_gather = true",
            r"1: int8\.enable_fsdp_int8_all_gather changes the class of the weights",
        ),
    ],
)
def test_schedules_that_make_no_sense(text: str, message: str, tmp_path: Path) -> None:
    config = parse(tmp_path, text, "--training.steps=100")
    with pytest.raises(ConfigError, match=message) as caught:
        parse_phases(config)
    assert len(caught.value.problems) == 1


def test_a_run_shorter_than_its_schedule_is_no_mistake(tmp_path: Path) -> None:
    assert phase_of(5, parse_phases(parse(tmp_path, SCHEDULE.replace("0.9", "1.0"), "--training.steps=400"))) == 0


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))


SECTIONS: dict[str, Any] = {
    "float8": Float8(),
    "rowwise": Float8(recipe_name="rowwise"),
    "blockwise": Float8(recipe_name="blockwise"),
    "int8": Int8(filter_fqns=[]),
    "mx": MX(emulate=True, filter_fqns=[]),
    "nvfp4": MX(emulate=True, filter_fqns=[], recipe_name="nvfp4"),
    "bf16": None,
    "first in int8": Int8(filter_fqns=["1"]),
}


def converted(name: str) -> tuple[Any, list[Any]]:
    with torch.device("meta"):
        model = blocks()
    section = SECTIONS[name]
    names = [] if section is None else [type(section).__name__.lower()]
    return model, apply_converters(model, names, lambda _: section, CPU)


def in_precision(name: str, weights: list[nn.Parameter]) -> nn.Sequential:
    """A model built in this precision."""
    model, _ = converted(name)
    for layer, weight in zip(model, weights, strict=True):
        layer.weight = weight
    return model


@pytest.mark.parametrize("old", SECTIONS)
def test_a_switched_model_computes_as_one_that_was_built_so(old: str) -> None:
    weights = [nn.Parameter(torch.randn(64, 64, dtype=torch.bfloat16)) for _ in range(2)]
    model = in_precision(old, weights)
    layers = list(model)
    calls = []
    layers[0].register_forward_hook(lambda *_: calls.append(0))
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    for new in SECTIONS:
        old_variants, new_variants = layer_variants([converted(old), converted(new)])
        apply_variants(model, old_variants, new_variants)
        calls.clear()
        result = torch.autograd.grad(model(x).float().square().sum(), weights)
        expected = torch.autograd.grad(in_precision(new, weights)(x).float().square().sum(), weights)
        assert all_equal(result, expected), new
        # The modules, their parameters and their hooks are the same objects.
        assert list(model) == layers and list(model.parameters()) == weights and calls == [0]
        old = new
    assert type(layers[1]) is nn.Linear and vars(layers[1]).keys() == vars(nn.Linear(1, 1)).keys()


class Counting(LinearConverter):
    """Its layers carry state between steps."""

    def swap(self, linear: nn.Linear) -> nn.Linear:
        new = super().swap(linear)
        new.kept = torch.zeros(3)
        return new


class Buffering(LinearConverter):
    def swap(self, linear: nn.Linear) -> nn.Linear:
        new = super().swap(linear)
        new.register_buffer("kept", torch.zeros(3, device=linear.weight.device))
        return new


def by(converter: LinearConverter) -> tuple[nn.Module, list[Any]]:
    with torch.device("meta"):
        model = blocks()
    converter.convert(model)
    return model, [converter]


def test_what_layers_keep_comes_and_goes_with_the_phase() -> None:
    phases = [converted("bf16"), *(by(Counting(INT8_SECTION, Int8(filter_fqns=[]), CPU)) for _ in range(2))]
    bf16, first, second = layer_variants(phases)
    live: Any = in_precision("bf16", [nn.Parameter(torch.randn(64, 64)) for _ in range(2)])
    apply_variants(live, bf16, first)
    assert isinstance(live[0], LowPrecisionLinear)
    live[0].kept.fill_(5)
    apply_variants(live, first, second)
    assert live[0].kept.tolist() == [0, 0, 0]
    apply_variants(live, second, bf16)
    assert not hasattr(live[0], "kept")


def test_layers_with_buffers_of_their_own_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 does not have the same parameters, buffers and children in all phases"):
        layer_variants([converted("bf16"), by(Buffering(INT8_SECTION, Int8(filter_fqns=[]), CPU))])


def test_converters_that_add_modules_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 is not in the model in all phases"):
        layer_variants([converted("bf16"), (nn.Sequential(*blocks(), nn.ReLU()), [])])


def test_products_of_another_phase_are_found() -> None:
    x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
    model = in_precision("int8", [nn.Parameter(torch.randn(64, 64, dtype=torch.bfloat16)) for _ in range(2)])
    others = [CONVERTERS.get("int8").build(Int8(), CPU)]
    with (
        pytest.raises(ConfigError, match=r"torchtitan::int8_mm ran 6 times in this step, though no converter"),
        checked_gemms(model, [], {}, compiled=False, others=others),
    ):
        model(x).float().sum().backward()


def test_gemms_that_autotuning_replaced_are_counted() -> None:
    """Under max-autotune, the compiler may choose a Triton GEMM, which the profiler shows by its name."""
    int8, float8 = ProfilerOp("aten::_int_mm"), ProfilerOp("aten::_scaled_mm")
    with profile(activities=[ProfilerActivity.CPU], acc_events=False) as recorded:
        for name in ("triton_tem_fused__int_mm_mul_3", "triton_tem_fused_mm_1", "triton_poi_fused__int_mm_2"):
            with record_function(name):
                pass
    counts = gemm_check._count(recorded.profiler.kineto_results.events(), [int8, float8])
    assert sum(counts[int8].values()) == 1 and not counts[float8]


def test_no_trace_is_taken_while_products_are_counted() -> None:
    action = trace_schedule(0, 10, busy={2, 18, 30})
    recorded = [step for step in range(1, 51) if action(step - 1) is ProfilerAction.RECORD_AND_SAVE]
    warm = [step for step in range(1, 51) if action(step - 1) is ProfilerAction.WARMUP]
    assert recorded == [10, 20, 40, 50]
    assert warm == [7, 8, 9, 19, 37, 38, 39, 47, 48, 49]


def test_a_conversion_is_explained_phase_by_phase(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SCHEDULE)
    flags = (f"--job.config_file={tmp_path}/run.toml", "--training.steps=1000")
    done = python("scripts/explain_conversion.py", *flags, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    first, second, third = json.loads((tmp_path / "out.json").read_text())
    assert [phase["precision"] for phase in (first, second, third)] == [
        "float8 rowwise",
        "int8 rowwise + float8 tensorwise",  # in layer order
        "bf16",
    ]
    assert (first["phase"], first["last_step"], third["phase"], third["last_step"]) == (1, 300, 3, None)
    assert {layer["fqn"] for layer in first["layers"] if not layer["converted"]} == {"output"}
    assert "[[precision.phase]] 2, to step 900" in done.stdout and "no converters" in done.stdout
