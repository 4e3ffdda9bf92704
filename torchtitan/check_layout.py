"""Compares a layout's gradients with one process's, on a small model with the degrees of your file.

NGPU=4 python -m torchtitan.check_layout [--full] [--output FILE.json] --job.config_file=FILE.toml --section.key=value
"""

import argparse
import json
import os
import sys

from torchtitan.errors import ConfigError, command_parser
from torchtitan.files import local_path
from torchtitan.launcher.rank_process import rank_process
from torchtitan.launcher.signals import exit_now
from torchtitan.strict_json import finite
from torchtitan.world import world

MOST_ROWS = 10  # parameters in the table
TITLES = {"loss": "loss", "norm": "gradient norm", "gradient": "gradient of {name}", "weight": "{name} after 3 steps"}


def parsed_flags(flags: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of this command, and the flags of the configuration."""
    parser = command_parser("check_layout", __doc__)
    parser.add_argument("--full", action="store_true", help="keep all sizes; one process must hold the model")
    parser.add_argument("--output", type=local_path, help="JSON file to write: all comparisons", metavar="FILE")
    return parser.parse_known_args(flags)


def main(flags: list[str]) -> int:
    """Runs on every rank; rank 0 prints. Returns the exit status: 1 if something deviates."""
    arguments, flags = parsed_flags(flags)
    from torchtitan.config import ConfigManager

    config = ConfigManager().parse_args(flags)
    place = world()
    if (output := arguments.output) and place.rank == 0 and (output.is_dir() or not os.access(output.parent, os.W_OK)):
        raise ConfigError(f"--output: {output} cannot be written; name a file in a folder that can.")
    from torchtitan.engine.model_args import register_models
    from torchtitan.logging import init_logging
    from torchtitan.run.layout_check import compare

    init_logging(place.rank, place.size, color=not config.metrics.disable_color_printing)
    register_models(config)
    compared = compare(config, arguments.full)
    if compared is None:
        return 0
    dims, trained, rows = compared
    wrong = [row for row in rows if row.cause]
    print(f"{dims}: {trained}\n")
    print(f"{'':58}{'error':>9}{'allowed':>9}{'cosine':>8}{'ratio':>7}")
    worst = list({row.quantity: row for row in reversed(rows)}.values())[::-1]
    for row in [*worst, *(row for row in wrong if row not in worst)][: len(worst) + MOST_ROWS]:
        cause = f"  {row.cause}" if row.cause else ""
        title = TITLES[row.quantity].format(name=row.name)
        print(f"{title:58}{row.error:9.1e}{row.allowed:9.1e}{row.cosine:8.3f}{row.ratio:7.3f}{cause}")
    print(f"\n{f'{len(wrong)} of {len(rows)} deviate' if wrong else 'equal to one process'}")
    if arguments.output:
        content = {"layout": str(dims), "trained": trained, "comparisons": [row._asdict() for row in rows]}
        try:
            arguments.output.write_text(json.dumps(finite(content), indent=1))
        except OSError as error:
            raise ConfigError(f"--output: {arguments.output} cannot be written ({error.strerror}).") from None
    return 1 if wrong else 0


if __name__ == "__main__":
    if "RANK" not in os.environ:
        from torchtitan.launch import launch

        parsed_flags(sys.argv[1:])  # --help needs no processes
        # Status 1 is an answer here: the processes are not to be started again.
        sys.exit(launch(["--max-restarts=0", "-m", "torchtitan.check_layout", *sys.argv[1:]]))
    with rank_process(saves=False):
        status = main(sys.argv[1:])
    exit_now(status)  # torch's threads would abort a rank that ends before the others
