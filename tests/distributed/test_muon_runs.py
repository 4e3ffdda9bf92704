"""Runs with Muon: resumed bit for bit, under another layout, with small states."""

import shutil
from pathlib import Path

import pytest
from runs import TINY, assert_equal_bit_for_bit, into, losses, tensors_of, train, train_here

FLAGS = (
    *TINY,
    "--training.steps=8",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=4",
    "--optimizer.name=Muon",
)
ONE, TP = "--training.local_batch_size=4", "--parallelism.tensor_parallel_degree=2"
OPTIONS = {
    "NorMuon, bfloat16": ("--optimizer.muon_row_normalization", "--training.mixed_precision_param=bfloat16"),
    "8bit, bfloat16 weights": (
        "--optimizer.name=Muon8bit",
        "--model.flavor=wide",
        "--training.weight_dtype=bfloat16",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIONS)
def test_resumed_it_ends_bit_for_bit_the_same(name: str, tmp_path: Path) -> None:
    flags, whole, resumed = (*FLAGS, *OPTIONS[name]), tmp_path / "whole", tmp_path / "resumed"
    train(*flags, into(whole), processes=2)
    shutil.copytree(whole / "checkpoint" / "step-4", resumed / "checkpoint" / "step-4")
    train(*flags, into(resumed), processes=2)
    assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step > 4}
    assert_equal_bit_for_bit(tensors_of(resumed, 8), tensors_of(whole, 8))


def test_another_layout_goes_on(tmp_path: Path) -> None:
    """With the momentum, and with the rows' mean squares."""
    flags = (*FLAGS, "--optimizer.muon_row_normalization")
    train_here(*flags, ONE, into(tmp_path / "one"))
    shutil.copytree(tmp_path / "one" / "checkpoint" / "step-4", tmp_path / "tp" / "checkpoint" / "step-4")
    train(*flags, ONE, TP, into(tmp_path / "tp"), processes=2)
    expected = {step: loss for step, loss in losses(tmp_path / "one").items() if step > 4}
    assert losses(tmp_path / "tp") == pytest.approx(expected, rel=1e-5)
