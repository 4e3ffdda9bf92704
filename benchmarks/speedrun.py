"""What a given time on this machine reaches: held-out bits per byte of the debug model, one change after another.

python -m benchmarks speedrun [--minutes 10] [--seeds 3] [--only NAMES] [--folder outputs/speedrun]

Each change is tried on top of the adopted ones before it (CHANGES), for as many steps as then fit into the time: the
steps of all are timed in turn first, on an otherwise idle machine. Finished runs and timings are not repeated.
`--minutes 10 --only "32 sequences a step,all adopted"` compares the first with the last.
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

ROUNDS = 3  # of timing recipes in turn
WARMUP, TIMED = 2, 12  # steps
HELD_OUT = "held_out/bits_per_byte"
EVALUATION = ["--evaluation.tasks=held_out", "--evaluation.freq=1000000", "--validation.enabled"]
EVALUATION += ["--validation.freq=1000000"]  # both also run after the last step
FIRST, LAST = "32 sequences a step", "all adopted"
BATCH = "training.local_batch_size"
WARM_UP = 0.05  # of the steps
SAME_TIME = ("optimizer.lr", "optimizer.weight_decay", "lr_scheduler.decay_ratio")  # whatever their value
Recipe = dict[str, str]
"""Keys of the configuration and their values."""


@dataclass(frozen=True)
class Change:
    """A change of a recipe. A name contains no comma.

    Attributes:
        keys: that it sets; in `recipes`, all of the recipe with this change.
        before: the name of the recipe that it changes; empty for the first.
    """

    name: str
    keys: Recipe
    adopted: bool = False
    before: str = ""


DEBUG = {"training.seq_len": "256", BATCH: "32"}  # the debug model before it took 16; `loss_runs.run` has its own
MUON = {"optimizer.name": "Muon", "optimizer.muon_momentum": "0.85", "optimizer.muon_row_normalization": "true"}
CHANGES = [
    Change("8 sequences a step", {BATCH: "8"}, adopted=True),
    Change("4 sequences a step", {BATCH: "4"}),
    Change("AdamW at 6e-3", {"optimizer.lr": "6e-3"}),
    Change("AdamW at 1.5e-3", {"optimizer.lr": "1.5e-3"}),
    Change("compile", {"training.compile": "true"}),
    Change("int8", {"model.converters": "int8"}),
    Change("Muon at 4e-3", {**MUON, "optimizer.lr": "4e-3"}),
    Change("Muon at 8e-3", {**MUON, "optimizer.lr": "8e-3"}),
    Change("16 sequences a step", {BATCH: "16"}, adopted=True),
    Change("Muon with 16 sequences", {**MUON, "optimizer.lr": "8e-3"}, adopted=True),
    Change("Muon with 32 sequences", {BATCH: "32"}),
    Change("learning rate 1.2e-2", {"optimizer.lr": "1.2e-2"}),
    Change("decay over all steps", {"lr_scheduler.decay_ratio": "none"}),
    Change("no weight decay", {"optimizer.weight_decay": "0"}),
    Change("Qwen3's blocks", {"model.name": "qwen3"}),
    Change("4 layers", {"model.n_layers": "4"}),
    Change("192 wide", {"model.dim": "192"}, adopted=True),
    Change("192 wide with 4 layers", {"model.n_layers": "4"}),
    Change("192 wide with 8 sequences", {BATCH: "8"}),
    Change("128 wide", {"model.dim": "128"}, adopted=True),
    Change("64 wide", {"model.dim": "64"}),
    Change("128 wide with 4 layers", {"model.n_layers": "4"}, adopted=True),
    Change("128 tokens a sequence", {"training.seq_len": "128", BATCH: "32"}, adopted=True),
    Change("2 layers", {"model.n_layers": "2"}),
    Change("16 sequences of 128 tokens", {BATCH: "16"}),
]


def recipes() -> dict[str, Change]:
    """What is run, by name."""
    before = Change(FIRST, DEBUG)
    by_name = {FIRST: before}
    for change in CHANGES:
        by_name[change.name] = replace(change, keys={**before.keys, **change.keys}, before=before.name)
        if change.adopted:
            before = by_name[change.name]
    return {**by_name, LAST: replace(before, name=LAST, before=FIRST)}


def arguments_of(recipe: Recipe, steps: int) -> list[str]:
    """Flags of train.py."""
    warm_up = f"--lr_scheduler.warmup_steps={round(WARM_UP * steps)}"
    return [warm_up, *(f"--{key}={value}" for key, value in recipe.items())]


def time_of(name: str) -> str:
    """The first recipe whose steps take the same time."""
    timed_keys = {recipe: {**change.keys, **dict.fromkeys(SAME_TIME, "")} for recipe, change in recipes().items()}
    return next(recipe for recipe, keys in timed_keys.items() if keys == timed_keys[name])


def steps_that_fit(minutes: float, names: list[str], folder: Path) -> dict[str, int]:
    """Of each recipe. Those not timed before are timed in turn, and the first among them, so that a machine that gets
    slower changes nothing."""
    file, changes = folder / "seconds.json", recipes()
    known: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    if missing := {time_of(name) for name in names} - known.keys():
        times: dict[str, list[float]] = {name: [] for name in changes if name in {FIRST, *missing}}
        for _ in range(ROUNDS):
            for name in times:
                variant = Variant(name, {}, arguments_of(changes[name].keys, WARMUP + TIMED))
                records = timed(variant, DEBUG_MODEL, [], WARMUP, TIMED).records
                times[name] += [record["step_seconds"] for record in records]
        quartiles = {name: statistics.quantiles(values, n=4)[0] for name, values in times.items()}
        slower = known.get(FIRST, quartiles[FIRST]) / quartiles[FIRST]
        known |= {name: slower * quartiles[name] for name in missing}
        write_json(file, known)
        print(f"seconds a step: {known}", file=sys.stderr, flush=True)
    return {name: round(60 * minutes / known[time_of(name)]) for name in names}


def bits_per_byte(dump: Path) -> float:
    """Of a finished run."""
    entries = map(json.loads, (dump / "metrics.jsonl").read_text().splitlines())
    return float(next(entry[HELD_OUT] for entry in entries if HELD_OUT in entry))


def measure(name: str, minutes: float, steps: int, seeds: int, folder: Path) -> list[float]:
    """The result of each seed."""
    flags = [*arguments_of(recipes()[name].keys, steps), *EVALUATION]
    dumps = run_seeds(f"{name} {minutes:g} min", flags, steps, folder, seeds)
    return [bits_per_byte(dump) for dump in dumps]


def table(names: list[str], minutes: float, seeds: int, folder: Path) -> str:
    """Each of these compared with the recipe that it changes."""
    before = [recipes()[name].before for name in names]
    steps = steps_that_fit(minutes, [*filter(None, before), *names], folder)
    results = {name: measure(name, minutes, steps[name], seeds, folder) for name in steps}
    rows = []
    for name in names:
        recipe, values = recipes()[name], results[name]
        gap = mean_gap(values, results[recipe.before]) if recipe.before else ["", ""]
        rows.append([name, f"{steps[name]}", f"{statistics.mean(values):.4f}", *gap, "yes" if recipe.adopted else ""])
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
