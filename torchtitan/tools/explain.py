"""Prints which layers a run would convert to low precision, and why, without training.

python -m torchtitan.tools.explain [--json out.json] --job.config_file=FILE.toml --section.key=value ...

With --data, it prints the first batch that each stage trains on instead, with what does not count in the loss in
brackets: ⟦so⟧.
"""

from torchtitan.config import ConfigManager
from torchtitan.errors import command_parser, run_command
from torchtitan.files import local_path
from torchtitan.registry import deferred

_explain = deferred("torchtitan.run.conversion_log:explain")
_explain_data = deferred("torchtitan.tools.explain_data:explain_data")


def main() -> None:
    parser = command_parser("explain", __doc__)
    parser.add_argument(
        "--json", type=local_path, help="JSON file to write the report to, as a list of objects", metavar="FILE"
    )
    parser.add_argument("--data", action="store_true", help="print the first batch, with the tokens that count")
    arguments, flags = parser.parse_known_args()
    config = ConfigManager().parse_args(flags)
    if arguments.data:
        _explain_data(config)
    else:
        _explain(config, arguments.json)


if __name__ == "__main__":
    run_command(main)
