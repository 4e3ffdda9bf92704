"""scripts/search_precision.py, as a user starts it: what it writes, that a run accepts it, and wrong input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import ROOT, TINY, python

# A configuration without the tables that the search writes, so that its fragment can be pasted at the end.
CONFIG = "[training]\nseed = 1\n"
FLAGS = (*TINY, "--training.mixed_precision_param=bfloat16")


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SCRIPT = ROOT / "scripts" / "search_precision.py"


def search(folder: Path, *flags: str, budget: str = "100%") -> subprocess.CompletedProcess[str]:
    (folder / "run.toml").write_text(CONFIG)
    short = ("--steps", "2", "--seeds", "2", "--output", folder / "found_1.0")
    return python(SCRIPT, folder / "run.toml", "--budget", budget, *short, *FLAGS, *flags)


def test_a_run_accepts_what_the_search_writes(tmp_path: Path) -> None:
    done = search(tmp_path, "--gemms-only")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found_1.0.json").read_text())
    assert set(found["assignment"].values()) != {"bf16"} and "measured" in done.stdout
    assert found["time_of_linear_layers"] < 1 and found["predicted_percent"] > 0
    assert found["layers"]["output"]["int8 rowwise"]["errors"]["grad_input"]["flushed"] > 0.5
    assert (tmp_path / "found_1.0.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "low.toml").write_text(CONFIG + (tmp_path / "found_1.0.toml").read_text())
    run = python(
        ROOT / "train.py",
        f"--job.config_file={tmp_path / 'low.toml'}",
        f"--job.dump_folder={tmp_path}",
        "--training.steps=2",
        *FLAGS,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads((tmp_path / "conversion.json").read_text())
    converted = {one["fqn"]: f"{one['converter']} {one['recipe']}" if one["converted"] else "bf16" for one in report}
    assert converted == found["assignment"]


@pytest.mark.full
def test_a_budget_of_zero_leaves_all_layers_in_bf16(tmp_path: Path) -> None:
    done = search(tmp_path, "--gemms-only", budget="0")
    assert done.returncode == 0, done.stderr
    assert "no layer is converted: the budget allows none" in done.stdout
    assert set(json.loads((tmp_path / "found_1.0.json").read_text())["assignment"].values()) == {"bf16"}
    assert (tmp_path / "found_1.0.toml").read_text().split() == ["[model]", "converters", "=", "[]"]


def test_ctrl_c_ends_it_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "run.toml").write_text(CONFIG)
    command = [sys.executable, SCRIPT, tmp_path / "run.toml", "--budget=1%", "--steps=100000", *FLAGS]
    log = (tmp_path / "log").open("w+")
    with subprocess.Popen(
        [*command, f"--output={tmp_path / 'found'}"],
        env={**ENVIRONMENT, "TMPDIR": str(temporary)},
        stdout=log,
        stderr=log,
    ) as process:
        try:
            deadline = time.monotonic() + 120
            while not any(file.stat().st_size for file in temporary.glob("*/*/metrics.jsonl")):
                assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
        finally:
            process.kill()
    printed = (tmp_path / "log").read_text().splitlines()
    assert printed[-1] == "Stopped by SIGINT. Nothing is written; the same command starts again."
    assert "Traceback" not in "".join(printed)
    assert list(temporary.iterdir()) == [] and list(tmp_path.glob("found*")) == []


@pytest.mark.parametrize(
    ("flag", "budget", "problem"),
    [
        ("--training.sed=3", "1%", "training.sed"),
        ("--int8.filter_fqns=atention.wq", "1%", "'atention.wq' matches no module of this model"),
        ("--training.seed=3", "little", "--budget: 'little' is not a percentage of the loss, such as 0.5%."),
    ],
)
def test_wrong_input_ends_it_with_one_sentence(tmp_path: Path, flag: str, budget: str, problem: str) -> None:
    done = search(tmp_path, flag, budget=budget)
    assert done.returncode == 2
    assert problem in done.stderr and "Traceback" not in done.stderr
