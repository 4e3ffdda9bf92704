"""Loss of each recipe relative to bf16, for the debug model with the same data, and the errors of its GEMMs: two tables
and a plot.

python -m benchmarks low_precision --output docs/figures/low_precision.png [--steps 300]

A recipe's loss is the mean over the last 20 steps. Runs that exist already (in --folder) are not repeated.
"""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import differences
from benchmarks.loss_runs import LAST, losses, losses_table, run, spread_of_losses
from benchmarks.tables import markdown

FLOAT8: tuple[Any, ...] = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# The output layer as well, the hardest one to convert.
FLOAT8_EVERYWHERE = ["--model.converters=float8", "--float8.filter_fqns="]
DELAYED = [*FLOAT8_EVERYWHERE, "--float8.recipe_name=delayed"]
INT8 = ["--model.converters=int8"]
MX_FLAGS = ["--model.converters=mx", "--mx.emulate"]
FLOOR = "--mx.scale_calculation_mode=floor"
NVFP4 = [*MX_FLAGS, "--mx.recipe_name=nvfp4"]
RECIPES: dict[str, list[str]] = {
    "bf16": [],
    "float8 tensorwise": FLOAT8_EVERYWHERE,
    "float8 rowwise": [*FLOAT8_EVERYWHERE, "--float8.recipe_name=rowwise"],
    "float8 rowwise_with_gw_hp": [*FLOAT8_EVERYWHERE, "--float8.recipe_name=rowwise_with_gw_hp"],
    "float8 delayed": DELAYED,
    "float8 delayed, most recent amax": [*DELAYED, "--float8.delayed_amax=most_recent"],
    "float8 delayed, margin 1": [*DELAYED, "--float8.delayed_margin=1"],
    "float8 delayed, e4m3 gradients": [*DELAYED, "--float8.delayed_format=e4m3"],
    "float8 delayed, weights dynamic": [*DELAYED, "--float8.cast_weight=dynamic"],
    "float8 tensorwise, all-gather by bound": [
        *FLOAT8_EVERYWHERE,
        "--float8.enable_fsdp_float8_all_gather",
        "--float8.weight_scale=bound",
    ],
    "int8 rowwise": INT8,
    "int8 tensorwise": [*INT8, "--int8.recipe_name=tensorwise"],
    "int8 rowwise, output too": [*INT8, "--int8.filter_fqns="],
    "int8 rowwise, int8 all-gather": [*INT8, "--int8.enable_fsdp_int8_all_gather"],
    "float8 blockwise (emulated)": [*FLOAT8_EVERYWHERE, "--float8.recipe_name=blockwise"],
    "mx mxfp8 (emulated)": MX_FLAGS,
    "mx mxint8 (emulated)": [*MX_FLAGS, "--mx.recipe_name=mxint8"],
    "mx mxint8, floor": [*MX_FLAGS, "--mx.recipe_name=mxint8", FLOOR],
    "mx mxint8, floor, to -128": [*MX_FLAGS, "--mx.recipe_name=mxint8", FLOOR, "--mx.symmetric_clipping=false"],
    "mx nvfp4 (emulated)": NVFP4,
    "mx nvfp4, all blocks": [*NVFP4, "--mx.keep_last_blocks_fraction=0"],
    "mx nvfp4, no transform": [*NVFP4, "--mx.random_hadamard=false"],
    "mx nvfp4, round to nearest": [*NVFP4, "--mx.stochastic_rounding=false"],
    "mx nvfp4, 1D weight scales": [*NVFP4, "--mx.weight_scales_2d=false"],
    "mx nvfp4, output in bf16": [*NVFP4, "--mx.forward_with_hp"],
    "mx nvfp4, weight gradient in bf16": [*NVFP4, "--mx.wgrad_with_hp"],
}

OTHER_SEEDS = (1, 2)  # of bf16, for the spread of its losses


def by_family(results: dict[str, Path]) -> dict[str, dict[str, list[float]]]:
    """The losses of all runs but bf16's: in a panel each for float8, delayed float8, and the other converters."""
    panels: dict[str, dict[str, list[float]]] = {}
    for name, dump in results.items():
        if name != "bf16":
            float8 = "float8, delayed scales" if "delayed" in name else "float8, output layer too"
            panels.setdefault(float8 if "float8" in name else "int8 and mx", {})[name] = losses(dump)
    return panels


def gemms_table() -> str:
    """Relative errors of one layer's GEMMs compared with bf16, on normally distributed data."""
    from torchtitan.config.low_precision import MX, Float8, Int8
    from torchtitan.converters import CONVERTERS, LinearConverter, Target
    from torchtitan.converters.linear import relative_errors

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
        converter = CONVERTERS.get(converter_name).build(section, Target("cpu"))
        assert isinstance(converter, LinearConverter)
        errors = relative_errors(converter, "cpu").values()
        rows.append([name, *(f"{error:.3f}" if error else "bf16" for error in errors)])
    return markdown(["recipe", "output", "input gradient", "weight gradient"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, default=Path("outputs/low_precision"))
    parser.add_argument("--output", type=Path, default=Path("low_precision.png"))
    arguments = parser.parse_args()
    import torch

    results = {name: run(name, flags, arguments.steps, arguments.folder) for name, flags in RECIPES.items()}
    others = [
        run(f"bf16 seed {seed}", [f"--training.seed={seed}"], arguments.steps, arguments.folder) for seed in OTHER_SEEDS
    ]
    print(f"CPU, torch {torch.__version__}, torchao {version('torchao')}, {arguments.steps} steps\n")
    print(losses_table("recipe", results))
    spread = spread_of_losses([results["bf16"], *others])
    print(f"\nbf16 with {1 + len(OTHER_SEEDS)} seeds: losses spread by {spread:.2f}% (standard deviation)")
    print(f"\n{gemms_table()}")
    differences(by_family(results), [losses(results["bf16"]), *map(losses, others)], arguments.output, LAST)


if __name__ == "__main__":
    main()
