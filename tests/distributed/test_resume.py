"""A stopped run resumes as if uninterrupted: exactly under the same layout, to rounding under another."""

import json
import re
import shutil
from pathlib import Path

import pytest
from runs import (
    HELD,
    TINY,
    assert_equal_bit_for_bit,
    checkpoint_steps,
    hold,
    into,
    last_step,
    lines_of,
    losses,
    reports,
    started,
    tensors_of,
    train,
    train_here,
)

STEPS = 16
FLAGS = (
    *TINY,
    f"--training.steps={STEPS}",
    "--training.local_batch_size=1",
    "--training.record_sample_ids",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=4",
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two FSDP ranks, each step with two grad-accumulation steps, shuffled data."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(*FLAGS, into(folder), processes=2)
    return folder


def kill_after_next_checkpoint(folder: Path, *flags: str) -> None:
    """Runs the command until it has passed a new checkpoint, then kills all its processes at once."""
    target = max(checkpoint_steps(folder), default=0) + 4
    hold(folder, target + 2)
    with started(*FLAGS, *HELD, *flags, into(folder), processes=2) as run:
        run.wait_until(lambda: target in checkpoint_steps(folder) and last_step(folder) > target)
        run.kill()
    assert last_step(folder) < STEPS


def sample_ids(folder: Path, ranks: int) -> dict[int, list[list[str]]]:
    """By step, the ids of every row of the global batch."""
    rows: dict[int, list[list[str]]] = {}
    for rank in range(ranks):
        for line in lines_of(folder / "sample_ids" / f"rank_{rank}.jsonl"):
            rows.setdefault(line["step"], []).extend(line["ids"])
    return rows


@pytest.mark.full
def test_killed_twice_and_resumed_it_ends_bit_for_bit_the_same(uninterrupted: Path, tmp_path: Path) -> None:
    """Whether a checkpoint was written in the background or not."""
    background = "--checkpoint.async_mode=async"
    killed = tmp_path / "killed"
    kill_after_next_checkpoint(killed, background)
    kill_after_next_checkpoint(killed)
    train(*FLAGS, into(killed), background, processes=2)
    assert losses(killed) == losses(uninterrupted)
    assert list(losses(killed)) == list(range(1, STEPS + 1))
    assert sample_ids(killed, ranks=2) == sample_ids(uninterrupted, ranks=2)
    assert_equal_bit_for_bit(tensors_of(killed, STEPS), tensors_of(uninterrupted, STEPS))


def test_epochs_end_in_a_resumed_run_as_in_a_whole_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So few documents that every row has read its own several times, in a different order each time."""
    (tmp_path / "data").mkdir()
    for number in range(9):
        text = " ".join(str(number * step * step) for step in range(20 + 3 * number))
        (tmp_path / "data" / f"{number}.txt").write_text(text)
    flags = (*FLAGS, f"--training.dataset_path={tmp_path}/data")
    whole, resumed = tmp_path / "whole", tmp_path / "parts"
    train_here(*flags, into(whole))
    for steps in (7, 13, STEPS):
        train_here(*flags, into(resumed), f"--training.steps={steps}")
    assert losses(resumed) == losses(whole)
    assert sample_ids(resumed, ranks=1) == sample_ids(whole, ranks=1)
    assert_equal_bit_for_bit(tensors_of(resumed, STEPS), tensors_of(whole, STEPS))
    state = json.loads((whole / "checkpoint" / f"step-{STEPS}" / "train_state.json").read_text())
    assert state["dataloader"]["epoch"] >= 2
    four = tmp_path / "four"
    line = r"step (\d+) \| .*/data: all documents are read, epoch (\d+) has begun"
    begun = re.findall(line, capsys.readouterr().out)
    train(*flags, into(four), processes=4)
    epochs = {line["step"]: line[f"epoch/{tmp_path}/data"] for line in reports(whole)}
    for other in (resumed, four):
        assert epochs == {line["step"]: line[f"epoch/{tmp_path}/data"] for line in reports(other)}
    rises = [(str(step), str(epoch + 1)) for step, epoch in epochs.items() if epoch > epochs.get(step - 1, 0)]
    assert begun == rises * 2 and len(rises) >= 2  # once by the whole run, once by the starts together


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_a_run_changes_its_number_of_processes_and_loses_no_sample(
    before: int, after: int, uninterrupted: Path, tmp_path: Path
) -> None:
    train(*FLAGS, into(tmp_path), "--training.steps=6", processes=before)
    train(*FLAGS, into(tmp_path), "--training.steps=10", processes=after)
    expected = {step: ids for step, ids in sample_ids(uninterrupted, ranks=2).items() if step <= 10}
    seen = sample_ids(tmp_path, ranks=max(before, after))
    assert {step: sorted(ids) for step, ids in seen.items()} == {step: sorted(ids) for step, ids in expected.items()}
    assert list(losses(tmp_path).values()) == pytest.approx(list(losses(uninterrupted).values())[:10], abs=1e-4)


TP, PP = "--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2"
OTHER_LAYOUTS = {
    "one process": (1, ()),
    "FSDP 4": (4, ()),
    "FSDP 2 x TP 2": (4, (TP,)),
    "TP 2 x PP 2": (4, (TP, PP, "--training.local_batch_size=4")),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_another_layout_goes_on_with_the_same_samples_and_back(
    layout: str, uninterrupted: Path, tmp_path: Path
) -> None:
    processes, flags = OTHER_LAYOUTS[layout]
    shutil.copytree(uninterrupted / "checkpoint" / "step-8", tmp_path / "checkpoint" / "step-8")
    keep_optimizer = "--checkpoint.no_last_save_model_weights_only"
    train(*FLAGS, into(tmp_path), "--training.steps=12", keep_optimizer, *flags, processes=processes)
    if layout != "one process":
        train(*FLAGS, into(tmp_path), "--training.steps=14")
    resumed, expected, ids = losses(tmp_path), losses(uninterrupted), sample_ids(uninterrupted, ranks=2)
    assert list(resumed.values()) == pytest.approx([expected[step] for step in resumed], abs=1e-5)
    assert list(resumed) == list(range(9, 13 if layout == "one process" else 15))
    assert sample_ids(tmp_path, ranks=processes) == {step: ids[step] for step in resumed}
