"""Decays that branch off a run, averages of checkpoints, and the moving average of weights."""

import functools
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import TINY, assert_equal_bit_for_bit, into, losses, python, reports, tensors_of, train, train_here
from safetensors.torch import load_file

from torchtitan.errors import CheckpointError
from torchtitan.tools.branch import make_branch
from torchtitan.tools.generation.open import open_model

STABLE = (*TINY, "--training.local_batch_size=4", "--checkpoint.enable_checkpoint", "--checkpoint.interval=2")
TWO = (*STABLE, "--training.local_batch_size=2")
EVERY = (*STABLE, "--checkpoint.interval=1", "--checkpoint.keep_latest_k=0")
TP, PP = "--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2"
LAYOUTS_WITH_AVERAGES = {
    "FSDP 2 x TP 2": (TP, "--training.local_batch_size=2"),
    "TP 2 x PP 2": (TP, PP),
    "FSDP 4, EP 2": ("--model.name=sparse", "--parallelism.expert_parallel_degree=2", "--training.local_batch_size=1"),
}


def script(name: str, *arguments: object) -> tuple[int, str]:
    """Exit status and output of a script."""
    done = python(f"scripts/{name}", *arguments, PYTHON=sys.executable)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def stable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps at a constant learning rate, with an average of its weights."""
    folder = tmp_path_factory.mktemp("stable")
    start = "--checkpoint.exclude_from_loading=optimizer,dataloader"  # once, if it started from a checkpoint
    train_here(*STABLE, into(folder), "--training.steps=6", "--optimizer.ema_decay=0.75", start)
    return folder


def weights_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}


@pytest.mark.full
def test_a_branch_decays_on_the_data_that_follow(stable: Path, tmp_path: Path) -> None:
    """The run itself is not touched, and the first update is the one that the run would have made."""
    before = sorted(path for path in stable.rglob("*") if path.is_file())
    folder = tmp_path / "branch"
    left = folder.with_name("branch.tmp") / "checkpoint" / "step-4"
    left.mkdir(parents=True)  # by a branch that was killed while it copied
    (left / "half").touch()
    flags = ("--decay-steps", 3, "--folder", folder, "--metrics.log_freq=1", "--custom-import", "tiny")
    status, output = script("branch.py", stable / "checkpoint" / "step-4", *flags)
    assert status == 0, output
    assert sorted(path for path in stable.rglob("*") if path.is_file()) == before
    rates = {line["step"]: line["lr"] for line in reports(folder)}
    assert rates == pytest.approx({5: 8e-4, 6: 8e-4 * 2 / 3, 7: 8e-4 / 3})
    assert losses(folder)[5] == losses(stable)[5]
    assert losses(folder)[6] == losses(stable)[6]  # before the second update
    status, output = script("branch.py", folder, "--decay-steps", 3, "--custom-import=tiny")
    assert status == 2
    assert "is of the decay: its learning rate was 33% of the peak. Branch from a checkpoint of step 5 or" in output


def test_flags_of_a_branch_are_checked_before_it_is_made(stable: Path, tmp_path: Path) -> None:
    flags = ("--decay-steps", 1, "--folder", tmp_path / "branch", "--custom-import=tiny", "--prepare-only")
    status, output = script("branch.py", stable, *flags, "--training.stepz=3", "--stage.decay.optimizer.lr=many")
    assert status == 2 and "Traceback" not in output
    assert "unknown flag --training.stepz (did you mean training.steps?)" in output
    assert "--stage.decay.optimizer.lr must be" in output and not [*tmp_path.iterdir()]
    status, output = script("branch.py", stable, *flags, "--stage.decay.optimizer.lr=0.1")
    assert status == 0 and (tmp_path / "branch").is_dir(), output


@pytest.mark.full
def test_a_branch_has_checkpoints_of_its_own(tmp_path: Path) -> None:
    """Where the checkpoints of its run are outside the run's folder."""
    saved = tmp_path / "saved"
    train_here(*STABLE, into(tmp_path / "run"), "--training.steps=2", f"--checkpoint.folder={saved}")
    before = sorted(saved.rglob("*"))
    flags = ("--decay-steps", 1, "--folder", tmp_path / "branch", "--experimental.custom_import=tiny")
    status, output = script("branch.py", tmp_path / "run", *flags)  # which says where they are
    assert status == 0, output
    shutil.copytree(saved, tmp_path / "moved")
    status, output = script("branch.py", tmp_path / "moved", "--decay-steps", 1, "--custom-import=tiny")
    assert status == 2 and "say where the branch goes with --folder" in output
    assert sorted(saved.rglob("*")) == before and (tmp_path / "branch" / "checkpoint" / "step-3").exists()


STAGES = """
[training]
global_batch_size = "4@0, 8@7"
seq_len = 64
steps = 8
[[stage]]
name = "stable"
until = 0.25
[[stage]]
name = "long"
until = 0.75
training.seq_len = 128
lr_scheduler.warmup_steps = 1
lr_scheduler.decay_ratio = 0.25
[[stage]]
name = "anneal"
training.dataset_mixture = ["python_stdlib:0.5", "FOLDER/*.jsonl:0.5"]
lr_scheduler.warmup_steps = 0
lr_scheduler.decay_ratio = 1.0
"""
OF_STAGES = [flag for flag in STABLE if not flag.startswith(("--training.seq_len", "--training.global"))]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2, 4 and 2 steps, whose second stage warms up and decays."""
    folder = tmp_path_factory.mktemp("stages")
    documents = [json.dumps({"text": f"Document {number} says {'this ' * (number % 90)}."}) for number in range(400)]
    (folder / "documents.jsonl").write_text("\n".join(documents))
    (folder / "stages.toml").write_text(STAGES.replace("FOLDER", str(folder)))
    every = ("--checkpoint.interval=1", "--checkpoint.keep_latest_k=0")
    train_here(*OF_STAGES, *every, f"--job.config_file={folder / 'stages.toml'}", into(folder / "run"))
    return folder / "run"


@pytest.mark.full
@pytest.mark.parametrize(("step", "trained", "mixture"), [(2, "stable to step 2", True), (4, "long to step 4", False)])
def test_a_branch_is_a_last_stage(
    step: int, trained: str, mixture: bool, stages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the end of a stage, or within one; flags change only the last. The run's batch grew later."""
    flags = ["--experimental.custom_import=tiny"]
    if mixture:
        flags.append(f'--stage.decay.training.dataset_mixture=["python_stdlib:0.5","{stages.parent}/*.jsonl:0.5"]')
    config = make_branch(stages / "checkpoint" / f"step-{step}", 3, tmp_path / "branch", flags)
    train_here(f"--job.config_file={config}", *flags)
    output = capsys.readouterr().out
    assert f"stage {trained}, then stage decay to step {step + 3} (" in output
    assert ("jsonl 50%" in output) == mixture
    lines = reports(tmp_path / "branch")
    rates = {step + 1: 8e-4, step + 2: 8e-4 * 2 / 3, step + 3: 8e-4 / 3}
    assert {line["step"]: line["lr"] for line in lines} == pytest.approx(rates)
    if not mixture:
        assert losses(tmp_path / "branch")[5] == losses(stages)[5]  # the same data
        assert [line["tokens_seen"] for line in lines] == [512 * count for count in (4, 5, 6)]


def test_a_stage_that_decays_has_no_branch(stages: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"was 50% of the peak\. Branch from a checkpoint of step 7 or earlier"):
        make_branch(stages, 2, tmp_path / "branch", ["--experimental.custom_import=tiny"])


@pytest.mark.full
def test_another_last_stage(stages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a copy of the run, with another file, which also changes what is over: this is said, and not repeated."""
    shutil.copytree(stages, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("step-7", "step-8"))
    text = STAGES.replace("FOLDER", str(stages.parent)).replace('"anneal"', '"other"').replace("0.25", "3", 1)
    (tmp_path / "other.toml").write_text(text)
    train_here(*OF_STAGES, f"--job.config_file={tmp_path / 'other.toml'}", into(tmp_path))
    output = capsys.readouterr().out
    assert "is of a run with stage stable to step 2, then stage long to step 6, then stage anneal to step 7" in output
    assert "goes on with stage stable to step 3, then stage long to step 6, then stage other to step 7" in output
    assert [line["step"] for line in reports(tmp_path)] == [*range(1, 9)]
    assert list(losses(tmp_path).values())[:6] == list(losses(stages).values())[:6]


@pytest.mark.parametrize(
    ("checkpoint", "more", "message"),
    [
        ("checkpoint/step-4/nowhere", (), "nowhere does not exist"),
        ("conversion", (), "conversion holds no checkpoint"),
        ("checkpoint/step-4", (), r"imported the module 'tiny', .* add --experimental\.custom_import=tiny"),
        ("checkpoint/step-4", ("--custom-import=tiny", "--folder", "{tmp}"), "exists; choose another folder"),
    ],
)
def test_branches_that_cannot_be(
    checkpoint: str, more: tuple[str, ...], message: str, stable: Path, tmp_path: Path
) -> None:
    (stable / "conversion").mkdir(exist_ok=True)
    status, output = script(
        "branch.py", stable / checkpoint, "--decay-steps", 2, *(flag.format(tmp=tmp_path) for flag in more)
    )
    assert status == 2
    assert re.search(message, output), output
    assert len(output.strip().splitlines()) == 1


def test_the_average_is_the_exact_mean_in_float32(stable: Path, tmp_path: Path) -> None:
    """And a run starts from it."""
    checkpoints = [stable / "checkpoint" / f"step-{step}" for step in (2, 4, 6)]
    out = tmp_path / "average" / "checkpoint"
    status, output = script("average_checkpoints.py", *checkpoints, "--out", out, "--custom-import", "tiny")
    assert status == 0, output
    assert f"{out / 'step-6'}\n" in output
    average, sources = tensors_of(out.parent, 6), [weights_of(tensors_of(stable, step)) for step in (2, 4, 6)]
    assert average.keys() == sources[0].keys()
    for name, mean in average.items():
        assert torch.equal(mean, (sum(source[name].double() for source in sources) / 3).float())
    start = f"--checkpoint.initial_load_path={out / 'step-6'}"
    train_here(*STABLE, into(tmp_path / "started"), start, "--training.steps=1")
    assert losses(tmp_path / "started")[1] < losses(stable)[1]
    damaged = tmp_path / "damaged" / "step-6"
    shutil.copytree(checkpoints[2], damaged)
    file = next(damaged.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    status, output = script("average_checkpoints.py", damaged, "--out", tmp_path / "x", "--custom-import", "tiny")
    assert status == 2
    assert "is damaged" in output


def test_the_moving_average_of_experts(tmp_path: Path) -> None:
    """Their biases are no weights: the average has them as they are."""
    sparse = ("--model.name=sparse", "--model.flavor=narrow", "--optimizer.ema_decay=0.75")
    train_here(*STABLE, *sparse, into(tmp_path / "run"), "--training.steps=2")
    status, output = script(
        "average_checkpoints.py",
        tmp_path / "run",
        "--ema",
        "--out",
        tmp_path / "out" / "checkpoint",
        "--custom-import=tiny",
    )
    assert status == 0, output
    average, saved = tensors_of(tmp_path / "out", 2), tensors_of(tmp_path / "run", 2)
    assert average.keys() == weights_of(saved).keys()
    for name, tensor in average.items():
        assert torch.equal(tensor, saved[name if name.endswith("expert_bias") else f"optimizer.state.{name}.ema"])


@pytest.mark.full
def test_the_moving_average_of_the_weights(stable: Path, tmp_path: Path) -> None:
    """Saved with each checkpoint, going on under another layout, and extracted by the script."""
    averages = {
        step: {
            name.removeprefix("optimizer.state.").removesuffix(".ema"): tensor
            for name, tensor in tensors_of(stable, step).items()
            if name.endswith(".ema")
        }
        for step in (4, 6)
    }
    every = tmp_path / "every"
    flags = ("--optimizer.ema_decay=0.75", "--training.steps=6")
    train_here(*STABLE, into(every), *flags, "--checkpoint.interval=1")
    expected = weights_of(tensors_of(every, 1))
    for step in range(2, 7):
        weights = weights_of(tensors_of(every, step))
        expected = {name: 0.75 * average + 0.25 * weights[name] for name, average in expected.items()}
    assert averages[6].keys() == expected.keys()
    for name, average in averages[6].items():
        torch.testing.assert_close(average, expected[name])
    shutil.copytree(stable / "checkpoint" / "step-4", tmp_path / "two" / "checkpoint" / "step-4")
    train(*TWO, into(tmp_path / "two"), *flags, processes=2)
    for name, tensor in tensors_of(tmp_path / "two", 6).items():
        if name.endswith(".ema"):
            alone = averages[6][name.removeprefix("optimizer.state.").removesuffix(".ema")]
            assert (tensor - alone).norm() < 1e-5 * alone.norm()
    out = tmp_path / "out"
    status, output = script(
        "average_checkpoints.py", stable, "--ema", "--out", out / "checkpoint", "--custom-import=tiny"
    )
    assert status == 0, output
    averaged = tensors_of(out, 6)
    assert all(torch.equal(averaged[name], average) for name, average in averages[6].items())


AVERAGE = "--optimizer.ema_decay=0.75"


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs of 7 steps without an average, one for each kind of flags, with all their checkpoints."""

    @functools.cache
    def run(*flags: str) -> Path:
        folder = tmp_path_factory.mktemp("without")
        train_here(*EVERY, *flags, into(folder), "--training.steps=7")
        return folder

    return run


def check_late_average(folder: Path, without: Path, first: int, last: int) -> None:
    """The average of the checkpoints in `folder` begins as the weights at step `first`. Everything else, moments among
    it, is equal bit for bit to the run without."""
    weights = weights_of(tensors_of(without, first))
    expected = {name: weight.double() for name, weight in weights.items() if not name.endswith("expert_bias")}
    for step in range(first + 1, last + 1):
        plain, tensors = tensors_of(without, step), tensors_of(folder, step)
        averages = {name: tensors.pop(name) for name in [*tensors] if name.endswith(".ema")}
        assert_equal_bit_for_bit(tensors, plain)
        expected = {name: 0.75 * average + 0.25 * plain[name].double() for name, average in expected.items()}
        assert averages.keys() == {f"optimizer.state.{name}.ema" for name in expected}
        for name, average in expected.items():
            torch.testing.assert_close(averages[f"optimizer.state.{name}.ema"].double(), average, rtol=1e-5, atol=1e-7)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW8bit", "Muon"])
def test_an_average_begins_late_and_anew_after_a_time_without(
    optimizer: str, without: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the weights of the checkpoint, while the moments go on; later starts continue it."""
    name = f"--optimizer.name={optimizer}"
    whole = without(name)
    shutil.copytree(whole / "checkpoint" / "step-2", tmp_path / "checkpoint" / "step-2")
    begins, ends = (
        r"the moving average begins at step (\d+), from the weights there",
        "the moving average in .* ends here",
    )
    for last, flags, begun, ended in (
        (3, (AVERAGE,), ["2"], 0),
        (4, (AVERAGE,), [], 0),
        (5, (), [], 1),
        (7, (AVERAGE,), ["5"], 0),
    ):
        capsys.readouterr()
        train_here(*EVERY, name, into(tmp_path), f"--training.steps={last}", *flags)
        output = capsys.readouterr().out
        assert (re.findall(begins, output), len(re.findall(ends, output))) == (begun, ended)
    check_late_average(tmp_path, whole, 2, 4)
    check_late_average(tmp_path, whole, 5, 7)
    assert losses(tmp_path) == {step: loss for step, loss in losses(whole).items() if step > 2}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS_WITH_AVERAGES)
def test_an_average_begins_late_under_every_layout(layout: str, tmp_path: Path) -> None:
    flags = (*EVERY, *LAYOUTS_WITH_AVERAGES[layout])
    whole, late = tmp_path / "whole", tmp_path / "late"
    train(*flags, into(whole), "--training.steps=4", processes=4)
    shutil.copytree(whole / "checkpoint" / "step-2", late / "checkpoint" / "step-2")
    for last in (3, 4):
        train(*flags, into(late), AVERAGE, f"--training.steps={last}", processes=4)
    check_late_average(late, whole, 2, 4)


def test_an_average_of_new_weights_begins_with_their_first_update(
    without: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where only the optimizer was loaded, no weights of the checkpoint are in the average."""
    start = f"--checkpoint.initial_load_path={without('--optimizer.name=AdamW') / 'checkpoint' / 'step-2'}"
    parts = ("--checkpoint.no_initial_load_model_weights_only", "--checkpoint.exclude_from_loading=model,train_state")
    train_here(*EVERY, into(tmp_path), start, *parts, AVERAGE, "--training.steps=1")
    assert "the moving average begins" not in capsys.readouterr().out
    tensors = tensors_of(tmp_path, 1)
    for name, weight in weights_of(tensors).items():
        assert torch.equal(tensors[f"optimizer.state.{name}.ema"], weight)


@pytest.mark.full
def test_commands_take_the_moving_average(stable: Path, tmp_path: Path) -> None:
    """Exports, evaluation and generation, which say which weights they use; a sentence where there are none."""
    average, scores = tmp_path / "average" / "checkpoint", tmp_path / "scores"
    status, output = script("average_checkpoints.py", stable, "--ema", "--out", average, "--custom-import=tiny")
    assert status == 0, output

    def say(module: str, *arguments: object) -> str:
        done = python("-m", f"torchtitan.{module}", *arguments, "--custom-import=tiny")
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    moving, exported = "moving averages of the weights", {}
    for checkpoint, flags, weights in (
        (stable, ("--ema",), moving),
        (average, (), f"mean of {moving}"),
        (stable, (), "trained weights"),
    ):
        out = tmp_path / weights
        assert f"exported the {weights} of" in say("tools.convert", "to-hf", checkpoint, out, "--dtype=float32", *flags)
        assert json.loads((out / "config.json").read_text())["torchtitan_weights"] == weights
        exported[weights] = load_file(out / "model.safetensors")
        tasks = ("--tasks", f"text:{Path(__file__)}", f"--dump-folder={scores}")
        assert f", {weights}, " in say("tools.evaluate", checkpoint, *tasks, *flags)
    assert_equal_bit_for_bit(exported[moving], exported[f"mean of {moving}"])
    assert not torch.equal(exported[moving]["model.norm.weight"], exported["trained weights"]["model.norm.weight"])
    lines = [json.loads(line) for line in (scores / "metrics.jsonl").read_text().splitlines()]
    assert {key.removeprefix("ema/"): value for key, value in lines[0].items()} == lines[1] != lines[2]
    assert all(key == "step" or key.startswith("ema/") for key in lines[0])
    assert f", {moving}, " in say(
        "tools.generate", "--checkpoint", stable, "--ema", "--prompt=def ", "--max-new-tokens=4"
    )
    for folder, message in ((average, "has no moving average"), (tmp_path / moving, "--ema: .* is no checkpoint of")):
        with pytest.raises(CheckpointError, match=message):
            open_model(folder, torch.device("cpu"), torch.float32, ema=True)
