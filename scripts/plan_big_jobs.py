#!/usr/bin/env python3
"""Generates docs/measurements/plan.md, plans of five big jobs by `--job.plan`, and pictures in docs/figures.

python scripts/plan_big_jobs.py
"""

import argparse
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "measurements" / "plan.md"
JOBS = {
    "Llama 3 8B on 8 (FSDP 8)": ("llama3_8b", ["--job.simulate_world_size=8"]),
    "Llama 3 70B on 256 (FSDP 256)": ("llama3_70b", ["--job.simulate_world_size=256"]),
    "Llama 3 405B on 512 (FSDP 8 x TP 8 x PP 8)": ("llama3_405b", ["--job.simulate_world_size=512"]),
    "Qwen3 30B-A3B on 64 (FSDP 64)": ("qwen3_30b_a3b", ["--job.simulate_world_size=64"]),
    "Qwen3 235B-A22B on 512 (FSDP 64 x PP 8 x EP 8)": ("qwen3_235b_a22b", ["--job.simulate_world_size=512"]),
}
PICTURES = ("qwen3_30b_a3b", "qwen3_235b_a22b")
HEAD = """\
# Plans of five large jobs

Produced by `scripts/plan_big_jobs.py`. Each is the command's own output, with its flags;
[plan.md](../plan.md#what-the-numbers-are) explains it.
"""


def main() -> None:
    sections = [HEAD]
    for title, (name, flags) in JOBS.items():
        config = f"train_configs/{name}.toml"
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "train.py", f"--job.config_file={config}", "--job.plan", *flags]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                [*command, f"--job.dump_folder={folder}"], cwd=ROOT, env=environment, capture_output=True, text=True
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            if done.returncode:
                sys.exit(done.stdout + done.stderr)
            if name in PICTURES:
                shutil.copy(Path(folder) / "plan.png", ROOT / "docs" / "figures" / f"plan_{name}.png")
        text = done.stdout + done.stderr
        plan = re.search(r"plan of .*(?=\nplanned in)", text, re.DOTALL)
        if plan is None:
            sys.exit(f"no plan in the output of {' '.join(command)}:\n{text}")
        memory = after.ru_maxrss / 2**20  # KiB on Linux; the largest child so far
        picture = f"\n![Memory, and time by cause](../figures/plan_{name}.png)\n" if name in PICTURES else ""
        sections.append(
            f"\n## {title}\n\n`train.py --job.config_file={config} --job.plan {' '.join(flags)}`: {seconds:.0f} s of "
            f"CPU time, {memory:.1f} GiB of CPU memory at most.\n\n```\n{plan[0]}\n```\n{picture}"
        )
        print(f"{title}: {seconds:.0f} s")
    PAGE.write_text("".join(sections), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
