"""Tokens/s, MFU, memory and time to the first step of variants of a run, beside each other on one machine.

python benchmarks/throughput.py --variant "bf16:" --variant "int8: --model.converters=int8" -- --training.seq_len=512
python benchmarks/throughput.py --variant "one:" --variant "FSDP 2: NGPU=2 --training.local_batch_size=2"
python benchmarks/throughput.py --against "COMMAND OF ANOTHER TRAINER"

A variant is a name, then variables and flags of its own; flags after -- are for all. Variants run in turn, A B C A B C,
and ratios are taken within a round, since the speed of a machine drifts. Rates are those of all processes together, the
median over the steps after warm-up.
"""

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEBUG_MODEL = ROOT / "train_configs" / "debug_model.toml"


@dataclass(frozen=True)
class Variant:
    """What is timed: our trainer with these variables and flags, or another's command."""

    name: str
    environment: dict[str, str]
    flags: list[str]

    @classmethod
    def parse(cls, text: str) -> "Variant":
        name, _, rest = text.partition(":")
        words = shlex.split(rest)
        variables = dict(word.split("=", 1) for word in words if not word.startswith("-"))
        return cls(name.strip(), variables, [word for word in words if word.startswith("-")])


@dataclass(frozen=True)
class Result:
    """Of one run; what is not known is None.

    Attributes:
        rate: tokens/s of all processes.
        mfu: 0 to 1.
        memory: peak bytes of the first process.
        first_step: seconds from the command to the end of the first step.
    """

    rate: float
    mfu: float | None = None
    memory: float | None = None
    first_step: float | None = None


def run(variant: Variant, config: Path, flags: Sequence[str], warmup: int, steps: int) -> Result:
    """One run of our trainer."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(ROOT / "run_train.sh"),
            f"--job.dump_folder={folder}",
            f"--training.steps={warmup + steps}",
            "--metrics.log_freq=1",
            *flags,
            *variant.flags,
        ]
        environment = {**os.environ, "CONFIG_FILE": str(config), **variant.environment}
        start = time.time()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        assert process.stdout is not None
        lines, first_step = [], None
        for line in process.stdout:
            lines.append(line)
            if first_step is None and re.search(r"step +1/", line):
                first_step = time.time() - start
        if process.wait() != 0:
            sys.exit(f"{variant.name}:\n{''.join(lines)}")
        reports = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()][warmup:]
    processes = int(environment.get("NGPU") or 1)
    mfus = [report["mfu"] for report in reports if report["mfu"]]
    return Result(
        processes * statistics.median(report["tokens_per_second"] for report in reports),
        statistics.median(mfus) if mfus else None,
        max(report["peak_memory_bytes"] for report in reports),
        first_step,
    )


def run_other(command: str, pattern: str) -> Result:
    """One run of another trainer: what the pattern finds last in its output is its rate."""
    done = subprocess.run(shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = re.findall(pattern, done.stdout)
    if done.returncode != 0 or not found:
        sys.exit(f"the other trainer failed, or printed nothing like {pattern!r}:\n{done.stdout}")
    return Result(float(found[-1].replace(",", "")))


def table(results: dict[str, list[Result]]) -> str:
    """Markdown; ratios to the first variant."""
    base = next(iter(results.values()))
    lines = [
        "| variant | tokens/s | range | ratio | range | MFU | memory, GiB | first step, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        rates = [result.rate for result in runs]
        ratios = [result.rate / first.rate for result, first in zip(runs, base, strict=True)]
        cells = [
            name,
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f} to {max(rates):,.0f}",
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            median_of([result.mfu for result in runs], "{:.1%}"),
            median_of([result.memory and result.memory / 2**30 for result in runs], "{:.2f}"),
            median_of([result.first_step for result in runs], "{:.1f}"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def median_of(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return form.format(statistics.median(known)) if known else ""


def machine() -> str:
    """Device and versions, for people."""
    import torch

    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    else:
        device = f"{platform.machine()} CPU, {os.cpu_count()} cores, {os.environ.get('OMP_NUM_THREADS', 'all')} threads"
    return f"{device}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEBUG_MODEL, help="TOML file (default: the debug model)")
    parser.add_argument("--variant", action="append", type=Variant.parse, help="name, a colon, variables and flags")
    parser.add_argument("--against", help="command of another trainer, at the same sizes")
    parser.add_argument("--against-pattern", default=r"tps: ([0-9,]+)", help="where its tokens/s are (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=4, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=12, help="steps that do")
    parser.add_argument("--json", type=Path, help="write every figure there")
    parser.add_argument("flags", nargs="*", help="flags for all variants, after --")
    arguments = parser.parse_args()
    variants = arguments.variant or [Variant("ours", {}, [])]
    results: dict[str, list[Result]] = {"the other": []} if arguments.against else {}
    results |= {variant.name: [] for variant in variants}
    for number in range(1, arguments.rounds + 1):
        if arguments.against:
            results["the other"].append(run_other(arguments.against, arguments.against_pattern))
        for variant in variants:
            result = run(variant, arguments.config, arguments.flags, arguments.warmup, arguments.steps)
            results[variant.name].append(result)
            print(f"round {number}, {variant.name}: {result.rate:,.0f} tokens/s", file=sys.stderr, flush=True)
    print(f"{machine()}, {arguments.rounds} rounds of {arguments.steps} steps\n\n{table(results)}")
    if arguments.json:
        figures = {name: [vars(result) for result in runs] for name, runs in results.items()}
        arguments.json.write_text(json.dumps({"machine": machine(), "results": figures}, indent=1))


if __name__ == "__main__":
    main()
