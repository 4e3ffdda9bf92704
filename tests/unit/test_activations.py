"""Activations of feed-forward layers: the formulas, and what they keep for the backward pass."""

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from torchtitan.kernels.swiglu import ActivationName, activation
from torchtitan.models.transformer import FeedForward


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.minimum(torch.tensor(7.0)), up.clamp(-7, 7)
    return gate / (1 + (-1.702 * gate).exp()) * (up + 1)


def geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + inner.tanh()) * up


FORMULAS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "swiglu": lambda gate, up: gate / (1 + (-gate).exp()) * up,
    "clamped_swiglu": clamped_swiglu,
    "geglu": geglu,
    "relu_squared": lambda gate, up: gate.clamp(min=0) ** 2,
}


@pytest.mark.parametrize("name", get_args(ActivationName))
def test_a_feed_forward_and_its_gradients_are_the_formula(name: ActivationName) -> None:
    generator = torch.Generator().manual_seed(0)
    layer, exact = FeedForward(16, 24, name), FeedForward(16, 24, name).double()
    for ours, theirs in zip(layer.parameters(), exact.parameters(), strict=True):
        ours.data.normal_(generator=generator)
        theirs.data.copy_(ours.data)
    exact.activation = FORMULAS[name]
    x = torch.randn(2, 9, 16, generator=generator)  # some gates are above 7
    grad = torch.randn(2, 9, 16, generator=generator)
    outs = layer(x), exact(x.double())
    torch.testing.assert_close(outs[0].double(), outs[1], rtol=1e-5, atol=1e-4)
    outs[0].backward(grad)
    outs[1].backward(grad.double())
    assert len(list(layer.parameters())) == (2 if name == "relu_squared" else 3)
    for ours, theirs in zip(layer.parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert (ours.grad - theirs.grad).abs().max() <= 1e-5 * theirs.grad.abs().max()


@pytest.mark.parametrize("name", ["clamped_swiglu", "geglu", "relu_squared"])  # SwiGLU's kernels have other tests
def test_only_the_inputs_are_kept_for_the_backward_pass(name: Any) -> None:
    gate, up = (torch.randn(4, 24, requires_grad=True) for _ in range(2))
    kept: dict[int, int] = {}
    with saved_tensors_hooks(lambda t: kept.update({t.data_ptr(): t.nbytes}) or t, lambda t: t):
        activation(name)(gate, up)
    assert sum(kept.values()) <= gate.nbytes + up.nbytes
