"""Makes a checkpoint from published weights: a Hugging Face folder (safetensors) or Meta's (consolidated.*.pth).

python scripts/convert_from_hf.py FOLDER OUT [--family llama3] [--custom-import MODULE]

The checkpoint is OUT/step-0; start from it with --checkpoint.initial_load_path=OUT/step-0. (initial_load_path also
accepts FOLDER directly.) Weights are read and written one at a time.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from torchtitan.config.extension import add_custom_import
from torchtitan.errors import run_command
from torchtitan.files import expand, local_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=local_path)
    parser.add_argument("out", type=local_path, help="folder for the checkpoint")
    parser.add_argument(
        "--family", help="model.name of the checkpoint; default: the first family with a matching flavor"
    )
    parser.add_argument("--tokenizer-path", type=expand, help="tokenizer of the model; default: the one in FOLDER")
    add_custom_import(parser)
    arguments = parser.parse_args()
    from torchtitan.interchange.convert import import_weights, one_process

    with one_process(arguments.custom_import):
        where = import_weights(arguments.folder, arguments.out, arguments.family, arguments.tokenizer_path)
    print(f"saved {where}")


if __name__ == "__main__":
    run_command(main)
