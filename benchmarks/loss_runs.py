"""Runs of the debug model whose losses are compared. Finished ones are not repeated."""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.runs import DEBUG_MODEL, ROOT, finish
from benchmarks.tables import markdown

LAST = 20  # a run's loss is the mean of this many steps


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
        "--training.seq_len=128",
        "--training.local_batch_size=8",
        "--metrics.log_freq=1",
        *flags,
    ]
    finish(command, processes)
    print(f"{name}: loss {statistics.mean(losses(dump)[-LAST:]):.4f}", file=sys.stderr, flush=True)
    return dump


def losses(dump: Path) -> list[float]:
    """The loss of every step of a finished run."""
    entries = map(json.loads, (dump / "metrics.jsonl").read_text().splitlines())
    return [entry["loss"] for entry in entries if "loss" in entry]


def final_loss(dump: Path) -> float:
    """The loss of a finished run: the mean of its last steps."""
    return statistics.mean(losses(dump)[-LAST:])


def spread_of_losses(dumps: Sequence[Path]) -> float:
    """The standard deviation of the losses of runs that differ in their seed, in percent of their mean."""
    found = [final_loss(dump) for dump in dumps]
    return 100 * statistics.stdev(found) / statistics.mean(found)


def losses_table(what: str, runs: dict[str, Path]) -> str:
    """Compares each run with the first."""
    means = {name: final_loss(dump) for name, dump in runs.items()}
    base = next(iter(means))
    rows = [[name, f"{loss:.4f}", f"{loss / means[base] - 1:+.2%}"] for name, loss in means.items()]
    return markdown([what, "loss", f"against {base}"], rows)
