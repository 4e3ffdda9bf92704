"""Kernels and bytes of a compiled Llama 3 8B block on an H200, ours beside torchtitan 0.1.0's, without a GPU.

python -m benchmarks block_bytes

Forward and backward of one block, 8,192 tokens, bf16 weights; bytes as the compiler counts them, GEMMs included. Ours
are those that tests/cross recorded. The other's block comes from carried/ (scripts/carry_for_gpu.sh) and is lowered in
a process of its own for each recipe, in about a minute. Needs triton and a C++ compiler.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu import carried
from benchmarks.gpu_peer import replace_imports
from benchmarks.runs import ROOT
from benchmarks.tables import markdown

RECIPES = {"bf16": "", "float8 tensorwise": "tensorwise", "float8 rowwise": "rowwise"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    peer = carried("peer")
    if not peer:
        sys.exit("torchtitan 0.1.0 is not in carried/ for this Python; run scripts/carry_for_gpu.sh with its version")
    if arguments.lower is not None:
        print(json.dumps(lower(peer, arguments.lower)))
        return
    figures = json.loads((ROOT / "tests" / "cross" / "figures.json").read_text())["cases"]
    rows = []
    for name, recipe in RECIPES.items():
        command = [sys.executable, __file__, f"--lower={recipe}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        reference = json.loads(done.stdout.splitlines()[-1])
        kernels, size = figures[name]["kernels of a block"], figures[name]["GB of a block"]
        rows.append([name, f"{reference['kernels']}", f"{reference['GB']:.2f}", f"{kernels}", f"{size:.2f}"])
        rows[-1].append(f"{size / reference['GB']:.2f}")
    columns = ["block", "torchtitan 0.1.0, kernels", "GB", "ours, kernels", "GB", "ratio of the bytes"]
    print(markdown(columns, rows))


def lower(peer: str, recipe: str) -> dict[str, Any]:
    """Kernels and GB of the other's block. In this process `torchtitan` is then the other one."""
    sys.path.insert(0, str(ROOT / "tests" / "cross"))
    from compiler import bytes_of, launches, on_lowered
    from lowering import SIMULATED, start

    start(SIMULATED["sm_90"])
    totals = Counter[str]()

    def take(graph: Any, code: str) -> None:
        totals["kernels"] += launches(code)
        totals["bytes"] += sum(map(bytes_of, graph.scheduler.nodes))

    on_lowered(take)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchtitan"]:
        del sys.modules[name]
    sys.path.insert(0, peer)
    replace_imports()
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torchtitan.models.llama3 import llama3_configs  # of the other
    from torchtitan.models.llama3.model.model import TransformerBlock

    sizes, seq_len = llama3_configs["8B"], 8192
    with torch.device("meta"):
        block = TransformerBlock(0, sizes).bfloat16()
    if recipe:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(block, config=Float8LinearConfig.from_recipe_name(recipe))
    with FakeTensorMode(allow_non_fake_inputs=True):
        block.to_empty(device="cuda")
        x = torch.empty(1, seq_len, sizes.dim, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        rotation = torch.empty(seq_len, sizes.dim // sizes.n_heads // 2, dtype=torch.complex64, device="cuda")
        torch.compile(block)(x, rotation).sum().backward()  # type: ignore[no-untyped-call]
    return {"kernels": totals["kernels"], "GB": totals["bytes"] / 1e9}


if __name__ == "__main__":
    main()
