"""What a training step keeps for its backward pass, by the plan (which tests compare with real steps).

python -m benchmarks kept_activations [--models debug,100M] [--device cpu]

Peak bytes of a step, and bytes of activations and buffers per token, with activations in 8 bits and without.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import ask
from benchmarks.runs import ROOT, finish
from benchmarks.tables import markdown

SEQ_LEN, BATCH = 512, 16
MODELS: dict[str, list[str]] = {
    "debug": [],
    "100M": ["--experimental.custom_import=benchmarks.sizes", "--model.name=sizes", "--model.flavor=100M"],
}
INT8, FLOAT8 = ["--model.converters=int8"], ["--model.converters=float8"]
KEPT = "--activation_checkpoint.swiglu_dtype="
VARIANTS: dict[str, list[str]] = {
    "bf16": [],
    "bf16, SwiGLU int8": [KEPT + "int8"],
    "bf16, SwiGLU float8": [KEPT + "float8"],
    "float8": FLOAT8,
    "float8, SwiGLU float8": [*FLOAT8, KEPT + "float8"],
    "int8": INT8,
    "int8, SwiGLU int8": [*INT8, KEPT + "int8"],
}


def memory(device: str, models: list[str]) -> str:
    rows: list[list[str]] = []
    base: list[float] = []
    for name, flags in VARIANTS.items():
        cells = []
        for model in models:
            with tempfile.TemporaryDirectory() as folder:
                size = [f"--training.seq_len={SEQ_LEN}", f"--training.local_batch_size={BATCH}"]
                keys = ["--activation_checkpoint.mode=none", "--job.plan", f"--job.dump_folder={folder}"]
                keys.append(f"--job.simulate_device={device}")
                finish([sys.executable, str(ROOT / "train.py"), *MODELS[model], *size, *keys, *flags])
                (rank,) = json.loads((Path(folder) / "plan.json").read_text())["ranks"]
            cells += [rank["peaks"]["none"] / 2**20, rank["kept_per_token"]["none"] / 2**10]
        base = base or cells
        numbers = [(f"{cell:,.1f}", f"{cell / first:.2f}") for cell, first in zip(cells, base, strict=True)]
        rows.append([name, *(text for number in numbers for text in number)])
    head = ["step"]
    for name in models:
        head += [f"{name}: peak, MiB", "against bf16", "activations, KiB per token", "against bf16"]
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--device", default="cpu", help="as job.simulate_device")
    arguments = parser.parse_args()
    print(ask())
    print(f"\n{BATCH} x {SEQ_LEN} tokens on one {arguments.device}\n", flush=True)
    print(memory(arguments.device, arguments.models.split(",")))


if __name__ == "__main__":
    main()
