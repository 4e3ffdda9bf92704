"""Optimizers that a user registers (docs/examples/my_optimizers.py): checkpoints, other layouts, plans."""

import json
import re
import shutil
from pathlib import Path

import pytest
from runs import ROOT, TINY, assert_equal_bit_for_bit, failure, into, losses, tensors_of, train

EXAMPLE = (ROOT / "docs" / "examples" / "my_optimizers.py").read_text(encoding="utf-8")
FLAGS = (
    *TINY,
    "--experimental.custom_args_module=docs.examples.my_optimizers",
    "--training.steps=8",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=4",
    "--optimizer.lr=0.01",
)
ONE = "--training.local_batch_size=4"


@pytest.mark.full
@pytest.mark.parametrize("name", ["SGD", "TorchMuon", "Lion"])
def test_it_resumes_bit_for_bit_and_under_another_layout(name: str, tmp_path: Path) -> None:
    flags = (*FLAGS, f"--optimizer.name={name}")
    whole, resumed, sharded = tmp_path / "whole", tmp_path / "resumed", tmp_path / "sharded"
    train(*flags, into(whole), ONE, processes=1)
    for folder, processes in ((resumed, 1), (sharded, 2)):
        if processes == 2 and name == "TorchMuon":
            continue  # torch's is for one process
        shutil.copytree(whole / "checkpoint" / "step-4", folder / "checkpoint" / "step-4")
        train(*flags, into(folder), *([ONE] if processes == 1 else []), processes=processes)
        assert losses(folder) == pytest.approx({s: loss for s, loss in losses(whole).items() if s > 4}, rel=1e-5)
    assert_equal_bit_for_bit(tensors_of(resumed, 8), tensors_of(whole, 8))
    assert losses(whole)[8] < losses(whole)[1]


@pytest.mark.full
def test_it_is_planned(tmp_path: Path) -> None:
    """With a state of one number per parameter, on two ranks."""
    plan = ("--job.plan", "--job.simulate_world_size=2", "--job.simulate_device=cpu")
    train(*FLAGS, into(tmp_path), *plan, "--optimizer.name=Lion", processes=1)
    rank = json.loads((tmp_path / "plan.json").read_text())["ranks"][0]
    assert rank["optimizer"] == rank["parameters"]


def test_each_takes_under_20_lines() -> None:
    sections = re.split(r"\n\n\n# ", EXAMPLE)[-3:]
    assert all("OPTIMIZERS.register(" in section for section in sections)
    for section in sections:
        assert len([line for line in section.splitlines()[1:] if line.strip()]) < 20


def test_a_section_that_is_not_defined(tmp_path: Path) -> None:
    flags = [flag.replace("custom_args_module", "custom_import") for flag in FLAGS if "custom_import" not in flag]
    flags = [flag for flag in flags if not flag.startswith("--model.")]
    status, output = failure(*flags, into(tmp_path), "--optimizer.name=SGD")
    assert status == 2
    assert "optimizer.name = SGD reads the section [momentum], which is not defined" in output
