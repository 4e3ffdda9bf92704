"""Loss of the debug model whose ranks sum gradients in bfloat16, relative to float32 with the same seed: a table.

python -m benchmarks gradient_sums [--ranks 4] [--steps 200] [--seeds 3]

A run's loss is the mean over the last 20 steps. Runs that exist already (in --folder) are not repeated.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.loss_runs import losses, run_seeds, seeds_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("outputs/gradient_sums"))
    arguments = parser.parse_args()
    import torch

    ranks = arguments.ranks
    common = ["--training.local_batch_size=2", "--training.mixed_precision_param=bfloat16"]
    sums = {
        f"sums in {dtype}": run_seeds(
            f"{dtype} {ranks} ranks",
            [*common, f"--training.mixed_precision_reduce={dtype}"],
            arguments.steps,
            arguments.folder,
            arguments.seeds,
            ranks,
        )
        for dtype in ("float32", "bfloat16")
    }
    print(f"debug model, {ranks} ranks on a CPU, torch {torch.__version__}, {arguments.steps} steps\n")
    print(seeds_table("gradients", sums))
    pairs = zip(*(map(losses, dumps) for dumps in sums.values()), strict=True)
    largest = max(abs(loss / base - 1) for bases, run in pairs for base, loss in zip(bases, run, strict=True))
    print(f"\nThe loss of one step differs by at most {largest:.2%}.")


if __name__ == "__main__":
    main()
