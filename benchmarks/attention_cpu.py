"""Backward pass of causal attention on CPU: torch's kernel, our tiles and our C++, in time and in error.

python benchmarks/attention_cpu.py [--shape 4,16,512,16]   (batch, heads, sequence, head dimension)
"""

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

from benchmarks.tables import markdown
from torchtitan.device import find_device
from torchtitan.models.attention_cpu import (
    gradients_by_matrix_unit,
    gradients_by_tiles,
    gradients_by_torch,
    matrix_unit_library,
)

ROUNDS = 11


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4,16,512,16")
    shape = batch, heads, seq, head_dim = tuple(map(int, parser.parse_args().shape.split(",")))
    find_device(0)
    torch.manual_seed(0)
    q, k, v, out_grad = (torch.randn(batch, seq, heads, head_dim).bfloat16().transpose(1, 2) for _ in range(4))
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    ways = {"torch": gradients_by_torch, "tiles, float32": gradients_by_tiles}
    if library := matrix_unit_library():
        ways["matrix unit"] = partial(gradients_by_matrix_unit, library)

    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, compute in ways.items():
            start = perf_counter()
            compute(q, k, v, out, logsumexp, out_grad)
            seconds[way].append(perf_counter() - start)
    leaves = q64, k64, v64 = tuple(tensor.double().requires_grad_() for tensor in (q, k, v))
    out64 = F.scaled_dot_product_attention(q64, k64, v64, is_causal=True)
    right = torch.autograd.grad(out64, leaves, out_grad.double())
    rows = []
    for way, compute in ways.items():
        ratios = [mine / theirs for mine, theirs in zip(seconds[way], seconds["torch"], strict=True)]
        median = statistics.median(seconds[way])
        operations = 5 * batch * heads * seq**2 * head_dim  # five products, of which causality leaves half
        found = compute(q, k, v, out, logsumexp, out_grad)
        errors = [float((mine - exact).norm() / exact.norm()) for mine, exact in zip(found, right, strict=True)]
        rows.append(
            [
                way,
                f"{1e3 * median:.1f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{operations / median / 1e12:.2f}",
                *(f"{error:.2%}" for error in errors),
            ]
        )
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, (B, H, S, D) = {shape}; {ROUNDS} rounds\n")
    print(markdown(["backward pass", "ms", "of torch's", "TFLOP/s, causal", "error of dq", "dk", "dv"], rows))


if __name__ == "__main__":
    main()
