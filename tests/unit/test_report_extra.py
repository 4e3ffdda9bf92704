"""Without the extra `report`: what needs its packages ends with one sentence, and a run goes on without them."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT, TINY, into, train

from torchtitan.errors import UserError, install
from torchtitan.metrics.writers import TensorBoardWriter
from torchtitan.tools.report.page import write_at_end

PACKAGES = ("jinja2", "matplotlib", "plotly", "scipy", "tensorboard")
REMEDY = f"which is not installed: {install('report')}."


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH in which these packages cannot be imported."""
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('hidden', name={name!r})\n")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("-m torchtitan.tools.report {run}", "A report (python -m torchtitan.tools.report) needs plotly"),
        (
            "-m torchtitan.tools.ladder train_configs/debug_model.toml --sizes=1M,2M,3M --predict=10M",
            "python -m torchtitan.tools.ladder needs scipy",
        ),
        ("scripts/plot_run.py {run}", "scripts/plot_run.py needs matplotlib"),
        ("scripts/plot_experts.py {run}", "scripts/plot_experts.py needs matplotlib"),
        ("scripts/coordinate_check.py", "scripts/coordinate_check.py needs matplotlib"),
        ("scripts/learning_rate_transfer.py", "scripts/learning_rate_transfer.py needs matplotlib"),
        ("scripts/numerics_report.py", "scripts/numerics_report.py needs matplotlib"),
    ],
)
def test_a_command_says_what_is_missing(command: str, message: str, bare: Path) -> None:
    (bare / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    arguments = command.format(run=bare).split()
    environment = {**os.environ, "PYTHONPATH": f"{bare}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(rf"\S+: {re.escape(f'{message}, {REMEDY}')}\n", done.stderr)


def test_a_run_ends_without_its_report(tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    write_at_end(tmp_path)
    assert len(log) == 1 and log[0].startswith("WARNING metrics.report: report.html could not be written")
    assert log[0].endswith(f"(A report (python -m torchtitan.tools.report) needs plotly, {REMEDY})")
    assert not (tmp_path / "report.html").exists()


def test_tensorboard_is_needed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"metrics\.enable_tensorboard needs tensorboard, which is not installed"):
        TensorBoardWriter(tmp_path / "tb", 0)
    assert not (tmp_path / "tb").exists()


@pytest.mark.full
def test_training_and_a_plan_need_none_of_it(bare: Path) -> None:
    environment: dict[str, Any] = {"PYTHONPATH": os.pathsep.join(map(str, (bare, ROOT, ROOT / "tests/helpers")))}
    output = train(*TINY, "--training.steps=2", "--metrics.report", into(bare / "run"), **environment)
    assert output.count(REMEDY) == 1 and (bare / "run" / "metrics.jsonl").exists()
    output = train(*TINY, "--job.plan", into(bare / "plan"), **environment)
    assert f"plan.png needs matplotlib, {REMEDY}" in output and (bare / "plan" / "plan.json").exists()
