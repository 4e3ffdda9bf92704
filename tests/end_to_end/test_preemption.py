"""SIGTERM and SIGUSR1 at any time: all ranks save the same step and exit cleanly, and the next start resumes."""

import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from runs import (
    TINY,
    Run,
    checkpoint_steps,
    failure,
    into,
    last_step,
    lines_of,
    losses,
    started,
    takes,
    train,
    train_here,
)
from workers import PATIENCE

from torchtitan.checkpoint.manifest import damage
from torchtitan.errors import ConfigError
from torchtitan.launcher import folder_lock

ENDLESS = (*TINY, "--training.steps=100000", "--checkpoint.enable_checkpoint", "--checkpoint.interval=1000000")
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
    "-m",
    "torchtitan.train",
)


def assert_saved(run: Run, folder: Path, name: str) -> int:
    """The run exited cleanly, and all completed steps are saved. Returns the step."""
    status, output = run.finish()
    assert status == 0, output
    assert "Traceback" not in output
    assert run.pids() == []
    step = last_step(folder)
    assert checkpoint_steps(folder)[-1] == step
    assert damage(folder / "checkpoint" / f"step-{step}") == []
    assert (
        f"stopped by {name} after step {step}; its checkpoint is saved, and the same command resumes from it" in output
    )
    return step


def assert_goes_on(folder: Path, step: int, processes: int | None) -> None:
    train(*ENDLESS, into(folder), f"--training.steps={step + 2}", processes=processes)
    assert list(losses(folder)) == list(range(1, step + 3))


@pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.full)], ids=["one process", "two"])
def test_sigterm_during_training(processes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (sys.executable, *(("-m", "torchtitan.launch") if processes else ()), "train.py")
    stopped = tmp_path / "stopped"
    command = ("nohup", *program)
    with started(
        *ENDLESS, into(tmp_path), command=command, processes=processes, TORCHTITAN_STOPPED=str(stopped)
    ) as run:
        run.wait_until(lambda: last_step(tmp_path) >= 2)
        run.signal_group(signal.SIGHUP)
        step = last_step(tmp_path)
        run.wait_until(lambda: last_step(tmp_path) > step + 2)
        monkeypatch.setattr(folder_lock, "HOLDER_PATIENCE", 0)
        with pytest.raises(ConfigError, match=r"job\.dump_folder: another run"):  # and the first run continues
            train_here(*ENDLESS, into(tmp_path), "--training.steps=3")
        run.signal_group(signal.SIGTERM)
        step = assert_saved(run, tmp_path, "SIGTERM")
    assert stopped.read_text() == f"{step}\n"
    assert_goes_on(tmp_path, step, processes)


@pytest.mark.full
def test_a_reader_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    piped = 'exec > >(head -n 3 > /dev/null) 2>&1; exec "$0" -m torchtitan.launch train.py "$@"'
    with started(*ENDLESS, into(tmp_path), command=("bash", "-c", piped, sys.executable)) as run:
        run.wait_until(lambda: last_step(tmp_path) >= 2)
        run.process.terminate()
        assert run.process.wait(PATIENCE) == 0
    step = last_step(tmp_path)
    assert checkpoint_steps(tmp_path) == [step]
    assert damage(tmp_path / "checkpoint" / f"step-{step}") == []


@pytest.mark.full
def test_a_second_run_of_two_ranks_is_one_sentence(tmp_path: Path) -> None:
    with started(*ENDLESS, into(tmp_path)) as run:
        run.wait_until(lambda: last_step(tmp_path) >= 2)
        status, output = failure(*ENDLESS, into(tmp_path), processes=2)
        assert status == 2
        assert output.count("Error:") == 1
        assert "another run" in output and "Traceback" not in output
        step = last_step(tmp_path)
        run.wait_until(lambda: last_step(tmp_path) > step)


LAYOUTS = {
    "FSDP": (2, ()),
    "TP x PP": (4, ("--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2")),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", ["FSDP", pytest.param("TP x PP", marks=pytest.mark.full)])
def test_a_signal_to_one_rank_is_for_all(layout: str, tmp_path: Path) -> None:
    processes, flags = LAYOUTS[layout]
    with started(*ENDLESS, *flags, into(tmp_path), processes=processes) as run:
        run.wait_until(lambda: last_step(tmp_path) >= 2)
        pid = run.pid_of_rank(1)
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        assert_saved(run, tmp_path, "SIGUSR1")


@pytest.mark.full
def test_sigusr1_to_the_launcher_while_validating(tmp_path: Path) -> None:
    validating = ("--validation.enabled", "--validation.freq=2", "--validation.steps=1000000")  # hours
    with started(*ENDLESS, *validating, into(tmp_path), processes=2) as run:
        run.wait_until(lambda: last_step(tmp_path) >= 2)
        run.signal_group(signal.SIGUSR1)
        assert assert_saved(run, tmp_path, "SIGUSR1") <= 4


@pytest.mark.full
def test_what_a_signal_cuts_off_after_the_last_step_is_done_by_the_next_start(tmp_path: Path) -> None:
    flags = (
        *(*ENDLESS, "--training.steps=3", "--validation.enabled", "--validation.sample_prompts=def f(", into(tmp_path)),
        *("--evaluation.tasks=held_out", "--evaluation.limit=2"),
    )
    with started(*flags, "--validation.steps=1000000") as run:  # hours
        run.wait_until(lambda: last_step(tmp_path) >= 3)
        run.signal_group(signal.SIGTERM)
        assert assert_saved(run, tmp_path, "SIGTERM") == 3
        assert "with what is left to evaluate" in run.output() and "training finished" not in run.output()
    assert "training finished after step 3" in train(*flags, "--validation.steps=2")
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    for key in ("validation_loss", "held_out/bits_per_byte"):
        assert [line["step"] for line in lines if key in line] == [3]
    assert [line["step"] for line in lines_of(tmp_path / "samples.jsonl")] == [3]
    assert "already finished its 3 steps" in train(*flags, "--validation.steps=2")


@pytest.mark.full
@pytest.mark.parametrize("mode", [pytest.param("disabled", marks=pytest.mark.full), "async"])
def test_signals_while_saving_do_no_harm(mode: str, tmp_path: Path) -> None:
    saving = ("--checkpoint.interval=1", f"--checkpoint.async_mode={mode}")
    with started(*ENDLESS, *saving, into(tmp_path), processes=2) as run:
        run.wait_until(lambda: last_step(tmp_path) >= 3 and list((tmp_path / "checkpoint").glob("*.tmp")))
        while run.process.poll() is None:  # until the very end
            with suppress(ProcessLookupError):
                run.signal_group(signal.SIGTERM)
                for pid in filter(None, (run.pid_of_rank(0), run.pid_of_rank(1))):
                    os.kill(pid, signal.SIGTERM)
            time.sleep(0.01)
        assert_saved(run, tmp_path, "SIGTERM")
    assert not list((tmp_path / "checkpoint").glob("*.tmp"))


@pytest.mark.full
@pytest.mark.parametrize("moment", ["launcher", pytest.param("imports", marks=pytest.mark.full), "weights"])
def test_before_the_first_step_there_is_nothing_to_save(moment: str, tmp_path: Path) -> None:
    with started(*ENDLESS, into(tmp_path), processes=2, fresh=moment != "weights") as run:
        if moment == "launcher":
            run.wait_until(lambda: takes(run.process.pid, signal.SIGTERM))
        elif moment == "imports":
            run.wait_until(lambda: run.pid_of_rank(1))
            time.sleep(0.3)
        else:
            run.wait_until(lambda: "batch  " in run.output())
        run.signal_group(signal.SIGTERM)
        status, output = run.finish()
        assert status == 0, output
        assert "Traceback" not in output
        assert "stopped by SIGTERM" in output.replace("Stopped", "stopped")
        assert run.pids() == []
    assert checkpoint_steps(tmp_path) == [last_step(tmp_path)] * (last_step(tmp_path) > 0)


@pytest.mark.full
@pytest.mark.parametrize("to_all", [True, False], ids=["to all", "to one rank"])
def test_during_compilation(to_all: bool, tmp_path: Path) -> None:
    # Compiling takes longer than the grace period, as nothing is compiled yet.
    cache = tmp_path / "cache"
    (tmp_path / "cold.py").write_text(f"import os, tiny\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = {str(cache)!r}\n")
    cold = ("--training.compile", "--experimental.custom_import=cold")
    with started(*ENDLESS, *cold, into(tmp_path / "run"), processes=2, folder=tmp_path) as run:
        run.wait_until(lambda: "MFU counts" in run.output() and cache.exists())
        if to_all:
            run.signal_group(signal.SIGTERM)
        else:
            pid = run.pid_of_rank(1)
            assert pid is not None
            os.kill(pid, signal.SIGTERM)
        status, output = run.finish()
        assert status == 0, output
        assert "Traceback" not in output
        deadline = time.monotonic() + PATIENCE
        while run.pids():  # compiler processes
            assert time.monotonic() < deadline
            time.sleep(0.1)


DEAF = """
import time, tiny
from torchtitan.converters import CONVERTERS, ConverterEntry
from torchtitan.launcher import signals
from torchtitan.parallel.heartbeat import Heartbeat
signals.GRACE = 1
Heartbeat._forward_stop_request = lambda self: None
class Slow:
    def convert(self, model):
        print('converting', flush=True)
        time.sleep(600)
CONVERTERS.register('slow', ConverterEntry('', lambda section, target: Slow()))
"""


@pytest.mark.full
def test_a_rank_that_gives_up_ends_the_others_even_if_heartbeats_fail(tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    deaf = ("--experimental.custom_import=deaf", "--model.converters=slow")
    with started(*ENDLESS, *deaf, into(tmp_path), processes=2, folder=tmp_path) as run:
        run.wait_until(lambda: run.output().count("converting") == 2)
        os.kill(run.pid_of_rank(1) or 0, signal.SIGTERM)
        status, output = run.finish()
        assert status == 0, output
        assert "Stopped by SIGTERM before the first step finished" in output
        assert "Traceback" not in output


STUCK = """
import os, tiny, torch
from torchtitan.launcher import signals
from torchtitan.converters import CONVERTERS, ConverterEntry
from torchtitan.run import watchdog
signals.GRACE, watchdog.FIRST = 2, 1
class Stuck:
    steps = 0
    def convert(self, model): pass
    def post_optimizer_hook(self, models):
        self.steps += 1
        if os.environ['RANK'] == '1' and self.steps == 3:
            numbers = torch.ones(4000, 4000, dtype=torch.int64)
            torch.linalg.matrix_power(numbers, 1 << 40)  # minutes, since there is no fast kernel
CONVERTERS.register('stuck', ConverterEntry('', lambda section, target: Stuck()))
"""


@pytest.mark.full
def test_a_rank_inside_a_long_gemm_is_shown_and_ends_within_the_grace_period(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    stuck = ("--experimental.custom_import=stuck", "--model.converters=stuck")
    with started(*ENDLESS, *stuck, into(tmp_path), processes=2, folder=tmp_path) as run:
        # The other rank may come to its collective later.
        run.wait_until(lambda: re.search("Rank 1: at .*matrix_power.*Rank 0: at .*in a collective", run.output()))
        pid = run.pid_of_rank(1) or 0
        os.kill(pid, signal.SIGUSR2)
        run.wait_until(lambda: "stuck.py" in run.output().partition("most recent call first")[2])
        os.kill(pid, signal.SIGTERM)  # the other rank learns of it although they do not communicate
        status, output = run.finish(90)  # a collective would end after 100 s
        assert run.pids() == []
    assert "stuck.py:14, in post_optimizer_hook (`torch.linalg.matrix_power(numbers" in output
    assert f"(rank 1: {pid} on " in output
    assert status == 128 + signal.SIGTERM
    assert "Stopped by SIGTERM during a step that does not end, so nothing is saved." in output
    assert "Traceback" not in output
