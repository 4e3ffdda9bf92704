"""SwiGLU that keeps its inputs for the backward pass in 8 bits."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from torchtitan.kernels import pointwise
from torchtitan.kernels.swiglu import swiglu
from torchtitan.kernels.swiglu_8bit import swiglu_saved_in_8_bits
from torchtitan.models.transformer import FeedForward

TOKENS, DIM, INNER = 96, 64, 192
ERRORS = {"int8": 0.012, "float8": 0.04}  # of the gradients, on normally distributed inputs


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(2, TOKENS // 2, INNER, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    return gate, up


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["int8", "float8"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_result_is_the_same_and_gradients_are_close(dtype: Any, compiled: bool) -> None:
    gate, up = inputs()
    function = functools.partial(swiglu_saved_in_8_bits, dtype=dtype)
    out = (torch.compile(function, fullgraph=True) if compiled else function)(gate, up)
    expected = swiglu(gate, up)
    torch.testing.assert_close(out, expected)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    for gradient, exact in zip(
        torch.autograd.grad(out, [gate, up], weight), torch.autograd.grad(expected, [gate, up], weight), strict=True
    ):
        error = float((gradient - exact).norm() / exact.norm())
        assert ERRORS[dtype] / 4 < error < ERRORS[dtype]


def test_gradients_are_exact_at_inputs_that_8_bits_hold() -> None:
    """The formula, without rounding: multiples of 1/16 up to 127/16, with one scale per token, are int8 numbers."""
    numbers = torch.arange(-127, 128, dtype=torch.float64) / 16
    gate = numbers.repeat(3, 1).requires_grad_()
    up = numbers.flip(0).repeat(3, 1).requires_grad_()
    gradients = torch.autograd.grad(swiglu(gate, up).sum(), [gate, up])
    low_gate, low_up = (x.detach().float().requires_grad_() for x in (gate, up))
    actual = torch.autograd.grad(swiglu_saved_in_8_bits(low_gate, low_up, "int8").sum(), [low_gate, low_up])
    for gradient, exact in zip(actual, gradients, strict=True):
        torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=1e-6)


def kept(dtype: str | None) -> int:
    """Bytes that a feed-forward layer keeps for its backward pass, weights and the layer's input left out."""
    with torch.device("cpu"):
        layer = FeedForward(DIM, INNER).bfloat16()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.1)
    if dtype is not None:
        layer.activation = functools.partial(swiglu_saved_in_8_bits, dtype=dtype)  # type: ignore[arg-type]
    x = torch.randn(TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)
    other = {x.untyped_storage().data_ptr(), *(p.untyped_storage().data_ptr() for p in layer.parameters())}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in other:
            saved[place] = tensor  # kept alive, so nothing else gets its memory
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x).sum().backward()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("dtype", ["int8", "float8"])
def test_what_is_kept(dtype: str) -> None:
    """In bfloat16: gate, up and their product, which is the last layer's input; without our kernel silu(gate), too."""
    own = pointwise.applies_to(torch.empty(TOKENS, INNER, dtype=torch.bfloat16))
    assert kept(None) == TOKENS * INNER * 2 * (3 if own else 4)
    assert kept(dtype) == TOKENS * INNER * (2 + 1 + 1) + 2 * TOKENS * 4  # two scales per token
