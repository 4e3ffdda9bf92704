"""How far AdamW can move a weight: a search finds no gradients that exceed the bound, and some that come close."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.config.training import Optimizer
from torchtitan.converters import scaling
from torchtitan.converters.scaling import WeightBounds, bound_after_update, largest_adam_ratio

BETAS = [(0.9, 0.95), (0.9, 0.999), (0.8, 0.9), (0.95, 0.98), (0.0, 0.9), (0.9, 0.82), (0.99, 0.999)]


def worst_gradients(beta1: float, beta2: float, steps: int) -> torch.Tensor:
    """Equality in Cauchy-Schwarz: each gradient is beta1 / beta2 of the next, and the last is 1."""
    return (beta1 / beta2) ** torch.arange(steps - 1, -1, -1, dtype=torch.float64)


def ratios(gradients: torch.Tensor, beta1: float, beta2: float) -> list[float]:
    """|m| / sqrt(v) with bias corrections after each gradient, in float64."""
    m = v = 0.0
    by_step = []
    for step, gradient in enumerate(gradients.tolist(), 1):
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        by_step.append(abs(m) / (1 - beta1**step) / math.sqrt(v / (1 - beta2**step)) if v else 0.0)
    return by_step


@pytest.mark.parametrize(("beta1", "beta2"), BETAS)
def test_the_largest_ratio_is_reached_and_never_exceeded(beta1: float, beta2: float) -> None:
    largest = largest_adam_ratio(beta1, beta2)
    steps = 4000 if beta1 == 0.99 else 1500
    # Bias corrections are nearly 1 by then; earlier zeros do not matter.
    late = torch.cat([torch.zeros(8000), worst_gradients(beta1, beta2, steps).clamp_min(1e-150)])
    assert max(ratios(late, beta1, beta2)) == pytest.approx(largest, rel=1e-3)
    for count in (1, 2, 3, 10, 100, steps):
        reached = ratios(worst_gradients(beta1, beta2, count), beta1, beta2)
        assert reached and all(ratio <= largest * (1 + 1e-9) for ratio in reached)


def test_adams_own_claim_is_exceeded_where_ours_is_not() -> None:
    """Section 2.1 of the paper: 1 where 1 - beta1 <= sqrt(1 - beta2), else (1 - beta1) / sqrt(1 - beta2)."""
    assert largest_adam_ratio(0.9, 0.95) == pytest.approx(1.165, abs=1e-3)
    assert largest_adam_ratio(0.9, 0.999) == pytest.approx(7.27, abs=1e-2)
    late = torch.cat([torch.zeros(2000), worst_gradients(0.9, 0.95, 200)])
    assert max(ratios(late, 0.9, 0.95)) > 1.16


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.81), (0.9, 0.5), (0.9, 1.0), (0.5, 0.0)])
def test_without_a_bound_it_is_infinite(beta1: float, beta2: float) -> None:
    assert largest_adam_ratio(beta1, beta2) == math.inf
    if beta2 == 0.5:
        assert max(ratios(worst_gradients(beta1, beta2, 60), beta1, beta2)) > 1000


@st.composite
def runs(draw: Any) -> dict[str, Any]:
    beta1, beta2 = draw(st.sampled_from(BETAS))
    steps = draw(st.integers(1, 60))
    pattern = draw(st.sampled_from(["worst", "constant", "signs", "sparse", "wild", "given"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    gradients = {
        "worst": worst_gradients(beta1, beta2, steps).float(),
        "constant": torch.ones(steps),
        "signs": torch.randn(steps, generator=generator).sign(),
        "sparse": torch.randn(steps, generator=generator) * (torch.rand(steps, generator=generator) < 0.1),
        "wild": torch.randn(steps, generator=generator)
        * 10 ** torch.empty(steps).uniform_(-12, 6, generator=generator),
        "given": torch.tensor(draw(st.lists(st.floats(-1e6, 1e6, width=32), min_size=steps, max_size=steps))),
    }[pattern]
    return {
        "betas": (beta1, beta2),
        "gradients": gradients * draw(st.sampled_from([1.0, -1.0])),
        "rates": draw(st.lists(st.floats(1e-8, 1.0), min_size=steps, max_size=steps)),
        "decay": draw(st.sampled_from([0.0, 0.1, 10.0])),
        "weight": draw(st.floats(-100, 100, width=32)),
        "optimizer": draw(st.sampled_from(["Adam", "AdamW"])),
        "how": draw(st.sampled_from(["fused", "foreach", "for-loop"])),
        "every": draw(st.sampled_from([1, 3, 16, 64])),
    }


@pytest.mark.full
@settings(deadline=None, max_examples=150)
@given(run=runs())
def test_no_weight_moves_beyond_its_bound(run: dict[str, Any]) -> None:
    """torch's optimizers in float32, with the bound measured again at intervals: it must also hold for a weight that
    has reached a bound and is moved further."""
    weight = torch.nn.Parameter(torch.tensor([run["weight"], -run["weight"], 0.0]))
    optimizer = getattr(torch.optim, run["optimizer"])(
        [weight],
        betas=run["betas"],
        eps=1e-15,
        weight_decay=run["decay"],
        fused=run["how"] == "fused",
        foreach=run["how"] == "foreach",
    )
    ratio, decay = largest_adam_ratio(*run["betas"]), run["decay"] if run["optimizer"] == "AdamW" else 0.0
    weight_bounds = weight.detach().double().abs()
    for step, (gradient, rate) in enumerate(zip(run["gradients"], run["rates"], strict=True), 1):
        weight.grad = torch.stack([gradient, gradient, -gradient])
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        weight_bounds = bound_after_update(weight_bounds, rate, ratio, decay)
        assert (weight.detach().double().abs() <= weight_bounds).all()
        if step % run["every"] == 0:
            weight_bounds = weight.detach().double().abs()


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_after_other_betas_weights_are_measured_each_step(
    beta2: float, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    """Moments from other betas may move a weight beyond the bound."""
    weight = torch.ones(3)
    monkeypatch.setattr(scaling, "float8_all_gather_weights", lambda models: {"layer": weight})
    monkeypatch.setattr(scaling, "set_scales", lambda weights, amaxes: None)
    monkeypatch.setattr(scaling, "measure_amaxes", lambda weights, group: weight.amax().view(1))
    before = WeightBounds(Optimizer(beta1=0.9, beta2=0.999), every=8)
    before.after_step([], 1e-2)
    state = before.state_dict([])
    for _ in range(2):  # a resume, and one more step
        after = WeightBounds(Optimizer(beta1=0.9, beta2=beta2), every=8)
        after.load_state_dict([], state)
        for _ in range(3):
            weight += 0.1  # further than a bound allows
            if beta2 == 0.95:
                after.after_step([], 1e-2)
                assert after.bounds is not None and after.bounds.item() == weight.amax()
        state = after.state_dict([])
        assert after.every == (1 if beta2 == 0.95 else 8)
    assert any("betas have changed" in line for line in log) == (beta2 == 0.95)
