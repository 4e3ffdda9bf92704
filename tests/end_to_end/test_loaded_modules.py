"""What README's first command loads: the core, without the tools beside it."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES = 14_000
# Runs train.py; then writes each module of ours that is loaded, and its number of lines, to a file.
SCRIPT = """
import json, runpy, sys
from pathlib import Path
result, *sys.argv = sys.argv[1:]
runpy.run_path("train.py", run_name="__main__")
files = {name: module.__file__ for name, module in sys.modules.items() if (name + ".").startswith("torchtitan.")}
lines = {name: Path(file).read_text().count("\\n") for name, file in files.items() if file}
Path(result).write_text(json.dumps(lines))
"""


def test_a_plain_run_loads_no_more_than_it_needs(tmp_path: Path) -> None:
    flags = ("--job.config_file=train_configs/debug_model.toml", "--training.steps=1", "--training.seq_len=128")
    result = tmp_path / "loaded.json"
    subprocess.run(
        [sys.executable, "-c", SCRIPT, result, "train.py", *flags, f"--job.dump_folder={tmp_path}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    lines = json.loads(result.read_text())
    for name, number in sorted(lines.items()):
        print(number, name)
    print(f"{len(lines)} modules of {sum(lines.values())} lines")
    assert [name for name in lines if name.startswith(("torchtitan.tools", "torchtitan.config.legacy"))] == []
    assert sum(lines.values()) <= MOST_LINES
