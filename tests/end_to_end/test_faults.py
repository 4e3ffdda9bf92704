"""Real fault injection: all processes killed, bits flipped, disks filled or made read-only.

With FIGURES=file.jsonl in the environment, each test appends a line with its figures, for
docs/measurements/checkpoints.md, and there are more kills and corruptions.
"""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import ATTACKS
from runs import (
    HELD,
    ROOT,
    TINY,
    Run,
    assert_equal_bit_for_bit,
    checkpoint_steps,
    fill,
    hold,
    into,
    last_step,
    let_go,
    lines_of,
    losses,
    started,
    tensors_of,
    train,
    train_here,
)
from workers import once

from torchtitan.checkpoint.manifest import damage
from torchtitan.checkpoint.store import Disk
from torchtitan.errors import CheckpointError
from torchtitan.optim.skip_step import UpdateGuard
from torchtitan.run.trainer import Trainer


def figures(**values: object) -> None:
    if path := os.environ.get("FIGURES"):
        with open(path, "a") as file:
            file.write(json.dumps(values) + "\n")


SAVING = (*TINY, "--checkpoint.enable_checkpoint", "--training.local_batch_size=1", "--training.record_sample_ids")
KILLS, CORRUPTIONS = (20, 5000) if "FIGURES" in os.environ else (2, 100)
STEPS = 6 * KILLS  # of runs whose processes are killed


def ids_of(folder: Path) -> list[tuple[int, list[str]]]:
    """The ids read by each of two ranks, by step."""
    lines = [line for rank in (0, 1) for line in lines_of(folder / "sample_ids" / f"rank_{rank}.jsonl")]
    assert lines
    return sorted((line["step"], line["ids"]) for line in lines)


Whole = tuple[dict[int, float], dict[str, torch.Tensor], list[tuple[int, list[str]]]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Losses, last tensors and ids of a run of two ranks to which nothing happens."""
    folder = tmp_path_factory.mktemp("whole")

    def train_it() -> Whole:
        train(*SAVING, "--checkpoint.interval=2", f"--training.steps={STEPS}", into(folder), processes=2)
        return losses(folder), tensors_of(folder, STEPS), ids_of(folder)

    return once(tmp_path_factory, "whole_run_of_two_ranks", train_it)


def assert_whole(folder: Path, whole: Whole) -> None:
    all_losses, tensors, ids = whole
    assert losses(folder) == all_losses
    assert_equal_bit_for_bit(tensors_of(folder, STEPS), tensors)
    assert ids_of(folder) == ids


def kill_at_a_random_moment(run: Run, folder: Path, at_step: int) -> bool:
    """Whether a checkpoint was being written at that moment."""
    if random.random() < 0.2:  # most likely while it starts
        time.sleep(random.uniform(0, 0.5))
        run.kill()
        return False
    at_step = min(at_step, STEPS - 1)  # where it is held
    run.wait_until(lambda: "MFU counts" in run.output() and last_step(folder) >= at_step)
    processes = run.pids()  # searching for them takes longer than a save
    if random.random() < 0.6:  # during the next save, which is imminent
        later = min(at_step + 3, STEPS - 1)
        run.wait_until(lambda: list((folder / "checkpoint").glob("*.tmp")) or last_step(folder) >= later)
        time.sleep(random.uniform(0, 0.03))
    else:
        time.sleep(random.uniform(0, 0.5))
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.kill()
    return bool(list((folder / "checkpoint").glob("*.tmp")))


@pytest.mark.full
@pytest.mark.timeout(330 + 60 * KILLS)
@pytest.mark.parametrize(
    ("kills", "mode", "seed"),
    [
        (2, "disabled", 37),  # in a step, in a save
        *([(KILLS, "disabled", 0)] if "FIGURES" in os.environ else []),
        (KILLS, "async", 6),  # in a save, in a start
    ],
)
def test_kills_at_random_moments_cost_no_published_step(
    kills: int, mode: str, seed: int, whole: Whole, tmp_path: Path
) -> None:
    random.seed(seed)
    flags = (*SAVING, "--checkpoint.interval=2", f"--checkpoint.async_mode={mode}", f"--training.steps={STEPS}")
    run_folder = tmp_path / "killed"
    hold(run_folder, STEPS - 1)
    while_saving, started_training, published, lost_steps = 0, 0, 0, 0
    for kill in range(kills):
        with started(*flags, *HELD, into(run_folder), processes=2) as run:
            while_saving += kill_at_a_random_moment(run, run_folder, published + 1 + random.randrange(3))
            output = run.output()
        # It resumed from the newest checkpoint of the previous kill, if it got that far.
        assert "checkpoints  every" not in output or (f"loaded {run_folder}/checkpoint/step-{published}" in output) == (
            published > 0
        ), (kill, output)
        started_training += "checkpoints  every" in output
        published = max(checkpoint_steps(run_folder), default=0)
        lost_steps += max(0, last_step(run_folder) - published)
        for step in checkpoint_steps(run_folder):
            assert damage(run_folder / "checkpoint" / f"step-{step}") == [], kill
    assert published or mode == "async"  # so that there is something to resume
    train(*flags, into(run_folder), processes=2)
    assert_whole(run_folder, whole)
    figures(
        test="kills",
        async_mode=mode,
        kills=kills,
        survived=kills,
        while_starting=kills - started_training,
        while_saving=while_saving,
        steps=STEPS,
        steps_trained_again=lost_steps,
        samples_lost_or_repeated=0,
    )


@pytest.mark.full
def test_every_corruption_is_caught(tmp_path: Path) -> None:
    train_here(*SAVING, into(tmp_path), "--training.steps=1")
    checkpoint = tmp_path / "checkpoint" / "step-1"
    files = sorted(checkpoint.iterdir())
    random.seed(0)
    for attempt in range(CORRUPTIONS):
        path, corruption = random.choice(files), attempt % 3
        size = path.stat().st_size
        with open(path, "r+b") as file:
            content = file.read()
            place = random.randrange(size)
            file.seek(place)
            if corruption == 0:  # a bit, a burst of bytes, or the end
                file.write(bytes([content[place] ^ 1 << random.randrange(8)]))
            elif corruption == 1:
                file.write(bytes(byte ^ 255 for byte in content[place : place + 512]))
            else:
                file.truncate(place)
        faults = damage(checkpoint)
        assert len(faults) == 1 and faults[0].startswith(path.name), (path, corruption, place)
        path.write_bytes(content)
    assert damage(checkpoint) == []
    figures(test="corruptions", corruptions=CORRUPTIONS, caught=CORRUPTIONS)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A separate small disk: a mounted tmpfs. Needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "none", folder]).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


# A user's module: the run waits after some steps for a file, so that what happens to it needs few of them.
GATES = """
import pathlib, time, tiny
from torchtitan.protocols import Hook
from torchtitan.run.hooks import HOOKS

class Gate(Hook):
    def after_step(self, run):
        while run.step in (3, 11) and not pathlib.Path(f"past {run.step}").exists():
            time.sleep(0.02)

HOOKS.register("gate", Gate)
"""
GATED = (*SAVING, "--experimental.custom_import=gates", "--training.steps=16")


@pytest.fixture
def gates(tmp_path: Path) -> Path:
    """The folder for GATED runs, which go on after steps 3 and 11 when they are opened."""
    (tmp_path / "gates.py").write_text(GATES)
    return tmp_path


def open_gate(step: int, folder: Path) -> None:
    (folder / f"past {step}").touch()


@pytest.mark.full
@pytest.mark.parametrize("mode", ["disabled", pytest.param("async", marks=pytest.mark.full)])
def test_training_outlives_a_full_disk(mode: str, disk: Path, gates: Path) -> None:
    flags = (*GATED, "--checkpoint.interval=2", "--checkpoint.keep_latest_k=2", f"--checkpoint.async_mode={mode}")
    with started(*flags, into(disk), processes=2, folder=gates) as run:
        run.wait_until(lambda: checkpoint_steps(disk) and last_step(disk) >= 3)
        filler = fill(disk)
        open_gate(3, gates)

        def two_saves_and_a_line_failed() -> bool:
            fill(disk)  # a save that was being written has failed, and freed its space
            return run.output().count("could not be saved") >= 2 and " lost so far" in run.output()

        run.wait_until(two_saves_and_a_line_failed)
        assert all(damage(disk / "checkpoint" / f"step-{step}") == [] for step in checkpoint_steps(disk))
        failed = run.output().count("could not be saved")
        assert f"{failed} saves failed so far" in run.output()
        filler.unlink()
        open_gate(11, gates)
        status, output = run.finish()
    assert status == 0, output
    assert "No space left on device" in output
    assert "Traceback" not in output
    assert checkpoint_steps(disk) == [14, 16]
    text = (disk / "metrics.jsonl").read_text()
    assert all(json.loads(line)["step"] for line in text.splitlines())  # no partial line
    assert lines_of(disk / "metrics.jsonl")[-1]["failed_saves"] >= failed
    figures(test="full disk", async_mode=mode, failed_saves=failed, earlier_checkpoints_intact=True)


@pytest.mark.full
def test_training_outlives_a_disk_that_turns_read_only(disk: Path, gates: Path) -> None:
    run_folder = gates / "run"
    saving = ("--checkpoint.interval=2", "--checkpoint.keep_latest_k=2", f"--checkpoint.folder={disk}")
    flags = (*GATED, *saving, into(run_folder))

    def remount(how: str) -> None:
        for _ in range(500):  # refused while a file is being written
            if subprocess.run(["mount", "-o", f"remount,{how}", disk], stderr=subprocess.DEVNULL).returncode == 0:
                return
            time.sleep(0.01)
        raise AssertionError("always busy")

    for lock in (disk / ".lock", gates / "lock"):
        lock.touch()
    # The lock is open for writing, so it would keep its file system writable: it gets another one.
    subprocess.run(["mount", "--bind", gates / "lock", disk / ".lock"], check=True)
    with started(*flags, processes=2, folder=gates) as run:
        run.wait_until(lambda: (disk / "step-2").exists())
        remount("ro")
        open_gate(3, gates)
        run.wait_until(lambda: run.output().count("could not be saved") >= 2)
        steps = [int(path.name.removeprefix("step-")) for path in disk.glob("step-*[0-9]")]
        assert all(damage(disk / f"step-{step}") == [] for step in steps) and steps
        remount("rw")
        open_gate(11, gates)
        status, output = run.finish()
    assert status == 0, output
    assert "Read-only file system" in output
    assert "Traceback" not in output
    assert list(losses(run_folder)) == list(range(1, 17))
    assert damage(disk / "step-14") == damage(disk / "step-16") == []
    figures(test="read-only disk", failed_saves=output.count("could not be saved"))


def at_step(step: int, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls `act` before step `step` of a run in this process."""
    train_step = Trainer.train_step

    def acted(self: Trainer, *arguments: Any) -> None:
        if self.step == step:
            act()
        train_step(self, *arguments)

    monkeypatch.setattr(Trainer, "train_step", acted)


@pytest.mark.full
def test_training_outlives_a_disk_on_which_no_file_can_be_made(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def allow_files(number: int) -> None:
        subprocess.run(["mount", "-o", f"remount,nr_inodes={number}", disk], check=True)

    usage = os.statvfs
    at_step(3, lambda: allow_files(usage(disk).f_files - usage(disk).f_ffree), monkeypatch)
    at_step(7, lambda: allow_files(1000), monkeypatch)
    monkeypatch.setattr(
        UpdateGuard, "_reason", lambda guard, *_: "a bad day" * (guard.in_a_row < 3)
    )  # recorded, if not skipped
    flags = ("--checkpoint.interval=2", "--profiling.enable_profiling", "--profiling.profile_freq=5")
    train_here(*SAVING, *flags, into(disk), "--training.steps=8", "--training.max_skips_in_a_row=100")
    output = capsys.readouterr().out
    assert "checkpoint of step 4 could not be saved" in output
    assert "iteration_5/rank0_trace.json cannot be written" in output
    assert output.count("No space left on device") >= 3
    assert list(losses(disk)) == list(range(1, 9))
    assert checkpoint_steps(disk) == [2, 8]


@pytest.mark.full
@pytest.mark.parametrize(("mode", "last"), [("disabled", 4), ("async", 6)])
def test_a_run_none_of_whose_saves_succeeds_stops_after_the_second(
    mode: str, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the background it is known when the next one is due."""

    def refuse(self: Disk, final: Path, *_: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded", str(final))

    flags = (*SAVING, "--checkpoint.interval=2", f"--checkpoint.async_mode={mode}", "--training.steps=9")
    with monkeypatch.context() as patch:
        patch.setattr(Disk, "publish", refuse)
        with pytest.raises(CheckpointError, match=r"the first 2 saves have failed .* the run stops: .*/checkpoint"):
            train_here(*flags, into(tmp_path))
    output = "".join(capfd.readouterr())
    assert output.count("could not be saved") == 2 and output.count("Training continues") == 1  # not after the second
    assert [*losses(tmp_path)][-1] == last
    assert [path.name for path in (tmp_path / "checkpoint").iterdir() if path.name.startswith("step")] == []
    train_here(*flags, into(tmp_path))
    assert checkpoint_steps(tmp_path) == [2, 4, 6, 8, 9]


QUOTA = """
import errno, os, sys, tiny
from torchtitan.errors import CheckpointError
from torchtitan.optim.skip_step import UpdateGuard
from torchtitan.run.trainer import Trainer
used_up = False

def refuse_new_files(event, arguments):
    creates = event == "os.mkdir" or (event == "open" and arguments[2] & os.O_CREAT)
    if used_up and creates and isinstance(arguments[0], str | os.PathLike) and not os.path.exists(arguments[0]):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(arguments[0]))

sys.addaudithook(refuse_new_files)
train_step = Trainer.train_step

def act(self, *arguments):
    global used_up
    used_up = 3 <= self.step < 7
    train_step(self, *arguments)

Trainer.train_step = act
UpdateGuard._reason = lambda guard, *_: "a bad day" * (guard.in_a_row < 3)  # recorded, if not skipped
"""


@pytest.mark.full
def test_training_outlives_a_quota_of_files_that_is_used_up(tmp_path: Path) -> None:
    """Test machines rarely have a kernel with quotas, so opening a new file fails as it would with one."""
    (tmp_path / "quota.py").write_text(QUOTA)
    run_folder = tmp_path / "run"
    quota = ("--experimental.custom_import=quota", "--training.steps=8", "--training.max_skips_in_a_row=100")
    flags = (*SAVING, *quota, "--checkpoint.interval=2", "--profiling.enable_profiling", "--profiling.profile_freq=5")
    with started(*flags, into(run_folder), folder=tmp_path) as run:
        status, output = run.finish()
    assert status == 0, output
    assert "checkpoint of step 4 could not be saved" in output
    assert "iteration_5/rank0_trace.json cannot be written" in output
    assert output.count("Disk quota exceeded") >= 3
    assert "Traceback" not in output
    assert list(losses(run_folder)) == list(range(1, 9))
    assert checkpoint_steps(run_folder) == [2, 8]


def test_a_dump_folder_that_is_removed_is_made_again_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    at_step(4, lambda: shutil.rmtree(folder), monkeypatch)
    train_here(*SAVING, "--checkpoint.interval=2", into(folder), "--training.steps=6")
    output = capsys.readouterr().out
    for name in ("metrics.jsonl", "sample_ids/rank_0.jsonl", "config.toml", "checkpoint"):
        assert f"{folder}/{name} was removed" in output
    assert list(losses(folder)) == [4, 5, 6]
    assert checkpoint_steps(folder) == [4, 6] and damage(folder / "checkpoint" / "step-4") == []
    assert (folder / "config.toml").exists()


def test_a_dump_folder_that_loses_its_permissions_costs_the_saves_until_it_has_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, user = tmp_path / "run", os.geteuid()
    public = Path(tempfile.mkdtemp())  # the text stays readable, which Python's library may not be
    public.chmod(0o755)
    (public / "text.jsonl").write_text(4 * (json.dumps({"text": Path(os.__file__).read_text()}) + "\n"))

    def deny() -> None:
        folder.chmod(0)
        os.seteuid(user or 65534)  # root needs no permissions

    def allow() -> None:
        os.seteuid(user)
        folder.chmod(0o755)

    at_step(3, deny, monkeypatch)
    at_step(5, allow, monkeypatch)
    data = f"--training.dataset_path={public / 'text.jsonl'}"
    try:
        train_here(*SAVING, "--checkpoint.interval=2", into(folder), "--training.steps=6", data)
    finally:
        allow()
        shutil.rmtree(public)
    output = capsys.readouterr().out
    assert "checkpoint of step 4 could not be saved (rank 0: [Errno 13] Permission denied" in output
    assert "was removed" not in output
    assert list(losses(folder)) == [1, 2, 3, 4, 5, 6]  # the files are open
    assert checkpoint_steps(folder) == [2, 6] and damage(folder / "checkpoint" / "step-6") == []


def test_a_disk_that_is_full_from_the_start_is_one_sentence(disk: Path) -> None:
    fill(disk)
    with started(*SAVING, into(disk), "--training.steps=2", processes=2) as run:
        status, output = run.finish()
    assert status == 2
    assert "No space left on device" in output
    assert output.count("Error:") == 1
    assert "Traceback" not in output


@pytest.mark.full
def test_a_killed_rank_comes_back_by_itself(whole: Whole, tmp_path: Path) -> None:
    launcher = (sys.executable, "-m", "torchtitan.launch", "--standalone", "--max-restarts=3", "train.py")
    flags = (*SAVING, "--checkpoint.interval=2", f"--training.steps={STEPS}")
    folder = tmp_path / "run"
    hold(folder, 3)
    with started(*flags, *HELD, into(folder), command=launcher, processes=2) as run:
        for step in (3, 7):
            run.wait_until(lambda step=step: last_step(folder) >= step and run.pid_of_rank(1))  # type: ignore[misc]
            pid = run.pid_of_rank(1)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            hold(folder, {3: 7, 7: STEPS}[step])
            run.wait_until(lambda pid=pid: run.pid_of_rank(1) not in (None, pid))  # type: ignore[misc]
        let_go(folder)
        status, output = run.finish()
    assert status == 0, output
    assert_whole(folder, whole)
    figures(test="restarts", killed_ranks=2, samples_lost_or_repeated=0)


# Rank 1 of the first start never comes.
HASTY = """
import os, pathlib, time, tiny
from torchtitan.launcher import signals
signals.GRACE = 1
if os.environ["RANK"] == "1" and not pathlib.Path("late").exists():
    pathlib.Path("late").touch()
    time.sleep(600)
"""


@pytest.mark.full
def test_a_rank_that_is_killed_while_the_others_wait_for_it_comes_back(tmp_path: Path) -> None:
    """torchrun ends the others with SIGTERM, which must not count as the user's."""
    (tmp_path / "hasty.py").write_text(HASTY)
    hasty = ("--experimental.custom_import=hasty", "--training.steps=2")
    with started(*SAVING, *hasty, into(tmp_path / "run"), processes=2, folder=tmp_path, PET_MAX_RESTARTS="1") as run:
        run.wait_until(lambda: listens(run.pid_of_rank(0)) and (tmp_path / "late").exists())
        pid = run.pid_of_rank(1)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        status, output = run.finish()
    assert status == 0, output
    assert "restarts left after this one: 0" in output
    assert "training finished after step 2" in output


def listens(pid: int | None) -> bool:
    """Whether a process has a handler for SIGTERM."""
    if pid is None:
        return False
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1 == 1


FOREIGN = (2, 62, 179, 230, 612, 1121, 1158)
# Each attack once, in one process or in two that save in the background; then inputs of other kinds than the above.
EVERY_ATTACK = (102, 18, 73, 173, 25, 11, 83, 30, 163, 58)
MORE_FOREIGN = (907, 15, 607, 26, 46, 1290, 543, 548, 103, 258, 240, 345, 384, 22)


@pytest.mark.full
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(FOREIGN, id="foreign inputs"),
        pytest.param(EVERY_ATTACK + MORE_FOREIGN, id="every attack, more foreign inputs"),
    ],
)
def test_random_attacks_break_no_promise(seeds: tuple[int, ...]) -> None:
    """Some of the attacks of docs/checkpoints.md."""
    command = [sys.executable, "-m", "benchmarks", "faults", "--only", *map(str, seeds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| all | {len(seeds)} | | | none |" in done.stdout
    if seeds is not FOREIGN and os.geteuid() == 0:  # who may not fill disks draws other attacks
        assert not [name for name in ATTACKS if f"| {name} | 0 |" in done.stdout]
