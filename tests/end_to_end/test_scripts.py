"""What all scripts have in common."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs import python

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py") if path.stem != "site_home")  # a hook of mkdocs


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_printed_and_nothing_done(name: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in ROOT.glob("docs/**/*") if path.is_file()}
    done = python(f"scripts/{name}.py", "--help")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "usage: " in done.stdout
    assert before == {path: path.stat().st_mtime_ns for path in ROOT.glob("docs/**/*") if path.is_file()}


@pytest.mark.parametrize("name", ["carry_for_gpu", "check_versions"])
def test_a_shell_script_says_what_it_takes(name: str) -> None:
    for argument, status in (("--help", 0), ("3.x", 2)):
        done = subprocess.run(["bash", f"scripts/{name}.sh", argument], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == status and "PYTHON" in done.stdout + done.stderr, done


# An import that takes as long as it takes to be said.
IMPORT = """
import sys, threading, time
from torchtitan import errors
said = threading.Event()
class Screen:
    def write(self, text): sys.__stderr__.write(text); "slow" in text and said.set()
    def flush(self): sys.__stderr__.flush()
sys.stderr = Screen()
errors.PROGRESS = 0.2
errors.tell_of_imports()
time.sleep(0.4)
sys.path.insert(0, sys.argv[1])
import slow
"""


def test_an_import_that_takes_long_is_said(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import __main__; __main__.said.wait(120)")
    done = subprocess.run([sys.executable, "-c", IMPORT, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert re.fullmatch(r"(importing slow: \d+ s so far\n)+", done.stderr), done.stderr
