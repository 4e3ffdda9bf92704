"""Compilation of blocks that are not alike."""

import functools

import pytest
import torch
from torch import nn

from torchtitan.parallel.compile import apply_compile


class Block(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor if self.training else x


def test_blocks_may_all_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dynamo's own limit the ninth does not compile."""
    # Not the compiler is tested, but how often it may be called; "cuda" means no options for a CPU's compiler.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=8):
        blocks = [Block(factor) for factor in range(1, 11)]
        apply_compile(blocks, "cuda")
        x = torch.ones(3)
        for training in (True, False):
            for block in blocks:
                block.train(training)
                assert block(x).tolist() == [block.factor if training else 1] * 3
