"""Compares a layout's gradients with one process's, on a small model with the degrees of your file.

NGPU=4 python -m torchtitan.tools.check_layout [--full] [--output FILE.json] --job.config_file=FILE.toml [--KEY=VALUE]
"""

import argparse
import os
import sys
from collections.abc import Callable

from torchtitan.errors import ConfigError, command_parser
from torchtitan.files import local_path
from torchtitan.launcher.rank_process import rank_process
from torchtitan.launcher.signals import exit_now
from torchtitan.registry import deferred
from torchtitan.world import world

_manager = deferred("torchtitan.config:ConfigManager")
_compare_and_print: Callable[..., int] = deferred("torchtitan.tools.layout_comparison:compare_and_print")
_launch = deferred("torchtitan.launch:launch")


def parsed_flags(flags: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of this command, and the flags of the configuration."""
    parser = command_parser("check_layout", __doc__)
    parser.add_argument("--full", action="store_true", help="keep all sizes; one process must hold the model")
    parser.add_argument("--output", type=local_path, help="JSON file to write: all comparisons", metavar="FILE")
    return parser.parse_known_args(flags)


def main(flags: list[str]) -> int:
    """Runs on every rank; rank 0 prints. Returns the exit status: 1 if something deviates."""
    arguments, flags = parsed_flags(flags)
    config, place = _manager().parse_args(flags), world()
    if (output := arguments.output) and place.rank == 0 and (output.is_dir() or not os.access(output.parent, os.W_OK)):
        raise ConfigError(f"--output: {output} cannot be written; name a file in a folder that can.")
    return _compare_and_print(config, arguments.full, output)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        parsed_flags(sys.argv[1:])  # --help needs no processes
        # Status 1 is an answer here: the processes are not to be started again.
        sys.exit(_launch(["--max-restarts=0", "-m", "torchtitan.tools.check_layout", *sys.argv[1:]]))
    with rank_process(saves=False):
        status = main(sys.argv[1:])
    exit_now(status)  # torch's threads would abort a rank that ends before the others
