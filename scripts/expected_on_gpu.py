"""What a step is expected to take on an H200, by recipe and part: the table of docs/measurements/performance.md.

python scripts/expected_on_gpu.py [--gpu H200] [--models 8B,3B,1B] [--recipes "float8 rowwise"]

Of compiled runs, by the plan's formula. Models that do not fit into one GPU are computed for 8.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.expected import Step
from benchmarks.gpu_row import config_of
from benchmarks.gpu_rows import BASE, FILTERED, MODELS, ROWWISE, SPARSE, TENSORWISE, Recipe
from benchmarks.tables import markdown
from torchtitan.errors import run_command

RECIPES = (BASE, TENSORWISE, ROWWISE, FILTERED)
GPUS_OF = {"8B": 8}
COLUMNS = {  # of the table, and the parts of a step in them
    "bf16 GEMMs": ("bf16 GEMMs",),
    "8-bit GEMMs": ("8-bit GEMMs",),
    "attention": ("attention",),
    "fused kernels": ("fused kernels",),
    "rounding": ("rounding to 8 bits",),
    "uncompiled operations": ("uncompiled operations",),
    "optimizer": ("optimizer",),
    "collectives": ("collectives",),
    "host": ("waiting for the host",),
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
    processes = GPUS_OF.get(model, 1)
    step = Step(recipe.name, gpu, config_of(replace(MODELS[model], ranks=processes), recipe, 8192), processes)
    seconds_of = step.expected.parts
    return [
        model if processes == 1 else f"{model}, FSDP {processes}",
        recipe.name,
        *(f"{1e3 * sum(seconds_of[name] for name in names):.0f}" for names in COLUMNS.values()),
        f"{1e3 * step.expected.seconds:.0f}",
        f"{step.expected_rate:,.0f}",
        *(f"{mfu:.1%}" for mfu in step.expected.mfu),
    ]


if __name__ == "__main__":
    run_command(main)
