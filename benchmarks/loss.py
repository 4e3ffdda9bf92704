"""The chunked loss compared with the plain one: time and extra memory of forward and backward, at a large vocabulary.

python -m benchmarks loss [--tokens 8192] [--vocabulary 128256] [--dim 256]

Each runs in a separate process. Extra memory is the peak beyond hidden states, weights and their gradients: of the
entire process on CPU, of torch's allocator on a GPU. The plain loss stores all logits: 16 GiB.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.tables import markdown
from torchtitan.device import find_device
from torchtitan.models.loss import chunked_cross_entropy


def plain(output: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output(hidden).flatten(0, 1).float(), labels.flatten(), reduction="sum")


def chunked(output: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return chunked_cross_entropy(output, output.weight, hidden, labels)


LOSSES = {"plain": plain, "chunked": chunked}


def measure(name: str, tokens: int, vocabulary: int, dim: int, repetitions: int) -> None:
    """Prints seconds, bytes and the loss."""
    device = find_device(0)
    torch.manual_seed(0)
    with torch.device(device.torch_device):
        output = nn.Linear(dim, vocabulary, bias=False, dtype=torch.bfloat16)
        hidden = torch.randn(1, tokens, dim, dtype=torch.bfloat16).requires_grad_()
        labels = torch.randint(vocabulary, (1, tokens))
        output.weight.grad, hidden.grad = torch.zeros_like(output.weight), torch.zeros_like(hidden)
    before = device.peak_memory_bytes()
    seconds = []
    for _ in range(repetitions):
        device.synchronize()
        start = perf_counter()
        loss = LOSSES[name](output, hidden, labels)
        (loss / tokens).backward()
        device.synchronize()
        seconds.append(perf_counter() - start)
    print(statistics.median(seconds), device.peak_memory_bytes() - before, loss.item() / tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=LOSSES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = (arguments.tokens, arguments.vocabulary, arguments.dim)
    if arguments.only:
        return measure(arguments.only, *sizes, arguments.repetitions)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {sizes[0]} tokens, {sizes[1]} x {sizes[2]}\n")
    rows = []
    for name in [*LOSSES] * arguments.rounds:
        command = [sys.executable, str(Path(__file__)), "--only", name, *sys.argv[1:]]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        took, extra, value = map(float, done.stdout.split())
        rows.append([name, f"{took:.2f}", f"{extra / 2**30:.2f}", f"{value:.4f}"])
    print(markdown(["loss", "seconds", "extra memory, GiB", "value"], rows))


if __name__ == "__main__":
    main()
