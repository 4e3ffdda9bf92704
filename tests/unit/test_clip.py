"""Clipping by the norm of all gradients."""

import pytest
import torch
from torch import nn

from torchtitan.optim.clip import clip_grad_norm


def parameters(*gradients: list[float] | None) -> list[nn.Parameter]:
    made = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(len(gradient or [0])))
        parameter.grad = None if gradient is None else torch.tensor(gradient)
        made.append(parameter)
    return made


def test_gradients_above_the_norm_are_scaled_down_together() -> None:
    three, four, unused = parameters([3.0, 0.0], [4.0], None)
    norm = clip_grad_norm([three, four, unused], max_norm=1.0)
    assert norm.item() == 5.0 and norm.dtype == torch.float32  # before clipping
    torch.testing.assert_close(three.grad, torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(four.grad, torch.tensor([0.8]))
    assert unused.grad is None


@pytest.mark.parametrize("max_norm", [5.1, float("inf")])
def test_gradients_within_the_norm_stay_as_they_are(max_norm: float) -> None:
    [parameter] = parameters([3.0, -4.0])
    assert clip_grad_norm(iter([parameter]), max_norm).item() == 5.0
    assert parameter.grad is not None and parameter.grad.tolist() == [3.0, -4.0]


def test_a_gradient_that_is_not_finite_shows_in_the_norm() -> None:
    assert clip_grad_norm(parameters([1.0], [float("nan")]), 1.0).isnan()
    assert clip_grad_norm(parameters([1.0], [float("inf")]), 1.0).isinf()
