"""Exports a checkpoint for Hugging Face `transformers` (vLLM, llama.cpp, ...): safetensors, configuration, tokenizer.

python scripts/convert_to_hf.py CHECKPOINT OUT [--dtype bfloat16] [--custom-import MODULE]

CHECKPOINT is a step-N folder or a run's dump folder (its newest checkpoint is used). Weights are read and written one
file at a time (at most 5 GB).
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
    parser.add_argument("checkpoint", type=local_path)
    parser.add_argument("out", type=local_path, help="folder to create; must not exist")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--tokenizer-path", type=expand, help="default: the model's own")
    add_custom_import(parser)
    arguments = parser.parse_args()
    import torch

    from torchtitan.interchange.convert import one_process, saved_model
    from torchtitan.interchange.export import export, require_no_bias

    with one_process(arguments.custom_import):
        saved = saved_model(arguments.checkpoint)
        model = saved.published(arguments.tokenizer_path)
        require_no_bias(saved.weight(name) for name in model.unpublished)
        export(arguments.out, model.shapes, saved.weight, model, getattr(torch, arguments.dtype))


if __name__ == "__main__":
    run_command(main)
