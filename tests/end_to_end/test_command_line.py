"""The ways to start a run, and whether a run learns."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT, TINY, into, losses, python, train, train_here
from workers import once

from torchtitan.container import available_cores

DEBUG_MODEL = f"--job.config_file={ROOT}/train_configs/debug_model.toml"
STEPS = 20
SHORT = ("--training.seq_len=64", "--training.local_batch_size=4", f"--training.steps={STEPS}", "--metrics.log_freq=1")


def test_run_train_from_any_folder(tmp_path: Path) -> None:
    output = train(
        *TINY,
        "--training.steps=2",
        command=[str(ROOT / "run_train.sh")],
        folder=tmp_path,
        PYTHON=sys.executable,
    )
    assert "layout       one process" in output
    assert "Llama debug model" in output  # of train_configs/debug_model.toml
    assert list(losses(tmp_path / "outputs")) == [1, 2]


@pytest.mark.full
@pytest.mark.parametrize("option", ["--nproc-per-node=2", "PET_NPROC_PER_NODE=2"])
def test_the_ranks_that_torchruns_option_asks_for_share_the_cores(option: str, tmp_path: Path) -> None:
    script = tmp_path / "threads.py"
    script.write_text("import os; os.write(1, f'threads {os.environ[\"OMP_NUM_THREADS\"]}\\n'.encode())")
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "NGPU")}
    launch = [sys.executable, "-m", "torchtitan.launch"]
    if option.startswith("PET"):
        environment |= dict([option.split("=")])
    else:
        launch.append(option)
    done = subprocess.run([*launch, str(script)], env=environment, capture_output=True, text=True)
    assert done.stdout.count(f"threads {max(1, available_cores() // 2)}\n") == 2
    mistake = python("-m", "torchtitan.launch", "--nproc-per-node=many", str(script))
    assert (mistake.returncode, mistake.stderr) == (2, "Error: Unsupported nproc_per_node value: many\n")


@pytest.mark.parametrize("launcher", [(), ("--nproc-per-node=2",)])
@pytest.mark.parametrize("program", ["trian.py", "-m torchtitan.trainer", "-m torchtitan.launch.train"])
def test_a_program_that_does_not_exist(launcher: tuple[str, ...], program: str) -> None:
    done = python("-m", "torchtitan.launch", *launcher, *program.split(), "--training.steps=1")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert program.split()[-1] in done.stderr and "-m torchtitan.train" in done.stderr


@pytest.mark.full
def test_the_saved_configuration_is_the_same_run(tmp_path: Path) -> None:
    train(*TINY, "--training.steps=3", "--training.seed=7", into(tmp_path / "first"), processes=None)
    train_here(f"--job.config_file={tmp_path}/first/config.toml", into(tmp_path / "again"))
    assert losses(tmp_path / "again") == pytest.approx(losses(tmp_path / "first"), abs=1e-5)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the debug model in bfloat16, which one of pytest's workers trains for all."""
    folder = tmp_path_factory.mktemp("learned")

    def train_it() -> dict[int, float]:
        train(DEBUG_MODEL, *SHORT, into(folder))
        return losses(folder)

    return once(tmp_path_factory, "learned", train_it)


def test_the_debug_model_learns(learned: dict[int, float]) -> None:
    assert learned[1] == pytest.approx(math.log(4096), abs=0.15)  # untrained
    assert learned[STEPS] < learned[1] - 1  # about 1.9


@pytest.mark.full
def test_float8_ends_within_two_percent_of_bfloat16(learned: dict[int, float], tmp_path: Path) -> None:
    train(DEBUG_MODEL, *SHORT, "--model.converters=float8", into(tmp_path))
    assert losses(tmp_path)[STEPS] == pytest.approx(learned[STEPS], rel=0.02)  # they are up to 0.3% apart
