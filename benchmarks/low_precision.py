"""Loss of each recipe relative to bf16 with the same seed and data, and the errors of its GEMMs: tables and a plot.

python -m benchmarks low_precision --output docs/figures/low_precision.png [--steps 300] [--seeds 3]
python -m benchmarks low_precision --model 100M --steps 40

A run's loss is the mean over the last 20 steps. Runs that exist already (in --folder) are not repeated.
"""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import differences
from benchmarks.loss_runs import LAST, MODEL_FLAGS, losses, run_other_weights, run_seeds, seeds_table, spread_of_losses
from benchmarks.tables import markdown

FLOAT8: tuple[Any, ...] = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# The output layer as well, the hardest one to convert.
FLOAT8_EVERYWHERE = ["--model.converters=float8", "--float8.filter_fqns="]
DELAYED = [*FLOAT8_EVERYWHERE, "--float8.recipe_name=delayed"]
INT8 = ["--model.converters=int8"]
MX_FLAGS = ["--model.converters=mx", "--mx.emulate"]
NVFP4 = [*MX_FLAGS, "--mx.recipe_name=nvfp4"]
RECIPES: dict[str, list[str]] = {
    "bf16": [],
    "float8 tensorwise": FLOAT8_EVERYWHERE,
    "float8 rowwise": [*FLOAT8_EVERYWHERE, "--float8.recipe_name=rowwise"],
    "float8 rowwise_with_gw_hp": [*FLOAT8_EVERYWHERE, "--float8.recipe_name=rowwise_with_gw_hp"],
    "float8 delayed": DELAYED,
    "float8 blockwise (emulated)": [*FLOAT8_EVERYWHERE, "--float8.recipe_name=blockwise"],
    "int8 rowwise": INT8,
    "int8 tensorwise": [*INT8, "--int8.recipe_name=tensorwise"],
    "mx mxfp8 (emulated)": MX_FLAGS,
    "mx mxint8 (emulated)": [*MX_FLAGS, "--mx.recipe_name=mxint8"],
    "mx nvfp4 (emulated)": NVFP4,
}


def by_family(results: dict[str, list[Path]]) -> dict[str, dict[str, list[list[float]]]]:
    """The losses of all runs but bf16's: a panel for each converter."""
    panels: dict[str, dict[str, list[list[float]]]] = {}
    for name, dumps in results.items():
        if name != "bf16":
            panel = {"float8": "float8, output layer too", "int8": "int8", "mx": "mx"}[name.split()[0]]
            panels.setdefault(panel, {})[name] = [losses(dump) for dump in dumps]
    return panels


def gemms_table() -> str:
    """Relative errors of one layer's GEMMs compared with bf16, on normally distributed data."""
    from torchtitan.config.low_precision import MX, Float8, Int8
    from torchtitan.converters import CONVERTERS, Target
    from torchtitan.converters.linear_converter import relative_errors

    sections: dict[str, tuple[str, Any]] = {
        **{f"float8 {recipe}": ("float8", Float8(recipe_name=recipe)) for recipe in FLOAT8},
        **{f"int8 {recipe}": ("int8", Int8(recipe_name=recipe)) for recipe in ("rowwise", "tensorwise")},
        **{
            f"mx, scales by {mode}": ("mx", MX(emulate=True, scale_calculation_mode=mode))
            for mode in ("rceil", "even", "floor")
        },
        "float8 blockwise": ("float8", Float8(recipe_name="blockwise")),
        **{f"mx {recipe}": ("mx", MX(emulate=True, recipe_name=recipe)) for recipe in ("mxint8", "nvfp4")},
    }
    rows = []
    for name, (converter_name, section) in sections.items():
        converter: Any = CONVERTERS.get(converter_name).build(section, Target("cpu"))
        errors = relative_errors(converter, "cpu").values()
        rows.append([name, *(f"{error:.3f}" if error else "bf16" for error in errors)])
    return markdown(["recipe", "output", "input gradient", "weight gradient"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", choices=MODEL_FLAGS, default="debug")
    parser.add_argument("--folder", type=Path, default=Path("outputs/low_precision"))
    parser.add_argument("--output", type=Path, default=Path("low_precision.png"))
    arguments = parser.parse_args()
    import torch

    folder, model = arguments.folder / arguments.model, MODEL_FLAGS[arguments.model]

    recipes = {
        name: run_seeds(name, [*model, *flags], arguments.steps, folder, arguments.seeds)
        for name, flags in RECIPES.items()
    }
    chance = [recipes["bf16"][0], *run_other_weights("bf16", model, arguments.steps, folder, arguments.seeds)]
    print(f"{arguments.model} model, CPU, torch {torch.__version__}, torchao {version('torchao')}, ", end="")
    print(f"{arguments.steps} steps\n\n{seeds_table('recipe', recipes)}")
    if arguments.seeds > 1:
        print(f"\nbf16's losses spread by {spread_of_losses(chance):.2f}% over initial weights with the same data")
        print(f"and by {spread_of_losses(recipes['bf16']):.2f}% over seeds, which also choose the data.")
    print(f"\n{gemms_table()}")
    differences(
        by_family(recipes), list(map(losses, recipes["bf16"])), arguments.output, LAST, list(map(losses, chance))
    )


if __name__ == "__main__":
    main()
