"""Low precision throughout, bf16 throughout, and a switch between them: loss and time of the debug model, as a table
and a plot.

python -m benchmarks precision_schedule --output docs/figures/precision_schedule.png [--steps 300]

A run's loss is the mean over its last 20 steps. Its time is the median step time of each phase times the number of its
steps, summed over the phases. Runs that exist already (in --folder) are not repeated.
"""

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.figures import GREY, bare, label_ends, percent_above, pyplot, saved, spread_of_runs
from benchmarks.loss_runs import LAST, losses, run, run_other_weights
from benchmarks.runs import DEBUG_MODEL
from benchmarks.tables import markdown

RECIPES = {
    "float8 rowwise": 'converters = ["float8"]\n[precision.phase.float8]\nrecipe_name = "rowwise"\n',
    "float8 tensorwise": 'converters = ["float8"]\n',
    "int8 rowwise": 'converters = ["int8"]\n',
}
SHARES = {"throughout": 1.0, "90%, then bf16": 0.9, "50%, then bf16": 0.5}
BATCH = 8
SEEDS = 3  # of bf16's initial weights, for the spread of its losses


@dataclass(frozen=True)
class Result:
    """The result of one run.

    Attributes:
        losses: of each step.
        step_seconds: for each phase, the median and the number of steps.
    """

    losses: list[float]
    step_seconds: list[tuple[float, int]]

    @property
    def seconds(self) -> float:
        return sum(seconds * steps for seconds, steps in self.step_seconds)

    @property
    def loss(self) -> float:
        return statistics.mean(self.losses[-LAST:])


def schedule(recipe: str, share: float) -> str:
    """The debug model's configuration with this recipe for a fraction of the steps."""
    text = DEBUG_MODEL.read_text()
    if share:
        text += f"\n[[precision.phase]]\nuntil = {share}\n{RECIPES[recipe]}"
    return text + ("[[precision.phase]]\n" if share < 1 else "")


def result(name: str, recipe: str, share: float, processes: int, steps: int, folder: Path) -> Result:
    name = f"{name}, {processes} process{'es' if processes > 1 else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name.replace(' ', '_').replace('%', '')}.toml"
    file.write_text(schedule(recipe, share))
    flags = [f"--job.config_file={file}", f"--training.local_batch_size={BATCH // processes}"]
    dump = run(name.replace("%", ""), flags, steps, folder, processes)
    entries = [json.loads(line) for line in (dump / "metrics.jsonl").read_text().splitlines()]
    times: dict[int, list[float]] = {}
    for entry in entries:
        times.setdefault(entry["precision_phase"], []).append(entry["step_seconds"])
    found = Result([entry["loss"] for entry in entries], [(statistics.median(of), len(of)) for of in times.values()])
    print(f"{name}: loss {found.loss:.4f}, {found.seconds:.0f} s", file=sys.stderr, flush=True)
    return found


def plot(
    results: dict[tuple[str, str, int], Result],
    chance: list[list[float]],
    recipes: list[str],
    processes: list[int],
    output: Path,
) -> None:
    """For each recipe: how far its losses are above bf16's, as a moving average, in front of what other initial
    weights change (one standard deviation); and its times relative to bf16's."""
    figure, grid = pyplot().subplots(
        len(recipes), 2, figsize=(12, 0.6 + 3.2 * len(recipes)), squeeze=False, width_ratios=(3, 1.2)
    )
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.5 / len(recipes) / 3, top=0.9, wspace=0.42)
    for (left, right), recipe in zip(grid, recipes, strict=True):
        base = results["", "bf16", processes[0]]
        for number, (name, share) in enumerate(SHARES.items()):
            found = results[recipe, name, processes[0]]
            above = percent_above(found.losses, base.losses, LAST)
            left.plot(range(1, len(above) + 1), above, f"C{number}", label=name)
            if share < 1:
                left.axvline(round(share * len(above)), color=f"C{number}", linestyle=":")
            for place, count in enumerate(processes):
                ratio = results[recipe, name, count].seconds / results["", "bf16", count].seconds
                bar = right.bar(number + 0.4 * place, ratio, 0.36, color=f"C{number}", alpha=1 - 0.5 * place)
                right.bar_label(bar, [f"{ratio:.2f}"], fontsize=8)
                right.text(number + 0.4 * place, 0.05, f"{count} p", ha="center", fontsize=8)
        band = spread_of_runs([base.losses, *chance], LAST)
        left.fill_between(range(1, len(band) + 1), [-one for one in band], band, color=GREY, linewidth=0)
        left.axhline(0, color="black", linewidth=0.8)
        left.set(
            xlabel="step; grey: standard deviation over initial weights",
            ylabel=f"loss against bf16\n(%, mean of {LAST} steps)",
        )
        left.set_title(recipe, loc="left", fontsize=10)
        right.axhline(1, color="black", linewidth=0.8)
        right.set(xticks=[])
        right.set_title("time over bf16's, by processes (p)", loc="left", fontsize=10)
        for axes in (left, right):
            bare(axes)
        label_ends(left)
    saved(figure, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--processes", default="1,2", help="comma-separated (default: %(default)s)")
    parser.add_argument("--recipes", default="float8 rowwise,int8 rowwise", help=f"from {', '.join(RECIPES)}")
    parser.add_argument("--folder", type=Path, default=Path("outputs/precision_schedule"))
    parser.add_argument("--output", type=Path, default=Path("precision_schedule.png"))
    arguments = parser.parse_args()
    recipes = [recipe.strip() for recipe in arguments.recipes.split(",")]
    processes = [int(count) for count in arguments.processes.split(",")]
    results: dict[tuple[str, str, int], Result] = {}
    for count in processes:
        results["", "bf16", count] = result("bf16", "", 0, count, arguments.steps, arguments.folder)
        for recipe in recipes:
            for name, share in SHARES.items():
                of_run = result(f"{recipe} {name}", recipe, share, count, arguments.steps, arguments.folder)
                results[recipe, name, count] = of_run
    print(f"CPU, torch {torch.__version__}, torchao {version('torchao')}, {arguments.steps} steps\n")
    rows = []
    for (recipe, name, count), found in results.items():
        base = results["", "bf16", count]
        by_phase = ", ".join(f"{seconds:.2f}" for seconds, _ in found.step_seconds)
        against = f"{found.loss / base.loss - 1:+.2%}"
        times = [by_phase, f"{found.seconds:.0f}", f"{found.seconds / base.seconds:.2f}"]
        rows.append([f"{recipe} {name}".strip(), f"{count}", f"{found.loss:.4f}", against, *times])
    columns = ["run", "processes", "loss", "against bf16", "seconds a step, by phase", "seconds", "against bf16"]
    print(markdown(columns, rows))
    chance = [losses(dump) for dump in run_other_weights("bf16", [], arguments.steps, arguments.folder, SEEDS)]
    plot(results, chance, recipes, processes, arguments.output)


if __name__ == "__main__":
    main()
