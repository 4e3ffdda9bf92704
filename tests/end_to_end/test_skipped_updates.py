"""Harmful updates are skipped by all ranks, counted and named."""

import json
from pathlib import Path
from typing import Any

import pytest
from runs import (
    TINY,
    assert_equal_bit_for_bit,
    checkpoint_steps,
    failure,
    into,
    lines_of,
    losses,
    reports,
    tensors_of,
    train,
    train_here,
)

from torchtitan.checkpoint.manager import CheckpointManager
from torchtitan.errors import CheckpointError, TrainingError
from torchtitan.tools.interchange.convert import average

# A converter that corrupts the results of the ranks in RANKS in the steps in STEPS.
POISON = """
import os, tiny, torch
from torchtitan.converters import CONVERTERS, ConverterEntry

class Poison:
    def convert(self, model):
        self.step = int(os.environ.get("FIRST_STEP", 1))
        forward = model.norm.forward
        def spoiled(x):
            x = forward(x)
            if not torch.is_grad_enabled() or self.step not in eval(os.environ["STEPS"]):
                return x
            if os.environ.get("RANK", "0") not in os.environ["RANKS"]:
                return x
            if os.environ["HOW"] == "loss":
                return x * float("nan")
            x.register_hook(lambda grad: grad * float(os.environ["HOW"]))
            return x
        model.norm.forward = spoiled
    def post_optimizer_hook(self, models):
        self.step += 1

CONVERTERS.register("poison", ConverterEntry("", lambda section, target: Poison()))
"""
# A converter that gives a layer an infinite input in step 3.
INFINITE_INPUT = """
import tiny, torch
from torchtitan.converters import CONVERTERS, ConverterEntry

class Infinite:
    def convert(self, model):
        self.step, layer = 1, model.layers["0"].feed_forward.w2
        forward = layer.forward
        def spoiled(x):
            return forward(torch.where(torch.arange(x.shape[-1]) == 0, float("inf"), x) if self.step == 3 else x)
        layer.forward = spoiled
    def post_optimizer_hook(self, models):
        self.step += 1

CONVERTERS.register("infinite", ConverterEntry("", lambda section, target: Infinite()))
"""
FLAGS = (
    *TINY,
    "--experimental.custom_import=poison",
    "--model.converters=poison",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=1",
    "--training.record_sample_ids",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "poison.py").write_text(POISON)
    return tmp_path


PIPELINE = ("--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=2")


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "how", "ranks"),
    [
        ((), "loss", "0 and 1"),
        ((), "loss", "1"),
        ((), "inf", "1"),
        (PIPELINE, "loss", "1"),
        (PIPELINE, "inf", "1"),
    ],
    ids=["FSDP, both ranks", "FSDP", "FSDP, gradient", "PP", "PP, gradient"],
)
def test_what_any_rank_finds_all_skip(
    layout: tuple[str, ...], how: str, ranks: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / "run"
    for name, value in {"STEPS": "[3]", "RANKS": ranks, "HOW": how}.items():
        monkeypatch.setenv(name, value)
    flags = (*FLAGS, into(run), "--training.steps=5", "--training.local_batch_size=1", *layout)
    output = train(*flags, processes=2, folder=folder)
    assert output.count("step 3: update skipped") == 1
    assert ("the loss is not finite" if how == "loss" else "the gradient norm is not finite") in output
    # Nothing changed, not even the optimizer's moments and its step count.
    assert_equal_bit_for_bit(tensors_of(run, 2), tensors_of(run, 3))
    lines = reports(run)
    assert [line["skipped_updates"] for line in lines] == [0, 0, 1, 1, 1]
    assert lines[2]["grad_norm"] is None
    assert all(line["loss"] < 10 for line in lines[3:])
    [skipped] = lines_of(run / "skipped_updates.jsonl")
    read = [lines_of(path)[2] for path in (run / "sample_ids").iterdir()]
    assert skipped["step"] == 3
    assert set(skipped["ids"]) == {sample for line in read for row in line["ids"] for sample in row}


@pytest.mark.full
def test_too_many_in_a_row_stop_the_run_and_name_the_samples(folder: Path) -> None:
    run = folder / "run"
    options: dict[str, Any] = {"STEPS": "range(3, 99)", "RANKS": "1", "HOW": "nan", "processes": 2, "folder": folder}
    flags = (*FLAGS, "--training.max_skips_in_a_row=2", "--training.local_batch_size=1")
    status, output = failure(*flags, into(run), "--training.steps=9", **options)
    assert status == 2
    assert "Traceback" not in output
    [error] = [line for line in output.splitlines() if "Error:" in line]
    assert "steps 3 to 4 were all skipped" in error
    assert "training.max_skips_in_a_row" in error
    lines = lines_of(run / "skipped_updates.jsonl")
    assert [line["step"] for line in lines] == [3, 4]
    assert lines[1]["ids"] and all(sample in error for sample in lines[1]["ids"][:8])


@pytest.fixture
def poisoned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For runs in this process."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(__import__("sys").modules, "poison", raising=False)
    from torchtitan.converters import CONVERTERS

    monkeypatch.setattr(CONVERTERS, "_entries", dict(CONVERTERS._entries))
    monkeypatch.setenv("RANKS", "0")
    return folder


def test_switched_off_it_goes_on_but_saves_no_weights_that_are_lost(
    poisoned: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPS", "[2]")
    monkeypatch.setenv("HOW", "nan")
    flags = (*FLAGS, into(poisoned), "--training.steps=3", "--training.no_skip_nonfinite")
    with pytest.raises(CheckpointError, match=r"its last checkpoint could not be saved.*step 1 is on disk"):
        train_here(*flags)
    assert reports(poisoned)[2]["loss"] is None and checkpoint_steps(poisoned) == [1]
    output = "".join(capfd.readouterr())
    assert output.count("has numbers that are not finite (NaN or infinity)") == 2  # of steps 2 and 3


def test_a_checkpoint_whose_weights_are_not_finite_is_refused(poisoned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As earlier versions saved them."""
    monkeypatch.setenv("STEPS", "[2]")
    monkeypatch.setenv("HOW", "nan")
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointManager, "_not_finite", lambda *_: "")
        train_here(*FLAGS, into(poisoned / "run"), "--training.steps=2", "--training.no_skip_nonfinite")
    last = poisoned / "run" / "checkpoint" / "step-2"
    message = r"step-2 is refused: it has weights with numbers that are not finite .*, in .* and \d+ more\. {}"
    starts = {
        into(poisoned / "run"): r"Choose an earlier one with --checkpoint\.load_step\.",
        f"--checkpoint.initial_load_path={last}": r"Choose an earlier one\.",
    }
    for flag, remedy in starts.items():
        with pytest.raises(CheckpointError, match=message.format(remedy)):
            train_here(*FLAGS, into(poisoned / "other"), flag, "--training.steps=3")
    with pytest.raises(CheckpointError, match=r"step-2 is refused: it has weights with numbers that are not finite"):
        average([last], poisoned / "average")
    assert not (poisoned / "average" / "step-2").exists()


@pytest.mark.full
def test_a_run_without_one_update_has_failed(
    poisoned: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also if it is shorter than `max_skips_in_a_row`, and if its command is repeated."""
    monkeypatch.setenv("HOW", "nan")
    monkeypatch.setenv("STEPS", "range(99)")
    for _ in range(2):
        with pytest.raises(TrainingError, match=r"the run has failed: every update \(steps 1 to 2\) was skipped"):
            train_here(*FLAGS, into(poisoned), "--training.steps=2")
    assert "finished" not in "".join(capfd.readouterr())
    monkeypatch.setenv("STEPS", "[]")
    train_here(*FLAGS, into(poisoned), "--training.steps=4")
    monkeypatch.setenv("STEPS", "range(99)")
    start = (f"--checkpoint.initial_load_path={poisoned}/checkpoint/step-4", "--checkpoint.continue_from_path")
    for _ in range(2):
        with pytest.raises(TrainingError, match=r"every update \(steps 5 to 6\) was skipped"):
            train_here(*FLAGS, *start, into(poisoned / "other"), "--training.steps=6")
    train_here(*FLAGS, into(poisoned), "--training.steps=5")  # the last updates of others


@pytest.mark.full
def test_outliers_are_skipped_and_a_resumed_run_skips_the_same(poisoned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "[5, 24, 27]")
    monkeypatch.setenv("HOW", "1000")
    flags = (*FLAGS, "--training.skip_grad_norm_outliers=20", "--checkpoint.interval=26")
    train_here(*flags, into(poisoned / "whole"), "--training.steps=28")
    # In step 5 there is no history to compare it with yet.
    assert [line["step"] for line in lines_of(poisoned / "whole" / "skipped_updates.jsonl")] == [24, 27]
    train_here(*flags, into(poisoned / "parts"), "--training.steps=26")
    monkeypatch.setenv("FIRST_STEP", "27")
    train_here(*flags, into(poisoned / "parts"), "--training.steps=28")
    assert losses(poisoned / "parts") == losses(poisoned / "whole")
    assert [line["skipped_updates"] for line in reports(poisoned / "parts")[-3:]] == [1, 2, 2]
    assert_equal_bit_for_bit(tensors_of(poisoned / "parts", 28), tensors_of(poisoned / "whole", 28))


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "step", "flags"),
    [
        ("1e6", 24, ["--training.skip_grad_norm_outliers=20"]),  # the host decides
        ("1e30", 3, []),  # the device does: the sum of squares is infinite, the numbers are not
    ],
)
def test_amaxes_of_a_skipped_update_set_no_scales(
    how: str, step: int, flags: list[str], poisoned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPS", f"[{step}]")
    monkeypatch.setenv("HOW", how)
    delayed = ("--model.converters=float8,poison", "--float8.recipe_name=delayed", "--float8.filter_fqns=")
    precise = ("--training.mixed_precision_param=bfloat16", f"--checkpoint.interval={step - 1}")
    train_here(*FLAGS, *delayed, *precise, *flags, into(poisoned), f"--training.steps={step}")
    assert [line["step"] for line in lines_of(poisoned / "skipped_updates.jsonl")] == [step]
    before, after = (
        json.loads((poisoned / "checkpoint" / f"step-{number}" / "train_state.json").read_text())["converters"]
        for number in (step - 1, step)
    )
    assert before == after and before["float8"]


@pytest.mark.full
def test_a_skipped_update_moves_no_bias_of_experts(poisoned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "[3]")
    monkeypatch.setenv("HOW", "nan")
    train_here(*FLAGS, into(poisoned), "--model.name=sparse", "--model.flavor=deep", "--training.steps=3")
    assert_equal_bit_for_bit(tensors_of(poisoned, 2), tensors_of(poisoned, 3))
    biases = [tensor for name, tensor in tensors_of(poisoned, 3).items() if name.endswith("expert_bias")]
    assert biases and all(bias.any() and abs(bias.mean()) < 1e-8 for bias in biases)


@pytest.mark.full
def test_one_good_step_resets_the_count(poisoned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOW", "nan")
    monkeypatch.setenv("STEPS", "[1, 2, 4, 5]")
    train_here(*FLAGS, into(poisoned / "run"), "--training.steps=6", "--training.max_skips_in_a_row=3")
    monkeypatch.setenv("STEPS", "[1, 2, 3]")
    with pytest.raises(TrainingError, match="steps 1 to 3"):
        train_here(*FLAGS, into(poisoned / "other"), "--training.steps=6", "--training.max_skips_in_a_row=3")


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_what_is_reported_later_is_skipped_all_the_same(
    implementation: str, poisoned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skipped by the device itself, or, if the optimizer cannot read the decision there, by the host."""
    monkeypatch.setenv("HOW", "nan")
    monkeypatch.setenv("STEPS", "[2, 3]")
    flags = (*FLAGS, "--training.steps=6", "--checkpoint.interval=6", f"--optimizer.implementation={implementation}")
    train_here(*flags, into(poisoned / "each"))
    train_here(*flags, into(poisoned / "fourth"), "--metrics.log_freq=4")
    assert [line["skipped_updates"] for line in reports(poisoned / "fourth")] == [0, 2, 2]
    skipped = [lines_of(poisoned / name / "skipped_updates.jsonl") for name in ("each", "fourth")]
    assert [line["step"] for line in skipped[0]] == [2, 3]
    assert skipped[0] == skipped[1]
    assert_equal_bit_for_bit(tensors_of(poisoned / "fourth", 6), tensors_of(poisoned / "each", 6))


@pytest.mark.parametrize("skip", [True, False])
def test_infinities_that_delayed_scales_saturate_are_found(
    skip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither loss nor gradients show them."""
    name = f"infinite_{skip}"
    (tmp_path / f"{name}.py").write_text(INFINITE_INPUT.replace('"infinite"', f'"{name}"'))
    monkeypatch.syspath_prepend(tmp_path)
    flags = (
        *(*TINY, "--training.mixed_precision_param=bfloat16", "--training.steps=4", into(tmp_path / "run")),
        *(f"--experimental.custom_import={name}", f"--model.converters=float8,{name}"),
        *("--float8.recipe_name=delayed", f"--training.skip_nonfinite={str(skip).lower()}"),
    )
    train_here(*flags)
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]
    output = capsys.readouterr().out
    prefix = "step 3: update skipped, " if skip else "step 3: "
    assert output.count(f"{prefix}an operand of a low-precision GEMM is not finite") == 1
    assert [line["skipped_updates"] for line in reports(tmp_path / "run")] == ([0, 0, 1, 1] if skip else [0, 0, 0, 0])
