"""GEMMs of compiled blocks on CPU."""

import re

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from torchtitan.parallel.compile import apply_compile, has_cpp_compiler


class Block(nn.Module):
    """Weight gradients of both kinds, wide and tall, and one too small to gain anything."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.also_wide = (nn.Linear(1024, 1152, bias=False) for _ in range(2))
        self.narrow, self.small = nn.Linear(1152, 1024, bias=False), nn.Linear(1024, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(self.narrow(nn.functional.silu(self.wide(x)) * self.also_wide(x)))


@pytest.mark.full
@pytest.mark.skipif(not has_cpp_compiler(), reason="no C++ compiler, without which nothing is compiled on CPU")
def test_large_weight_gradients_are_not_taken_from_transposed_memory() -> None:
    torch.manual_seed(0)
    block = Block().bfloat16()
    batches = [torch.randn(size, 32, 1024).bfloat16().requires_grad_() for size in (3, 5)]

    def gradients(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(block(x).square().sum(), [x, *block.parameters()])

    eager = [gradients(x) for x in batches]
    apply_compile([block], "cpu")
    first, code = run_and_get_code(lambda: gradients(batches[0]))
    another = gradients(batches[1])  # of another size, for which the compiler makes sizes dynamic
    for right, gradient in zip((*eager[0], *eager[1]), (*first, *another), strict=True):
        assert gradient.stride() == right.stride()
        torch.testing.assert_close(gradient, right, rtol=0.02, atol=0.02 * float(right.abs().max()))
    transposed = re.findall(r"extern_kernels\.mm\(reinterpret_tensor\(\w+, \((\d+), 96\), \(1, \d+\)", code[-1])
    assert transposed == ["64"]
