"""Starts training commands, ours and others', and observes them from outside: lines with their times, time, memory."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from torchtitan.container import available_cores
from torchtitan.launcher.signals import STARTER

ROOT = Path(__file__).resolve().parent.parent
DEBUG_MODEL = ROOT / "train_configs" / "debug_model.toml"
FIRST_STEP = r"\bstep +1/"
RECOMPILED = re.compile(r"\[__recompiles\] Recompiling function (.*)")
PROFILE_FREQ = 4  # at least the three steps of profiler warm-up
PROFILED = 3  # traces; the first is not used, because its steps may not be steady yet


def finish(command: Sequence[str], processes: int = 1) -> str:
    """The standard output of a command. If it fails, this process exits with that output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NGPU": str(processes)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


@dataclass(frozen=True)
class Variant:
    """A variant to time: a name, and its variables and flags. For another trainer the flags are the command."""

    name: str
    environment: dict[str, str]
    flags: list[str]

    @classmethod
    def parse(cls, text: str) -> "Variant":
        """`NAME: VARIABLE=value --flag=value ...`."""
        name, _, rest = text.partition(":")
        return cls(name.strip(), *variables_first(rest))

    @property
    def processes(self) -> int:
        return int(self.environment.get("NGPU") or os.environ.get("NGPU") or 1)

    @property
    def threads(self) -> int:
        """Number of CPU threads of all processes together; torchtitan.launch divides the cores among them."""
        each = self.environment.get("OMP_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
        return self.processes * int(each) if each else max(self.processes, available_cores())


def variables_first(text: str) -> tuple[dict[str, str], list[str]]:
    """Splits `A=1 B=2 word ...` into variables and the remaining words."""
    words, variables = shlex.split(text), {}
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    return variables, words


@dataclass(frozen=True)
class Observed:
    """One command, observed from outside.

    Attributes:
        lines: (seconds since the command was started, line).
        seconds: in total.
        memory: peak resident bytes of the largest process in its process tree, from `wait4`.
    """

    lines: list[tuple[float, str]]
    seconds: float
    memory: int

    @property
    def text(self) -> str:
        return "".join(line for _, line in self.lines)

    def when(self, pattern: str) -> float | None:
        """Seconds until the first line that matches the pattern."""
        return next((seconds for seconds, line in self.lines if re.search(pattern, line)), None)


def observe(name: str, command: Sequence[str], environment: Mapping[str, str]) -> Observed:
    """Runs a command. If it fails, exits with everything it printed."""
    lines: list[tuple[float, str]] = []
    start = perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1", STARTER: str(os.getpid()), **environment},
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((perf_counter() - start, line))
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    # This process's memory at the fork is a lower bound: Linux includes the time before exec.
    memory = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    observed = Observed(lines, perf_counter() - start, memory)
    if process.returncode != 0:
        sys.exit(f"{name} exited with status {process.returncode}:\n{observed.text}")
    return observed


@dataclass(frozen=True)
class Result:
    """One timed run. Unknown values are None.

    Attributes:
        step_rates: tokens/s of all processes in each measured step.
        first_step: seconds from the command to the end of the first step.
        memory: peak resident bytes of the largest process.
        device_memory: peak bytes of torch's allocator on a GPU.
        data_wait: fraction of the measured steps, 0 to 1.
    """

    step_rates: list[float]
    first_step: float | None
    memory: int
    device_memory: int | None = None
    data_wait: float | None = None
    records: list[dict[str, Any]] = field(default_factory=list, repr=False)

    @property
    def rate(self) -> float:
        ordered = sorted(self.step_rates)
        middle = len(ordered) // 2
        return (ordered[middle] + ordered[-middle - 1]) / 2


def train(variant: Variant, config: Path, flags: Sequence[str], folder: Path, **settings: Any) -> Observed:
    """Runs our trainer, with `settings` in the form `section__key` added after all flags."""
    own = [f"--{key.replace('__', '.')}={value}" for key, value in settings.items()]
    command = [str(ROOT / "run_train.sh"), f"--job.dump_folder={folder}", *flags, *variant.flags, *own]
    # The compiler logs only recompilations.
    logs = ",".join(filter(None, [os.environ.get("TORCH_LOGS"), "recompiles"]))
    return observe(
        variant.name,
        command,
        {"PYTHON": sys.executable, "CONFIG_FILE": str(config), "TORCH_LOGS": logs, **variant.environment},
    )


def timed(variant: Variant, config: Path, flags: Sequence[str], warmup: int, steps: int) -> Result:
    """Runs our trainer and measures the last `steps` steps. Exits if they include a recompilation."""
    with tempfile.TemporaryDirectory() as folder:
        observed = train(variant, config, flags, Path(folder), training__steps=warmup + steps, metrics__log_freq=1)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    late = recompiled_after(observed, warmup)
    if late:
        sys.exit(
            f"{variant.name}: after {warmup} steps of warm-up the compiler was still running ({late[0]}). A run should "
            "compile only in its first steps: raise --warmup if these were too few, or find what causes recompilation."
        )
    records = [json.loads(line) for line in lines]
    records = [record for record in records if "loss" in record][warmup:]
    gpu = any(record["mfu"] is not None for record in records) and on_gpu(observed)
    return Result(
        [variant.processes * record["tokens_per_second"] for record in records],
        observed.when(FIRST_STEP),
        observed.memory,
        max(record["peak_memory_bytes"] for record in records) if gpu else None,
        sum(record["data_wait_share"] * record["step_seconds"] for record in records)
        / sum(record["step_seconds"] for record in records),
        records,
    )


def on_gpu(observed: Observed) -> bool:
    return re.search(r"\bdevice +cuda\b", observed.text) is not None


def recompiled_after(observed: Observed, step: int) -> list[str]:
    """Recompilations logged after the line that reports on `step`."""
    reported = observed.when(rf"\bstep +{step}/")
    matches = [(seconds, RECOMPILED.search(line)) for seconds, line in observed.lines]
    return [match[1] for seconds, match in matches if match and reported is not None and seconds >= reported]


def split_of(variant: Variant, config: Path, flags: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a step by phase and by kind of operation. Traced in a separate run, so that timed runs are not
    disturbed."""
    from benchmarks.step_split import medians, step_split, time_by_class

    with tempfile.TemporaryDirectory() as folder:
        train(
            variant, config, flags, Path(folder),
            training__steps=PROFILE_FREQ * PROFILED, metrics__log_freq=1,
            profiling__enable_profiling="true", profiling__profile_freq=PROFILE_FREQ,
        )  # fmt: skip
        traces = sorted(Path(folder).glob("profile_traces/iteration_*/rank0_trace.json"))
        last = [trace for trace in traces if trace.parent.name != f"iteration_{PROFILE_FREQ}"]
        return medians([step_split(trace) for trace in last]), medians([time_by_class(trace)[0] for trace in last])


def timed_other(command: Variant, pattern: str, first_step: str, warmup: int) -> Result:
    """Runs another trainer. The pattern extracts tokens/s per process, once for each step that it reports."""
    observed = observe(command.name, command.flags, command.environment)
    rates = [float(rate.replace(",", "")) for rate in re.findall(pattern, observed.text)]
    if not rates:
        sys.exit(f"{command.name} printed nothing that matches {pattern!r}:\n{observed.text}")
    return Result(
        [command.processes * rate for rate in rates[warmup:] or rates[-1:]],
        observed.when(first_step),
        observed.memory,
    )
