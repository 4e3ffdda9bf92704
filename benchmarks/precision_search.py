"""The precision search compared with one recipe in all layers, in all but the output layer and (nvfp4, whose default it
is) in all but the last block, at equal modelled time: a table and a plot of losses.

python -m benchmarks precision_search --device B200 --output precision_search.png [--steps 300] [--seeds 3]
python -m benchmarks precision_search --model 100M --steps 40 --measured-steps 20

Times are those of the linear layers' GEMMs alone: small models stand for ones whose layers are large enough to gain.
Losses are means over the last 20 and over the last 100 steps. Runs that exist already (in --folder) are not repeated.
"""

import argparse
import dataclasses
import math
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import differences
from benchmarks.loss_runs import BATCH, LAST, MODEL_FLAGS, against, final_loss, losses, run, run_other_weights
from benchmarks.runs import DEBUG_MODEL
from benchmarks.tables import markdown

NVFP4 = ("mx nvfp4",)
RECIPES = {"H100": ("float8 tensorwise", "int8 rowwise"), "B200": NVFP4}
LONG = 100  # steps in the mean that varies less


def measure(model: list[str], steps: int, device: str) -> Any:
    """The `Table` of a model after `steps` steps in bf16, with times of the device."""
    from torchtitan.config import ConfigManager
    from torchtitan.device import find_device
    from torchtitan.engine.explain import conversion_target
    from torchtitan.engine.model_args import register_models
    from torchtitan.models import MODELS
    from torchtitan.plan.step_model import DATA_SHEET_RATES, RATES
    from torchtitan.precision_search.candidates import find_candidates
    from torchtitan.precision_search.runs import short_run
    from torchtitan.precision_search.search import Table

    flags = [f"--job.config_file={DEBUG_MODEL}", *BATCH, *model, f"--training.steps={steps}"]
    config = ConfigManager().parse_args(flags)
    register_models(config)
    operands = short_run(config, capture=True).operands
    candidates = find_candidates(config, conversion_target(config, MODELS.get(config.model.name), find_device(0)))
    rates = dataclasses.replace({**RATES, **DATA_SHEET_RATES}[device], bandwidth=math.inf)
    return Table.of(candidates, operands, rates, config.optimizer.beta1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=RECIPES, default="H100", help="to model the time of")
    parser.add_argument("--model", choices=MODEL_FLAGS, default="debug")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--measured-steps", type=int, default=60, help="after which errors are measured")
    parser.add_argument("--folder", type=Path, default=Path("outputs/precision_search"))
    parser.add_argument("--output", type=Path, default=Path("precision_search.png"))
    arguments = parser.parse_args()
    import torch

    from torchtitan.precision_search import fragment

    model = MODEL_FLAGS[arguments.model]
    folder = arguments.folder / arguments.model
    table = measure(model, arguments.measured_steps, arguments.device)
    names = [candidate.name for candidate in table.candidates]
    recipes = RECIPES[arguments.device]
    titles = {"all layers": [], "all but output": ["output"]}
    if recipes == NVFP4:
        last_block = max(int(fqn.split(".")[1]) for fqn in table.cells if fqn.startswith("layers."))
        titles["all but the last block"] = [fqn for fqn in table.cells if fqn.startswith(f"layers.{last_block}.")]
    assignments: dict[str, dict[str, int | None]] = {"bf16": dict.fromkeys(table.cells)}
    for title, excluded in titles.items():
        for recipe in recipes:
            assignments[f"{title} {recipe}"] = table.throughout(names.index(recipe), excluded)
        found = table.quietest(table.seconds(assignments[f"{title} {recipes[0]}"]))
        if found not in assignments.values():
            assignments[f"{title} time search"] = found
        else:
            same = next(name for name, one in assignments.items() if one == found)
            print(f"{title} time search: the same as {same}")
    base_seconds = table.seconds(assignments["bf16"])
    dumps: dict[str, list[Path]] = {}
    for name, assignment in assignments.items():
        flags = [*model, *fragment.to_flags(fragment.tables_of(table.candidates, assignment))]
        title = f"{name} {arguments.device}" if name.endswith("search") else name  # the others are the same everywhere
        dumps[name] = [
            run(f"{title} seed {seed}", [*flags, f"--training.seed={seed}"], arguments.steps, folder)
            for seed in range(arguments.seeds)
        ]
        counts = {
            which: sum(index == number for index in assignment.values())
            for number, which in [*enumerate(names), (None, "bf16")]
        }
        print(f"{name}: {', '.join(f'{which} {count}' for which, count in counts.items() if count)}")
    rows = [
        [
            name,
            f"{table.seconds(assignments[name]) / base_seconds:.2f}",
            f"{table.noise(assignments[name]):,.0f}",
            f"{statistics.mean(map(final_loss, runs)):.4f}",
            *against(runs, dumps["bf16"], LAST),
            *against(runs, dumps["bf16"], LONG),
        ]
        for name, runs in dumps.items()
    ]
    print(f"{arguments.model} model, CPU, torch {torch.__version__}, torchao {version('torchao')}, ", end="")
    print(f"{arguments.steps} steps, ", end="")
    print(f"{arguments.seeds} seeds, times of {arguments.device}\n")
    of_steps = [f"{what} ({steps} steps)" for steps in (LAST, LONG) for what in ("against bf16", "standard deviation")]
    print(markdown(["layers in low precision", "modelled time", "noise", "loss", *of_steps], rows))
    for title in titles:
        for recipe in recipes if f"{title} time search" in dumps else ():
            gaps = [
                f"{100 * (final_loss(found) / final_loss(base) - 1):+.2f}%"
                for found, base in zip(dumps[f"{title} time search"], dumps[f"{title} {recipe}"], strict=True)
            ]
            print(f"\nAt the time of {title}, the search against {recipe}, by seed: {', '.join(gaps)}")
    panels = {
        title: {name: list(map(losses, runs)) for name, runs in dumps.items() if name.startswith(title)}
        for title in titles
    }
    chance = [dumps["bf16"][0], *run_other_weights("bf16", model, arguments.steps, folder, arguments.seeds)]
    differences(panels, list(map(losses, dumps["bf16"])), arguments.output, LAST, list(map(losses, chance)))


if __name__ == "__main__":
    main()
