#!/usr/bin/env python3
"""Attacks hundreds of tiny runs at random moments, and prints the outcomes, as in docs/measurements/checkpoints.md.

python -m benchmarks faults --trials 300 --seed 0     all (tests/helpers/attacks.py, foreign.py); --only 17 repeats one
python -m benchmarks faults --tests [--full]          figures of tests/end_to_end/test_faults.py

Each trial's result is a line in RESULTS, from which an interrupted run resumes. With --shard 0/2 and --shard 1/2 two
processes share the trials. --full kills 20 times in each mode and takes a quarter of an hour. Filling disks needs root.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from attacks import ATTACKS, STEPS, Start, Trial, Undisturbed, tensor_hashes, write_data  # noqa: E402
from foreign import foreign_input  # noqa: E402
from runs import last_step, losses  # noqa: E402

from benchmarks.forks import import_ahead  # noqa: E402

ATTACKS["foreign input"] = foreign_input, 200

Result = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first trial; later trials count up from it")
    parser.add_argument(
        "--only", type=int, nargs="+", help="repeat the trials with these seeds, and print their output"
    )
    parser.add_argument("--attack", choices=ATTACKS, help="of these trials, only those with this attack")
    parser.add_argument("--shard", default="0/1", help="I/N: every Nth trial, from the Ith")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "faults.jsonl")
    parser.add_argument("--tests", action="store_true", help="run the tests instead, and print their results")
    parser.add_argument("--full", action="store_true", help="with --tests: include the long tests")
    parser.add_argument("--figures", type=Path, help="only print the results that an earlier run of the tests wrote")
    arguments = parser.parse_args()
    if arguments.tests or arguments.full or arguments.figures:
        return figures_of_tests(arguments.figures, arguments.full)
    number, shards = map(int, arguments.shard.split("/"))
    seeds = [*range(arguments.seed, arguments.seed + arguments.trials)]
    if arguments.only is not None:
        seeds, arguments.results = arguments.only, Path(os.devnull)
    elif arguments.attack:
        seeds = [seed for seed in seeds if drawn(seed)[1] == arguments.attack]
    results = read(arguments.results)
    if left := [seed for seed in seeds[number::shards] if seed not in results]:
        import_ahead()
        with tempfile.TemporaryDirectory() as name:
            runs = UndisturbedRuns(Path(name))
            for seed in left:
                if seed in read(arguments.results):  # done by another shard
                    continue
                results[seed] = attempt(seed, runs, verbose=arguments.only is not None)
                line = json.dumps(results[seed])
                print(line, flush=True)
                with arguments.results.open("a") as file:
                    file.write(f"{line}\n")
    results = {**results, **read(arguments.results)}  # including other shards
    done = [results[seed] for seed in seeds if seed in results]
    print(table(done))
    return int(any(result["problem"] for result in done))


class UndisturbedRuns:
    """Reference runs without attacks, one for each layout, created on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data.jsonl"
        self.known: dict[tuple[int, str], tuple[Undisturbed, Path]] = {}
        write_data(self.data)

    def of(self, processes: int, async_mode: str) -> tuple[Undisturbed, Path]:
        key = processes, async_mode
        if key not in self.known:
            self.known[key] = self._run(*key)
        return self.known[key]

    def _run(self, processes: int, async_mode: str) -> tuple[Undisturbed, Path]:
        folder = self.folder / f"{processes}-{async_mode}"
        folder.mkdir()
        nothing = Undisturbed({}, {}, 0)
        trial = Trial(folder, random.Random(0), processes, async_mode, False, nothing, folder, self.data)
        began, template = time.monotonic(), folder / "template"
        start = Start(trial, f"--training.steps={STEPS - 2}")
        start.wait_until(lambda: last_step(trial.run) > 0)
        seconds = time.monotonic() - began
        status = start.finish()
        assert status == 0, start.output()
        shutil.copytree(trial.run, template)
        start = Start(trial)
        status = start.finish()
        assert status == 0, start.output()
        tensors = tensor_hashes(trial.run / "checkpoint" / f"step-{STEPS}")
        return Undisturbed(losses(trial.run), tensors, seconds), template


def drawn(seed: int) -> tuple[random.Random, str]:
    """A trial's generator, and its attack, the first thing drawn from it."""
    draw = random.Random(seed)
    names = [name for name in ATTACKS if name != "disk full" or os.geteuid() == 0]
    return draw, draw.choices(names, [ATTACKS[name][1] for name in names])[0]


def attempt(seed: int, runs: UndisturbedRuns, verbose: bool) -> Result:
    """Runs a trial. Returns its facts and its problem, if any."""
    draw, name = drawn(seed)
    processes, mode = draw.choice((1, 1, 2)), draw.choice(("disabled", "async"))
    real = name in ("process killed", "signals") and draw.random() < 0.15
    undisturbed, template = runs.of(processes, mode)
    problem, began = "", time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        trial = Trial(Path(folder), draw, processes, mode, real, undisturbed, template, runs.data)
        try:
            ATTACKS[name][0](trial)
        except AssertionError as error:
            problem = str(error) or "assertion failed"
        for output in trial.outputs if verbose or problem else ():
            print(output, file=sys.stderr)
    facts = {"processes": processes, "async_mode": mode, "real": real, **trial.facts}
    seconds = round(time.monotonic() - began, 1)
    return {"seed": seed, "attack": name, "problem": problem, "seconds": seconds, **facts}


def read(path: Path) -> dict[int, Result]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {result["seed"]: result for result in map(json.loads, lines)}


def table(results: list[Result]) -> str:
    lines = ["| attack | trials | with two processes | moments | problems (seeds) |", "|---|---:|---:|---|---|"]
    for name in ATTACKS:
        ours = [result for result in results if result["attack"] == name]
        moments = Counter(moment(result) for result in ours)
        broken = [str(result["seed"]) for result in ours if result["problem"]]
        two = sum(result["processes"] == 2 for result in ours)
        told = ", ".join(f"{name} {count}" for name, count in moments.most_common())
        lines.append(f"| {name} | {len(ours)} | {two} | {told} | {', '.join(broken) or 'none'} |")
    failed = [result for result in results if result["problem"]]
    lines.append(f"| all | {len(results)} | | | {len(failed) or 'none'} |")
    return "\n".join(lines)


def moment(result: Result) -> str:
    """When the attack happened."""
    return "after the end" if result.get("ended before") else str(result.get("phase", "any"))


def figures_of_tests(figures: Path | None, full: bool) -> int:
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        path = figures or Path(folder) / "figures.jsonl"
        if figures is None:
            marker = "full or not full" if full else "not full"
            options = ["-m", marker, "-o", "timeout=3600", "tests/end_to_end/test_faults.py"]
            command = [sys.executable, "-m", "pytest", *options]
            status = subprocess.run(command, cwd=ROOT, env={**os.environ, "FIGURES": str(path)}).returncode
        print("\n| fault | figures |\n|---|---|")
        for line in path.read_text().splitlines():
            values = json.loads(line)
            name = values.pop("test")
            print(f"| {name} | {', '.join(f'{key}: {value}' for key, value in values.items())} |".replace("_", " "))
    return status


if __name__ == "__main__":
    sys.exit(main())
