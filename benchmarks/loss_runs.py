"""Runs of small models whose losses are compared. Finished ones are not repeated."""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.runs import DEBUG_MODEL, ROOT, finish
from benchmarks.tables import markdown

LAST = 20  # a run's loss is the mean of this many steps
BATCH = ["--training.seq_len=128", "--training.local_batch_size=8"]
MODEL_FLAGS: dict[str, list[str]] = {
    "debug": [],
    # benchmarks/sizes.py, in runs of a few minutes
    "100M": [
        *("--experimental.custom_import=benchmarks.sizes", "--model.name=sizes", "--model.flavor=100M"),
        *("--optimizer.lr=1e-3", "--training.local_batch_size=4"),
    ],
}


def run(name: str, flags: list[str], steps: int, folder: Path, processes: int = 1) -> Path:
    """The dump folder of a finished run."""
    dump = folder / name.replace(" ", "_").replace(",", "")
    metrics = dump / "metrics.jsonl"
    if metrics.exists() and json.loads(metrics.read_text().splitlines()[-1])["step"] == steps:
        return dump
    command = [
        sys.executable,
        *(["-m", "torchtitan.launch"] if processes > 1 else []),
        str(ROOT / "train.py"),
        f"--job.config_file={DEBUG_MODEL}",
        f"--job.dump_folder={dump}",
        f"--training.steps={steps}",
        *BATCH,
        "--metrics.log_freq=1",
        *flags,
    ]
    finish(command, processes)
    print(f"{name}: loss {statistics.mean(losses(dump)[-LAST:]):.4f}", file=sys.stderr, flush=True)
    return dump


def run_seeds(name: str, flags: list[str], steps: int, folder: Path, seeds: int, processes: int = 1) -> list[Path]:
    """`run` with each seed."""
    names = [name, *(f"{name} seed {seed}" for seed in range(1, seeds))]
    return [
        run(title, [*flags, f"--training.seed={seed}"], steps, folder, processes) for seed, title in enumerate(names)
    ]


def run_other_weights(name: str, flags: list[str], steps: int, folder: Path, seeds: int) -> list[Path]:
    """`run` with the data of seed 0 and the initial weights of the others: how far chance alone moves a loss."""
    dumps = []
    for seed in range(1, seeds):
        start = folder / f"weights_of_seed_{seed}"
        weights = start / "checkpoint/step-0"
        if not weights.exists():
            command = [sys.executable, str(ROOT / "train.py"), f"--job.config_file={DEBUG_MODEL}", *flags]
            command += [f"--training.seed={seed}", f"--job.dump_folder={start}", "--checkpoint.enable_checkpoint"]
            finish([*command, "--checkpoint.create_seed_checkpoint"])
        more = ["--training.seed=0", f"--checkpoint.initial_load_path={weights}"]
        dumps.append(run(f"{name} weights of seed {seed}", [*flags, *more], steps, folder))
    return dumps


def losses(dump: Path) -> list[float]:
    """The loss of every step of a finished run."""
    entries = map(json.loads, (dump / "metrics.jsonl").read_text().splitlines())
    return [entry["loss"] for entry in entries if "loss" in entry]


def final_loss(dump: Path) -> float:
    """The loss of a finished run: the mean of its last steps."""
    return statistics.mean(losses(dump)[-LAST:])


def spread_of_losses(dumps: Sequence[Path]) -> float:
    """The standard deviation of the losses of runs, in percent of their mean."""
    final = [final_loss(dump) for dump in dumps]
    return 100 * statistics.stdev(final) / statistics.mean(final)


def losses_table(header: str, runs: dict[str, Path]) -> str:
    """Compares each run with the first."""
    means = {name: final_loss(dump) for name, dump in runs.items()}
    base = next(iter(means))
    rows = [[name, f"{loss:.4f}", f"{loss / means[base] - 1:+.2%}"] for name, loss in means.items()]
    return markdown([header, "loss", f"against {base}"], rows)


def against(runs: Sequence[Path], bases: Sequence[Path]) -> list[str]:
    """How far the mean loss of the last steps is above the base's with the same seed: the mean over seeds, and its
    standard deviation, both in percent."""
    return mean_gap(list(map(final_loss, runs)), list(map(final_loss, bases)))


def mean_gap(results: Sequence[float], bases: Sequence[float]) -> list[str]:
    """How far results are above those with the same seed: the mean, and its standard deviation, both in percent."""
    gaps = [100 * (result / base - 1) for result, base in zip(results, bases, strict=False)]
    return [f"{statistics.mean(gaps):+.2f}%", f"{statistics.stdev(gaps):.2f}" if len(gaps) > 1 else ""]


def seeds_table(header: str, runs: dict[str, list[Path]]) -> str:
    """Compares the runs of each row with the first row's runs that have the same seeds."""
    base = next(iter(runs))
    rows = [
        [name, str(len(dumps)), f"{statistics.mean(map(final_loss, dumps)):.4f}", *against(dumps, runs[base])]
        for name, dumps in runs.items()
    ]
    return markdown([header, "seeds", "loss", f"against {base} with the same seed", "standard deviation, %"], rows)
