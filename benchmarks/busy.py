"""Waiting threads on a quiet CPU and beside another busy process: tokens/s of the debug model by OpenMP settings.

python -m benchmarks busy --variant "NAME: VARIABLE=value ..." ... --rounds 3 -- flags of train.py

Each run trains on a quiet machine first, then beside one process that never waits. Intervals in which anything else
used more than a tenth of a core are discarded.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, sleep

from benchmarks.runs import ROOT, Variant
from benchmarks.tables import markdown

DEFAULTS = [
    "spins on a quiet machine only (the default):",
    "spins always: GOMP_SPINCOUNT=300000",
    "spins a little: GOMP_SPINCOUNT=7000",
    "never spins: OMP_WAIT_POLICY=passive",
    "one thread: OMP_NUM_THREADS=1",
]
IDLE = (3, 4)  # columns of /proc/stat: idle, and waiting for the disk
TRIES = 3
NOISE = 0.1  # of one core
NEIGHBOR = [sys.executable, "-c", "while True: pass"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--variant",
        action="append",
        type=Variant.parse,
        help="name, a colon, variables; the first is the baseline; repeatable",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.5, help="duration of each measurement")
    parser.add_argument("flags", nargs="*", default=["--training.seq_len=512", "--training.local_batch_size=4"])
    options = parser.parse_args()
    variants = options.variant or [Variant.parse(text) for text in DEFAULTS]
    rates: dict[str, list[tuple[float, float]]] = {variant.name: [] for variant in variants}
    for number in range(options.rounds):
        for variant in variants:
            rates[variant.name].append(quiet_and_busy(variant, options.flags, options.seconds))
            quiet, busy = rates[variant.name][-1]
            print(f"round {number + 1}, {variant.name}: {quiet:,.0f} quiet, {busy:,.0f} busy", flush=True)
    print(markdown(*table(rates)))


def table(rates: dict[str, list[tuple[float, float]]]) -> tuple[list[str], list[list[str]]]:
    """Medians, and the range of ratios to the first variant on a quiet machine in the same round."""
    reference = [quiet for quiet, _ in next(iter(rates.values()))]
    rows = []
    for name, pairs in rates.items():
        row = [name]
        for values in zip(*pairs, strict=True):
            found = [(value, value / quiet) for value, quiet in zip(values, reference, strict=True)]
            found = [(value, ratio) for value, ratio in found if not math.isnan(ratio)] or [(math.nan, math.nan)]
            rates_found, ratios = zip(*found, strict=True)
            row += [
                f"{statistics.median(rates_found):,.0f}",
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            ]
        rows.append(row)
    return ["setting", "quiet, tokens/s", "ratio", "range", "busy, tokens/s", "ratio", "range"], rows


def quiet_and_busy(variant: Variant, flags: list[str], seconds: float) -> tuple[float, float]:
    """Tokens/s before and after another process starts."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(ROOT / "run_train.sh"), f"--job.dump_folder={folder}", *flags, *variant.flags]
        command += ["--training.steps=100000", "--metrics.log_freq=1"]
        environment = {**os.environ, "PYTHON": sys.executable, **variant.environment}
        with open(Path(folder) / "log", "w") as log:
            run = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            metrics = Path(folder) / "metrics.jsonl"
            quiet = rate(run, metrics, 4, seconds, [run.pid])
            neighbor = subprocess.Popen(NEIGHBOR, start_new_session=True)  # as if started from another terminal
            try:
                return quiet, rate(run, metrics, 1, seconds, [run.pid, neighbor.pid])
            finally:
                neighbor.kill()
                neighbor.wait()
        except EOFError:
            sys.exit(f"{variant.name} ended:\n{(Path(folder) / 'log').read_text()}")
        finally:
            run.kill()
            run.wait()


def rate(run: "subprocess.Popen[bytes]", metrics: Path, skip: int, seconds: float, ours: list[int]) -> float:
    """Tokens/s after `skip` steps, over `seconds`, or over two steps if they take longer. NaN if other processes were
    active all the time."""
    for _ in range(TRIES):
        first = len(records(metrics)) + skip
        while len(records(metrics)) < first:
            if run.poll() is not None:
                raise EOFError
            sleep(0.02)
        start, used = perf_counter(), cpu_seconds_of_others(ours)
        while perf_counter() - start < seconds or len(records(metrics)) < first + 2:
            sleep(0.05)
        if cpu_seconds_of_others(ours) - used < NOISE * (perf_counter() - start):
            return statistics.harmonic_mean(records(metrics)[first:])
    return math.nan


def records(metrics: Path) -> list[float]:
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return [json.loads(line)["tokens_per_second"] for line in lines]


def cpu_seconds_of_others(ours: list[int]) -> float:
    """Since boot, in units of Linux's clock ticks."""
    busy = sum(int(ticks) for i, ticks in enumerate(Path("/proc/stat").read_text().split()[1:9]) if i not in IDLE)
    own = sum(sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[11:13])) for pid in ours)
    return (busy - own) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
