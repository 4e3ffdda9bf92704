"""The precision schedule: valid config files, the steps of each phase, and what a switch changes."""

import json
from pathlib import Path

import pytest
from runs import python
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from torchtitan.checks.config_checks import check
from torchtitan.config import ConfigManager, JobConfig, to_toml
from torchtitan.config.low_precision import Float8
from torchtitan.converters import (
    Target,
    gemm_check,
)
from torchtitan.converters.converter import ProfilerOp
from torchtitan.engine.stages import parse_stages, stage_of
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
    phases = parse_stages(parse(tmp_path, SCHEDULE, "--training.steps=1000", "--float8.emulate"))
    assert [phase.last_step for phase in phases] == [300, 900, 1000]
    assert [phase.config.model.converters for phase in phases] == [["float8"], ["float8", "int8"], []]
    # A phase's table overrides only the keys that it names.
    assert phases[0].config.float8 == Float8(recipe_name="rowwise", filter_fqns=["output"], emulate=True)
    assert phases[1].config.float8 == Float8(filter_fqns=["attention", "output"], emulate=True)
    assert [stage_of(step, phases).number for step in (1, 300, 301, 900, 901, 1000, 5000)] == [1, 1, 2, 2, 3, 3, 3]


def test_a_share_follows_the_steps(tmp_path: Path) -> None:
    assert parse_stages(parse(tmp_path, SCHEDULE, "--training.steps=5000"))[1].last_step == 4500


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
    assert [phase.last_step for phase in parse_stages(config)] == [50, 90, 100]


PHASE, FLOAT8 = "[[precision.phase]]\n", "[[precision.phase]]\nconverters = ['float8']\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"[model]\nconverters = ['int8']\n{FLOAT8}",
            r"model\.converters and \[\[precision\.phase\]\] exclude each other",
        ),
        (FLOAT8 + PHASE, r"1: it has no end; set until_step, or until: a fraction"),
        (f"{PHASE}until = 0.5\nuntil_step = 50\n{PHASE}", r"1: until and until_step are both set"),
        (f"{PHASE}until = 0.001\n{PHASE}", r"1: it ends at step 0 of 100, but that is before the first one"),
        (
            f"{PHASE}until = 0.5\n{PHASE}until_step = 50\n{PHASE}",
            r"2: it ends at step 50 .*; end it later",
        ),
        (
            f"{PHASE}until = 0.5\n{PHASE}until = 0.9",
            r"2: the last one ends at step 90 of 100; remove its",
        ),
        (f"{PHASE}converters = ['flot8']", r"1: unknown converter 'flot8' \(did you mean float8\?\)"),
        (f"{PHASE}converters = ['mx', 'mx']", r"1: a converter is listed twice"),
        (
            f"{FLOAT8}[precision.phase.int8]\nemulate = true",
            r"1: the table \[precision\.phase\.int8\] belongs to no",
        ),
        (
            f"{FLOAT8}[precision.phase.training]\nsteps = 3",
            r"1: the table \[precision\.phase\.training\] belongs to no",
        ),
    ],
)
def test_schedules_that_make_no_sense(text: str, message: str, tmp_path: Path) -> None:
    config = parse(tmp_path, text, "--training.steps=100", f"--job.dump_folder={tmp_path}")
    with pytest.raises(ConfigError, match=message) as caught:
        check(config, 1, "cpu")
    assert len(caught.value.problems) == 1


def test_a_run_shorter_than_its_schedule_is_no_mistake(tmp_path: Path) -> None:
    phases = parse_stages(parse(tmp_path, SCHEDULE.replace("0.9", "1.0"), "--training.steps=400"))
    assert stage_of(5, phases).number == 1


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


@pytest.mark.full
def test_a_conversion_is_explained_phase_by_phase(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SCHEDULE)
    flags = (f"--job.config_file={tmp_path}/run.toml", "--training.steps=1000")
    done = python("-m", "torchtitan.tools.explain", *flags, "--json", tmp_path / "out.json")
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
