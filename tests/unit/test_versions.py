"""A torch or torchao older than supported, the script that tests other versions, and quick imports."""

import gc
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from threading import Event

import pytest
from runs import ROOT, failure

import torchtitan
from torchtitan.launcher.imports import OLDEST_VERSIONS, quick_imports


def test_the_version_is_the_last_release_of_the_changelog() -> None:
    releases = re.findall(r"^## (?!Unreleased)(\S+) - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert releases[0] == torchtitan.__version__


def test_what_is_promised_is_what_is_refused() -> None:
    dependencies = (ROOT / "pyproject.toml").read_text()
    for name, least in OLDEST_VERSIONS.items():
        assert re.search(rf'"{name}>=([\d.]+)"', dependencies)[1] == ".".join(map(str, least))  # type: ignore[index]


@pytest.mark.parametrize("processes", [None, 1, 2])
@pytest.mark.parametrize(("name", "old"), [("torch", "2.10.1+cpu"), ("torchao", "0.9.0")])
def test_an_older_one_is_one_sentence(name: str, old: str, processes: int | None, tmp_path: Path) -> None:
    installed = tmp_path / f"{name}-{old}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {old}\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    status, output = failure("--model.name=none", processes=processes, folder=tmp_path, PYTHONPATH=path)
    least = ".".join(map(str, OLDEST_VERSIONS[name]))
    assert status == 2
    assert (
        output
        == f"Error: {name} {least} or later is required, but {old} is installed; run pip install '{name}>={least}'.\n"
    )


@pytest.mark.parametrize(
    ("pair", "status", "message"),
    [
        ("3.12", 2, "Error: 3.12 is not PYTHON:TORCH, such as 3.12:2.11, 3.12:newest or 3.12:lowest."),
        ("3.99:2.11", 1, "Python 3.99 not found"),
    ],
)
def test_the_script_says_what_it_cannot_try(pair: str, status: int, message: str, tmp_path: Path) -> None:
    environment = {**os.environ, "ENVIRONMENTS": str(tmp_path)}
    done = subprocess.run(
        [ROOT / "scripts" / "check_versions.sh", pair], env=environment, capture_output=True, text=True
    )
    assert done.returncode == status
    assert message in done.stderr
    assert "Python 3.99" not in message or "| 3.99 | 2.11 | not installed |" in done.stdout


@pytest.mark.parametrize(
    ("name", "old", "extra", "message"),
    [
        ("torch", "2.10.1", "", "torch>=2.11\n"),
        ("torch", "2.11.0a0+vendor", "", "\n"),  # as in a vendor's container
        ("plotly", "5.24.0", "", "\n"),
        ("plotly", "5.24.0", "report", "plotly>=6.0\n"),
        ("plotly", "5.24.0", "dev", "plotly>=6.0\n"),  # the extra dev contains the extra report
    ],
)
def test_what_an_environment_lacks(name: str, old: str, extra: str, message: str, tmp_path: Path) -> None:
    installed = tmp_path / f"{name}-{old}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {old}\n")
    command = [sys.executable, "scripts/missing.py", *extra.split()]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, message), done.stderr


def test_a_second_run_in_a_process_does_not_keep_the_first_for_good() -> None:
    with quick_imports():
        pass
    run = Event()  # stands for it: an object in a cycle
    run.cycle = run  # type: ignore[attr-defined]
    gone = weakref.ref(run)
    del run
    with quick_imports():
        pass
    gc.collect()
    assert gone() is None
