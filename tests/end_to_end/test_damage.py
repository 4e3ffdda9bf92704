"""Damaged, missing or foreign checkpoints: the newest intact one is loaded, or the run stops."""

import json
import logging
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from data_helpers import TOKENIZER, story, write_megatron, write_metadata
from runs import CHECKPOINTS, TINY, checkpoint_steps, failure, into, losses, started, train_here

from torchtitan.checkpoint.manifest import damage
from torchtitan.data import Document, hashes
from torchtitan.data.packing import tokens_of
from torchtitan.errors import CheckpointError, DataError
from torchtitan.files import sha256_of
from torchtitan.launcher.signals import Stop
from torchtitan.logging import Waiting, logger
from torchtitan.run import data_readiness

FLAGS = (*TINY, *CHECKPOINTS)


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints of steps 2, 4 and 6. Read-only."""
    folder = tmp_path_factory.mktemp("six_steps")
    train_here(*FLAGS, into(folder), "--training.steps=6")
    return folder


@pytest.fixture
def run(six_steps: Path, tmp_path: Path) -> Path:
    return shutil.copytree(six_steps, tmp_path / "run")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_a_manifest_tells_what_a_checkpoint_is(six_steps: Path) -> None:
    checkpoint = six_steps / "checkpoint" / "step-4"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest["step"] == 4
    assert manifest["layout"]["processes"] == 1
    assert manifest["configuration"]["model"]["flavor"] == "narrow"
    assert set(manifest["versions"]) == {"torchtitan", "torch", "python"}
    assert set(manifest["files"]) == {path.name for path in checkpoint.iterdir()} - {"manifest.json"}


@pytest.mark.parametrize(
    ("name", "harm", "named"),
    [
        ("__0_0.distcp", flip, "SHA-256 differs"),
        ("__0_0.distcp", cut_short, "bytes instead of"),
        (".metadata", Path.unlink, "is missing"),
        ("manifest.json", flip, "is damaged"),
    ],
)
def test_the_newest_intact_one_is_taken(
    name: str,
    harm: Callable[[Path], None],
    named: str,
    run: Path,
    six_steps: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    harm(run / "checkpoint" / "step-6" / name)
    train_here(*FLAGS, into(run), "--training.steps=6")
    output = capsys.readouterr().out
    [line] = [line for line in output.splitlines() if "is damaged: " in line]
    assert "ERROR" in line and "step-6" in line and name in line and named in line
    assert "resuming from step 4" in output
    assert losses(run) == losses(six_steps)
    assert damage(run / "checkpoint" / "step-6") == []


@pytest.mark.full
def test_two_ranks_share_the_reading_and_agree(six_steps: Path, tmp_path: Path) -> None:
    with started(*FLAGS, into(tmp_path), "--training.steps=4", processes=2) as run:
        assert run.finish()[0] == 0
    flip(tmp_path / "checkpoint" / "step-4" / "__1_0.distcp")
    with started(*FLAGS, into(tmp_path), "--training.steps=4", processes=2) as run:
        status, output = run.finish()
    assert status == 0
    assert output.count("__1_0.distcp has changed since it was written") == 1
    assert list(losses(tmp_path)) == [1, 2, 3, 4]


def test_the_last_intact_one_is_kept(run: Path) -> None:
    for step in (4, 6):
        flip(run / "checkpoint" / f"step-{step}" / "__0_0.distcp")
    train_here(*FLAGS, into(run), "--training.steps=3", "--checkpoint.keep_latest_k=2")
    assert checkpoint_steps(run)[:2] == [2, 3]
    assert damage(run / "checkpoint" / "step-2") == damage(run / "checkpoint" / "step-3") == []
    # The damaged checkpoint is not chosen as the newest again.
    train_here(*FLAGS, into(run), "--training.steps=4")
    assert list(losses(run)) == [1, 2, 3, 4]


def test_a_damaged_step_that_was_asked_for_is_an_error(run: Path) -> None:
    flip(run / "checkpoint" / "step-4" / "__0_0.distcp")
    status, output = failure(*FLAGS, into(run), "--checkpoint.load_step=4", processes=None)
    assert status == 2
    assert "step-4 is damaged: __0_0.distcp" in output
    assert "Traceback" not in output


@pytest.mark.full
def test_a_folder_of_damaged_ones_is_an_error(run: Path) -> None:
    for step, harm in ((2, Path.unlink), (4, flip), (6, cut_short)):
        harm(run / "checkpoint" / f"step-{step}" / "train_state.json")
    status, output = failure(*FLAGS, into(run), processes=2)
    assert status == 2
    assert "holds 3 checkpoints, but none is intact" in output
    assert output.count("Error:") == 1
    assert "Traceback" not in output
    assert list(losses(run)) == [1, 2, 3, 4, 5, 6]  # nothing has changed
    assert checkpoint_steps(run) == [2, 4, 6]


def test_after_load_step_the_new_course_is_gone_on_with(run: Path) -> None:
    train_here(*FLAGS, into(run), "--training.steps=3", "--checkpoint.load_step=2")
    train_here(*FLAGS, into(run), "--training.steps=4")
    assert list(losses(run)) == [1, 2, 3, 4]
    assert damage(run / "checkpoint" / "step-6.abandoned-1") == []


@pytest.mark.parametrize("name", ["global_step6", "step_6", "step-6.bak", "checkpoint/step-6"])
def test_other_names_are_not_passed_over(name: str, run: Path) -> None:
    newest = run / "checkpoint" / "step-6"
    kept = newest.rename(run / "kept")
    shutil.rmtree(run / "checkpoint")
    (run / "checkpoint" / name).parent.mkdir(parents=True)
    kept.rename(run / "checkpoint" / name)
    with pytest.raises(CheckpointError, match=rf"checkpoint\.folder.* holds {name.split('/')[0]}.*step-N"):
        train_here(*FLAGS, into(run))


def test_a_wrong_folder_is_not_a_new_run(run: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--checkpoint\.folder=checkpoint to resume"):
        train_here(*FLAGS, into(run), "--checkpoint.folder=chekpoint")


def test_saving_switched_off_says_that_checkpoints_are_passed_over(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(*TINY, into(run), "--training.steps=1")
    assert "up to step 6, which are ignored because checkpoint.enable_checkpoint is off" in capsys.readouterr().out


def test_weights_of_another_shape_are_named(run: Path, tmp_path: Path) -> None:
    start = f"--checkpoint.initial_load_path={run}/checkpoint/step-6"
    status, output = failure(*TINY, into(tmp_path / "new"), start, "--model.flavor=wide", processes=None)
    assert status == 2
    assert "tok_embeddings.weight has shape (4096, 64) in the checkpoint and (4096, 128) in this run" in output
    assert "Traceback" not in output


def test_weights_of_a_deeper_model_are_not_loaded_in_part(run: Path, tmp_path: Path) -> None:
    start = f"--checkpoint.initial_load_path={run}/checkpoint/step-6"
    with pytest.raises(CheckpointError, match=r"it has layers\.1\..*which this model lacks"):
        train_here(*TINY, into(tmp_path / "new"), start, "--model.flavor=shallow")


def test_a_damaged_start_is_an_error(run: Path, tmp_path: Path) -> None:
    flip(run / "checkpoint" / "step-6" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"initial_load_path.*__0_0\.distcp"):
        train_here(*TINY, into(tmp_path / "new"), f"--checkpoint.initial_load_path={run}/checkpoint/step-6")
    with pytest.raises(CheckpointError, match=r"It contains checkpoints: use .*step-6"):
        train_here(*TINY, into(tmp_path / "new"), f"--checkpoint.initial_load_path={run}/checkpoint")


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Token shards with hashes, one for each of 8 rows, that take longer to hash than the run takes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def slow(path: Path) -> str:
        time.sleep(0.2)
        return sha256_of(path)

    monkeypatch.setattr(hashes, "sha256_of", slow)
    return tokenized(tmp_path / "tokens")


def tokenized(folder: Path, documents: int = 4) -> Path:
    folder.mkdir()
    for number in range(8):
        stories = (story(documents * number + n, words=60) for n in range(documents))
        write_megatron(
            folder / f"{number}.bin", [tokens_of(Document(text, ""), TOKENIZER).tolist() for text in stories]
        )
    write_metadata(folder)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("key", ["training.dataset_path", "validation.dataset_path"])
def test_a_run_on_a_damaged_shard_saves_nothing_and_fails(
    key: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validates = ("--validation.enabled", "--validation.freq=2") if key.startswith("valid") else ()
    flags = (*FLAGS, into(tmp_path / "run"), "--training.steps=4", f"--{key}={shards}", *validates)
    content = (shards / "5.bin").read_bytes()
    flip(shards / "5.bin")
    with pytest.raises(DataError, match=r"5\.bin does not have the SHA-256 that metadata\.json beside it says"):
        train_here(*flags)
    assert checkpoint_steps(tmp_path / "run") == []
    with pytest.raises(DataError, match=r"5\.bin does not have the SHA-256"):
        train_here(*flags, "--checkpoint.no_enable_checkpoint")
    assert "training finished" not in capsys.readouterr().out
    (shards / "5.bin").write_bytes(content)
    train_here(*flags)
    assert checkpoint_steps(tmp_path / "run") == [2, 4]
    output = capsys.readouterr().out
    assert "all that this rank has read so far of token shards (" in output
    assert output.index(") is verified") < output.index("step-2")


def hold_hashes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Lets no file be verified until the event is set, or for a minute: on a slow machine a few small files are
    verified before the first step ends."""
    release = threading.Event()
    monkeypatch.setattr(hashes, "sha256_of", lambda path: (release.wait(60), sha256_of(path))[1])
    return release


def test_a_run_that_is_stopped_saves_nothing_that_is_not_verified(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*FLAGS, into(tmp_path / "run"), "--training.steps=9", f"--training.dataset_path={shards}")
    release = hold_hashes(monkeypatch)
    monkeypatch.setattr(data_readiness, "SECONDS_TO_VERIFY", 0.0)
    monkeypatch.setattr(Stop, "requested", property(lambda stop: signal.SIGTERM * stop.has_trained, lambda *_: None))
    train_here(*flags)
    assert "SIGTERM after step 1, which is not saved: " in capsys.readouterr().out
    assert checkpoint_steps(tmp_path / "run") == []
    release.set()
    monkeypatch.setattr(data_readiness, "SECONDS_TO_VERIFY", 60.0)
    train_here(*flags)
    assert checkpoint_steps(tmp_path / "run") == [1]


def test_waiting_for_hashes_tells_how_far_it_is(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release = hold_hashes(monkeypatch)

    def release_when_it_is_told(record: logging.LogRecord) -> bool:
        if re.match(r"verifying what was read: 0 of \d+ files of token shards", record.getMessage()):
            release.set()
        return True

    monkeypatch.setattr(Waiting, "INTERVAL", 0.1)
    monkeypatch.setattr(logger, "filters", [release_when_it_is_told])
    train_here(*TINY, into(tmp_path / "run"), "--training.steps=2", f"--training.dataset_path={shards}")
    assert release.is_set() and "verifying what was read: " in capsys.readouterr().out


@pytest.mark.full
def test_one_rank_that_has_read_a_damaged_shard_stops_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flip(tokenized(tmp_path / "tokens", documents=1) / "3.bin")  # its document is of the last row
    flags = (*FLAGS, into(tmp_path), f"--training.dataset_path={tmp_path / 'tokens'}", "--training.no_shuffle")
    status, output = failure(*flags, "--training.steps=4", processes=2)
    assert status == 2
    assert output.count("3.bin does not have the SHA-256") == 1 and "Traceback" not in output
    assert checkpoint_steps(tmp_path) == []
