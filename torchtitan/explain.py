"""Prints which layers a run would convert to low precision, and why, without training.

python -m torchtitan.explain [--json out.json] --job.config_file=FILE.toml --section.key=value ...
"""

from torchtitan.config import ConfigManager
from torchtitan.errors import command_parser, run_command
from torchtitan.files import local_path
from torchtitan.registry import deferred

_explain = deferred("torchtitan.run.conversion_log:explain")


def main() -> None:
    parser = command_parser("explain", __doc__)
    parser.add_argument(
        "--json", type=local_path, help="JSON file to write the report to, as a list of objects", metavar="FILE"
    )
    arguments, flags = parser.parse_known_args()
    _explain(ConfigManager().parse_args(flags), arguments.json)


if __name__ == "__main__":
    run_command(main)
