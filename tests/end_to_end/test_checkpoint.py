"""Which checkpoints are retained, which is loaded, and what is loaded from it; and failing saves."""

import gc
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import (
    CHECKPOINTS,
    TINY,
    assert_equal_bit_for_bit,
    checkpoint_steps,
    failure,
    files_of_at_most,
    into,
    lines_of,
    losses,
    reports,
    started,
    tensors_of,
    train,
    train_here,
)

from torchtitan.checkpoint.manager import CheckpointManager
from torchtitan.errors import CheckpointError, ConfigError, UserError
from torchtitan.models.rope import YarnScaling
from torchtitan.run.trainer import Trainer
from torchtitan.tools.interchange.convert import saved_model
from torchtitan.tools.report.page import render
from torchtitan.tools.report.run import read_run

YARN = ('--model.rope_scaling={type = "yarn", factor = 4, original = 32}', "--model.rope_theta=12345")
FLAGS = (*TINY, *CHECKPOINTS, "--optimizer.lr=1e-2")  # so that six steps have a visible effect on the loss


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints of steps 2, 4 and 6. Read-only."""
    folder = tmp_path_factory.mktemp("six_steps")
    train_here(*FLAGS, into(folder), "--training.steps=6")
    return folder


def copy_of(run: Path, folder: Path) -> Path:
    return shutil.copytree(run, folder / "copy")


def train_state(folder: Path, step: int) -> dict[str, object]:
    return json.loads((folder / "checkpoint" / f"step-{step}" / "train_state.json").read_text())


def test_keeps_the_latest(tmp_path: Path) -> None:
    train_here(*FLAGS, into(tmp_path), "--training.steps=8", "--checkpoint.keep_latest_k=2")
    assert [path.name for path in sorted((tmp_path / "checkpoint").iterdir())] == ["step-6", "step-8"]


@pytest.mark.parametrize(
    ("every", "mode"),
    [("3", "disabled"), pytest.param("0.7K", "async", marks=pytest.mark.full)],  # a step has 256 tokens
)
def test_keeps_some_for_good(every: str, mode: str, tmp_path: Path) -> None:
    """With the seed, beside the latest, between two saves of the interval; also after the key is unset."""
    train_here(*FLAGS, into(tmp_path), "--checkpoint.create_seed_checkpoint")
    flags = (*FLAGS, into(tmp_path), "--checkpoint.keep_latest_k=2", f"--checkpoint.async_mode={mode}")
    train_here(*flags, "--training.steps=5", f"--checkpoint.keep_every={every}")
    assert checkpoint_steps(tmp_path) == [0, 3, 4, 5]
    train_here(*flags, "--training.steps=7", f"--checkpoint.keep_every={every}")
    assert checkpoint_steps(tmp_path) == [0, 3, 5, 6, 7]
    train_here(*flags, "--training.steps=8", f"--checkpoint.keep_every={every}")  # which reaches no other multiple
    train_here(*flags, "--training.steps=12")
    assert checkpoint_steps(tmp_path) == [0, 3, 6, 10, 12]


@pytest.mark.full
def test_saves_after_the_first_step_when_asked(six_steps: Path, tmp_path: Path) -> None:
    train_here(*FLAGS, into(tmp_path), "--training.steps=3", "--checkpoint.enable_first_step_checkpoint")
    assert checkpoint_steps(tmp_path) == [1, 2, 3]
    assert checkpoint_steps(six_steps) == [2, 4, 6]


def test_resumes_from_the_newest(six_steps: Path, tmp_path: Path) -> None:
    run = copy_of(six_steps, tmp_path)
    shutil.rmtree(run / "checkpoint" / "step-6")
    train_here(*FLAGS, into(run), "--training.steps=6")
    assert losses(run) == losses(six_steps)
    assert_equal_bit_for_bit(tensors_of(run, 6), tensors_of(six_steps, 6))


def test_resumes_from_the_step_asked_for(six_steps: Path, tmp_path: Path) -> None:
    run = copy_of(six_steps, tmp_path)
    expected = {step: loss for step, loss in losses(run).items() if step <= 3}
    train_here(*FLAGS, into(run), "--training.steps=3", "--checkpoint.load_step=2")
    assert losses(run) == expected


@pytest.mark.full
def test_keys_of_the_first_start_do_not_throw_away_what_they_began(
    six_steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A restart by torchrun, or by hand after a signal, repeats the same command."""
    run = copy_of(six_steps, tmp_path)
    command = (*FLAGS, into(run), "--checkpoint.load_step=2", "--checkpoint.exclude_from_loading=optimizer")
    train_here(*command, "--training.steps=5")
    begun = {step: (run / "checkpoint" / f"step-{step}" / "manifest.json").read_bytes() for step in (4, 5)}
    assert "step-2, without optimizer" in capsys.readouterr().out
    train_here(*command, "--training.steps=7")
    output = capsys.readouterr().out
    assert (
        "resuming from step 5, which this same command saved" in output
        and "loaded " in output
        and "without" not in output
    )
    assert list(losses(run)) == list(range(1, 8))
    assert begun == {step: (run / "checkpoint" / f"step-{step}" / "manifest.json").read_bytes() for step in begun}
    assert [path.name for path in sorted((run / "checkpoint").glob("*abandoned*"))] == [
        f"step-{step}.abandoned-1" for step in (4, 6)
    ]
    # As if it had not been interrupted
    whole = shutil.copytree(six_steps, tmp_path / "whole")
    train_here(*command, into(whole), "--training.steps=7")
    assert_equal_bit_for_bit(tensors_of(run, 7), tensors_of(whole, 7))
    # Another command starts from there again.
    capsys.readouterr()
    train_here(*command, "--training.steps=3", "--optimizer.lr=1e-3")
    assert "step-2, without optimizer" in capsys.readouterr().out
    assert checkpoint_steps(run) == [2, 3]


def test_tokens_seen_before_another_batch_are_counted_as_they_were(
    six_steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(six_steps, tmp_path)
    before = reports(run)[-1]["tokens_seen"]
    other = (
        "--training.local_batch_size=2",
        "--training.global_batch_size=2",
        "--checkpoint.exclude_from_loading=dataloader",
    )
    train_here(*FLAGS, into(run), "--training.steps=8", *other)
    config = next(line for line in (run / "config.toml").read_text().splitlines() if line.startswith("seq_len"))
    total = before + 2 * 2 * int(config.split("=")[1])
    assert reports(run)[-1]["tokens_seen"] == total
    assert f"7 to 8, {total:,} tokens in total" in capsys.readouterr().out


@pytest.mark.full
def test_a_run_taken_back_exports_what_it_became(six_steps: Path, tmp_path: Path) -> None:
    run = copy_of(six_steps, tmp_path)
    command = (*FLAGS, into(run), "--training.steps=6", "--checkpoint.last_save_in_hf")
    train_here(*command)
    exported = run / "checkpoint" / "step-6-hf" / "model.safetensors"
    first = exported.read_bytes()
    train_here(*command, "--checkpoint.load_step=4", "--optimizer.lr=1e-3")
    assert exported.read_bytes() != first
    assert (run / "checkpoint" / "step-6-hf.abandoned-1" / "model.safetensors").read_bytes() == first


def test_a_finished_run_says_so_and_changes_nothing(
    six_steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(six_steps, tmp_path)
    train_here(*FLAGS, into(run), "--training.steps=6")
    assert "already finished its 6 steps" in capsys.readouterr().out
    assert (run / "metrics.jsonl").read_bytes() == (six_steps / "metrics.jsonl").read_bytes()


def test_a_finished_run_can_be_extended(six_steps: Path, tmp_path: Path) -> None:
    run = copy_of(six_steps, tmp_path)
    train_here(*FLAGS, into(run), "--training.steps=8")
    assert list(losses(run)) == list(range(1, 9))
    assert train_state(run, 8)["step"] == 8


def test_a_step_that_is_not_there_is_refused(six_steps: Path, tmp_path: Path) -> None:
    status, output = failure(*FLAGS, into(copy_of(six_steps, tmp_path)), "--checkpoint.load_step=5", processes=None)
    assert status == 2
    assert "checkpoint.load_step" in output
    assert "2, 4, 6" in output
    assert "Traceback" not in output


def test_parts_can_be_left_out(six_steps: Path, tmp_path: Path) -> None:
    run = copy_of(six_steps, tmp_path)
    train_here(*FLAGS, into(run), "--training.steps=7", "--checkpoint.exclude_from_loading=dataloader,optimizer")
    assert list(losses(run)) == list(range(1, 8))
    # Adam's first moment was reset: after one step it is a tenth of a gradient, of norm 1 at most.
    moments = [tensor for name, tensor in tensors_of(run, 7).items() if name.endswith("exp_avg")]
    assert torch.stack([moment.norm() for moment in moments]).norm() < 0.1 * 1.001
    # The data were reset too: the first rows of text again.
    train_here(*FLAGS, into(tmp_path / "new"), "--training.steps=1")
    assert train_state(run, 7)["dataloader"] == train_state(tmp_path / "new", 1)["dataloader"]


def test_weights_are_drawn_only_if_none_are_loaded(
    six_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy_of(six_steps, tmp_path)
    train_here(
        *FLAGS,
        into(run),
        "--training.steps=1",
        "--checkpoint.exclude_from_loading=model,optimizer,train_state,dataloader",
    )
    assert losses(run)[1] == losses(six_steps)[1]

    def refuse(*arguments: object) -> None:
        raise AssertionError("weights are drawn")

    monkeypatch.setattr("torchtitan.run.trainer.init_weights", refuse)
    train_here(*FLAGS, into(copy_of(six_steps, tmp_path / "resumed")), "--training.steps=7")
    with pytest.raises(AssertionError, match="weights are drawn"):
        train_here(*FLAGS, into(tmp_path / "new"), "--training.steps=1")


def test_train_state_left_out_counts_from_one_again(six_steps: Path, tmp_path: Path) -> None:
    run = copy_of(six_steps, tmp_path)
    train_here(*FLAGS, into(run), "--training.steps=1", "--checkpoint.exclude_from_loading=train_state,optimizer")
    assert list(losses(run)) == [1]
    # weights that are already trained
    assert losses(run)[1] < losses(six_steps)[1] - 0.05


def test_starts_from_the_weights_of_another_run(six_steps: Path, tmp_path: Path) -> None:
    path = f"--checkpoint.initial_load_path={six_steps}/checkpoint/step-6"
    train_here(*TINY, into(tmp_path), "--training.steps=1", path)
    assert list(losses(tmp_path)) == [1]
    assert losses(tmp_path)[1] < losses(six_steps)[1] - 0.05


def test_starts_from_published_weights_beside_the_tokenizer(six_steps: Path, tmp_path: Path) -> None:
    run = copy_of(six_steps, tmp_path)
    train_here(*FLAGS, into(run), "--training.steps=6", "--checkpoint.last_save_in_hf")
    published = (f"--model.hf_assets_path={run}/checkpoint/step-6-hf", "--checkpoint.initial_load_in_hf")
    train_here(*TINY, into(tmp_path / "new"), "--training.steps=1", *published)
    assert losses(tmp_path / "new")[1] < losses(six_steps)[1] - 0.05


def test_starts_where_another_run_was(six_steps: Path, tmp_path: Path) -> None:
    path = f"--checkpoint.initial_load_path={six_steps}/checkpoint/step-4"
    for everything in ("--checkpoint.no_initial_load_model_weights_only", "--checkpoint.continue_from_path"):
        train_here(*FLAGS, into(tmp_path / everything), "--training.steps=6", path, everything)
        assert losses(tmp_path / everything) == {step: loss for step, loss in losses(six_steps).items() if step > 4}


def test_what_a_resume_changes_and_passes_over_is_told(
    six_steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(six_steps, tmp_path)
    path = f"--checkpoint.initial_load_path={six_steps}/checkpoint/step-6"
    change = ("--checkpoint.load_step=4", "--optimizer.lr=4e-4", *YARN)
    train_here(*FLAGS, into(run), "--training.steps=6", *change, path, "--checkpoint.last_save_in_hf")
    output = capsys.readouterr().out
    assert "model.rope_theta = 12345; it was" in output
    exported = json.loads((run / "checkpoint" / "step-6-hf" / "config.json").read_text())
    assert exported["rope_scaling"]["original_max_position_embeddings"] == 32 and exported["rope_theta"] == 12345
    args: Any = saved_model(run / "checkpoint" / "step-6").args
    assert args.rope_scaling == YarnScaling(factor=4.0, original=32)
    assert "the learning rate of step 5 is 0.0004; it would have been 0.01 in the run of the checkpoint" in output
    assert f"step-6 is passed over: the run resumes from {run}/checkpoint/step-4" in output


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere"):
        train_here(*TINY, into(tmp_path), "--training.steps=1", f"--checkpoint.initial_load_path={tmp_path}/nowhere")


@pytest.mark.full
def test_the_last_can_be_the_weights_alone_in_another_dtype(six_steps: Path, tmp_path: Path) -> None:
    weights_alone = ("--checkpoint.last_save_model_weights_only", "--checkpoint.export_dtype=bfloat16")
    train_here(*FLAGS, into(tmp_path), "--training.steps=6", *weights_alone)
    exported, whole = tensors_of(tmp_path, 6), tensors_of(six_steps, 6)
    assert "output.weight" in exported
    assert_equal_bit_for_bit(
        exported, {name: tensor.bfloat16() for name, tensor in whole.items() if not name.startswith("optimizer.")}
    )
    assert any(name.startswith("optimizer.") for name in tensors_of(tmp_path, 4))
    # The same command has nothing left to do, but an export that is missing;
    before = losses(tmp_path)
    train_here(*FLAGS, into(tmp_path), "--training.steps=6", *weights_alone, "--checkpoint.last_save_in_hf")
    assert losses(tmp_path) == before and checkpoint_steps(tmp_path) == [2, 4, 6]
    assert (tmp_path / "checkpoint" / "step-6-hf" / "model.safetensors").exists()
    # it cannot be resumed from,
    with pytest.raises(CheckpointError, match=r"only the weights.*initial_load_path"):
        train_here(*FLAGS, into(tmp_path), "--training.steps=8")
    # nor can a new run with its step and data,
    path = f"--checkpoint.initial_load_path={tmp_path}/checkpoint/step-6"
    with pytest.raises(CheckpointError, match=r"only the weights.*turn checkpoint\.initial_load_model_weights_only on"):
        train_here(*FLAGS, into(tmp_path / "x"), path, "--checkpoint.no_initial_load_model_weights_only")
    # but a new run can start from it.
    path = f"--checkpoint.initial_load_path={tmp_path}/checkpoint/step-6"
    train_here(*TINY, into(tmp_path / "new"), "--training.steps=1", path)
    assert losses(tmp_path / "new")[1] < losses(six_steps)[1] - 0.05


def test_a_seed_checkpoint_gives_a_run_its_weights(six_steps: Path, tmp_path: Path) -> None:
    train_here(*FLAGS, into(tmp_path), "--checkpoint.create_seed_checkpoint")
    assert checkpoint_steps(tmp_path) == [0]
    train_here(*FLAGS, into(tmp_path), "--training.steps=2", "--training.seed=0")
    assert losses(tmp_path) == {step: loss for step, loss in losses(six_steps).items() if step <= 2}


def test_other_data_and_another_batch_may_follow_a_seed_checkpoint(tmp_path: Path) -> None:
    train_here(*FLAGS, into(tmp_path), "--checkpoint.create_seed_checkpoint")
    train_here(*FLAGS, into(tmp_path), "--training.steps=2", "--training.global_batch_size=16", "--validation.enabled")
    assert checkpoint_steps(tmp_path) == [0, 2]


def test_a_seed_checkpoint_does_not_displace_a_run(six_steps: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"create_seed_checkpoint: .* already holds checkpoints; choose another"):
        train_here(*FLAGS, into(copy_of(six_steps, tmp_path)), "--checkpoint.create_seed_checkpoint")


def test_a_seed_checkpoint_that_cannot_be_saved_is_an_error(tmp_path: Path) -> None:
    with (
        files_of_at_most(LIMIT),
        pytest.raises(CheckpointError, match=r"create_seed_checkpoint: .* could not be saved"),
    ):
        train_here(*FLAGS, into(tmp_path), "--checkpoint.create_seed_checkpoint")


@pytest.mark.full
def test_no_save_in_the_background_is_lost(six_steps: Path, tmp_path: Path) -> None:
    """Each is due before the previous one is written, and the last when the run ends."""
    background = ("--checkpoint.async_mode=async", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=0")
    train_here(*FLAGS, into(tmp_path), "--training.steps=6", *background)
    assert checkpoint_steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    for step in (2, 4, 6):
        assert_equal_bit_for_bit(tensors_of(tmp_path, step), tensors_of(six_steps, step))


def test_a_save_that_was_cut_short_is_ignored_and_removed(six_steps: Path, tmp_path: Path) -> None:
    run = copy_of(six_steps, tmp_path)
    (run / "checkpoint" / "step-6").rename(run / "checkpoint" / "step-6.tmp")
    train_here(*FLAGS, into(run), "--training.steps=5")
    assert losses(run)[5] == losses(six_steps)[5]
    assert [path.name for path in sorted((run / "checkpoint").iterdir())] == ["step-2", "step-4", "step-5"]


def test_a_checkpoint_of_another_model_is_refused(six_steps: Path, tmp_path: Path) -> None:
    run = copy_of(six_steps, tmp_path)
    (run / "config.toml").unlink()  # otherwise it would be in the way
    status, output = failure(*FLAGS, into(run), "--model.flavor=wide", processes=None)
    assert status == 2
    assert "dim is 64, this run's is 128" in output
    assert "Traceback" not in output


def test_a_dump_folder_of_another_model_is_refused(six_steps: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job\.dump_folder: .* tiny narrow, but this run is tiny wide"):
        train_here(*FLAGS, into(copy_of(six_steps, tmp_path)), "--model.flavor=wide")


def test_other_data_are_refused(six_steps: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"training\.seed .*exclude_from_loading=dataloader"):
        train_here(*FLAGS, into(copy_of(six_steps, tmp_path)), "--training.steps=8", "--training.seed=1")


@pytest.mark.full
def test_validation_disturbs_neither_training_nor_resuming(tmp_path: Path) -> None:
    validating = (*FLAGS, "--validation.enabled", "--validation.freq=3", "--validation.steps=2")
    train_here(*validating, into(tmp_path / "whole"), "--training.steps=6")
    train_here(*validating, into(tmp_path / "parts"), "--training.steps=4")
    train_here(*validating, into(tmp_path / "parts"), "--training.steps=6")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    lines = [line for line in lines_of(tmp_path / "whole" / "metrics.jsonl") if "validation_loss" in line]
    assert [line["step"] for line in lines] == [3, 6]
    assert lines[1]["validation_loss"] < lines[0]["validation_loss"]


@pytest.mark.full
def test_curves_begin_where_the_run_does(six_steps: Path, tmp_path: Path) -> None:
    """At step 0 and after each resume, once for each step."""
    validating = (*FLAGS, "--validation.enabled", "--validation.freq=3", "--validation.steps=2")
    prompts = ("--validation.sample_prompts=def ", "--validation.dataset=python_stdlib")  # held out: other data
    flags = (*validating, *prompts, into(tmp_path), "--evaluation.at_start", f"--evaluation.tasks=text:{__file__}")

    def steps_with(key: str, file: str = "metrics.jsonl") -> list[int]:
        return [line["step"] for line in lines_of(tmp_path / file) if key in line]

    train_here(*flags, "--training.steps=4")
    assert steps_with("validation_loss") == steps_with("prompt", "samples.jsonl") == [0, 3, 4]
    assert steps_with("evaluation_seconds") == [0, 4]
    assert losses(tmp_path) == {step: loss for step, loss in losses(six_steps).items() if step <= 4}
    shutil.rmtree(tmp_path / "checkpoint" / "step-4")
    for last in (6, 6, 7):
        train_here(*flags, f"--training.steps={last}")
    assert steps_with("validation_loss") == steps_with("prompt", "samples.jsonl") == [0, 2, 3, 6, 7]
    assert steps_with("evaluation_seconds") == [0, 2, 6, 7]
    assert losses(tmp_path).items() > losses(six_steps).items()
    train_here(*flags, "--training.steps=1", "--checkpoint.no_enable_checkpoint")
    assert steps_with("validation_loss") == [0, 1]  # another run, from its start


# A file-size limit simulates a full disk: writing fails in the same place, with an OSError, even for root.
LIMIT = 100_000  # bytes; a checkpoint of the tiny model has several million


@pytest.mark.full
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_save_that_fails_stops_nothing_and_harms_nothing(
    mode: str, six_steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(six_steps, tmp_path)
    flags = (*FLAGS, into(run), "--training.steps=10", f"--checkpoint.async_mode={mode}")
    with files_of_at_most(LIMIT), pytest.raises(CheckpointError, match=r"last checkpoint could not be saved"):
        train_here(*flags)
    output = capsys.readouterr().out
    assert "checkpoint of step 8 could not be saved" in output
    assert "checkpoint of step 10 could not be saved" in output
    assert "training continues" in output.lower()
    assert "File too large" in output
    assert list(losses(run)) == list(range(1, 11))
    assert [path.name for path in sorted((run / "checkpoint").iterdir())] == ["step-2", "step-4", "step-6"]
    assert_equal_bit_for_bit(tensors_of(run, 6), tensors_of(six_steps, 6))
    # Once there is space again, the same command finishes.
    train_here(*flags)
    assert checkpoint_steps(run) == [2, 4, 6, 8, 10]


def test_a_checkpoint_that_is_there_is_said_if_the_run_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Trainer, "train", lambda trainer: said.append(trainer.stop.on_disk))
    train_here(*FLAGS, into(tmp_path))
    monkeypatch.undo()
    train_here(*FLAGS, into(tmp_path), "--training.steps=2")
    monkeypatch.setattr(Trainer, "train", lambda trainer: said.append(trainer.stop.on_disk))
    train_here(*FLAGS, into(tmp_path))
    train_here(*FLAGS, into(tmp_path), "--checkpoint.exclude_from_loading=train_state", "--optimizer.lr=0.1")
    there = "The checkpoint of step 2 is on disk, and the same command resumes from it."
    assert said == ["This run has saved no checkpoint yet, so the same command starts again.", there, there]


@pytest.mark.full
def test_saves_that_fail_in_the_background_keep_no_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    wait = CheckpointManager.wait

    def count(self: CheckpointManager) -> None:
        """After a failed save. No other thread runs then: one that is building a tuple must not see it counted."""
        wait(self)
        if self.failed_saves > len(copies):
            tensors = [item for item in gc.get_objects() if type(item) is torch.Tensor]
            copies.append(sum(tensor.shape == (4096, 64) for tensor in tensors))

    monkeypatch.setattr(CheckpointManager, "wait", count)
    monkeypatch.setattr("torchtitan.checkpoint.manager.MOST_FAILED", 99)
    background = ("--checkpoint.async_mode=async", "--checkpoint.interval=1")
    with files_of_at_most(LIMIT), pytest.raises(CheckpointError, match="last checkpoint"):
        train_here(*FLAGS, *background, into(tmp_path), "--training.steps=6")
    assert len(copies) == 6
    assert copies[4] - copies[0] < 10, copies  # the current step has some of its own


def test_a_rank_that_is_lost_in_a_save_is_no_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the run would continue and fail in its next collective, without naming the rank."""

    def hang(*_: object, **__: object) -> None:
        raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv to complete")

    monkeypatch.setattr("torch.distributed.checkpoint.save", hang)
    with pytest.raises(RuntimeError, match="Timed out"):
        train_here(*FLAGS, into(tmp_path), "--training.steps=4")
    assert list(losses(tmp_path)) == [1, 2]


@pytest.mark.full
def test_a_disk_that_is_full_for_one_rank_only_fails_the_save_on_all(tmp_path: Path) -> None:
    (tmp_path / "full_disk.py").write_text(
        "import os, resource, tiny\n"
        f"if os.environ['RANK'] == '1': resource.setrlimit(resource.RLIMIT_FSIZE, ({LIMIT}, {LIMIT}))\n"
    )
    flags = (*FLAGS, "--experimental.custom_import=full_disk", "--training.steps=4", into(tmp_path))
    with started(*flags, processes=2, folder=tmp_path) as run:
        status, output = run.finish()
    assert status == 2
    assert list(losses(tmp_path)) == [1, 2, 3, 4]
    assert "checkpoint of step 2 could not be saved" in output
    assert "File too large" in output
    assert "Traceback" not in output
    assert list((tmp_path / "checkpoint").iterdir()) == []


def test_a_rank_without_memory_for_its_copies_fails_the_save_on_all(tmp_path: Path) -> None:
    """The others would wait for it in the save, until their collectives time out."""
    (tmp_path / "no_memory.py").write_text(
        "import os, tiny\n"
        "from torch.distributed.checkpoint.staging import DefaultStager\n"
        "stage, calls = DefaultStager.stage, []\n"
        "def first_fails(*arguments, **keys):\n"
        "    calls.append(1)\n"
        "    if os.environ['RANK'] == '1' and len(calls) == 1:\n"
        "        raise MemoryError('no memory')\n"
        "    return stage(*arguments, **keys)\n"
        "DefaultStager.stage = first_fails\n"
    )
    flags = (*FLAGS, "--experimental.custom_import=no_memory", "--training.steps=4", "--checkpoint.async_mode=async")
    output = train(*flags, into(tmp_path), processes=2, folder=tmp_path)
    assert "step 2 could not be saved (rank 1 could not copy its tensors into host memory: no memory)" in output
    assert list(losses(tmp_path)) == [1, 2, 3, 4]
    assert checkpoint_steps(tmp_path) == [4]


def test_a_second_run_in_a_folder_has_curves_of_its_own_in_tensorboard(tmp_path: Path) -> None:
    for _ in range(2):
        train_here(*TINY, "--training.steps=1", "--metrics.enable_tensorboard", into(tmp_path))
    assert [len([*(tmp_path / name).iterdir()]) for name in ("tb", "tb.1")] == [1, 1]


@pytest.mark.full
def test_a_second_run_in_a_folder_leaves_the_first_one_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its metrics and configuration are renamed together, and not before the second one trains."""
    folder = tmp_path / "run"
    flags = (*TINY, "--training.steps=2", into(folder))

    def content() -> dict[str, str]:
        left_out = {"checkpoint", "tokenizer_copy"}
        files = (path for path in folder.rglob("*.*") if path.is_file() and not left_out & set(path.parts))
        return {path.relative_to(folder).as_posix(): path.read_text() for path in files if path.name != ".lock"}

    train_here(*flags, "--optimizer.lr=1e-3", "--training.record_sample_ids", "--model.converters=int8")
    first = content()
    assert first.keys() > {"metrics.jsonl", "config.toml", "conversion.json", "sample_ids/rank_0.jsonl"}
    (tmp_path / "short.txt").write_text("too short")
    monkeypatch.setitem(sys.modules, "wandb", None)  # simulates that it is not installed
    for mistake in (f"--training.dataset_path={tmp_path}/short.txt", "--metrics.enable_wandb"):
        with pytest.raises(UserError):
            train_here(*flags, "--optimizer.lr=2e-3", mistake)
        assert content() == first
    train_here(*flags, "--optimizer.lr=3e-3", "--checkpoint.enable_checkpoint")
    second = content()
    for name, text in first.items():
        assert second.get(name.replace(".", ".1.")) == text or not text
    assert "lr = 0.003" in second["config.toml"]
    assert "conversion.json" not in second and "sample_ids/rank_0.jsonl" not in second

    capsys.readouterr()
    train_here(*flags, "--training.steps=4", "--optimizer.lr=4e-3", "--checkpoint.enable_checkpoint")
    assert "optimizer.lr = 0.004; it was 0.003 when the checkpoint was saved" in capsys.readouterr().out
    page = render([read_run(folder)])
    assert "training.steps = 4 (was 2); optimizer.lr = 0.004 (was 0.003)" in page or (
        "optimizer.lr = 0.004 (was 0.003); training.steps = 4 (was 2)" in page
    )
    capsys.readouterr()
    train_here(*flags, "--training.steps=4", "--optimizer.lr=5e-3", "--checkpoint.enable_checkpoint")
    assert "lr = 0.004" in (folder / "config.toml").read_text()  # nothing was trained with another one
