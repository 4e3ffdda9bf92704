"""The same training under every layout."""

import functools
from collections.abc import Callable
from pathlib import Path

import equality
import pytest
import torch
from runs import SMALL, TINY, grad_norms, into, losses, train, train_here

LONGER = (*SMALL, "--training.seq_len=128")
ROWS = [
    pytest.param(layout, id=layout.name, marks=[] if layout.core else [pytest.mark.full]) for layout in equality.LAYOUTS
]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], equality.Training]:
    """The training that a row must equal, run once."""
    return functools.cache(lambda name: equality.run(equality.REFERENCES[name], tmp_path_factory.mktemp("one")))


@pytest.mark.parametrize("layout", ROWS)
def test_layout_equals_one_process(
    layout: equality.Layout, one_process: Callable[[str], equality.Training], tmp_path: Path
) -> None:
    deviations = equality.deviations(one_process(layout.reference), equality.run(layout, tmp_path))
    assert equality.within_tolerance(deviations), deviations


@pytest.mark.parametrize("part", ["losses", "grad_norms", "weights"])
def test_a_number_that_is_not_finite_equals_none(part: str) -> None:
    """Wherever it occurs among the others."""

    def training() -> equality.Training:
        ones = torch.ones(equality.STEPS, dtype=torch.float64)
        return equality.Training(ones, ones.clone(), {name: torch.ones(2) for name in ("a", "b", "c")})

    assert equality.within_tolerance(equality.deviations(training(), training()))
    spoiled = training()
    numbers = spoiled.weights["b"] if part == "weights" else getattr(spoiled, part)
    numbers[1] = float("nan")
    assert not equality.within_tolerance(equality.deviations(training(), spoiled))


def test_tensor_parallelism_with_an_output_layer_that_is_the_embedding(tmp_path: Path) -> None:
    tied = (*TINY, "--model.flavor=tied", "--training.steps=4", "--training.local_batch_size=4")
    train_here(*tied, into(tmp_path / "one"))
    train(*tied, into(tmp_path / "tp"), "--parallelism.tensor_parallel_degree=2", processes=2)
    assert list(losses(tmp_path / "tp").values()) == pytest.approx(list(losses(tmp_path / "one").values()), rel=1e-5)
    assert grad_norms(tmp_path / "tp") == pytest.approx(grad_norms(tmp_path / "one"), rel=1e-5)


def test_computes_in_bfloat16_whatever_the_layout(tmp_path: Path) -> None:
    steps = (*LONGER, "--training.steps=3")
    bfloat16 = (*steps, "--training.mixed_precision_param=bfloat16")
    train_here(*steps, into(tmp_path / "float32"), "--training.local_batch_size=4")
    train_here(*bfloat16, into(tmp_path / "one"), "--training.local_batch_size=4")
    train(*bfloat16, into(tmp_path / "fsdp"), processes=2)
    tensor_parallel = "--parallelism.tensor_parallel_degree=2"
    train(*bfloat16, into(tmp_path / "tp"), "--training.local_batch_size=4", tensor_parallel, processes=2)
    expected = list(losses(tmp_path / "float32").values())
    for layout in ("one", "fsdp", "tp"):
        found = list(losses(tmp_path / layout).values())
        assert found == pytest.approx(expected, abs=2e-2)
        # float32 agrees to 1e-6 (above); bfloat16 has 8 bits
        assert found != pytest.approx(expected, abs=2e-5)
