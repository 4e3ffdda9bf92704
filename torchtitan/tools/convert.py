"""Imports and exports weights, between this project's checkpoints and published formats.

python -m torchtitan.tools.convert from-hf FOLDER OUT [--family llama3] [--custom-import MODULE]
    makes the checkpoint OUT/step-0 of a Hugging Face folder (safetensors) or Meta's (consolidated.*.pth). Start from it
    with --checkpoint.initial_load_path=OUT/step-0. (initial_load_path also accepts FOLDER directly.)

python -m torchtitan.tools.convert to-hf CHECKPOINT OUT [--dtype bfloat16] [--ema] [--custom-import MODULE]
    exports a step-N folder, or the newest checkpoint of a run's dump folder, for Hugging Face `transformers` (vLLM,
    llama.cpp, ...): safetensors, configuration, tokenizer.

Neither holds a whole model in memory: weights are read and written one at a time, or one file (at most 5 GB).
"""

import argparse

from torchtitan.config.extension import add_custom_import, add_ema
from torchtitan.errors import command_parser, run_command
from torchtitan.files import any_path, expand_any
from torchtitan.registry import deferred

_one_process = deferred("torchtitan.tools.interchange.convert:one_process")
_import_weights = deferred("torchtitan.tools.interchange.convert:import_weights")
_export_weights = deferred("torchtitan.tools.interchange.convert:export_weights")


def main() -> None:
    parser = command_parser("convert", __doc__)
    commands = parser.add_subparsers(required=True, metavar="from-hf|to-hf")
    importing = commands.add_parser("from-hf")
    importing.set_defaults(run=_from_hf)
    importing.add_argument("folder", type=any_path)
    importing.add_argument("out", type=any_path, help="folder for the checkpoint")
    importing.add_argument(
        "--family", help="model.name of the checkpoint; default: the first family with a matching flavor"
    )
    importing.add_argument(
        "--tokenizer-path", type=expand_any, help="tokenizer of the model; default: the one in FOLDER"
    )
    exporting = commands.add_parser("to-hf")
    exporting.set_defaults(run=_to_hf)
    exporting.add_argument("checkpoint", type=any_path)
    exporting.add_argument("out", type=any_path, help="folder to create; must not exist")
    exporting.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    exporting.add_argument("--tokenizer-path", type=expand_any, help="default: the model's own")
    add_ema(exporting)
    for command in (importing, exporting):
        add_custom_import(command)
    arguments = parser.parse_args()
    with _one_process(arguments.custom_import):
        arguments.run(arguments)


def _from_hf(arguments: argparse.Namespace) -> None:
    where = _import_weights(arguments.folder, arguments.out, arguments.family, arguments.tokenizer_path)
    print(f"saved {where}")


def _to_hf(arguments: argparse.Namespace) -> None:
    saved = _export_weights(
        arguments.checkpoint, arguments.out, arguments.dtype, arguments.tokenizer_path, arguments.ema
    )
    print(f"exported {saved} to {arguments.out}")


if __name__ == "__main__":
    run_command(main)
