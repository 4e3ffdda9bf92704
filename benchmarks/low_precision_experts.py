"""Experts in low precision: losses of a small mixture of experts relative to bf16, with converted layers and with
low-precision all-to-all; bytes of a row in all-to-all; time of a layer of experts: three tables.

python -m benchmarks low_precision_experts [--steps 100]

A run's loss is the mean over the last 20 steps. Runs that exist already (in --folder) are not repeated.
"""

import argparse
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.loss_runs import losses_table, run
from benchmarks.tables import markdown

MODEL = ["--experimental.custom_import=tests.tiny", "--model.name=sparse", "--model.flavor=deep"]
FLOAT8 = ["--model.converters=float8"]
ROWWISE = [*FLOAT8, "--float8.recipe_name=rowwise"]
RECIPES: dict[str, list[str]] = {
    "bf16": [],
    "float8 rowwise": ROWWISE,
    "float8 rowwise, experts in bf16": [*ROWWISE, "--float8.filter_fqns=output,moe.experts"],
    "float8 rowwise_with_gw_hp": [*FLOAT8, "--float8.recipe_name=rowwise_with_gw_hp"],
    "int8 rowwise": ["--model.converters=int8"],
    "mx mxfp8 (emulated)": ["--model.converters=mx", "--mx.emulate"],
}
TWO = ["--parallelism.expert_parallel_degree=2", "--training.local_batch_size=4"]
EXCHANGES = {
    "2 processes, bf16": TWO,
    "2 processes, float8": [*TWO, "--moe.all_to_all_dtype=float8"],
    "2 processes, int8": [*TWO, "--moe.all_to_all_dtype=int8"],
    "2 processes, int8, float8 rowwise": [*TWO, "--moe.all_to_all_dtype=int8", *ROWWISE],
}
DIMS = (256, 2048, 7168)
EXPERTS, TOKENS, TOP_K, DIM, FFN_DIM = 8, 4096, 2, 512, 512


def bytes_table() -> str:
    """Bytes of a row in all-to-all."""
    import torch

    from torchtitan.parallel.expert import pack_rows

    rows = []
    for dim in DIMS:
        row = torch.ones(1, dim, dtype=torch.bfloat16)
        packed = pack_rows(row, torch.int8).shape[1]
        rows.append([str(dim), str(row.nbytes), str(packed), f"{packed / row.nbytes:.2f}"])
    return markdown(["channels", "bf16", "float8 or int8", "ratio"], rows)


def layer_table() -> str:
    """Time of a layer of experts, forward and backward, relative to bf16 in the same rounds."""
    from torchtitan.config.low_precision import MX, Float8, Int8
    from torchtitan.converters import CONVERTERS, Target
    from torchtitan.converters.measured_filter import layer_seconds

    sections: dict[str, tuple[str, Any]] = {
        "float8 rowwise": ("float8", Float8(recipe_name="rowwise")),
        "float8 rowwise_with_gw_hp": ("float8", Float8(recipe_name="rowwise_with_gw_hp")),
        "int8 rowwise": ("int8", Int8()),
        "mx mxfp8 (emulated)": ("mx", MX(emulate=True)),
    }
    converters: list[Any] = [CONVERTERS.get(name).build(section, Target("cpu")) for name, section in sections.values()]
    m = TOKENS * TOP_K // EXPERTS
    seconds = layer_seconds([None, *converters], m, DIM, FFN_DIM, experts=EXPERTS)
    high, *low = ([sum(passes) for passes in rounds] for rounds in seconds)
    rows = []
    for name, times in zip(sections, low, strict=True):
        ratios = [time / base for time, base in zip(times, high, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append([name, f"{statistics.median(ratios):.2f}", spread])
    return markdown(["recipe", "time relative to bf16", "spread"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=Path("outputs/low_precision_experts"))
    arguments = parser.parse_args()
    import torch

    tables = [
        {
            name: run(name, [*MODEL, *flags], arguments.steps, arguments.folder, processes)
            for name, flags in runs.items()
        }
        for runs, processes in ((RECIPES, 1), (EXCHANGES, 2))
    ]
    print(f"CPU, torch {torch.__version__}, torchao {version('torchao')}, {arguments.steps} steps\n")
    for header, runs in zip(("recipe", "all-to-all"), tables, strict=True):
        print(losses_table(header, runs), end="\n\n")
    print(bytes_table())
    print(f"\n{EXPERTS} experts, {DIM} x {FFN_DIM}, {TOKENS} tokens, top {TOP_K}, {torch.get_num_threads()} threads\n")
    print(layer_table())


if __name__ == "__main__":
    main()
