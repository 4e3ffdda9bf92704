"""Averages the weights of checkpoints: a weights-only checkpoint, verified like any other.

python scripts/average_checkpoints.py CHECKPOINT ... --out FOLDER [--ema] [--custom-import MODULE]

CHECKPOINT is a step-N folder or a run's dump folder (its newest checkpoint is used). The mean is exact, rounded once to
float32. --ema takes the moving averages in the checkpoints (optimizer.ema_decay), perhaps of only one, not the weights.
Start a run from the result with --checkpoint.initial_load_path, export it (torchtitan.tools.convert), or evaluate it.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from torchtitan.config.extension import add_custom_import
from torchtitan.errors import run_command
from torchtitan.files import any_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=any_path, nargs="+")
    parser.add_argument("--out", type=any_path, required=True)
    parser.add_argument("--ema", action="store_true")
    add_custom_import(parser)
    arguments = parser.parse_args()
    from torchtitan.tools.interchange.convert import average, one_process

    with one_process(arguments.custom_import):
        print(average(arguments.checkpoints, arguments.out, arguments.ema))


if __name__ == "__main__":
    run_command(main)
