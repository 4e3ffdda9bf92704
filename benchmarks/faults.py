#!/usr/bin/env python3
"""Runs the fault-injection tests and prints their figures as a table, as docs/checkpoints.md has it.

python benchmarks/faults.py [--full]

The full form kills 20 times in each mode and takes a quarter of an hour; the short one is what runs on every commit.
Without root, disks are not filled (the tests mount a small one).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--full", action="store_true", help="the long forms too")
    parser.add_argument("--figures", type=Path, help="only print what an earlier run wrote with FIGURES=...")
    arguments = parser.parse_args()
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        figures = arguments.figures or Path(folder) / "figures.jsonl"
        if arguments.figures is None:
            marker = "full or not full" if arguments.full else "not full"
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-m",
                marker,
                "-o",
                "timeout=3600",
                "tests/end_to_end/test_faults.py",
            ]
            status = subprocess.run(command, cwd=ROOT, env={**os.environ, "FIGURES": str(figures)}).returncode
        print("\n| fault | figures |\n|---|---|")
        for line in figures.read_text().splitlines():
            values = json.loads(line)
            name = values.pop("test")
            print(f"| {name} | {', '.join(f'{key}: {value}' for key, value in values.items())} |".replace("_", " "))
    return status


if __name__ == "__main__":
    sys.exit(main())
