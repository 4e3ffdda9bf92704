"""SIGTERM and SIGUSR1, whenever they come: all ranks save the same step and end well, and the next start goes on."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from runs import PATIENCE, TINY, Run, checkpoint_steps, into, last_step, losses, started, train

from torchtitan.checkpoint.manifest import damage

ENDLESS = (*TINY, "--training.steps=100000", "--checkpoint.enable_checkpoint", "--checkpoint.interval=1000000")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py")


def assert_saved(run: Run, folder: Path, name: str) -> int:
    """It ended well, and everything that was done is saved. Returns the step."""
    status, output = run.finish()
    assert status == 0, output
    assert "Traceback" not in output
    assert run.pids() == []
    step = last_step(folder)
    assert checkpoint_steps(folder)[-1] == step
    assert damage(folder / "checkpoint" / f"step-{step}") == []
    assert f"stopped by {name} after step {step}, which is saved: the same command goes on from there" in output
    return step


def assert_goes_on(folder: Path, step: int, processes: int | None) -> None:
    train(*ENDLESS, into(folder), f"--training.steps={step + 2}", processes=processes)
    assert list(losses(folder)) == list(range(1, step + 3))


@pytest.mark.parametrize("processes", [pytest.param(None, marks=pytest.mark.full), 2], ids=["one process", "two"])
def test_sigterm_during_training(processes: int | None, tmp_path: Path) -> None:
    with started(*ENDLESS, into(tmp_path), processes=processes) as run:
        run.wait_until(lambda: last_step(tmp_path) >= 2)
        run.signal_group(signal.SIGTERM)
        step = assert_saved(run, tmp_path, "SIGTERM")
    assert_goes_on(tmp_path, step, processes)


LAYOUTS = {
    "FSDP": (2, ()),
    "TP x PP": (4, ("--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2")),
}


@pytest.mark.parametrize("layout", ["FSDP", pytest.param("TP x PP", marks=pytest.mark.full)])
def test_a_signal_to_one_rank_is_for_all(layout: str, tmp_path: Path) -> None:
    processes, flags = LAYOUTS[layout]
    with started(*ENDLESS, *flags, into(tmp_path), processes=processes) as run:
        run.wait_until(lambda: last_step(tmp_path) >= 2)
        pid = run.pid_of_rank(1)
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        assert_saved(run, tmp_path, "SIGUSR1")


def test_sigusr1_to_the_launcher_while_validating(tmp_path: Path) -> None:
    validating = ("--validation.enabled", "--validation.freq=2", "--validation.steps=100")
    with started(*ENDLESS, *validating, into(tmp_path), processes=2) as run:
        run.wait_until(lambda: last_step(tmp_path) >= 2)
        run.signal_group(signal.SIGUSR1)
        assert assert_saved(run, tmp_path, "SIGUSR1") <= 4


@pytest.mark.parametrize("mode", [pytest.param("disabled", marks=pytest.mark.full), "async"])
def test_signals_while_saving_do_no_harm(mode: str, tmp_path: Path) -> None:
    saving = ("--checkpoint.interval=1", f"--checkpoint.async_mode={mode}")
    with started(*ENDLESS, *saving, into(tmp_path), processes=2) as run:
        run.wait_until(lambda: last_step(tmp_path) >= 3 and list((tmp_path / "checkpoint").glob("*.tmp")))
        for _ in range(20):
            run.signal_group(signal.SIGTERM)
            time.sleep(0.01)
        assert_saved(run, tmp_path, "SIGTERM")
    assert not list((tmp_path / "checkpoint").glob("*.tmp"))


@pytest.mark.parametrize("moment", ["launcher", pytest.param("imports", marks=pytest.mark.full), "weights"])
def test_before_the_first_step_there_is_nothing_to_save(moment: str, tmp_path: Path) -> None:
    with started(*ENDLESS, into(tmp_path), processes=2) as run:
        if moment == "launcher":
            time.sleep(0.3)
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
def test_during_compilation(tmp_path: Path) -> None:
    with started(*ENDLESS, "--training.compile", into(tmp_path), processes=2) as run:
        run.wait_until(lambda: "MFU counts" in run.output())
        time.sleep(1)
        run.signal_group(signal.SIGTERM)
        status, output = run.finish()
        assert status == 0, output
        assert "Traceback" not in output


def test_torchrun_gives_half_a_minute(tmp_path: Path) -> None:
    with started(*ENDLESS, into(tmp_path), command=TORCHRUN) as run:
        run.wait_until(lambda: last_step(tmp_path) >= 2)
        os.kill(run.process.pid, signal.SIGTERM)
        _, output = run.finish(PATIENCE)  # torchrun's own status is that of its signal
    step = last_step(tmp_path)
    assert f"stopped by SIGTERM after step {step}, which is saved" in output
    assert checkpoint_steps(tmp_path) == [step]
    assert damage(tmp_path / "checkpoint" / f"step-{step}") == []
