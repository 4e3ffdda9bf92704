"""Two runs cannot write to the same folder; a dead run blocks nobody."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from clock import Clock
from runs import TINY, into, train_here

from torchtitan.errors import ConfigError
from torchtitan.launcher import folder_lock
from torchtitan.launcher.folder_lock import FolderLock

HOLDER = """
import sys, time
from pathlib import Path
from torchtitan.launcher import folder_lock
folder_lock.TOUCH_INTERVAL = 0.05
with folder_lock.FolderLock(Path(sys.argv[1])) as mine:
    mine.take()
    print("taken", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """For who waits for a lock, time passes only while it waits: a busy machine neither ends nor extends its wait."""
    monkeypatch.setattr(folder_lock, "TOUCH_INTERVAL", 0.05)
    monkeypatch.setattr(folder_lock, "LOCK_SILENCE", 0.5)
    monkeypatch.setattr(folder_lock, "HOLDER_PATIENCE", 0.2)
    clock = Clock()
    monkeypatch.setattr(folder_lock, "time", clock)
    return clock


def take(folder: Path, clock: Clock) -> float:
    """Seconds until the lock was acquired."""
    started = clock.now
    with FolderLock(folder) as mine:
        mine.take()
        assert json.loads((folder / ".lock").read_text())["name"].startswith(f"process {os.getpid()} on ")
    return clock.now - started


def left_by_another_machine(folder: Path, launcher: list[str] | None = None) -> None:
    content = {"id": "theirs", "name": "process 7 on node7", "kernel": "theirs", "launcher": launcher}
    file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    os.pwrite(file, json.dumps(content).encode().ljust(1000), 0)  # at once: a holder claims an empty file again
    os.close(file)


def test_a_lock_is_released_though_its_thread_has_ended_first(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as mine:
        mine.take()
        mine._stop.set()
        mine._thread.join()
    assert (tmp_path / ".lock").read_text() == ""


def test_a_second_run_is_refused_until_the_first_has_ended_or_was_killed(tmp_path: Path, clock: Clock) -> None:
    with another_process(tmp_path) as first:
        with pytest.raises(ConfigError, match=rf"job\.dump_folder: another run \(process {first.pid} on .*stop it"):
            take(tmp_path, clock)
        assert first.stdin is not None
        first.stdin.close()
        assert first.wait() == 0
        assert (tmp_path / ".lock").read_text() == ""
    with another_process(tmp_path) as first:
        first.kill()
        first.wait()
        assert take(tmp_path, clock) < 0.2


def test_one_that_is_about_to_end_is_waited_for(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "HOLDER_PATIENCE", 30)
    with another_process(tmp_path) as first:

        def ends() -> None:
            if clock.now > 0.25:
                first.kill()
                first.wait()

        clock.meanwhile = ends
        assert take(tmp_path, clock) == pytest.approx(0.3)


def test_on_another_machine_what_counts_is_a_sign_of_life(tmp_path: Path, clock: Clock, log: list[str]) -> None:
    left_by_another_machine(tmp_path)
    assert folder_lock.LOCK_SILENCE < take(tmp_path, clock) < 0.7
    assert "process 7 on node7 has not released its lock" in log[0]
    assert take(tmp_path, clock) == 0  # the last one has
    left_by_another_machine(tmp_path)
    clock.now, clock.meanwhile = 0.0, lambda: clock.now > 0.15 and os.utime(tmp_path / ".lock", (1, 1))
    with pytest.raises(ConfigError, match="process 7 on node7"):
        take(tmp_path, clock)


def test_restarts_by_the_same_launcher_do_not_wait(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "run1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    left_by_another_machine(tmp_path, ["run1", "node0", "29500"])
    assert take(tmp_path, clock) == 0
    left_by_another_machine(tmp_path, ["run1", "node0", "29501"])
    assert take(tmp_path, clock) > folder_lock.LOCK_SILENCE
    monkeypatch.setenv("MASTER_ADDR", "localhost")  # which every machine is
    left_by_another_machine(tmp_path, ["run1", "localhost", "29500"])
    assert take(tmp_path, clock) > folder_lock.LOCK_SILENCE


def test_without_locks_in_the_file_system_signs_of_life_decide_alone(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    assert take(tmp_path, clock) == 0
    with another_process(tmp_path) as first:
        file = tmp_path / ".lock"

        def touches() -> None:
            before, deadline = file.stat().st_mtime_ns, time.monotonic() + 120
            while file.stat().st_mtime_ns == before:
                assert time.monotonic() < deadline
                time.sleep(0.01)

        clock.meanwhile = touches
        with pytest.raises(ConfigError, match=f"process {first.pid}"):
            take(tmp_path, clock)
        assert clock.now < 0.15  # with the first sign of life
        first.kill()
        first.wait()
        clock.meanwhile = lambda: None
        assert take(tmp_path, clock) > folder_lock.LOCK_SILENCE


def test_a_folder_that_is_removed_is_locked_again(tmp_path: Path, clock: Clock) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with another_process(folder):
        # Where the holder made its file again in mid-removal, the folder could not be removed.
        shutil.rmtree(folder.rename(tmp_path / "removed"))
        while not (folder / ".lock").exists() or not (folder / ".lock").read_text():
            time.sleep(0.01)
        with pytest.raises(ConfigError, match="another run"):
            take(folder, clock)


def test_a_run_whose_folder_was_taken_over_ends(tmp_path: Path) -> None:
    """For example after a long stop, during which it gave no sign of life to another machine."""
    with another_process(tmp_path) as first:
        left_by_another_machine(tmp_path)
        assert first.wait() == 2
        assert first.stderr is not None
        assert first.stderr.read().startswith("Error: job.dump_folder: another run (process 7 on node7) is writing to")


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"job\.dump_folder: .*\.lock cannot be written \(Not a directory"):
        take(tmp_path / "file" / "folder", clock)


@pytest.mark.full
def test_runs_with_other_dump_folders_do_not_share_a_checkpoint_folder(tmp_path: Path) -> None:
    shared, steps = tmp_path / "shared", ("--training.steps=2", "--checkpoint.enable_checkpoint")
    flags = (*TINY, into(tmp_path / "mine"), f"--checkpoint.folder={shared}", *steps)
    shared.mkdir()
    with (
        another_process(shared),
        pytest.raises(ConfigError, match=r"checkpoint\.folder: another run .*--checkpoint\.f"),
    ):
        train_here(*flags)
    assert [path.name for path in shared.iterdir()] == [".lock"]
    train_here(*flags)
    assert (shared / "step-2").is_dir()
    train_here(*flags, "--training.steps=3")  # the lock is released, and in the way of nothing
    assert (shared / "step-3").is_dir()
