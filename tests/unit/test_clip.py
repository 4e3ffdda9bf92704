"""Clipping by the norm of all gradients, and skipping by it."""

import statistics

import pytest
import torch
from torch import nn

from torchtitan.config.training import Training
from torchtitan.optim.clip import clip_grad_norm
from torchtitan.optim.skip_step import UpdateGuard
from torchtitan.tools.interchange.convert import one_process


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


def test_a_norm_is_an_outlier_above_the_factor_times_the_recent_median() -> None:
    """Of the last hundred, outliers included, once there are twenty; a skewed history has another mean."""
    skipped: list[int] = []
    training = Training(skip_grad_norm_outliers=3.0, max_skips_in_a_row=5)
    with one_process(None):
        guard = UpdateGuard(training, lambda step, _: skipped.append(step))
        norms = [100.0, 50.0, *[1.0, 2.0, 3.0] * 6, 6.1, 5.9, *[10.0, 1.0] * 60, 5.4 * 3, 5.6 * 3]
        for step, norm in enumerate(norms, 1):
            guard.should_skip(step, torch.tensor(1.0), torch.tensor(norm), None, [])
    assert skipped[:1] == [21] and norms[20] == 6.1  # the median of the first twenty is 2
    expected = []
    for step, norm in enumerate(norms, 1):
        history = norms[max(step - 101, 0) : step - 1]
        if len(history) >= 20 and norm > 3 * statistics.median(history):
            expected.append(step)
    assert skipped == expected and len(norms) in skipped and len(norms) - 1 not in skipped
