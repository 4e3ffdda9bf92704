"""A run with stages: it goes on bit for bit wherever it is stopped, and in the same order of data on any number of
processes."""

import functools
import json
import random
import shutil
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import (
    HELD,
    TINY,
    assert_equal_bit_for_bit,
    hold,
    into,
    lines_of,
    losses,
    started,
    tensors_of,
    train,
    train_here,
)

from torchtitan.engine.stages import Stage
from torchtitan.run.build_trainer import StageBuilder
from torchtitan.tools.interchange.convert import average, saved_model

STAGES = """
[training]
global_batch_size = "4@0, 8@6, 4@7"
local_batch_size = 2
seq_len = 64
steps = 10
[[stage]]
name = "stable"
until = 3
[[stage]]
name = "long"
until = "3.5K"  # tokens: step 8
training.seq_len = 128
training.local_batch_size = 1
activation_checkpoint.mode = "full"
model.rope_theta = 50000.0
model.rope_scaling = {type = "yarn", factor = 2, original = 64}
optimizer.ema_decay = 0.9
[[stage]]
name = "anneal"
training.dataset_mixture = ["python_stdlib:0.5", "FOLDER/*.jsonl:0.5"]
lr_scheduler.warmup_steps = 0
lr_scheduler.decay_ratio = 1.0
optimizer.weight_decay = 0.0
model.converters = ["float8"]
float8.emulate = true
"""
OF_FILE = [flag for flag in TINY if not flag.startswith("--training.") or "precision" in flag]
BASE = (*OF_FILE, "--checkpoint.enable_checkpoint", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=0")
LAST = 10
IN_TENSORBOARD = {"1_stage_stable": [1, 2, 3], "2_stage_long": [4, 5, 6, 7, 8], "3_stage_anneal": [9, 10]}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("stages")
    documents = [json.dumps({"text": f"Document {number} says {'this ' * (number % 90)}."}) for number in range(400)]
    (folder / "documents.jsonl").write_text("\n".join(documents))
    file = folder / "stages.toml"
    file.write_text(STAGES.replace("FOLDER", str(folder)))
    return f"--job.config_file={file}"


@pytest.fixture(scope="module")
def whole(file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train_here(*BASE, file, into(folder), "--training.record_sample_ids", "--metrics.enable_tensorboard")
    return folder


def shown_by_tensorboard(folder: Path) -> dict[str, list[int]]:
    """The steps of the loss's curve in each of its runs."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = {file.parent for file in (folder / "tb").rglob("events.out.*")}
    boards = {str(run.relative_to(folder / "tb")): EventAccumulator(str(run)).Reload() for run in runs}
    curves = {run: board.Scalars("loss") for run, board in boards.items() if "loss" in board.Tags()["scalars"]}
    return {run: [event.step for event in curve] for run, curve in curves.items()}


@pytest.mark.full
def test_each_stage_trains_as_it_says(whole: Path) -> None:
    steps = lines_of(whole / "metrics.jsonl")
    assert [line["stage"] for line in steps] == [1] * 3 + [2] * 5 + [3] * 2
    tokens = [256] * 3 + [512] * 3 + [1024, 512] + [256] * 2
    assert [line["tokens_seen"] for line in steps] == [sum(tokens[: step + 1]) for step in range(LAST)]
    assert [line["lr"] for line in steps[2:]] == pytest.approx(
        [8e-4] * 7 + [4e-4]
    )  # the anneal stage decays over 2 steps
    state = json.loads((whole / "checkpoint" / "step-4" / "train_state.json").read_text())
    assert state["stages"] == [[3, "stage stable"], *([step, "stage long"] for step in (6, 7, 8)), [10, "stage anneal"]]
    assert shown_by_tensorboard(whole) == IN_TENSORBOARD
    assert [saved_model(whole / "checkpoint" / f"step-{step}").seq_len for step in (3, 4, 10)] == [64, 128, 128]


@pytest.mark.full
@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=[pytest.mark.full] * (step not in (3, 7))) for step in (1, 3, 6, 7, 8, 9)]
)
def test_it_goes_on_bit_for_bit(whole: Path, file: str, step: int, tmp_path: Path) -> None:
    """In the middle of a stage, at its end, and where a batch size ends."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    for later in range(step + 1, LAST + 1):
        shutil.rmtree(tmp_path / "checkpoint" / f"step-{later}")
    train_here(*BASE, file, into(tmp_path), "--metrics.enable_tensorboard")
    assert losses(whole) == losses(tmp_path)
    assert shown_by_tensorboard(tmp_path) == IN_TENSORBOARD  # no step twice
    assert_equal_bit_for_bit(tensors_of(whole, LAST), tensors_of(tmp_path, LAST))


@pytest.mark.full
@pytest.mark.parametrize("moved, step", [("--stage.stable.until=5", 4), ("--stage.long.until=6", 7)])
def test_a_file_whose_stages_have_moved_goes_on(
    whole: Path, file: str, moved: str, step: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Although the step of the checkpoint is in a stage with other data now."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    for later in range(step + 1, LAST + 1):
        shutil.rmtree(tmp_path / "checkpoint" / f"step-{later}")
    train_here(*BASE, file, moved, into(tmp_path))
    steps = {line["step"]: line["stage"] for line in lines_of(tmp_path / "metrics.jsonl")}
    assert list(steps) == list(range(1, LAST + 1)) and steps[step + 1] == (1 if step == 4 else 3)
    assert f"after step {step}: stage {'stable' if step == 4 else 'anneal'} begins" in capfd.readouterr().out


@pytest.mark.full
def test_a_later_stage_may_begin_with_a_validation(file: str, tmp_path: Path) -> None:
    flags = ("--training.steps=8", "--stage.long.until=7", "--stage.long.evaluation.at_start")
    validation = ("--validation.enabled", "--validation.steps=1", "--validation.dataset=python_stdlib")
    train_here(*BASE, file, *flags, *validation, into(tmp_path))
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "validation_loss" in line] == [3, 8]


def rows_of(folder: Path) -> list[list[str]]:
    """The documents of each step, whichever rank trained on them."""
    by_step: dict[int, list[str]] = {}
    for name in folder.glob("sample_ids/rank_*.jsonl"):
        for line in lines_of(name):
            by_step.setdefault(line["step"], []).extend(map(str, line["ids"]))
    return [sorted(by_step[step]) for step in sorted(by_step)]


@pytest.fixture(scope="module")
def on_processes(file: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, str]]:
    """The folder and the output of a run on so many processes, to which nothing happens."""

    @functools.cache
    def trained(processes: int) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp(f"on_{processes}")
        flags = (*of_each(processes), "--training.record_sample_ids", into(folder))
        return folder, train(*BASE, file, *flags, processes=processes)

    return trained


def of_each(processes: int) -> list[str]:
    return [f"--training.local_batch_size={min(2, 4 // processes)}"]


@pytest.mark.full
@pytest.mark.parametrize("processes", [2, 4])
def test_more_processes_read_the_same_data(
    processes: int, whole: Path, on_processes: Callable[[int], tuple[Path, str]]
) -> None:
    folder, output = on_processes(processes)
    assert "after step 3: stage long begins" in output and "after step 6: batch size 8 begins" in output
    assert output.count("MFU counts") <= 2  # once for all five builds, and once more if a later measurement is higher
    assert rows_of(folder) == rows_of(whole) and len(rows_of(whole)) == LAST
    alone, together = losses(whole), losses(folder)
    assert [together[step] for step in alone] == pytest.approx(list(alone.values()), rel=1e-3)


@pytest.mark.full
def test_no_model_is_kept_while_the_next_one_is_built(
    whole: Path, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run, and in a resume, which builds the first stage before its own step's. A device holds one."""
    models: list[weakref.ref[Any]] = []
    kept: list[int] = []
    build = StageBuilder.build

    def watched(builder: StageBuilder, stage: Stage) -> Any:
        kept.append(sum(model() is not None for model in models))
        engine, *others = build(builder, stage)
        models.append(weakref.ref(engine.model))
        return engine, *others

    monkeypatch.setattr(StageBuilder, "build", watched)
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    for step in range(7, LAST + 1):
        shutil.rmtree(tmp_path / "checkpoint" / f"step-{step}")
    train_here(*BASE, file, into(tmp_path))
    assert kept == [0] * 5  # the first stage, step 6's, and three more


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["Muon", "AdamW8bit"])
def test_every_state_goes_on(optimizer: str, file: str, tmp_path: Path) -> None:
    """A start in the middle of a stage hands moments and averages on once more than a run that is not stopped."""
    held_out = ("--validation.enabled", "--validation.freq=4", "--validation.local_batch_size=1")
    flags = (
        *(*BASE, file, *held_out, f"--optimizer.name={optimizer}"),
        *("--optimizer.ema_decay=0.9", "--training.steps=9"),
    )
    train_here(*flags, into(tmp_path / "whole"))
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    for step in range(6, 10):
        shutil.rmtree(tmp_path / "resumed" / "checkpoint" / f"step-{step}")
    train_here(*flags, into(tmp_path / "resumed"))
    assert losses(tmp_path / "whole") == losses(tmp_path / "resumed")
    assert_equal_bit_for_bit(tensors_of(tmp_path / "whole", 9), tensors_of(tmp_path / "resumed", 9))


AVERAGED = """
[training]
steps = 6
[[stage]]
name = "without"
until = 1
[[stage]]
name = "begins"
until = 3
optimizer.ema_decay = 0.75
[[stage]]
name = "pauses"
until = 5
training.seq_len = 32
[[stage]]
name = "goes_on"
optimizer.ema_decay = 0.5
"""
LAYOUTS = {
    "FSDP 2": (),
    "TP 2": ("--parallelism.tensor_parallel_degree=2", "--training.local_batch_size=4"),
    "PP 2": ("--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4"),
}
# Where the average begins, pauses and goes on. Beginnings under every layout are in test_branch_and_average.py.
STOPPED_AFTER = {"FSDP 2": (1, 4, 5), "TP 2": (5,), "PP 2": (4,)}
IN_FULL = [pytest.param(name, marks=[] if name == "FSDP 2" else [pytest.mark.full]) for name in LAYOUTS]


def averages_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ends = "optimizer.state.", ".ema"
    return {
        name.removeprefix(ends[0]).removesuffix(ends[1]): it for name, it in tensors.items() if name.endswith(ends[1])
    }


@pytest.mark.full
@pytest.mark.parametrize("layout", IN_FULL)
def test_the_average_begins_pauses_and_goes_on_with_the_stage(layout: str, tmp_path: Path) -> None:
    """Everything else, moments among it, is as in a run without an average, and so is a resume."""
    without, stages = tmp_path / "without.toml", tmp_path / "stages.toml"
    without.write_text("\n".join(line for line in AVERAGED.splitlines() if "ema_decay" not in line))
    stages.write_text(AVERAGED)
    folders = {name: tmp_path / name for name in ("plain", "whole", "resumed")}
    flags = (*(flag for flag in TINY if "seq_len" not in flag), "--training.seq_len=64", *BASE[-3:], *LAYOUTS[layout])
    train(*flags, f"--job.config_file={without}", into(folders["plain"]), processes=2)
    output = train(*flags, f"--job.config_file={stages}", into(folders["whole"]), processes=2)
    begins = "the moving average begins"
    assert output.count(begins) == output.count(f"{begins} at step 1, from the weights there") == 1
    expected: dict[str, torch.Tensor] = {}
    for step, share in enumerate((None, 0.25, 0.25, 0.0, 0.0, 0.5), 1):
        plain, tensors = tensors_of(folders["plain"], step), tensors_of(folders["whole"], step)
        averages, weights = averages_of(tensors), {name: it for name, it in plain.items() if "optimizer." not in name}
        assert_equal_bit_for_bit({name: it for name, it in tensors.items() if not name.endswith(".ema")}, plain)
        if share is None:
            assert not averages
            averages = weights
        elif share == 0:
            assert_equal_bit_for_bit(averages, expected)
        else:
            for name, weight in weights.items():
                torch.testing.assert_close(averages[name], expected[name].lerp(weight, share), rtol=1e-6, atol=1e-8)
        expected = averages
    paused = average([folders["whole"] / "checkpoint" / "step-5"], tmp_path / "mean" / "checkpoint", ema=True)
    assert paused.name == "step-5"
    assert_equal_bit_for_bit(tensors_of(tmp_path / "mean", 5), averages_of(tensors_of(folders["whole"], 3)))
    for step in STOPPED_AFTER[layout]:
        shutil.copytree(folders["whole"], folders["resumed"])
        for later in range(step + 1, 7):
            shutil.rmtree(folders["resumed"] / "checkpoint" / f"step-{later}")
        train(*flags, f"--job.config_file={stages}", into(folders["resumed"]), processes=2)
        assert_equal_bit_for_bit(tensors_of(folders["resumed"], 6), tensors_of(folders["whole"], 6))
        shutil.rmtree(folders["resumed"])


def test_the_average_of_a_run_that_starts_from_weights_begins_with_its_stage(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stages.toml").write_text(AVERAGED)
    start = (f"--checkpoint.initial_load_path={whole / 'checkpoint' / 'step-1'}", "--training.steps=4")
    file = f"--job.config_file={tmp_path / 'stages.toml'}"
    train_here(*TINY, *BASE[-3:], file, into(tmp_path), *start, "--stage.pauses.until=3", "--stage.begins.until=2")
    assert "the moving average begins at step 1, from the weights there" in capfd.readouterr().out
    assert not averages_of(tensors_of(tmp_path, 1)) and averages_of(tensors_of(tmp_path, 2))


# Processes -> steps that are killed after: a stage begins at 3, another batch size at 6; 9 is in the last stage.
KILLED_AFTER = {1: (3, 6, 9), 2: (6, 9), 4: (3,)}


@pytest.mark.full
@pytest.mark.parametrize("processes", KILLED_AFTER)
def test_kills_at_any_moment_change_nothing(
    processes: int, whole: Path, on_processes: Callable[[int], tuple[Path, str]], file: str, tmp_path: Path
) -> None:
    """In the save of a step, in the next step, or where a stage begins."""
    flags, moments = (*BASE, file, *of_each(processes)), random.Random(processes)
    folder = tmp_path / "run"
    hold(folder, LAST)
    for step in KILLED_AFTER[processes]:
        with started(*flags, *HELD, into(folder), processes=processes) as run:
            run.wait_until((folder / "checkpoint" / f"step-{step}").exists)
            time.sleep(moments.uniform(0, 0.3))
            assert run.process.poll() is None
            run.kill()
    train(*flags, into(folder), processes=processes)
    reference = whole if processes == 1 else on_processes(processes)[0]
    assert losses(folder) == losses(reference)
    assert_equal_bit_for_bit(tensors_of(folder, LAST), tensors_of(reference, LAST))
