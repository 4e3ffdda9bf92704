#!/usr/bin/env python3
"""Generates docs/plan.md: what a plan is, and the plans of three big jobs, made by `--job.plan` on this machine.

python scripts/plan_big_jobs.py
"""

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "plan.md"
JOBS = {
    "Llama 3 8B on 8 (FSDP 8)": ("llama3_8b", ["--job.simulate_world_size=8"]),
    "Llama 3 70B on 256 (FSDP 32 x TP 8)": ("llama3_70b", ["--job.simulate_world_size=256"]),
    "Llama 3 405B on 512 (FSDP 8 x TP 8 x PP 8)": ("llama3_405b", ["--job.simulate_world_size=512"]),
}
HEAD = """\
# Planning a run

`--job.plan` trains nothing. It says, for a rank of each place in the pipeline, what it would hold (parameters,
gradients, optimizer state, activations) against its device's memory, which collectives it would take part in over each
dimension of the mesh and how many bytes they move, FLOPs, a lower bound of the step's time, and what the converters
would convert. `plan.json` and `plan.png` in the dump folder hold the same.

    CONFIG_FILE=train_configs/llama3_70b.toml ./run_train.sh --job.plan --job.simulate_world_size=256

It takes one process on one CPU, no data and, where the flavor has its vocabulary, no tokenizer. Without
`job.simulate_world_size` it plans for the processes that `run_train.sh` would start here. `[memory_estimation] enabled`
is the same as `job.plan`; `disable_fake_mode` is refused, for a plan has no real tensors.

## What the numbers are

- The code of training itself builds the model and takes a step, in fake tensors and a pretended process group of
  the whole size. Tensors are counted from the operation that makes them until nothing refers to them.
- Parameters, gradients, optimizer state, number and bytes of collectives are exact; the peak is what torch's allocator
  hands out at most. "Activations and buffers" is the peak without the three states: activations, gathered weights,
  gradients before their reduction, temporary tensors. `tests/distributed/test_plan.py` holds all of them to real runs
  on 2, 4 and 8 gloo processes (the three states and collectives exactly, the rest within 10%; most layouts are within
  1%).
- Layers are alike. So few layers, microbatches, ranks of a pipeline and accumulated passes are simulated, and what more
  of them add is computed from the difference; the plan says how many. `tests/unit/test_plan_extrapolation.py` holds
  this to simulations of everything. Where it does not hold (layers that differ, schedules with several stages on a
  rank) everything is simulated, which may take minutes.
- Bytes are those of the whole tensor: what an all-gather makes, what a reduce-scatter is given, a message.
- The device is this machine's GPU. Where there is none and a world is simulated, it is an H100 SXM;
  `job.simulate_device` takes A100, H100, H200, B200, MI300X, or cpu. For a GPU, attention keeps what flash attention
  keeps (queries, keys, values, output, log-sum-exp) and norms keep their input; kernels of torch for CPU keep more.
- Not counted: what a kernel takes and gives back, CUDA's context, NCCL's buffers, fragmentation of the allocator, and
  what `torch.compile` saves. Leave 10% of the memory free.
- The lower bound takes GEMMs at the device's peak (attention at half, being causal; 8-bit GEMMs at twice the
  rate) with tensor and context parallel collectives, which are waited for, or FSDP's, if these take longer; and lets a
  1F1B or GPipe pipeline fill and drain. Each link carries a byte no oftener than it must, in machines of 8. A real step
  is slower.

## Three big jobs

Made by `scripts/plan_big_jobs.py`: each is the command's own output, with its flags.
"""


def main() -> None:
    parts = [HEAD]
    for title, (name, flags) in JOBS.items():
        config = f"train_configs/{name}.toml"
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "train.py", f"--job.config_file={config}", "--job.plan", *flags]
            start = time.perf_counter()
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                [*command, f"--job.dump_folder={folder}"], cwd=ROOT, env=environment, capture_output=True, text=True
            )
            seconds = time.perf_counter() - start
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        text = done.stdout + done.stderr
        plan = re.search(r"plan of .*planned in [\d.]+ s", text, re.DOTALL)
        if plan is None:
            sys.exit(f"no plan in the output of {' '.join(command)}:\n{text}")
        memory = (
            resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        )  # KiB on Linux; the largest child so far
        parts.append(
            f"\n### {title}\n\n`train.py --job.config_file={config} --job.plan {' '.join(flags)}`: {seconds:.0f} s, "
            f"{memory:.1f} GiB of host memory or less, one thread.\n\n```\n{plan[0]}\n```\n"
        )
        print(f"{title}: {seconds:.0f} s")
    PAGE.write_text("".join(parts), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
