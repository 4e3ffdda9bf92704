"""Runs the command of docs/extension.md verbatim, and checks the message that the page shows."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "extension.md").read_text(encoding="utf-8")


def run(arguments: list[str], folder: Path, python_path: str) -> subprocess.CompletedProcess[str]:
    """`train.py` in one process, in an empty working directory."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{python_path}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture
def command() -> tuple[list[str], str]:
    """Arguments and PYTHONPATH of the command in the page, with repository paths made absolute."""
    line = re.search(r"```bash\n(.*\./run_train\.sh.*)\n```", DOC)
    assert line, "docs/extension.md has no command"
    words = shlex.split(line[1])
    settings = dict(word.split("=", 1) for word in words[: words.index("./run_train.sh")])
    flags = words[words.index("./run_train.sh") + 1 :]
    return [f"--job.config_file={ROOT / settings['CONFIG_FILE']}", *flags], str(ROOT / settings["PYTHONPATH"])


@pytest.mark.full
def test_the_command_of_the_doc_trains(command: tuple[list[str], str], tmp_path: Path) -> None:
    done = run(command[0], tmp_path, command[1])
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert "rounding (4 bits): converted 12 of 15 linear layers" in log  # all except output and two attention.wo
    assert "my_llama tiny" in log and "sums; sentencepiece tokenizer" in log
    folder = tmp_path / "outputs" / "my_extension"
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [1, 2]
    assert all(math.isfinite(entry["loss"]) for entry in entries)
    assert "[rounding]\nbits = 4\n" in (folder / "config.toml").read_text()


def test_code_in_the_doc_is_the_example_or_a_real_family(command: tuple[list[str], str]) -> None:
    models = ROOT / "torchtitan" / "models"
    examples = [Path(command[1]) / name for name in ("my_extension.py", "my_hook.py")]
    files = [*examples, models / "qwen3.py", models / "registry.py"]
    extension, hook, *family = [path.read_text(encoding="utf-8") for path in files]
    blocks = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
    whole = [block for block in blocks if "..." not in block]
    assert len(whole) >= 7
    for block in whole:
        for snippet in block.strip().split("\n\n\n"):
            assert any(snippet in source for source in (extension, hook, *family)), snippet
    assert any(hook.endswith(f"\n\n{block}") for block in blocks)  # the hook is complete
    trinity = (models / "afmoe.py").read_text(encoding="utf-8")
    assert f"`torchtitan/models/afmoe.py` has {len(trinity.splitlines())} lines" in DOC
