"""The precision search compared with one recipe in all layers and in all but the output layer, at equal modelled time:
a table and a plot of the losses of the debug model.

python -m benchmarks precision_search --output docs/figures/precision_search.png [--steps 300] [--seeds 3]

Times are those of the linear layers' GEMMs alone: the debug model stands for one whose layers are large enough to gain.
A run's loss is the mean over its last 20 steps. Runs that exist already (in --folder) are not repeated.
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
from benchmarks.loss_runs import LAST, final_loss, losses, run, spread_of_losses
from benchmarks.runs import DEBUG_MODEL
from benchmarks.tables import markdown

RECIPES = ("float8 tensorwise", "int8 rowwise")
BATCH = ["--training.seq_len=128", "--training.local_batch_size=8"]


def measure(steps: int) -> Any:
    """The `Table` of the debug model after `steps` steps in bf16."""
    from torchtitan.config import ConfigManager
    from torchtitan.device import find_device
    from torchtitan.engine.explain import conversion_target
    from torchtitan.models import MODELS
    from torchtitan.plan.step_model import RATES
    from torchtitan.precision_search.candidates import find_candidates
    from torchtitan.precision_search.runs import short_run
    from torchtitan.precision_search.search import Table

    config = ConfigManager().parse_args([f"--job.config_file={DEBUG_MODEL}", *BATCH, f"--training.steps={steps}"])
    operands = short_run(config, capture=True).operands
    candidates = find_candidates(config, conversion_target(config, MODELS.get(config.model.name), find_device(0)))
    return Table.of(candidates, operands, dataclasses.replace(RATES["H100"], bandwidth=math.inf))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--measured-steps", type=int, default=100, help="after which errors are measured")
    parser.add_argument("--folder", type=Path, default=Path("outputs/precision_search"))
    parser.add_argument("--output", type=Path, default=Path("precision_search.png"))
    arguments = parser.parse_args()
    import torch

    from torchtitan.precision_search import fragment

    table = measure(arguments.measured_steps)
    names = [candidate.name for candidate in table.candidates]
    assignments: dict[str, dict[str, int | None]] = {"bf16": dict.fromkeys(table.cells)}
    for title, excluded in (("all layers", ()), ("all but output", ("output",))):
        for recipe in RECIPES:
            assignments[f"{title} {recipe}"] = table.throughout(names.index(recipe), excluded)
        assignments[f"{title} time search"] = table.quietest(table.seconds(assignments[f"{title} {RECIPES[0]}"]))
    base_seconds = table.seconds(assignments["bf16"])
    dumps: dict[str, list[Path]] = {}
    for name, assignment in assignments.items():
        flags = fragment.to_flags(fragment.tables_of(table.candidates, assignment))
        dumps[name] = [
            run(f"{name} seed {seed}", [*flags, f"--training.seed={seed}"], arguments.steps, arguments.folder)
            for seed in range(arguments.seeds)
        ]
    rows = []
    for name, runs in dumps.items():
        against = [
            100 * (final_loss(dump) / final_loss(base) - 1) for dump, base in zip(runs, dumps["bf16"], strict=True)
        ]
        deviation = f"{statistics.stdev(against):.2f}" if len(against) > 1 else ""
        assignment = assignments[name]
        rows.append(
            [
                name,
                f"{table.seconds(assignment) / base_seconds:.2f}",
                f"{table.noise(assignment):,.0f}",
                f"{statistics.mean(map(final_loss, runs)):.4f}",
                f"{statistics.mean(against):+.2f}%",
                deviation,
            ]
        )
    print(f"CPU, torch {torch.__version__}, torchao {version('torchao')}, {arguments.steps} steps, ", end="")
    print(f"{arguments.seeds} seeds\n")
    columns = ["layers in low precision", "modelled time", "noise", "loss", "against bf16", "standard deviation"]
    print(markdown(columns, rows))
    if arguments.seeds > 1:
        print(f"\nbf16's losses spread by {spread_of_losses(dumps['bf16']):.2f}% over seeds (standard deviation)")
    for title in ("all layers", "all but output"):
        found = assignments[f"{title} time search"]
        counts = {
            name: sum(index == number for index in found.values())
            for number, name in [*enumerate(names), (None, "bf16")]
        }
        print(f"{title} time search: {', '.join(f'{name} {count}' for name, count in counts.items() if count)}")
    panels = {
        title: {name: losses(runs[0]) for name, runs in dumps.items() if name.startswith(title)}
        for title in ("all layers", "all but output")
    }
    differences(panels, [losses(dump) for dump in dumps["bf16"]], arguments.output, LAST)


if __name__ == "__main__":
    main()
