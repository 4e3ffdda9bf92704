"""Continues a run from a checkpoint of its stable phase into a decay, in a folder of its own.

python scripts/branch.py CHECKPOINT --decay-steps N [--folder FOLDER] [--prepare-only] [--custom-import MODULE]
    [--section.key=value ...]

CHECKPOINT is a step-N folder, or a run's dump folder (its newest checkpoint is used). The data go on exactly where it
was saved. The decay is a stage, which --stage.decay.section.key=value changes. Further flags are the run's; NGPU is the
number of processes, as for run_train.sh. An interrupted branch resumes with the command that is printed.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from torchtitan.config.extension import add_custom_import
from torchtitan.errors import public_arguments, run_command
from torchtitan.files import any_path, local_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=any_path)
    parser.add_argument("--decay-steps", type=int, required=True)
    parser.add_argument("--folder", type=local_path, help="dump folder of the branch; default: beside the run's")
    parser.add_argument("--prepare-only", action="store_true", help="do not train yet")
    add_custom_import(parser)
    arguments, flags = parser.parse_known_args()
    if not 1 <= arguments.decay_steps < 2**31:
        parser.error("--decay-steps must be 1 or above, and below 2^31")
    if arguments.custom_import:
        flags.append(f"--experimental.custom_import={arguments.custom_import}")
    from torchtitan.logging import Waiting
    from torchtitan.tools.branch import make_branch

    with Waiting("copying the checkpoint"):
        config = make_branch(arguments.checkpoint, arguments.decay_steps, arguments.folder, flags)
    script = Path(__file__).resolve().parent.parent / "run_train.sh"
    print(f"CONFIG_FILE={shlex.quote(str(config))} {script} {shlex.join(public_arguments(flags))}".rstrip(), flush=True)
    if not arguments.prepare_only:  # in place of this process, so that signals reach the run
        os.execve(script, [str(script), *flags], {**os.environ, "CONFIG_FILE": str(config)})


if __name__ == "__main__":
    run_command(main)
