"""README's commands from training to transformers, as they are written there, with fewer steps and examples."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORTER = {"steps=300": "steps=2 --training.local_batch_size=4", "limit 200": "limit 10"}
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.full
def test_from_training_to_transformers(tmp_path: Path) -> None:
    section = README.partition("## From training to transformers")[2]
    found = re.search(r"```bash\n(.*?)\n```", section, re.DOTALL)
    assert found
    commands = found[1].splitlines()
    assert len(commands) == 5
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    outputs = []
    for command in commands:
        for written, shorter in SHORTER.items():
            command = command.replace(written, shorter)
        command = command.replace("outputs/", f"{tmp_path}/")
        done = subprocess.run(command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    _, ours, scores, _, theirs = outputs
    assert "def main(" in ours and ours.strip() == theirs.strip()
    assert "stdlib_brackets" in scores and "stdlib_identifiers" in scores
