"""Writes a page to inspect one or more runs: a single HTML file that makes no network requests."""

import argparse
import sys
from pathlib import Path

from torchtitan.errors import EXIT_STATUS, UserError
from torchtitan.files import local_path
from torchtitan.report.page import render, write
from torchtitan.report.run import read_runs


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m torchtitan.report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=local_path, help="dump folder of a run")
    parser.add_argument("-o", "--output", type=local_path, default=Path("report.html"), help="(default: %(default)s)")
    arguments = parser.parse_args()
    try:
        runs, left_out = read_runs(arguments.runs)
        for note in left_out:
            print(f"Warning: {note}", file=sys.stderr)
        write(render(runs, left_out), arguments.output)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(EXIT_STATUS)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
