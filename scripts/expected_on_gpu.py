"""What a step is expected to take on an H200, by recipe and part: the table of docs/measurements/performance.md.

python scripts/expected_on_gpu.py [--gpu H200] [--models 8B,3B,1B] [--recipes "float8 rowwise"]

Each row is a plan (`--job.plan`) of a compiled run, which takes some seconds. Models that do not fit into one GPU are
planned for 8.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_rows import BASE, FILTERED, MODELS, ROWWISE, SPARSE, Recipe
from benchmarks.runs import ROOT
from benchmarks.tables import markdown
from torchtitan.errors import run_command

RECIPES = (BASE, ROWWISE, FILTERED)  # the formula knows no difference between recipes in 8 bits
GPUS_OF = {"8B": 8}
COLUMNS = {  # of the table, and the parts of a step in them
    "bf16 GEMMs": ("bf16 GEMMs",),
    "8-bit GEMMs": ("8-bit GEMMs",),
    **{name: (name,) for name in ("attention", "fused kernels", "uncompiled operations", "optimizer", "collectives")},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--models", default="8B,3B,1B")
    names = [recipe.name.replace(",", "") for recipe in RECIPES]
    parser.add_argument("--recipes", default=",".join(names), help="comma-separated, a comma in a name left out")
    arguments = parser.parse_args()
    rows: list[list[str]] = []
    try:
        add_rows(rows, arguments)
    finally:  # also those before a plan that fails
        columns = ["model", "recipe", *COLUMNS, "step, ms", "tokens/s", "MFU full", "causal"]
        print(markdown(columns, rows))


def add_rows(rows: list[list[str]], arguments: argparse.Namespace) -> None:
    for model in arguments.models.split(","):
        for recipe in RECIPES:
            if recipe.name.replace(",", "") in arguments.recipes.split(",") and (model, recipe) != (SPARSE, FILTERED):
                rows.append(row(model, recipe, arguments.gpu))
                print(f"{rows[-1][:2]} done", file=sys.stderr, flush=True)


def row(model: str, recipe: Recipe, gpu: str) -> list[str]:
    family, flavor = MODELS[model]
    processes = GPUS_OF.get(model, 1)
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            "--job.plan", f"--job.simulate_world_size={processes}", f"--job.simulate_device={gpu}",
            f"--job.dump_folder={folder}", f"--model.name={family}", f"--model.flavor={flavor}",
            "--training.seq_len=8192", "--training.local_batch_size=1", "--training.compile",
            "--training.mixed_precision_param=bfloat16", "--activation_checkpoint.mode=none",
            "--parallelism.fsdp_reshard_after_forward=never",
        ]  # fmt: skip
        if recipe.converter:
            flags.append(f"--model.converters={recipe.converter}")
        for key, value in recipe.keys.items():
            flags.append(f"--{recipe.converter}.{key}={','.join(value) if isinstance(value, list) else value}")
        subprocess.run([sys.executable, str(ROOT / "train.py"), *flags], check=True, stdout=subprocess.DEVNULL)
        plan = json.loads((Path(folder) / "plan.json").read_text())
    expected = plan["expected"]
    if expected is None:
        sys.exit(plan["notes"][-1])
    seconds_of = expected["parts"]
    seconds = sum(seconds_of.values())
    return [
        model if processes == 1 else f"{model}, FSDP {processes}",
        recipe.name,
        *(f"{1e3 * sum(seconds_of.get(name, 0.0) for name in names):.0f}" for names in COLUMNS.values()),
        f"{1e3 * seconds:.0f}",
        f"{plan['tokens_per_step'] / seconds / processes:,.0f}",
        *(f"{mfu:.1%}" for mfu in expected["mfu"]),
    ]


if __name__ == "__main__":
    run_command(main)
