"""The learning-rate factor, exact at the boundaries of warm-up, stable and decay phases."""

import math
from typing import Any

import pytest

from torchtitan.config.training import LRScheduler
from torchtitan.optim.schedule import lr_factor, shortened


def factors(steps: int, **keys: Any) -> list[float]:
    config = LRScheduler(**keys)
    return [lr_factor(step, steps, config) for step in range(1, steps + 1)]


def test_linear_warmup_stable_decay() -> None:
    actual = factors(20, warmup_steps=4, decay_ratio=0.4)
    warmup, stable, decay = [0.25, 0.5, 0.75, 1.0], [1.0] * 8, [1 - n / 8 for n in range(8)]
    assert actual == warmup + stable + decay
    assert actual[-1] == 1 / 8  # zero would be reached one step later: the last step still updates the weights


@pytest.mark.parametrize(
    ("decay_type", "shape"),
    [
        ("linear", lambda progress: 1 - progress),
        ("sqrt", lambda progress: 1 - math.sqrt(progress)),
        ("cosine", lambda progress: (1 + math.cos(math.pi * progress)) / 2),
        ("power", lambda progress: math.sqrt(6 / (6 + 5 * progress))),  # of the steps
    ],
)
@pytest.mark.parametrize("lr_min", [0.0, 0.1])
def test_shapes_of_decay(decay_type: str, shape: Any, lr_min: float) -> None:
    actual = factors(10, warmup_steps=0, decay_ratio=0.5, decay_type=decay_type, lr_min=lr_min)
    assert actual[:6] == [1.0] * 6
    assert actual[6:] == pytest.approx([lr_min + (1 - lr_min) * shape(n / 5) for n in range(1, 5)], abs=1e-15)


def test_without_a_ratio_decay_follows_the_warmup() -> None:
    assert factors(6, warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert factors(4, warmup_steps=0) == [1.0, 0.75, 0.5, 0.25]


def test_decay_ratio_zero_never_decays() -> None:
    assert factors(4, warmup_steps=2, decay_ratio=0.0) == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("decay_ratio", [0.9, 1.0])
def test_decay_is_cut_to_what_the_warmup_leaves(decay_ratio: float) -> None:
    assert factors(6, warmup_steps=4, decay_ratio=decay_ratio) == [0.25, 0.5, 0.75, 1.0, 1.0, 0.5]


def test_warmup_longer_than_the_run_is_cut_to_it() -> None:
    assert factors(4, warmup_steps=200) == [0.25, 0.5, 0.75, 1.0]
    assert factors(4, warmup_steps=200, decay_ratio=0.5) == [0.25, 0.5, 0.75, 1.0]


def test_a_schedule_longer_than_the_run_is_the_beginning_of_that_of_a_longer_run() -> None:
    keys: dict[str, Any] = {"warmup_steps": 4, "decay_ratio": 0.5}
    assert factors(12, **keys, total_steps=20) == factors(20, **keys)[:12]
    assert factors(3, **keys, total_steps=20) == [0.25, 0.5, 0.75]
    assert shortened(3, LRScheduler(**keys, total_steps=20)) == ""
    assert factors(12, **keys, total_steps=12) == factors(12, **keys)


def test_one_step() -> None:
    assert factors(1, warmup_steps=0) == factors(1, warmup_steps=5) == [1.0]


def test_what_a_short_run_shortens_is_told() -> None:
    assert shortened(300, LRScheduler(warmup_steps=200)) == ""
    assert "warm-up 50 instead of lr_scheduler.warmup_steps = 200" in shortened(50, LRScheduler(warmup_steps=200))
    told = shortened(100, LRScheduler(warmup_steps=80, decay_ratio=0.5))
    assert told == "decay 20 instead of 50 (lr_scheduler.decay_ratio)"
