"""The same training, whatever the layout."""

from pathlib import Path

import pytest
from runs import SMALL, grad_norms, into, losses, train, train_here

LONGER = (*SMALL, "--training.seq_len=128")
DDP = "--parallelism.data_parallel_replicate_degree=2"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, 20 steps, each in one microbatch."""
    folder = tmp_path_factory.mktemp("one")
    train(*LONGER, into(folder), "--training.steps=20", "--training.local_batch_size=4")
    return folder


def test_fsdp_gives_the_losses_of_one_process(one: Path, tmp_path: Path) -> None:
    train(*LONGER, into(tmp_path), "--training.steps=20", "--training.local_batch_size=1", processes=2)
    assert_same_training(one, tmp_path, steps=20)


@pytest.mark.parametrize(
    ("layout", "processes", "local_batch_size"), [("DDP 2", 2, 1), ("HSDP 2 x 2", 4, 1)], ids=["DDP", "HSDP"]
)
def test_copies_give_the_losses_of_one_process(
    layout: str, processes: int, local_batch_size: int, one: Path, tmp_path: Path
) -> None:
    size = f"--training.local_batch_size={local_batch_size}"
    output = train(*LONGER, into(tmp_path), "--training.steps=6", size, DDP, processes=processes)
    assert layout in output
    assert_same_training(one, tmp_path, steps=6)


def assert_same_training(expected: Path, folder: Path, steps: int) -> None:
    theirs, ours = losses(expected), losses(folder)
    assert list(ours) == list(range(1, steps + 1))
    assert list(ours.values()) == pytest.approx(list(theirs.values())[:steps], abs=1e-5)
    # The first gradient sees every weight as it was initialized, and every row of the first batch.
    assert grad_norms(folder) == pytest.approx(grad_norms(expected)[:steps], rel=1e-4)


def test_computes_in_bfloat16_whatever_the_layout(one: Path, tmp_path: Path) -> None:
    bfloat16 = (*LONGER, "--training.mixed_precision_param=bfloat16", "--training.steps=3")
    train_here(*bfloat16, into(tmp_path / "one"), "--training.local_batch_size=4")
    train(*bfloat16, into(tmp_path / "fsdp"), processes=2)
    expected = list(losses(one).values())[:3]
    for folder in (tmp_path / "one", tmp_path / "fsdp"):
        assert list(losses(folder).values()) == pytest.approx(expected, abs=2e-2)
        # float32 agrees to 1e-6 (above), bfloat16 has 8 bits
        errors = [abs(mine - theirs) for mine, theirs in zip(losses(folder).values(), expected, strict=True)]
        assert max(errors) > 2e-5
