"""Runs with muP: their checkpoints, what they export, and the scripts that check the parametrization."""

import re
from pathlib import Path

import pytest
import torch
from runs import CHECKPOINTS, TINY, into, last_step, losses, python, tensors_of, train_here

from torchtitan.checkpoint.choose import check_model_identity
from torchtitan.errors import CheckpointError
from torchtitan.tools.generation.open import open_model

MUP = ("--model.parametrization=mup", "--model.mup_base_flavor=slim")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model twice as wide and deep as its base."""
    folder = tmp_path_factory.mktemp("mup")
    train_here(*TINY, *MUP, *CHECKPOINTS, into(folder), "--training.steps=2", "--checkpoint.last_save_in_hf")
    return folder


def test_a_model_of_the_sizes_of_its_base_trains_like_a_standard_one(tmp_path: Path) -> None:
    """Bit for bit."""
    for name, flags in {"standard": (), "mup": (MUP[0], "--model.mup_base_flavor=narrow")}.items():
        train_here(*TINY, *flags, *CHECKPOINTS, into(tmp_path / name), "--training.steps=2")
    standard, mup = (tensors_of(tmp_path / name, 2) for name in ("standard", "mup"))
    assert standard.keys() == mup.keys()
    assert all(torch.equal(tensor, mup[name]) for name, tensor in standard.items())


@pytest.mark.full
def test_a_checkpoint_resumes_under_its_own_parametrization_only(run: Path) -> None:
    for flags, mine in (((), "standard"), ((MUP[0], "--model.mup_base_flavor=narrow"), "mup with base narrow")):
        with pytest.raises(CheckpointError, match=f"parametrization is mup with base slim, this run's is {mine}. Use"):
            train_here(*TINY, *flags, *CHECKPOINTS, into(run), "--training.steps=3")
    train_here(*TINY, *MUP, *CHECKPOINTS, into(run), "--training.steps=3")
    assert last_step(run) == 3


def test_checkpoints_that_do_not_say_are_standard() -> None:
    check_model_identity(Path("step-1"), {"dim": 1}, {"dim": 1, "parametrization": "standard"})


def test_weights_start_a_run_of_either_parametrization(run: Path, tmp_path: Path) -> None:
    """The model is the same, so the first loss is."""
    start = f"--checkpoint.initial_load_path={run / 'checkpoint' / 'step-2'}"
    for name, flags in {"standard": (), "mup": MUP}.items():
        train_here(*TINY, *flags, start, into(tmp_path / name), "--training.steps=1")
    assert losses(tmp_path / "standard") == losses(tmp_path / "mup")


def test_the_exported_model_has_the_same_logits(run: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours = open_model(run / "checkpoint" / "step-2", torch.device("cpu"), torch.float32).model
    reference = AutoModelForCausalLM.from_pretrained(run / "checkpoint" / "step-2-hf", dtype=torch.float32)
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), reference(tokens).logits, rtol=1e-4, atol=1e-5)


def script(name: str, output: Path, *flags: str) -> str:
    users = output.parent / "checkpoints"
    saving = ("--checkpoint.enable_checkpoint", f"--checkpoint.folder={users}")
    base = ("--widths=32,64", *TINY, *saving, "--model.mup_base_flavor=narrow")
    done = python(f"scripts/{name}", "--output", output, *flags, *base)
    assert done.returncode == 0, done.stderr
    assert not users.exists()
    assert output.read_bytes().startswith(b"\x89PNG")
    return done.stdout


@pytest.mark.full
def test_coordinate_check(tmp_path: Path) -> None:
    table = script("coordinate_check.py", tmp_path / "check.png", "--steps", "2", "--depths", "1,2")
    sizes = [*re.findall(r"^(standard|mup) (\d+) x (\d): embedding [\d.]+, .* logits [\d.]+$", table, re.MULTILINE)]
    assert len(sizes) == 2 * 2 * 2


@pytest.mark.full
def test_a_sweep_trains_only_what_is_missing(tmp_path: Path) -> None:
    steps = "--training.steps=2"
    table = script("learning_rate_transfer.py", tmp_path / "sweep.png", "--rates", "1e-3,2e-3", steps)
    assert [*re.findall(r"\*\*\d\.\d+\*\*", table)] and len(table.splitlines()) == 2 + 4 + 1
    kept = (tmp_path / "sweep.json").read_text()
    # At the sizes of the base both are the same.
    rows = [re.findall(r"\d\.\d{3}", line) for line in table.splitlines() if "| 64 x 2 |" in line]
    assert len(rows) == 2 and rows[0] == rows[1]
    assert script("learning_rate_transfer.py", tmp_path / "sweep.png", "--rates", "1e-3,2e-3", steps) == table
    assert (tmp_path / "sweep.json").read_text() == kept
