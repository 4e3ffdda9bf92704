"""Writes a page to inspect one or more runs: a single HTML file that makes no network requests."""

import argparse
import sys
from pathlib import Path

from torchtitan.errors import run_command
from torchtitan.files import local_path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m torchtitan.report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=local_path, help="dump folder of a run")
    parser.add_argument("-o", "--output", type=local_path, default=Path("report.html"), help="(default: %(default)s)")
    arguments = parser.parse_args()
    from torchtitan.report.page import render, write_page
    from torchtitan.report.run import read_runs

    runs, left_out = read_runs(arguments.runs)
    for note in left_out:
        print(f"Warning: {note}", file=sys.stderr)
    write_page(render(runs, left_out), arguments.output)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    run_command(main)
