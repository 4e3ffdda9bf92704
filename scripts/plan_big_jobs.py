#!/usr/bin/env python3
"""Generates docs/plan.md: what a plan is, and the plans of five big jobs, made by `--job.plan` on this machine; and
pictures in docs/figures.

python scripts/plan_big_jobs.py
"""

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
PAGE = ROOT / "docs" / "plan.md"
JOBS = {
    "Llama 3 8B on 8 (FSDP 8)": ("llama3_8b", ["--job.simulate_world_size=8"]),
    "Llama 3 70B on 256 (FSDP 256)": ("llama3_70b", ["--job.simulate_world_size=256"]),
    "Llama 3 405B on 512 (FSDP 8 x TP 8 x PP 8)": ("llama3_405b", ["--job.simulate_world_size=512"]),
    "Qwen3 30B-A3B on 64 (FSDP 64)": ("qwen3_30b_a3b", ["--job.simulate_world_size=64"]),
    "Qwen3 235B-A22B on 512 (FSDP 64 x PP 8 x EP 8)": ("qwen3_235b_a22b", ["--job.simulate_world_size=512"]),
}
PICTURES = ("qwen3_30b_a3b", "qwen3_235b_a22b")
HEAD = """\
# Planning a run

`--job.plan` does not train. For one rank of each pipeline stage it reports the memory held (parameters, gradients,
optimizer state, activations) relative to the device's memory, the collectives over each mesh dimension and the bytes
they move, FLOPs, a lower bound of the step time, and which layers the converters would convert. `plan.json` and
`plan.png` in the dump folder contain the same.

    CONFIG_FILE=train_configs/llama3_70b.toml ./run_train.sh --job.plan --job.simulate_world_size=256

It takes one process on one CPU and no data. It needs no tokenizer if the flavor sets its vocabulary size. Without
`job.simulate_world_size` it plans for the processes that `run_train.sh` would start here. `[memory_estimation] enabled`
is the same as `job.plan`. `disable_fake_mode` is refused, because a plan has no real tensors.

## What the numbers are

- The training code itself builds the model and takes a step, with fake tensors and a fake process group of the full
  world size. A tensor counts from the operation that creates it until its last reference is gone.
- Parameters, gradients, optimizer state, and the number and bytes of collectives are exact. The peak is the maximum
  that torch's allocator hands out. "Activations and buffers" is the peak minus the three states: activations, gathered
  weights, unreduced gradients, temporary tensors. `tests/distributed/test_plan.py` compares all of them with real runs
  on 2, 4 and 8 gloo processes (the three states and collectives exactly, the rest within 10%; most layouts are within
  1%).
- Layers are identical, except for the first, dense ones of a model with mixtures of experts. So only a few layers,
  micro-batches, pipeline ranks and grad-accumulation steps are simulated, and the rest is extrapolated from their
  differences. The plan says how many were simulated. `tests/unit/test_plan_extrapolation.py` compares this with full
  simulations. Where extrapolation does not apply (layers that differ, schedules with several stages per rank)
  everything is simulated, which may take minutes.
- How [Muon](muon.md)'s matrices divide among ranks depends on their number, so its exchanges and FLOPs are computed for
  all layers, with the optimizer's own code. Only the memory during its update is extrapolated approximately.
- Bytes are those of the full tensor: the output of an all-gather, the input of a reduce-scatter, a message, the larger
  of what a rank sends and receives in an all-to-all. Two columns say how many of them at least a rank's links carry in
  one direction, within its machine of 8 and between machines.
- The device is this machine's GPU. Without one, a simulated world uses an H100 SXM. `job.simulate_device` takes A100,
  H100, H200, B200, MI300X, or cpu. For a GPU, attention saves what flash attention saves (queries, keys, values,
  output, log-sum-exp), and norms save their input. torch's CPU kernels save more.
- Not counted: workspace that a kernel allocates and frees, the CUDA context, NCCL's buffers, allocator fragmentation,
  and the memory that `torch.compile` saves. Leave 10% of the memory free.
- The lower bound assumes GEMMs at the device's peak (attention at half, because it is causal; 8-bit GEMMs at twice the
  rate). It adds the blocking collectives of tensor, context and expert parallelism, or takes FSDP's collectives if
  these take longer. A 1F1B or GPipe pipeline also fills and drains. Each link carries a byte no more often than
  necessary, in machines of 8. A real step is slower.
- Without a pipeline, on an H100 or H200, the plan begins with what a step is expected to take when it is compiled.
  The work is counted in the code that the compiler generates for that GPU ([architecture.md](architecture.md)): FLOPs
  of GEMMs and attention, bytes that generated kernels, uncompiled operations and the update read and write. It is
  divided by the rates in `torchtitan/plan/step_model.py`, which names their sources and ranges. The host is assumed to
  keep ahead. This takes a minute or two, with torch for CPUs or for CUDA, and touches no GPU. It needs the `triton`
  package, which comes with torch for CUDA on Linux, and a C++ compiler; where it is not possible, the plan says why.

## Suggestions

`--job.plan_suggest`, beside `--job.plan`, also prints the fastest five settings that fit into 90% of the device's
memory, on the same number of devices and with the same global batch, and the flags of each. It tries tensor parallelism
within a machine, expert parallelism, recomputation (`none`, `op`, `full`), `fsdp_reshard_after_forward` and
`local_batch_size`, as far as a start would accept them; replicas, context parallelism and pipelines stay as configured.

    CONFIG_FILE=train_configs/llama3_70b.toml ./run_train.sh --job.plan --job.plan_suggest --job.simulate_world_size=256

Steps are estimated by formula (`torchtitan/plan/suggest.py`), for compiled runs; `tests/cross/test_step_by_hand.py`
compares the formula with what the compiler generates. Memory is simulated, as in a plan, for one and two sequences at a
time, in which it is affine. A setting that is slower than another and not lighter is left out. On devices without known
rates (an A100, a CPU), its peak and typical ratios to it are taken.

## Mixtures of experts

- Fake tensors do not say which experts a router chooses. So with expert parallelism the planned rank computes as many
  rows (a token for one of its experts) as it sends, times `job.simulate_expert_load`: the rows of the rank that gets
  most over the mean of all, from 1 (even, the default) to the expert-parallel degree. Memory, all-to-alls and FLOPs
  follow. The others wait for that rank, so the step is its step.
- Dimension `ep` has the all-to-alls of a layer: the numbers of rows; the rows to their experts (dispatch) and the
  results back (combine); in the backward pass the gradients of both. The last four move the same number of bytes: with
  `moe.all_to_all_dtype` half of bf16's. With activation checkpointing, the forward pass's are repeated (`full`, and
  every layer that an integer selects) or their results are kept (`op`).
- Dimension `expert_fsdp` has the ranks that shard the same experts: they gather these with their block, and
  reduce-scatter the gradients. Without expert and tensor parallelism the experts belong to `fsdp`. Other dimensions of
  the same ranks share a name.
- FLOPs per token count the parameters that a token uses. A grouped GEMM is assumed to run at the device's peak, however
  few rows an expert gets. The loads that the stages of a pipeline gather for a report are not counted.

## Five large jobs

Produced by `scripts/plan_big_jobs.py`. Each is the command's own output, with its flags.
"""


def main() -> None:
    parts = [HEAD]
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
                shutil.copy(Path(folder) / "plan.png", PAGE.parent / "figures" / f"plan_{name}.png")
        text = done.stdout + done.stderr
        plan = re.search(r"plan of .*(?=\nplanned in)", text, re.DOTALL)
        if plan is None:
            sys.exit(f"no plan in the output of {' '.join(command)}:\n{text}")
        memory = after.ru_maxrss / 2**20  # KiB on Linux; the largest child so far
        picture = f"\n![Memory, and time by cause](figures/plan_{name}.png)\n" if name in PICTURES else ""
        parts.append(
            f"\n### {title}\n\n`train.py --job.config_file={config} --job.plan {' '.join(flags)}`: {seconds:.0f} s of "
            f"CPU time, {memory:.1f} GiB of CPU memory at most.\n\n```\n{plan[0]}\n```\n{picture}"
        )
        print(f"{title}: {seconds:.0f} s")
    PAGE.write_text("".join(parts), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
