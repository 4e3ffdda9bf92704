"""Training speed of Llama shapes on one GPU of the H100 class: bf16, float8 and int8, in under nine minutes.

python -m benchmarks gpu [--minutes 9] [--models 8B,qwen3-8B] [--rows "bf16 compiled,float8 tensorwise"] [--name h200]
    [--output FOLDER] [--cache FILE]

It runs from a bare checkout and needs only torch 2.11 or later and the packages of carried/ (scripts/carry_for_gpu.sh).
Rows run in order of importance; those for which no time is left are dropped, and the table says so. The table is
written after each row, to benchmarks/results/NAME.md and NAME.json, or into --output. `--smoke` runs tiny shapes
uncompiled, on CPU too; compiled with --cache.

The rows are a block's speed: no data, no checks, no logs. If time is left, train.py itself trains 20 steps at the end,
as a user starts it; `--rows train.py` runs it alone.
A row is `torchtitan.engine.engine` (model, converter, per-block compile, FSDP2 on a group of one, clipping, fused
AdamW with float32 weights and states) on random tokens, without activation checkpointing. If not all layers of a model
fit in memory, the row uses fewer and says how many. Steps are timed with CUDA events, without synchronization in
between; beside them stands what the host took to start each. The first step (compilation), a step that counts
low-precision GEMMs, and one more are not timed. The compiler's cache starts empty, except for the rows called "cached",
or with what --cache has: FILE is loaded before the rows, if this torch and this kind of GPU made it, and has afterwards
what these rows compiled or used (in FILE.1 and so on beyond 16 MiB). A row of 60 s runs without a pause, and lists
tokens/s, clock and power every 2 s. One process runs the rows in order. A row that fails
is recorded with the reason, and ends the process only where it leaves memory or the GPU unusable. Rows of torchtitan
0.1.0 are its own trainer's steps (gpu_peer.py), if it was carried.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_cache import save_cache
from benchmarks.gpu_report import report
from benchmarks.gpu_rows import (
    BASE,
    CACHED,
    MODELS,
    MORE,
    PEER,
    PEERS,
    RECIPES,
    SMOKE_USER,
    USER,
    USER_ROW,
    Recipe,
    Row,
    rows_by_worth,
)
from benchmarks.runs import ROOT
from benchmarks.tables import write_json

SEQ_LEN = 8192
MARK = "@gpu "  # prefix of the lines that a worker sends to its parent
RESERVE = 8.0  # seconds before the deadline at which the last row must have finished
ROW_SECONDS = 150.0  # after which a row is given up
USER_SECONDS = 15.0  # without which train.py is not even started
OUT_OF_MEMORY = "out of memory"
OURS, THEIRS = "gpu.py", "gpu_peer.py"  # workers
ARTIFACTS = "artifacts-{}"  # what the compiler has made for a worker, by its process id, in the folder of its cache


# The parent: does not import torch, passes rows to workers, and writes their results.


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the whole benchmark (%(default)s)")
    default = ",".join(name for name, shape in MODELS.items() if shape.ranks == 1)
    parser.add_argument("--models", default=default, help=f"comma-separated, of {', '.join(MODELS)} (%(default)s)")
    parser.add_argument(
        "--rows", default="", help="names of rows, comma-separated, without commas within names; default: all"
    )
    parser.add_argument("--steps", type=int, default=8, help="measured steps per row (%(default)s)")
    parser.add_argument("--name", default="", help="name of the result files; default: the GPU's")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the result files"
    )
    parser.add_argument("--cache", type=Path, help="the compiler's cache: loaded before the rows, saved after them")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, uncompiled without --cache, any device")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        return work(**json.loads(arguments.worker))
    start = time.monotonic()
    wanted = [name.strip() for name in arguments.rows.split(",") if name.strip()]
    unknown = set(arguments.models.split(",")) - set(MODELS)
    names = [recipe.name.replace(",", "") for recipe in (*RECIPES, *MORE, CACHED, *PEERS)] + [USER_ROW]
    unknown |= set(wanted) - set(names)
    if unknown:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; models are {', '.join(MODELS)}, rows {', '.join(names)}")
    models = arguments.models.split(",")
    rows = rows_by_worth(models, wanted, arguments.smoke, compiled=not arguments.smoke or arguments.cache is not None)
    run = Run(start + 60 * arguments.minutes, arguments)
    run.all(rows)
    if USER_ROW in wanted or (not wanted and all(MODELS[model].ranks == 1 for model in models)):
        run.as_a_user(SMOKE_USER if arguments.smoke else USER)
    if not any("rate" in result for result in run.results) and "last" not in run.user:
        sys.exit("no row finished")


class Run:
    """All rows, in as many processes as necessary.

    Args:
        deadline: on the monotonic clock.
    """

    def __init__(self, deadline: float, arguments: argparse.Namespace) -> None:
        self.deadline = deadline
        self.arguments = arguments
        self.about: dict[str, Any] = {}
        self.results: list[dict[str, Any]] = []
        self.user: dict[str, Any] = {}
        self.full = False  # there is no time for another row
        self.cache = tempfile.mkdtemp()
        self.carried = carried()
        self.peer = carried("peer")

    def as_a_user(self, flags: Sequence[str]) -> None:
        """Trains with train.py, on text, with everything that a run has; takes the speed from its metrics.jsonl."""
        file, *rest = flags
        with tempfile.TemporaryDirectory() as folder:
            environment = {
                **os.environ,
                **{"PYTHON": sys.executable, "NGPU": "1", "CONFIG_FILE": str(ROOT / "train_configs" / file)},
                "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), self.carried])),
            }
            self.user = {"command": " ".join([f"CONFIG_FILE=train_configs/{file} ./run_train.sh", *rest])}
            seconds = min(ROW_SECONDS, self.deadline - RESERVE - time.monotonic())
            try:
                if seconds < USER_SECONDS:
                    raise TimeoutError("no time left")
                command = [str(ROOT / "run_train.sh"), f"--job.dump_folder={folder}", *rest]
                subprocess.run(command, env=environment, timeout=seconds, check=True)
                lines = Path(folder, "metrics.jsonl").read_text().splitlines()
                self.user |= {"last": [line for line in map(json.loads, lines) if "tokens_per_second" in line][-1]}
            except (OSError, subprocess.SubprocessError, IndexError) as error:
                self.user["failed"] = str(error)
        if not self.about:  # train.py alone was asked for
            self.start(OURS, [])
        self.write()

    def all(self, rows: list[Row]) -> None:
        try:
            while rows and not self.full and time.monotonic() < self.deadline - RESERVE:
                rows = self.one_worker(rows)
                self.save_cache()
            self.results += [dropped(row) for row in rows]
            self.write()
        finally:
            shutil.rmtree(self.cache, ignore_errors=True)

    def save_cache(self) -> None:
        """Writes what the workers so far have compiled."""
        artifacts = [file.read_bytes() for file in sorted(Path(self.cache).glob(ARTIFACTS.format("*")))]
        if self.arguments.cache and artifacts:
            made_with = {"torch": self.about["machine"]["versions"]["torch"], "GPU": self.about["machine"]["device"]}
            written = save_cache(self.arguments.cache, artifacts, made_with)
            print(f"compiler's cache: {', '.join(f'{file} {file.stat().st_size / 2**20:.1f} MiB' for file in written)}")

    def one_worker(self, rows: list[Row]) -> list[Row]:
        """Runs a worker until it ends, normally or not. Returns the remaining rows."""
        process = rows[0].process
        count = len(list(itertools.takewhile(lambda row: row.process == process, rows)))
        rows, later = rows[:count], rows[count:]
        if process == "peer" and not self.about:  # ours describes the machine
            self.start(OURS, [])
        if process == "peer" and not self.peer:
            self.results += [
                {**dropped(row), "failed": "its packages are not in carried/ (run scripts/carry_for_gpu.sh)"}
                for row in rows
            ]
            return later
        before = len(self.results)
        status, stopped = self.start(THEIRS if process == "peer" else OURS, rows)
        done = len(self.results) - before
        left = rows[done:]
        if left and stopped:
            self.results.append({**dropped(left.pop(0)), "failed": stopped})
        elif left and status != 0 and not done:
            self.results.append({**dropped(left.pop(0)), "failed": f"its process exited with status {status}"})
        last = self.results[-1] if self.results else {}
        # All layers of one rank of several must fit.
        first = (process == "peer" or last.get("recipe") == BASE.name) and MODELS[last["model"]].ranks == 1
        if done and OUT_OF_MEMORY in last.get("failed", "") and first and (last["layers"] or 0) > 1:
            layers = max(1, int(0.75 * last["layers"]))  # the estimate was wrong: retry with fewer
            again = [rows[done - 1], *left]
            left = [replace(row, layers=layers) if row.model == last["model"] else row for row in again]
        return left + later

    def start(self, script: str, rows: list[Row]) -> tuple[int, str]:
        """Runs a worker. Returns its exit status, and why it was stopped, or ""."""
        ours = [result for result in self.results if "rate" in result and not result["recipe"].startswith(PEER)]
        layers = {result["model"]: result["layers"] for result in ours}
        task = {
            "rows": [asdict(replace(row, layers=row.layers or layers.get(row.model))) for row in rows],
            "seconds": self.deadline - RESERVE - time.monotonic(),
            "steps": self.arguments.steps,
            "smoke": self.arguments.smoke,
            "longest": max(map(without_sustained, self.results), default=0.0),
            "describe": not self.about,
            "cache": str(self.arguments.cache or ""),
        }
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": self.cache, "PYTHONUNBUFFERED": "1"}
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        environment.setdefault("TEARDOWN_CUPTI", "1")  # otherwise tracing slows down the following rows
        paths = [self.peer if script == THEIRS else str(ROOT), os.environ.get("PYTHONPATH"), self.carried]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), "--worker", json.dumps(task)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # a separate process group: the compiler's processes must not outlive it
        )
        assert process.stdout is not None
        stopped = ""
        # A rehearsal may compile for minutes, on a CPU that others use, too.
        limit = ROW_SECONDS * (4 if self.arguments.smoke else 1) + max((r.recipe.sustained for r in rows), default=0.0)

        def stop() -> None:
            nonlocal stopped
            late = time.monotonic() > self.deadline - RESERVE - 1
            stopped = "stopped: no time left" if late else f"stopped after {limit:.0f} s"
            os.killpg(process.pid, signal.SIGKILL)

        def new_timer() -> threading.Timer:
            timer = threading.Timer(min(limit, self.deadline - RESERVE - time.monotonic()), stop)
            timer.start()
            return timer

        timer = new_timer()
        for line in process.stdout:
            if line.startswith(MARK):
                self.take(json.loads(line.removeprefix(MARK)))
                timer.cancel()
                timer = new_timer()
            else:
                print(line, end="", flush=True)
        status = process.wait()
        timer.cancel()
        return status, stopped

    def take(self, message: dict[str, Any]) -> None:
        if "machine" in message:
            self.about = message
        elif "no time for another" in message:
            self.full = True
        elif "cache" in message:
            print(message["cache"], flush=True)
            self.about["settings"]["compiler's cache"] = message["cache"]
        else:
            self.results.append(message)
            print(f"{message['model']}, {message['recipe']}: {message.get('failed') or brief(message)}", flush=True)
        self.write()

    def write(self) -> None:
        if not self.about:
            return
        device = re.sub(r"\W+", "_", self.about["machine"]["device"].lower()).strip("_")
        name = self.arguments.name or ("smoke" if self.arguments.smoke else device)
        write_json(self.arguments.output / f"{name}.json", {**self.about, "user": self.user, "rows": self.results})
        (self.arguments.output / f"{name}.md").write_text(report(self.about, self.results, BASE.name, self.user))


def carried(*arguments: str) -> str:
    """The folder of packages that were brought along; empty if there are none."""
    command = [sys.executable, str(ROOT / "scripts" / "carried.py"), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def without_sustained(result: dict[str, Any]) -> float:
    """Seconds that a row took, except for those that it was told to go on."""
    return float(result.get("wall_seconds", 0.0) - result.get("sustained", {}).get("seconds", 0.0))


def dropped(row: Row) -> dict[str, Any]:
    return {"model": row.model, "recipe": row.recipe.name, "layers": row.layers, "failed": "dropped: no time left"}


def brief(result: dict[str, Any]) -> str:
    return f"{result['rate']:,.0f} tokens/s, first step {result['first_step']:.1f} s"


# The worker.


def work(
    rows: Sequence[dict[str, Any]],
    seconds: float,
    longest: float,
    steps: int,
    smoke: bool,
    describe: bool,
    cache: str,
) -> None:
    """Runs rows in order until one fails, or less than the `longest` of them is left of its `seconds`. `cache`: a file
    of the compiler's cache; empty: none."""
    end = time.monotonic() + seconds
    from benchmarks.gpu_row import Bench

    bench = Bench(smoke, SEQ_LEN, steps, MODELS[rows[0]["model"]].ranks if rows else 1)
    if describe:
        send({"machine": bench.describe_machine(), "settings": bench.settings})
        bench.clean()
    if cache and rows:
        send({"cache": bench.load_cache(Path(cache))})
    for values in rows:
        row = Row(**{**values, "recipe": Recipe(**values["recipe"])})
        if time.monotonic() + longest + row.recipe.sustained > end:
            send({"no time for another": True})
            break
        start = time.monotonic()
        about = {"model": row.model, "recipe": row.recipe.name}
        layers = row.layers or bench.layers_that_fit(MODELS[row.model])
        usable = True
        try:
            result = bench.run(MODELS[row.model], layers, row.recipe, row.traced)
            result = {**about, "layers": layers, **result, "wall_seconds": time.monotonic() - start}
            send(result)
            longest = max(longest, without_sustained(result))
        except Exception as error:
            reason = OUT_OF_MEMORY if OUT_OF_MEMORY in str(error) else f"{type(error).__name__}: {error}"
            send({**about, "layers": layers, "failed": " ".join(reason.split())[:400]})
            usable = OUT_OF_MEMORY not in reason and "CUDA error" not in reason
        if cache:  # after each row, since the next one may be stopped
            bench.save_artifacts(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], ARTIFACTS.format(os.getpid())))
        if not usable:
            sys.exit(1)  # frees everything with the process
        if not bench.clean():
            break
    bench.close()


def send(message: dict[str, Any]) -> None:
    print(f"{MARK}{json.dumps(message)}", flush=True)


if __name__ == "__main__":
    main()
