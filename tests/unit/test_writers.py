"""metrics.jsonl and TensorBoard."""

import json
import os
import shutil
from pathlib import Path

import pytest
from runs import files_of_at_most

from torchtitan.errors import counted
from torchtitan.metrics.writers import JSONLWriter, TensorBoardWriter, Value


def write(path: Path, start_step: int, *steps: int, **values: Value) -> None:
    writer = JSONLWriter(path, start_step)
    for step in steps:
        writer.write(step, values)
    writer.close()


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_one_object_a_line_at_full_precision_as_soon_as_it_is_written(path: Path) -> None:
    writer = JSONLWriter(path, 0)
    writer.write(1, {"loss": 1 / 3, "mfu": None, "tokens_seen": 2**40})
    assert json.loads(path.read_text()) == {"step": 1, "loss": 1 / 3, "mfu": None, "tokens_seen": 2**40}
    writer.close()


def test_numbers_that_json_lacks_are_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write(path, 0, 1, loss=float("nan"))


def test_resuming_drops_later_lines_and_has_nothing_twice(path: Path) -> None:
    write(path, 0, 1, 2, 3, 4, 4)
    write(path, 2, 3, 4, 5)
    assert steps_in(path) == [1, 2, 3, 4, 5]
    write(path, 5, 6)
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "half", ['{"step": 2, "lo', '{"step": 2}', "{", '{"step"', "\x00\x00", '{"step": 1e999}\n', "[" * 10_000 + "\n"]
)
def test_resuming_drops_a_line_that_is_not_one(half: str, path: Path) -> None:
    write(path, 0, 1)
    with path.open("a") as file:
        file.write(half)
    write(path, 2, 3)
    assert steps_in(path) == [1, 3]


def test_resuming_keeps_the_files_permissions_and_leaves_no_other_file(path: Path) -> None:
    write(path, 0, 1, 2)
    os.chmod(path, 0o640)
    write(path, 1, 2)
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(path.parent) == ["metrics.jsonl"]
    for start_step in (1, 2, 0):
        (path.parent / "metrics.jsonl.tmp").write_text("of a start that was killed while it did this")
        write(path, start_step, start_step + 1)
        assert not list(path.parent.glob("*.tmp"))


def test_resuming_without_a_file_starts_one(path: Path) -> None:
    write(path, 7, 8)
    assert steps_in(path) == [8]


def test_a_fresh_start_keeps_the_files_of_earlier_runs(path: Path, log: list[str]) -> None:
    for loss in (1.0, 2.0, 3.0):
        write(path, 0, 1, loss=loss)
    losses = {file.name: json.loads(file.read_text())["loss"] for file in path.parent.iterdir()}
    assert losses == {"metrics.1.jsonl": 1.0, "metrics.2.jsonl": 2.0, "metrics.jsonl": 3.0}
    assert len(log) == 2 and log[0].endswith("renamed metrics.jsonl of an earlier run to metrics.1.jsonl")


def test_an_empty_file_is_not_kept(path: Path) -> None:
    path.touch()
    write(path, 0, 1)
    assert os.listdir(path.parent) == ["metrics.jsonl"]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path / "tb", 0)
    writer.write(1, {"loss": 8.25, "mfu": None, "tokens_seen": 4096})
    writer.write(2, {"loss": 7.5, "mfu": 0.5})
    writer.write(2, {"mfu": 0.5})
    assert scalars(tmp_path / "tb")["loss"] == [(1, 8.25), (2, 7.5)]  # before close, so that a killed run has them too
    writer.close()
    assert scalars(tmp_path / "tb") == {
        "loss": [(1, 8.25), (2, 7.5)],
        "tokens_seen": [(1, 4096.0)],
        "mfu": [(2, 0.5)],
    }


@pytest.fixture
def numbered_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads files of the same second and process in the order of their numbers as text, 10 before 9."""
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


@pytest.mark.usefixtures("numbered_from_0")
def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import plugin_event_accumulator

    for start_step, steps, loss in [(0, (1, 2, 3), 1.0), (1, (2, 3, 4), 2.0)]:
        writer = TensorBoardWriter(tmp_path, start_step)
        for step in steps:
            writer.write(step, {"loss": loss})
        writer.close()
    assert scalars(tmp_path)["loss"] == [(1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]
    without_its_server = plugin_event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in without_its_server.Tensors("loss")] == [1, 2, 3, 4]


@pytest.mark.usefixtures("numbered_from_0")
def test_tensorboard_has_a_run_for_each_stage(tmp_path: Path) -> None:
    """It hides what a resume trains again also in the stages that come later."""
    stages = [(2, "stage one"), (3, "stage two"), (4, "stage two")]
    for start_step, steps in [(0, (1, 2, 3, 4)), (1, (2, 3))]:
        writer = TensorBoardWriter(tmp_path, start_step, stages)
        for step in steps:
            writer.write(step, {"loss": float(start_step)})
        writer.close()
    assert scalars(tmp_path / "1_stage_one")["loss"] == [(1, 0.0), (2, 1.0)]
    assert scalars(tmp_path / "2_stage_two")["loss"] == [(3, 1.0)]
    assert sorted(os.listdir(tmp_path)) == ["1_stage_one", "2_stage_two"]


def test_a_full_disk_costs_lines_and_no_run(tmp_path: Path, log: list[str]) -> None:
    writer = JSONLWriter(tmp_path / "metrics.jsonl", 0)
    writer.write(1, {"loss": 1.0})
    with files_of_at_most((tmp_path / "metrics.jsonl").stat().st_size + 5):
        for step in (2, 3, 4):
            writer.write(step, {"loss": 1.0})
    writer.write(5, {"loss": 1.0})
    writer.close()
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 5]
    assert len(log) == 2  # after the 1st and the 2nd; next after the 4th
    assert all("No space left" in line and f"{counted(lost, 'line')} lost" in line for lost, line in enumerate(log, 1))


def test_a_file_that_cannot_be_made_costs_lines_and_no_run(tmp_path: Path, log: list[str]) -> None:
    writer = JSONLWriter(tmp_path / "folder" / "skipped_updates.jsonl", 0)
    (tmp_path / "folder").write_text("in the way")
    writer.write(1, {})
    (tmp_path / "folder").unlink()
    writer.write(2, {})
    writer.close()
    assert steps_in(tmp_path / "folder" / "skipped_updates.jsonl") == [2]
    assert len(log) == 1 and "cannot be written (Not a directory); 1 line lost so far" in log[0]


def test_what_is_removed_in_mid_run_is_made_again_and_said(path: Path, log: list[str]) -> None:
    folder = path.parent / "run"
    writer, board = JSONLWriter(folder / "metrics.jsonl", 0), TensorBoardWriter(folder / "tb", 0)
    for step in (1, 2, 3):
        if step == 2:
            shutil.rmtree(folder)
        writer.write(step, {"loss": 1.0})
        board.write(step, {"loss": 1.0})
    writer.close()
    board.close()
    assert steps_in(folder / "metrics.jsonl") == [2, 3]
    assert scalars(folder / "tb")["loss"] == [(2, 1.0), (3, 1.0)]
    assert len(log) == 2 and all("was removed" in line and "from step 2" in line for line in log)
