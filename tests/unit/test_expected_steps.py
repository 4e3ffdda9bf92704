"""The plan's model of a step against what was measured."""

from dataclasses import replace

import pytest

from benchmarks.expected import ASKED, ON_256, Measured, Step, on_one_gpu, table
from benchmarks.gpu_row import config_of
from benchmarks.gpu_rows import BASE, MODELS, TENSORWISE, Recipe
from benchmarks.runs import ROOT


def name(row: Measured) -> str:
    return f"{row.gpu} {row.name}"


@pytest.mark.parametrize("row", ON_256, ids=name)
def test_a_70b_model_on_256_gpus_takes_what_torchtitan_measured(row: Measured) -> None:
    assert abs(row.error) < 0.15


def test_the_page_has_this_table() -> None:
    assert table(ON_256, with_ours=True) in (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")


def test_the_rows_are_in_the_order_that_was_measured() -> None:
    """float8 in all layers gains nothing over bf16, without the two small layers it gains, asynchronous TP gains."""
    rates = [row.expected_rate for row in ASKED]
    assert rates == sorted(rates) and [row.rate for row in ASKED] == sorted(row.rate for row in ASKED)


@pytest.mark.parametrize("row", list(on_one_gpu()), ids=name)
def test_a_step_on_one_gpu_takes_what_we_measured(row: Measured) -> None:
    assert abs(row.error) < 0.10


@pytest.mark.parametrize("recipe", [BASE, TENSORWISE])
def test_a_step_of_more_micro_batches_only_saves_what_is_done_once_a_step(recipe: Recipe) -> None:
    """GEMMs, in 8 bits too, are done in each."""
    once, four = (
        Step("", "H100", config_of(MODELS["8B"], replace(recipe, micro_batches=n), 8192), layers=9).expected.parts
        for n in (1, 4)
    )
    for part in ("bf16 GEMMs", "8-bit GEMMs", "attention", "fused kernels", "rounding to 8 bits"):
        assert four[part] == pytest.approx(4 * once[part], rel=0.02)
    assert once["optimizer"] == pytest.approx(four["optimizer"])
