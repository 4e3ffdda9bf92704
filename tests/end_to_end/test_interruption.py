"""Ctrl-C, a killed process, a failing rank: a short message, and nothing is lost or left behind."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from runs import HELD, TINY, Run, checkpoint_steps, failure, hold, into, last_step, started, variables_of
from workers import PATIENCE

ENDLESS = (*TINY, "--training.steps=100000")
SAVING = (*ENDLESS, "--checkpoint.enable_checkpoint", "--checkpoint.interval=2")


def assert_interrupted(run: Run) -> None:
    status, output = run.finish()
    assert status == 130, output
    assert "Traceback" not in output
    # A busy machine may take so long to start that the run says so.
    lines = [line for line in output.splitlines() if line and "no step has finished for" not in line]
    besides_the_log = [line for line in lines if not line.startswith("20")]
    assert len(besides_the_log) <= 1, output
    assert run.pids() == []


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for the signal. (Python has one for SIGINT before it has started.)"""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py")


@pytest.mark.parametrize(
    ("processes", "command"),
    [(1, None), (2, None), pytest.param(2, TORCHRUN, marks=pytest.mark.full)],
    ids=["one process", "two", "torchrun"],
)
def test_ctrl_c_saves_and_stops(processes: int, command: tuple[str, ...] | None, tmp_path: Path) -> None:
    with started(*SAVING, "--checkpoint.interval=1000", into(tmp_path), processes=processes, command=command) as run:
        run.wait_until(lambda: last_step(tmp_path) >= 2)
        run.signal_group(signal.SIGINT)
        status, output = run.finish()
        assert run.pids() == []
    step = last_step(tmp_path)
    assert checkpoint_steps(tmp_path) == [step], output
    assert f"stopped by SIGINT after step {step}; its checkpoint is saved" in output
    assert "This run has saved no checkpoint yet" in output  # before the save
    if command is None:  # torchrun adds its own traceback
        assert status == 0
        assert "Traceback" not in output


# Both ranks are stuck in step 5, and say when the first Ctrl-C has reached them.
SLOW = """
import os, pathlib, threading, time, tiny
from torchtitan.converters import CONVERTERS, ConverterEntry
from torchtitan.launcher import monitor, signals
signals.GRACE, rank = 1000, os.environ['RANK']
def tell():
    while monitor._takers[-1].__self__._first_signal is None:
        time.sleep(0.05)
    pathlib.Path('asked' + rank).touch()
class Slow:
    steps = 0
    def convert(self, model): pass
    def post_optimizer_hook(self, models):
        self.steps += 1
        if self.steps == 5:
            threading.Thread(target=tell, daemon=True).start()
            pathlib.Path('stuck' + rank).touch()
            time.sleep(1000)
CONVERTERS.register('slow', ConverterEntry('', lambda section, target: Slow()))
"""


@pytest.mark.full
def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    slow = ("--experimental.custom_import=slow", "--model.converters=slow")
    with started(*SAVING, *slow, into(tmp_path), processes=2, folder=tmp_path) as run:
        run.wait_until(lambda: len(list(tmp_path.glob("stuck*"))) == 2)
        run.signal_group(signal.SIGINT)
        run.wait_until(lambda: "Ctrl-C again ends it at once. The checkpoint of step 4 is on disk" in run.output())
        run.wait_until(lambda: len(list(tmp_path.glob("asked*"))) == 2)
        time.sleep(1)
        run.signal_group(signal.SIGINT)
        status, output = run.finish(90)  # the grace period of the first one is longer
        assert run.pids() == []
    assert status == 130, output
    assert "Stopped by SIGINT. The checkpoint of step 4 is on disk, and the same command resumes from it." in output
    assert "Traceback" not in output


@pytest.mark.parametrize("moment", ["launcher", "imports", pytest.param("weights", marks=pytest.mark.full)])
@pytest.mark.parametrize("processes", [1, 2])
def test_stopped_while_it_starts(moment: str, processes: int, tmp_path: Path) -> None:
    hold(tmp_path / "run", 0)
    with started(*ENDLESS, *HELD, into(tmp_path / "run"), processes=processes, fresh=moment != "weights") as run:
        if moment == "launcher" or (moment == "imports" and processes == 1):  # a single process is the launcher itself
            time.sleep(0.3)
            run.wait_until(lambda: handles(run.process.pid, signal.SIGTERM))  # Python itself may take longer to start
        if moment == "imports":
            run.wait_until(lambda: processes == 1 or run.pid_of_rank(0))
            time.sleep(0.3)
        elif moment == "weights":
            run.wait_until(lambda: "batch  " in run.output())
        run.signal_group(signal.SIGINT)
        assert_interrupted(run)


@pytest.mark.full
def test_stopped_while_the_launcher_starts_its_processes(tmp_path: Path) -> None:
    """All of them, also one that it does not know of yet."""
    hold(tmp_path / "run", 0)
    with started(*ENDLESS, *HELD, into(tmp_path / "run"), processes=8, fresh=True) as run:
        run.wait_until(lambda: run.pid_of_rank(0))
        run.signal_group(signal.SIGINT)
        assert_interrupted(run)


@pytest.mark.full
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with started(*ENDLESS, into(tmp_path), processes=2, TMPDIR=str(temporary)) as run:
        run.wait_until(lambda: last_step(tmp_path) >= 2)
        pid = run.pid_of_rank(1)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        status, output = run.finish()
        assert run.pids() == []
    assert not list(temporary.glob("torchelastic_*"))
    assert status == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in output


@pytest.mark.full
@pytest.mark.parametrize(
    ("raised", "expected_status", "expected"),
    [
        pytest.param(
            *("ArithmeticError('no good')", 1, ["[rank 1] Traceback (most", "[rank 1] ArithmeticError: no good"]),
            marks=pytest.mark.full,
        ),
        # usually the same on every rank, so normally only rank 0 prints it
        ("ConfigError('no good')", 2, ["[rank 1] Error: no good"]),
    ],
    ids=["crash", "mistake"],
)
def test_an_error_of_any_rank_reaches_the_screen(
    raised: str, expected_status: int, expected: list[str], tmp_path: Path
) -> None:
    (tmp_path / "faulty.py").write_text(
        "import os, tiny\n"
        "from torchtitan.converters import CONVERTERS, ConverterEntry\n"
        "from torchtitan.errors import ConfigError\n"
        "class Faulty:\n"
        "    def convert(self, model):\n"
        "        pass\n"
        "    def post_optimizer_hook(self, models):\n"
        "        if os.environ['RANK'] == '1':\n"
        f"            raise {raised}\n"
        "CONVERTERS.register('faulty', ConverterEntry('', lambda section, target: Faulty()))\n"
    )
    faulty = ("--experimental.custom_import=faulty", "--model.converters=faulty")
    status, output = failure(*ENDLESS, *faulty, into(tmp_path), processes=2, folder=tmp_path)
    assert status == expected_status
    assert all(line in output for line in expected), output


def assert_none_left(run: Run) -> None:
    deadline = time.monotonic() + PATIENCE
    while run.pids():
        assert time.monotonic() < deadline, "processes outlive the launcher"
        time.sleep(0.02)


def test_processes_do_not_outlive_the_launcher(tmp_path: Path) -> None:
    # Otherwise the same command, started again, would train in the folder they still use.
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with started(*ENDLESS, into(tmp_path), processes=2, TMPDIR=str(temporary)) as run:
        run.wait_until(lambda: last_step(tmp_path) >= 2)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        assert_none_left(run)
    assert not list(temporary.glob("torchelastic_*"))


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_where_the_launcher_ends_while_it_starts_them(number: int, tmp_path: Path) -> None:
    with started(*ENDLESS, into(tmp_path), processes=2, fresh=True) as run:
        while not any("RANK=0" in variables_of(pid) for pid in children_of(run.process.pid)):
            assert run.process.poll() is None
        run.process.send_signal(number)
        assert run.process.wait(PATIENCE) == (0 if number == signal.SIGTERM else -number), run.output()
        assert_none_left(run)
        assert not any(word in run.output() for word in ("Traceback", "Error")), run.output()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
