"""Backward pass of causal attention on CPU: torch's kernel against ours, in time and in error, with memory kept as in
a run.

python benchmarks/attention_cpu.py [--shape 4,16,512,16]   (batch, heads, sequence, head dimension)
"""

import argparse
import statistics
from time import perf_counter

import torch
import torch.nn.functional as F

from torchtitan.device import find_device
from torchtitan.models.attention_cpu import causal_attention_cpu

ROUNDS = 11


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4,16,512,16")
    batch, heads, seq, head_dim = map(int, parser.parse_args().shape.split(","))
    find_device(0)
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(batch, seq, heads, head_dim).bfloat16().transpose(1, 2) for _ in range(4))

    def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    exact = gradients(torchs, [t.double() for t in (q, k, v)], grad.double())[1]
    seconds: dict[str, list[float]] = {"torch": [], "ours": []}
    for _ in range(ROUNDS):
        for name, attention in (("torch", torchs), ("ours", causal_attention_cpu)):
            seconds[name].append(gradients(attention, [q, k, v], grad)[0])
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, (B, H, S, D) = {(batch, heads, seq, head_dim)}"
    )
    for name, attention in (("torch", torchs), ("ours", causal_attention_cpu)):
        found = gradients(attention, [q, k, v], grad)[1]
        errors = ", ".join(
            f"{float((low.double() - high).norm() / high.norm()):.4f}" for low, high in zip(found, exact, strict=True)
        )
        print(f"{name:6} backward {1e3 * statistics.median(seconds[name]):6.1f} ms; errors of dq, dk, dv: {errors}")
    ratios = [ours / theirs for ours, theirs in zip(seconds["ours"], seconds["torch"], strict=True)]
    print(f"ours takes {statistics.median(ratios):.2f} of torch's time ({min(ratios):.2f} to {max(ratios):.2f})")


def gradients(attention, inputs, grad):  # type: ignore[no-untyped-def]
    """(seconds of the backward pass, gradients)."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = attention(*leaves)
    start = perf_counter()
    found = torch.autograd.grad(out, leaves, grad)
    return perf_counter() - start, found


if __name__ == "__main__":
    main()
