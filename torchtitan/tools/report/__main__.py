"""Writes a page to inspect one or more runs: a single HTML file that makes no network requests."""

import argparse
import sys
from pathlib import Path

from torchtitan.errors import run_command
from torchtitan.files import local_path
from torchtitan.registry import deferred

_read_runs = deferred("torchtitan.tools.report.run:read_runs")
_render = deferred("torchtitan.tools.report.page:render")
_write_page = deferred("torchtitan.tools.report.page:write_page")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m torchtitan.tools.report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=local_path, help="dump folder of a run")
    parser.add_argument("-o", "--output", type=local_path, default=Path("report.html"), help="(default: %(default)s)")
    arguments = parser.parse_args()
    runs, left_out = _read_runs(arguments.runs)
    for note in left_out:
        print(f"Warning: {note}", file=sys.stderr)
    _write_page(_render(runs, left_out), arguments.output)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    run_command(main)
