"""Time and error of causal attention on CPU: torch's kernels and ours.

python -m benchmarks attention_cpu [--shape 4,16,512,16] [--float32]   (batch, heads, sequence, head dimension)
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

from benchmarks.tables import markdown, spread
from torchtitan.device import find_device
from torchtitan.kernels.attention_cpu import (
    attention_by,
    attention_by_torch,
    bfloat16_library,
    float32_library,
    gradients_by,
    gradients_by_torch,
)

ROUNDS = 11
Ways = dict[str, Callable[[], tuple[torch.Tensor, ...]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4,16,512,16")
    parser.add_argument("--float32", action="store_true", help="float32 tensors instead of bfloat16")
    arguments = parser.parse_args()
    shape = batch, heads, seq, head_dim = tuple(map(int, arguments.shape.split(",")))
    dtype = torch.float32 if arguments.float32 else torch.bfloat16
    find_device(0)
    torch.manual_seed(0)
    q, k, v, out_grad = (torch.randn(batch, seq, heads, head_dim).to(dtype).transpose(1, 2) for _ in range(4))
    saved = (q, k, v, *attention_by_torch(q, k, v))
    forward: Ways = {"torch": lambda: attention_by_torch(q, k, v)}
    backward: Ways = {"torch": lambda: gradients_by_torch(saved, out_grad)}
    own = {"float32 arithmetic": float32_library()}
    if dtype == torch.bfloat16:
        own["bfloat16 GEMMs"] = bfloat16_library()
    for name, library in own.items():
        if library is not None:
            forward[name] = partial(attention_by, library, q, k, v)
            backward[name] = partial(gradients_by, library, saved, out_grad)
    leaves = q64, k64, v64 = tuple(tensor.double().requires_grad_() for tensor in (q, k, v))
    out64 = F.scaled_dot_product_attention(q64, k64, v64, is_causal=True)
    gradients64 = torch.autograd.grad(out64, leaves, out_grad.double())
    rows = []
    for name, ways, right, gemms in (
        ("forward", forward, [out64.detach()], 2),
        ("backward", backward, gradients64, 5),
    ):
        operations = gemms * batch * heads * seq**2 * head_dim  # half of which the causal mask removes
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, compute in ways.items():
                start = perf_counter()
                compute()
                seconds[way].append(perf_counter() - start)
        for way, compute in ways.items():
            ratios = [ours / torchs for ours, torchs in zip(seconds[way], seconds["torch"], strict=True)]
            median = statistics.median(seconds[way])
            errors = [
                float((mine - exact).norm() / exact.norm()) for mine, exact in zip(compute(), right, strict=False)
            ]
            rows.append(
                [
                    f"{name}, {way}",
                    f"{1e3 * median:.1f}",
                    f"{statistics.median(ratios):.2f}",
                    spread(ratios, "{:.2f}"),
                    f"{operations / median / 1e12:.2f}",
                    ", ".join(f"{error:.2%}" for error in errors),
                ]
            )
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, (B, H, S, D) = {shape}; {ROUNDS} rounds\n")
    print(markdown(["pass", "ms", "of torch's", "range", "TFLOP/s, causal", "error of o, or dq, dk, dv"], rows))


if __name__ == "__main__":
    main()
