"""Every change to a checkpoint file is detected, and the file is named."""

import hashlib
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan.checkpoint import files
from torchtitan.checkpoint.choose import find_checkpoint
from torchtitan.checkpoint.folder import keep_latest, publish, saved_steps
from torchtitan.checkpoint.manager import CheckpointManager
from torchtitan.checkpoint.manifest import (
    FileRecord,
    HashingFile,
    damage,
    manifest_if_complete,
    read_manifest,
    write_manifest,
)
from torchtitan.checkpoint.train_state import TrainState
from torchtitan.config import JobConfig, to_toml
from torchtitan.config.output import Checkpoint
from torchtitan.errors import CheckpointError
from torchtitan.tools.interchange.convert import one_process

FILES = ("__0_0.distcp", ".metadata", "train_state.json", "manifest.json")


def save(folder: Path, step: int, content: bytes = b"tensors" * 1000) -> Path:
    temporary = folder / f"step-{step}.tmp"
    temporary.mkdir(parents=True)
    files = {}
    for name in FILES[:2]:
        with HashingFile(temporary / name) as file:
            file.write(content)
        files[name] = file.record()
    publish(folder, step, {"step": step}, {"step": step, "configuration": {"lr": 0.1, "names": ("a", "b")}}, files)
    return folder / f"step-{step}"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: random.randrange(path.stat().st_size)])


def test_a_large_checkpoint_is_written_and_hashed_in_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a file each, which load like one. What is damaged is found in all of them, in order."""
    monkeypatch.setattr(files, "WORTH_A_FILE", 1000)
    monkeypatch.setattr(files, "threads_of_rank", lambda: 3)
    # On a GPU none of them may use a stream: a new thread's streams are GPU 0's.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", None)
    tensors = {f"weight {number}": torch.randn(100 + number) for number in range(10)}
    written: dict[str, FileRecord] = {}
    dcp.save(tensors, storage_writer=files.CheckpointWriter(tmp_path, written.update), no_dist=True)
    names = [name for name in written if name.endswith(".distcp")]
    assert len(names) == 3
    assert max(written[name].size for name in names) < 2 * min(written[name].size for name in names)
    for name, record in written.items():
        content = (tmp_path / name).read_bytes()
        assert record == FileRecord(len(content), hashlib.sha256(content).hexdigest())
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_a_thread_that_cannot_write_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WORTH_A_FILE", 1000)
    monkeypatch.setattr(files, "threads_of_rank", lambda: 3)
    (tmp_path / "__0_1_0.distcp").mkdir()
    tensors = {f"weight {number}": torch.randn(100) for number in range(10)}
    with pytest.raises(CheckpointException, match="IsADirectoryError"):
        dcp.save(tensors, storage_writer=files.CheckpointWriter(tmp_path, lambda files: None), no_dist=True)


DAMAGES = [Path.unlink, cut_short, flip_a_bit]


def test_what_was_written_is_intact(tmp_path: Path) -> None:
    assert damage(save(tmp_path, 1)) == []
    assert damage(save(tmp_path, 2, b"x" * (9 << 20))) == []  # large pieces are hashed in a thread


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", DAMAGES)
def test_damage_is_noticed_and_named(harm: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    for seed in range(20):
        random.seed(seed)
        checkpoint = save(tmp_path / str(seed), 1)
        before = (checkpoint / name).read_bytes()
        harm(checkpoint / name)
        faults = damage(checkpoint)
        assert len(faults) == 1, (seed, before)
        assert faults[0].startswith(name)


def test_shares_are_all_files_once(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1)
    for name in FILES[:3]:
        flip_a_bit(checkpoint / name)
    for ranks in range(1, 6):
        shares = [damage(checkpoint, rank, ranks) for rank in range(ranks)]
        assert sorted(fault.split()[0] for share in shares for fault in share) == sorted(FILES[:3])
    assert max(len(damage(checkpoint, rank, 3)) for rank in range(3)) == 1


def test_a_link_is_not_a_file_of_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1)
    (checkpoint / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (checkpoint / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    assert damage(checkpoint) == ["__0_0.distcp is a link, a folder or a pipe, not a file"]


def test_what_the_manifest_does_not_list_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1)
    (checkpoint / "evil.py").touch()
    (checkpoint / "\x1b[31m").mkdir()
    assert damage(checkpoint) == [
        "\\x1b[31m is not listed in manifest.json", "evil.py is not listed in manifest.json"
    ]  # fmt: skip
    assert not manifest_if_complete(checkpoint)


def test_a_pipe_instead_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    for name, step in zip(FILES, range(1, 5), strict=True):
        checkpoint = save(tmp_path, step)
        (checkpoint / name).unlink()
        os.mkfifo(checkpoint / name)
        [fault] = damage(checkpoint)
        assert fault.startswith(name) and "a link, a folder or a pipe, not a file" in fault


def test_a_copy_under_the_name_of_another_step_is_none(tmp_path: Path) -> None:
    shutil.copytree(save(tmp_path, 2), tmp_path / "step-50")
    assert damage(tmp_path / "step-50") == ["manifest.json is of step 2: the folder is a renamed copy"]
    assert not manifest_if_complete(tmp_path / "step-50")
    shutil.copytree(tmp_path / "step-2", tmp_path / "step-02")
    assert saved_steps(tmp_path) == [2, 50]


@pytest.mark.parametrize("name", FILES[1:3])
def test_a_file_that_would_be_read_without_its_hash_is_missed_in_the_manifest(name: str, tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1)
    files = read_manifest(checkpoint).files
    del files[name]
    write_manifest(checkpoint, {"step": 1}, files)
    assert damage(checkpoint) == [f"manifest.json does not list {name}"]


def test_what_is_synced_is_in_the_file(tmp_path: Path) -> None:
    """torch calls `os.fsync(file.fileno())` without flushing first."""
    with HashingFile(tmp_path / "tensors") as file:
        file.write(b"tensors")
        assert os.fstat(file.fileno()).st_size == 7


def test_a_file_that_did_not_reach_the_disk_fails_the_save(tmp_path: Path) -> None:
    temporary = tmp_path / "step-1.tmp"
    temporary.mkdir()
    with HashingFile(temporary / "tensors") as file:
        file.write(b"tensors")
    cut_short(temporary / "tensors")
    with pytest.raises(OSError, match=r"tensors has \d bytes on disk, but 7 were written"):
        publish(tmp_path, 1, {}, {}, {"tensors": file.record()})
    assert saved_steps(tmp_path) == []


@pytest.mark.parametrize("folder", ["checkpoint", "mine", "deep/inside", "/absolute", ".", ""])
def test_commands_find_checkpoints_where_training_puts_them(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    saved = tmp_path / "elsewhere" if folder.startswith("/") else run / (folder or "checkpoint")
    steps = [save(saved, step) for step in (1, 2, 10)]
    if folder:  # else the configuration is damaged
        where = saved if folder.startswith("/") else folder
        config = replace(JobConfig(), checkpoint=Checkpoint(folder=str(where)))
        (run / "config.toml").parent.mkdir(exist_ok=True)
        (run / "config.toml").write_text(to_toml(config))
    else:
        (run / "config.toml").write_text("[checkpoint")
    with one_process():
        for path in (run, saved, steps[2]):
            assert find_checkpoint(path) == steps[2]
        assert find_checkpoint(steps[0]) == steps[0]
        cut_short(steps[2] / "__0_0.distcp")
        assert find_checkpoint(run) == steps[1]
        assert f"using {steps[1]}, the newest intact checkpoint" in caplog.text
        with pytest.raises(CheckpointError, match=r"step-10 is damaged: __0_0.distcp has"):
            find_checkpoint(steps[2])
        for step in steps[:2]:
            (step / "manifest.json").unlink()
        with pytest.raises(CheckpointError, match=r"3 checkpoint\(s\), but none is intact: .*manifest\.json"):
            find_checkpoint(run)
        assert find_checkpoint(tmp_path) is None
        for path, words in ((tmp_path / "none", "does not exist"), (run / "config.toml", "is a file, not a folder")):
            with pytest.raises(CheckpointError, match=words):
                find_checkpoint(path)


def test_weights_that_become_infinite_are_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    keys: dict[str, Any] = {"enable_checkpoint": True, "last_save_model_weights_only": True}
    dtype: Any
    for weight, dtype, saved in ((1e5, "float16", False), (1e5, "bfloat16", True), (6e4, "float16", True)):
        torch.nn.init.constant_(model.weight, weight)
        folder = tmp_path / f"{weight:g} {dtype}"
        with one_process():
            manager = CheckpointManager(Checkpoint(**keys, export_dtype=dtype), folder, model, optimizer, {})
            manager.save(1, lambda: TrainState(step=1), last=True)
        assert (manager.last_save_failed, saved_steps(folder / "checkpoint")) == (not saved, [1] * saved)
    assert "weight has numbers that are not finite in float16" in caplog.text


def test_the_next_checkpoint_is_kept_if_one_to_keep_could_not_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are those removed that a caller wants to keep."""

    def fail_at_4(folder: Path, step: int, *rest: Any) -> None:
        if step == 4:
            raise OSError(28, "No space left on device")
        publish(folder, step, *rest)

    monkeypatch.setattr("torchtitan.checkpoint.folder.publish", fail_at_4)
    model = torch.nn.Linear(2, 2)
    config = Checkpoint(enable_checkpoint=True, interval=3, keep_latest_k=2, keep_every=4)
    saved = []
    with one_process():
        manager = CheckpointManager(config, tmp_path, model, torch.optim.SGD(model.parameters()), {})
        for step in range(1, 14):
            if manager.due(step, step == 13) or step == 7:
                saved.append(step)
                manager.save(step, lambda: TrainState(step=step), keep=step == 7)  # noqa: B023  called at once
    assert saved == [3, 4, 6, 7, 8, 9, 12, 13]
    assert saved_steps(tmp_path / "checkpoint") == [6, 7, 8, 9, 12, 13]


def test_what_is_not_whole_counts_for_nothing_among_the_latest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    for step in (3, 4):
        cut_short(tmp_path / f"step-{step}" / "__0_0.distcp")
    keep_latest(tmp_path, 2, newest=4, permanent=set())
    assert saved_steps(tmp_path) == [1, 2, 3, 4]
    save(tmp_path, 5)
    keep_latest(tmp_path, 2, newest=5, permanent=set())
    assert [step for step in saved_steps(tmp_path) if manifest_if_complete(tmp_path / f"step-{step}")] == [2, 5]


def test_a_save_sets_a_course_that_was_given_up_aside(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    save(tmp_path, 2, b"other")
    keep_latest(tmp_path, 2, newest=2, permanent=set())
    assert saved_steps(tmp_path) == [1, 2]
    assert (tmp_path / "step-2" / "__0_0.distcp").read_bytes() == b"other"
    assert damage(tmp_path / "step-3.abandoned-1") == []
    save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.glob("*.abandoned*")) == [
        "step-2.abandoned-1",
        "step-2.abandoned-2",
        "step-3.abandoned-1",
    ]
