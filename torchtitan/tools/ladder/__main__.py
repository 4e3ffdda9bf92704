r"""Trains small models and predicts the loss of a large one.

python -m torchtitan.tools.ladder FILE.toml --sizes 0.3M,0.6M,1.2M,3M --tokens-per-parameter 5,10,20 --predict 10M \
    [--section.key=value ...]

Each run has a TOML file in the folder, resumes from its checkpoints, and is not repeated once it is finished. Results:
ladder.txt, ladder.json, ladder.png. Sizes do not count the embedding and the output layer. Further flags are the runs';
NGPU is the number of processes, as for run_train.sh.
"""

from torchtitan.config import ConfigManager
from torchtitan.errors import command_parser, require_report_extra, run_command
from torchtitan.files import local_path
from torchtitan.launcher.imports import quick_imports
from torchtitan.registry import load


def main() -> None:
    parser = command_parser("ladder", __doc__)
    parser.add_argument("file", metavar="FILE.toml")
    parser.add_argument("--sizes", required=True, help="parameters to train, such as 0.3M,0.6M,1.2M,3M")
    tokens = parser.add_mutually_exclusive_group()
    tokens.add_argument("--tokens-per-parameter", default="20", help="one or several (default: %(default)s)")
    tokens.add_argument("--tokens", help="instead: the same tokens for each size, one or several")
    parser.add_argument("--predict", required=True, help="parameters to predict, at the most tokens (per parameter)")
    parser.add_argument("--folder", type=local_path, help="default: job.dump_folder")
    parser.add_argument("--dry-run", action="store_true", help="print the runs only")
    parser.add_argument("--verify", action="store_true", help="finally train the predicted size too")
    arguments, flags = parser.parse_known_args()
    config = ConfigManager().parse_args([f"--job.config_file={arguments.file}", *flags])
    if not arguments.dry_run:  # before hours of training, not after
        require_report_extra("python -m torchtitan.tools.ladder", "scipy", "matplotlib")
    with quick_imports():
        climb = load("torchtitan.tools.ladder.climb:climb")
    climb(arguments, config)


if __name__ == "__main__":
    run_command(main)
