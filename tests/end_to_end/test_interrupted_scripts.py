"""Ctrl-C ends every script without a traceback, whatever it is doing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import without_slow_imports
from workers import PATIENCE

ROOT = Path(__file__).parents[2]
# Of each: what it imports when Ctrl-C comes.
COMMANDS = {
    "scripts/average_checkpoints.py": ("torch", "a", "--out=b"),
    "scripts/branch.py": ("torch", "a", "--decay-steps=1"),
    "-m torchtitan.tools.convert": ("torch", "from-hf", "a", "b"),
    "scripts/coordinate_check.py": ("matplotlib", "--output=/nowhere/a.png"),
    "-m torchtitan.tools.explain": ("torch",),
    "-m torchtitan.tools.generate": ("torch", "--checkpoint=a", "--prompt=b"),
    "scripts/learning_rate_transfer.py": ("matplotlib", "--output=/nowhere/a.png"),
    "scripts/numerics_report.py": ("torch", "--output=numerics"),
    "scripts/plot_experts.py": ("matplotlib", "a"),
    "scripts/plot_run.py": ("matplotlib", "a"),
    "scripts/train_tokenizer.py": ("sentencepiece", "--documents=1", "--output=/nowhere/a.model"),
    "-m torchtitan.tools.ladder": ("torch", "train_configs/debug_model.toml", "--sizes=1M,2M,3M", "--predict=10M"),
    "-m torchtitan.tools.report": ("numpy", "a"),
    "-m torchtitan.tools.tokenize": ("numpy", "a", "--output=b"),
    "-m torchtitan.tools.evaluate": ("torch", "a", "--tasks=b"),
}


FEW = {
    "-m torchtitan.tools.tokenize",
    "scripts/branch.py",
    "scripts/plot_run.py",
    "-m torchtitan.tools.evaluate",
    "-m torchtitan.tools.ladder",
}


def default_signals() -> None:
    """In the command's process: a shell lets what it starts in the background ignore Ctrl-C, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    "command", [pytest.param(command, marks=[] if command in FEW else pytest.mark.full) for command in COMMANDS]
)
def test_an_interrupted_script_says_nothing(command: str, tmp_path: Path) -> None:
    module, *arguments = COMMANDS[command]
    text = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(600)\n"
    (tmp_path / f"{module}.py").write_text(text)
    path = os.pathsep.join(map(str, (tmp_path, ROOT)))
    done = subprocess.run(
        [sys.executable, *command.split(), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        preexec_fn=default_signals,
    )
    assert done.returncode in (130, -2), done.stderr
    assert without_slow_imports(done.stdout + done.stderr).strip() == ""
