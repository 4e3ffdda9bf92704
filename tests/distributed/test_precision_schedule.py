"""A run that changes its precision equals, bit for bit, the single-precision runs that it consists of."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from runs import TINY, assert_equal_bit_for_bit, failure, into, lines_of, losses, tensors_of, train, train_here
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

BASE = (
    *TINY,
    "--training.mixed_precision_param=bfloat16",
    "--optimizer.lr=1e-2",
    "--lr_scheduler.warmup_steps=1",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=2",
)
# Precision of steps 1 and 2, 3 and 4, 5 and 6.
PRECISIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "float8 rowwise": ("float8", {"recipe_name": "rowwise"}),
    "float8 tensorwise": ("float8", {}),
    "int8 rowwise": ("int8", {"filter_fqns": ["attention.wk", "output"]}),
    "mx mxfp8": ("mx", {"emulate": True}),
    "mx nvfp4": ("mx", {"emulate": True, "recipe_name": "nvfp4"}),
    "bf16": ("", {}),
}


def schedule(folder: Path, *names: str) -> str:
    """A config file with two steps of each precision."""
    text = ""
    for number, name in enumerate(names, 1):
        converter, keys = PRECISIONS[name]
        text += "[[precision.phase]]\n" + (f"until_step = {2 * number}\n" if number < len(names) else "")
        if converter:
            text += f"converters = ['{converter}']\n[precision.phase.{converter}]\n"
            text += "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    file = folder / "schedule.toml"
    file.write_text(text)
    return f"--job.config_file={file}"


def flags_of(name: str) -> list[str]:
    """The same precision in a run without a schedule."""
    converter, keys = PRECISIONS[name]
    if not converter:
        return []
    values = {key: ",".join(value) if isinstance(value, list) else value for key, value in keys.items()}
    return [f"--model.converters={converter}", *(f"--{converter}.{key}={value}" for key, value in values.items())]


def pieces(folder: Path, names: tuple[str, ...], run: object, *flags: str) -> None:
    """The schedule as runs without one, each resuming from the previous one's checkpoint."""
    for number, name in enumerate(names, 1):
        run(*BASE, *flags, into(folder), f"--training.steps={2 * number}", *flags_of(name))


def assert_same_training(left: Path, right: Path, steps: int = 6) -> None:
    """Losses of all steps; weights and optimizer state at the end."""
    assert losses(left) == losses(right) and list(losses(left)) == list(range(1, steps + 1))
    assert_equal_bit_for_bit(tensors_of(left, steps), tensors_of(right, steps))


LAYOUTS = {
    "FSDP": (),
    "tensor parallel": ("--parallelism.tensor_parallel_degree=2",),
    "DDP": ("--parallelism.data_parallel_replicate_degree=2",),
    "pipeline": ("--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4"),
    "context parallel": ("--parallelism.context_parallel_degree=2",),
}
# Tensor parallelism gathers activations in float8 only in the first phase.
INTO, OUT_OF = ("bf16", "int8 rowwise"), ("float8 tensorwise", "bf16")


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("FSDP", INTO),
        ("FSDP", OUT_OF),
        ("tensor parallel", INTO),
        ("tensor parallel", OUT_OF),
        ("DDP", INTO),
        ("pipeline", OUT_OF),
        ("context parallel", OUT_OF),
    ],
)
def test_two_processes_go_on_as_from_a_checkpoint_in_the_other_precision(
    layout: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    base = (*BASE, *LAYOUTS[layout], "--training.steps=4")
    output = train(*base, into(tmp_path / "whole"), schedule(tmp_path, *names), processes=2)
    assert "after step 2: [[precision.phase]] 2 begins" in output and "low-precision GEMMs ran in this step" in output
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    train(*base, into(tmp_path / "resumed"), "--checkpoint.load_step=2", *flags_of(names[1]), processes=2)
    assert_same_training(tmp_path / "whole", tmp_path / "resumed", steps=4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process through the schedule, with accumulation and recomputation."""
    folder = tmp_path_factory.mktemp("whole")
    train_here(*BASE, *MORE, into(folder), "--training.steps=6", schedule(folder, *ALL_LOW))
    return folder


ALL_LOW = ("float8 rowwise", "mx nvfp4", "float8 tensorwise")
MORE = ("--activation_checkpoint.mode=full", "--training.local_batch_size=4")


@pytest.mark.full
def test_a_switched_run_is_its_pieces_in_one_process(whole: Path, tmp_path: Path) -> None:
    pieces(tmp_path, ALL_LOW, train_here, *MORE)
    assert_same_training(whole, tmp_path)


@pytest.mark.full
def test_it_goes_on_bit_for_bit_before_at_and_after_a_switch(whole: Path, tmp_path: Path) -> None:
    """Stopped after steps 1, 2 (the last of a phase), 3 (the first) and 4."""
    file = schedule(tmp_path, *ALL_LOW)
    for steps in (1, 2, 3, 4, 6):
        train_here(*BASE, *MORE, into(tmp_path), f"--training.steps={steps}", file)
    assert_same_training(whole, tmp_path)


def test_the_phase_is_in_the_metrics_the_report_and_the_checkpoint(whole: Path) -> None:
    assert [line["stage"] for line in lines_of(whole / "metrics.jsonl")] == [1, 1, 2, 2, 3, 3]
    report = json.loads((whole / "conversion.json").read_text())
    assert [(phase["phase"], phase["precision"], phase["last_step"]) for phase in report] == [
        (1, ALL_LOW[0], 2),
        (2, ALL_LOW[1], 4),
        (3, ALL_LOW[2], None),
    ]
    assert {layer["recipe"] for layer in report[1]["layers"]} == {"nvfp4", "bf16"}  # the last block, the output layer
    state = json.loads((whole / "checkpoint" / "step-4" / "train_state.json").read_text())
    assert state["stages"] == [[last, f"[[precision.phase]] {number}"] for number, last in ((1, 2), (2, 4), (3, 6))]


@pytest.mark.full
def test_another_schedule_at_a_resume_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "shares.toml"
    file.write_text("[[precision.phase]]\nuntil = 0.5\nconverters = ['float8']\n[[precision.phase]]\n")
    for steps in (2, 4):  # half of 2 is 1, half of 4 is 2
        train_here(*BASE, into(tmp_path), f"--training.steps={steps}", f"--job.config_file={file}")
    warning = (
        "is of a run with [[precision.phase]] 1 to step 1, then [[precision.phase]] 2 to step 2; this run goes on with"
    )
    assert warning in capfd.readouterr().out
    train_here(*BASE, into(tmp_path), "--training.steps=5", "--model.converters=float8")
    assert "then [[precision.phase]] 2 to step 4; this run goes on with no stages" in capfd.readouterr().out


def test_a_mistake_in_a_later_phase_stops_the_run_at_its_start(tmp_path: Path) -> None:
    file = tmp_path / "typo.toml"
    file.write_text(
        "[[precision.phase]]\nuntil_step = 900\nconverters = ['float8']\n"
        "[[precision.phase]]\nconverters = ['int8']\n[precision.phase.int8]\nfilter_fqns = ['atention.wk']\n"
    )
    status, output = failure(*BASE, into(tmp_path), "--training.steps=1000", f"--job.config_file={file}")
    assert status == 2
    assert (
        "Error: [[precision.phase]] 2: int8.filter_fqns: 'atention.wk' matches no module of this model "
        "(did you mean attention.wk?)." in output
    )


@pytest.mark.full
def test_blocks_are_compiled_once_for_each_phase(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    clear_compilation_metrics()
    flags = ("--training.compile", "--model.flavor=deep", "--training.steps=4")
    train_here(*BASE, into(tmp_path), *flags, schedule(tmp_path, "int8 rowwise", "bf16"))
    compiled = Counter((metrics.co_name, metrics.is_forward) for metrics in get_compilation_metrics())
    assert compiled["forward", True] == 2
    # 24 layers, 3 GEMMs, 2 grad-accumulation steps; counted in the second step of a phase.
    assert "int8 rowwise: 144 low-precision GEMMs ran in this step, 144 expected" in capfd.readouterr().out
