"""Cost and savings of scales from weight bounds (float8.weight_scale = bound), for the debug model: a table.

python -m benchmarks weight_bound [--steps 300] [--processes 2]

For each way to compute the scales of the float8 all-gather: all-reduces per step (including the two of every run:
gradient norm and skipped steps), bits of headroom lost, log2(bound / amax), over all weights and steps, weights that
saturated, and the mean loss of the last 20 steps.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.loss_runs import LAST
from benchmarks.runs import DEBUG_MODEL, finish
from benchmarks.tables import markdown

GATHER = ["--model.converters=float8", "--float8.enable_fsdp_float8_all_gather"]
BOUND = [*GATHER, "--float8.weight_scale=bound"]
VARIANTS: dict[str, list[str]] = {
    "gathered in bf16": ["--model.converters=float8"],
    "dynamic": GATHER,
    "precomputed": [*GATHER, "--float8.precompute_float8_dynamic_scale_for_fsdp"],
    "bound, k = 1": [*BOUND, "--float8.weight_scale_freq=1"],
    "bound, k = 16": [*BOUND, "--float8.weight_scale_freq=16"],
    "bound, k = 64": [*BOUND, "--float8.weight_scale_freq=64"],
}


def train(flags: list[str], output: Path) -> None:
    """In each process of a run: trains and inspects the weights after every step. Rank 0 writes the results."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    import torchtitan.trainer as loop
    from torchtitan.build_trainer import build_trainer
    from torchtitan.config import ConfigManager
    from torchtitan.converters.weight_bounds import float8_all_gather_weights
    from torchtitan.device import find_device
    from torchtitan.engine.config_checks import check, global_batch_size

    class AllReduces(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if DTensor in types:
                return NotImplemented  # a DTensor decomposes the operation first
            self.count += func._opname.replace("_", "").startswith("allreduce")
            return func(*args, **(kwargs or {}))

    config = ConfigManager().parse_args(flags)
    device = find_device(int(os.environ["LOCAL_RANK"]))
    dims = check(config, int(os.environ["WORLD_SIZE"]), device.type)
    all_reduces, bits, saturated = [], [], 0
    with build_trainer(config, dims, global_batch_size(config, dims), device) as trainer:
        model, train_step = trainer.engine.model, loop.train_step  # type: ignore[attr-defined]

        def watched(*arguments: Any, **options: Any) -> Any:
            nonlocal saturated
            with AllReduces() as counted:  # type: ignore[no-untyped-call]
                result = train_step(*arguments, **options)
            all_reduces.append(counted.count)
            weights = [w for w in float8_all_gather_weights([model]).values() if w._precomputed_scale is not None]
            if weights:
                amax = torch.stack([weight._tensor.abs().amax() for weight in weights])
                dist.all_reduce(amax, op=dist.ReduceOp.MAX)
                scales = torch.stack([weight._precomputed_scale for weight in weights])
                bits.append(torch.log2(448 / scales / amax).tolist())
                beyond = [(w._tensor.abs() * w._precomputed_scale > 448 * (1 + 1e-6)).sum() for w in weights]
                count = torch.stack(beyond).sum()
                dist.all_reduce(count)
                saturated += int(count)
            return result

        loop.train_step = watched  # type: ignore[attr-defined]
        trainer.train()
        if dist.get_rank() == 0:
            output.write_text(json.dumps({"all_reduces": all_reduces, "bits": bits, "saturated": saturated}))


def row(name: str, seen: dict[str, Any], losses: list[float]) -> list[str]:
    """A line of the table. The first step is excluded, because it has no scale yet."""
    bits = [value for step in seen["bits"] for value in step]
    per_step = statistics.mean(seen["all_reduces"][1:])
    lost = ["", "", ""]
    if bits:
        lost = [f"{max(statistics.mean(bits), 0):.3f}", f"{max(*bits, 0):.3f}", f"{seen['saturated']}"]
    return [name, f"{per_step:.2f}", *lost, f"{statistics.mean(losses[-LAST:]):.4f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", choices=VARIANTS, help="only this row")
    arguments = parser.parse_args()
    import torch

    rows = []
    for name, flags in VARIANTS.items():
        if arguments.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "seen.json"
            command = [sys.executable, "-m", "torchtitan.launch", __file__, "--write", str(output)]
            command += [
                f"--job.config_file={DEBUG_MODEL}",
                f"--job.dump_folder={folder}/run",
                f"--training.steps={arguments.steps}",
                "--training.seq_len=128",
                "--training.local_batch_size=4",
                "--training.global_batch_size=8",
                "--metrics.log_freq=1",
                *flags,
            ]
            finish(command, arguments.processes)
            lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
            rows.append(row(name, json.loads(output.read_text()), [json.loads(line)["loss"] for line in lines]))
            print(*rows[-1], sep=", ", file=sys.stderr, flush=True)
    print(f"CPU, {arguments.processes} processes, torch {torch.__version__}, {arguments.steps} steps\n")
    columns = ["scales", "all-reduces a step", "bits lost, mean", "at most", "saturated", "loss"]
    print(markdown(columns, rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        train(sys.argv[3:], Path(sys.argv[2]))
    else:
        main()
