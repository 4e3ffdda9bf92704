"""What a given time on this machine reaches: held-out bits per byte of the debug model, one change after another.

python -m benchmarks speedrun [--minutes 10] [--seeds 3] [--only NAMES] [--folder outputs/speedrun]

Each change is tried on top of the adopted ones before it (CHANGES), for as many steps as then fit into the time: the
steps of both are timed in turn first, on an otherwise idle machine. Finished runs and timings are not repeated.
`--minutes 10 --only "the debug model,all adopted"` compares the first with the last.
"""

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.loss_runs import mean_gap, run_seeds
from benchmarks.runs import DEBUG_MODEL, Variant, timed
from benchmarks.tables import markdown, write_json

ROUNDS = 4  # of timing two recipes in turn
WARMUP, TIMED = 2, 12  # steps
HELD_OUT = "held_out/bits_per_byte"
EVALUATION = ["--evaluation.tasks=held_out", "--evaluation.freq=1000000", "--validation.enabled"]
EVALUATION += ["--validation.freq=1000000"]  # both also run after the last step
FIRST, LAST = "the debug model", "all adopted"
BATCH = "training.local_batch_size"
WARM_UP = 0.05  # of the steps, as in the debug model's file
Recipe = dict[str, str]
"""Keys of the configuration and their values."""


@dataclass(frozen=True)
class Change:
    """A change of a recipe. A name contains no comma.

    Attributes:
        keys: that it sets; in `recipes`, all of the recipe with this change.
        timed: a step takes another time, which is measured.
        before: the name of the recipe that it changes; empty for the first.
    """

    name: str
    keys: Recipe
    timed: bool = False
    adopted: bool = False
    before: str = ""


DEBUG = {"training.seq_len": "256", BATCH: "32"}  # as in its file; `loss_runs.run` has its own
MUON = {"optimizer.name": "Muon", "optimizer.muon_momentum": "0.85", "optimizer.muon_row_normalization": "true"}
CHANGES = [
    Change("8 sequences a step", {BATCH: "8"}, timed=True, adopted=True),
    Change("4 sequences a step", {BATCH: "4"}, timed=True),
    Change("compile", {"training.compile": "true"}, timed=True),
    Change("int8", {"model.converters": "int8"}, timed=True),
    Change("Muon at 4e-3", {**MUON, "optimizer.lr": "4e-3"}, timed=True, adopted=True),
    Change("decay over all steps", {"lr_scheduler.decay_ratio": "none"}),
    Change("learning rate 8e-3", {"optimizer.lr": "8e-3"}, adopted=True),
    Change("Qwen3's blocks", {"model.name": "qwen3"}, timed=True),
    Change("4 layers", {"model.n_layers": "4"}, timed=True),
]


def recipes() -> dict[str, Change]:
    """What is run, by name."""
    before = Change(FIRST, DEBUG, timed=True)
    found = {FIRST: before}
    for change in CHANGES:
        found[change.name] = replace(change, keys={**before.keys, **change.keys}, before=before.name)
        if change.adopted:
            before = found[change.name]
    return {**found, LAST: Change(LAST, before.keys, timed=True, before=FIRST)}


def arguments_of(recipe: Recipe, steps: int) -> list[str]:
    """Flags of train.py."""
    warm_up = f"--lr_scheduler.warmup_steps={round(WARM_UP * steps)}"
    return [warm_up, *(f"--{key}={value}" for key, value in recipe.items())]


def seconds_a_step(name: str, folder: Path) -> float:
    """Measured in turn with the recipe that it changes, so that a machine that gets slower changes nothing."""
    file, recipe = folder / "seconds.json", recipes()[name]

    def known() -> dict[str, float]:
        return json.loads(file.read_text()) if file.exists() else {}

    if name in known():
        return known()[name]
    base = seconds_a_step(recipe.before, folder) if recipe.before else 1.0
    if not recipe.timed:
        return base
    times: dict[str, list[float]] = {one: [] for one in (recipe.before, name) if one}
    for _ in range(ROUNDS):
        for one in times:
            variant = Variant(one, {}, arguments_of(recipes()[one].keys, WARMUP + TIMED))
            records = timed(variant, DEBUG_MODEL, [], WARMUP, TIMED).records
            times[one] += [record["step_seconds"] for record in records]
    quartiles = {one: statistics.quantiles(values, n=4)[0] for one, values in times.items()}
    seconds = base * quartiles[name] / quartiles.get(recipe.before, 1.0)
    write_json(file, {**known(), name: seconds})
    print(f"{name}: {seconds:.3f} s a step", file=sys.stderr, flush=True)
    return seconds


def bits_per_byte(dump: Path) -> float:
    """Of a finished run."""
    entries = map(json.loads, (dump / "metrics.jsonl").read_text().splitlines())
    return float(next(entry[HELD_OUT] for entry in entries if HELD_OUT in entry))


def measure(name: str, minutes: float, seeds: int, folder: Path) -> tuple[int, list[float]]:
    """The steps that fit into the time, and the result of each seed."""
    steps = round(60 * minutes / seconds_a_step(name, folder))
    flags = [*arguments_of(recipes()[name].keys, steps), *EVALUATION]
    dumps = run_seeds(f"{name} {minutes:g} min", flags, steps, folder, seeds)
    return steps, [bits_per_byte(dump) for dump in dumps]


def table(names: list[str], minutes: float, seeds: int, folder: Path) -> str:
    """Each of these compared with the recipe that it changes."""
    rows = []
    for name in names:
        recipe = recipes()[name]
        steps, found = measure(name, minutes, seeds, folder)
        gap = mean_gap(found, measure(recipe.before, minutes, seeds, folder)[1]) if recipe.before else ["", ""]
        rows.append([name, f"{steps}", f"{statistics.mean(found):.4f}", *gap, "yes" if recipe.adopted else ""])
    columns = ["change", "steps", "bits per byte", "against before", "standard deviation, %", "adopted"]
    return markdown(columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--folder", type=Path, default=Path("outputs/speedrun"))
    arguments = parser.parse_args()
    names = [name.strip() for name in arguments.only.split(",")] if arguments.only else list(recipes())
    if unknown := [name for name in names if name not in recipes()]:
        parser.error(f"--only: unknown {', '.join(unknown)}; known: {', '.join(recipes())}")
    print(table(names, arguments.minutes, arguments.seeds, arguments.folder))


if __name__ == "__main__":
    main()
