"""Continues a run from a checkpoint of its stable phase into a decay, in a folder of its own.

python scripts/branch.py CHECKPOINT --decay-steps N [--folder FOLDER] [--prepare-only] [--section.key=value ...]

CHECKPOINT is a step-N folder. The data go on exactly where it was saved. Further flags are the run's; NGPU is the
number of processes, as for run_train.sh. An interrupted branch resumes with the command that is printed.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from torchtitan.files import local_path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=local_path)
    parser.add_argument("--decay-steps", type=int, required=True)
    parser.add_argument("--folder", type=local_path, help="dump folder of the branch; default: beside the run's")
    parser.add_argument("--prepare-only", action="store_true", help="do not train yet")
    arguments, flags = parser.parse_known_args()
    if arguments.decay_steps < 1:
        parser.error("--decay-steps must be above 0")
    from torchtitan.checkpoint.branch import make_branch
    from torchtitan.errors import EXIT_STATUS, UserError
    from torchtitan.logging import Waiting

    try:
        with Waiting("copying the checkpoint"):
            config = make_branch(arguments.checkpoint, arguments.decay_steps, arguments.folder)
    except (UserError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return EXIT_STATUS
    script = Path(__file__).resolve().parent.parent / "run_train.sh"
    print(f"CONFIG_FILE={config} {script} {' '.join(flags)}".rstrip(), flush=True)
    if arguments.prepare_only:
        return 0
    return subprocess.run([str(script), *flags], env={**os.environ, "CONFIG_FILE": str(config)}).returncode


if __name__ == "__main__":
    sys.exit(main())
