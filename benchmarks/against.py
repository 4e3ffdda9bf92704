"""Throughput and time to the first step of the debug model, beside another trainer on the same machine.

python benchmarks/against.py [--peer COMMAND] [--rounds 5] [-- --section.key=value ...]

The two commands run in turn, and each figure is compared within its round, since the speed of a machine drifts. The
peer's figure is what the pattern finds last in its output.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = [
    "--training.steps=24",
    "--training.seq_len=512",
    "--training.local_batch_size=4",
    "--metrics.log_freq=8",
    "--activation_checkpoint.mode=none",
    "--lr_scheduler.warmup_steps=2",
]


def ours(flags: list[str]) -> tuple[float, float]:
    """(tokens/s in the last report, seconds from the command to the end of the first step)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(ROOT / "run_train.sh"),
            f"--job.dump_folder={folder}",
            *FLAGS,
            *flags,
        ]
        start = time.time()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        first_step = 0.0
        lines = []
        for line in process.stdout:
            lines.append(line)
            if not first_step and re.search(r"step +1/", line):
                first_step = time.time() - start
        if process.wait() != 0:
            sys.exit("".join(lines))
        entries = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        return entries[-1]["tokens_per_second"], first_step


def peer(command: str, pattern: str) -> float:
    done = subprocess.run(shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = re.findall(pattern, done.stdout)
    if done.returncode != 0 or not found:
        sys.exit(f"the peer's command failed or printed nothing like {pattern!r}:\n{done.stdout}")
    return float(found[-1].replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="command of the other trainer, at the same sizes")
    parser.add_argument(
        "--peer-pattern", default=r"tps: ([0-9,]+)", help="where its tokens/s are (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("flags", nargs="*", help="flags for our run")
    arguments = parser.parse_args()

    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "all")
    print(f"{platform.machine()}, {os.cpu_count()} cores, {threads} threads, torch {torch.__version__}")
    rates, starts, ratios = [], [], []
    for number in range(1, arguments.rounds + 1):
        rate, first_step = ours(arguments.flags)
        rates.append(rate)
        starts.append(first_step)
        line = f"round {number}: {rate:,.0f} tokens/s, first step after {first_step:.1f} s"
        if arguments.peer:
            theirs = peer(arguments.peer, arguments.peer_pattern)
            ratios.append(rate / theirs)
            line += f"; peer {theirs:,.0f} tokens/s, ratio {ratios[-1]:.2f}"
        print(line, flush=True)
    print(f"median: {statistics.median(rates):,.0f} tokens/s, first step after {statistics.median(starts):.1f} s")
    if ratios:
        print(f"median ratio to the peer: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
