"""`MetricsReporter`: what is reported, when, and whether the numbers are consistent."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan.config.output import Metrics
from torchtitan.errors import ConfigError
from torchtitan.metrics import MetricsReporter, Peak
from torchtitan.metrics.reporter import duration

DEVICE = SimpleNamespace(
    peak_memory_bytes=lambda: 300,
    reset_peak_memory=lambda: None,
    memory_capacity_bytes=lambda: 1200,
    synchronize=lambda: None,
)


def make(folder: Path, metrics: Metrics | None = None, **keys: Any) -> MetricsReporter:
    defaults: dict[str, Any] = {
        "rank": 0,
        "world_size": 1,
        "total_steps": 10,
        "start_step": 0,
        "start_tokens": 0,
        "tokens_per_step": 1000,
        "flops_per_token": 50.0,
        "peak": Peak(1e6, "of this test"),
        "device": DEVICE,
    }
    return MetricsReporter(metrics or Metrics(log_freq=4), folder, **(defaults | keys))


def run(reporter: MetricsReporter, first: int = 1, last: int = 10, **readings: Any) -> list[int]:
    """Reports steps. Returns those at which a report was due."""
    with reporter:
        values = {"loss": 2.0, "grad_norm": 1.5, "lr": 1e-3} | readings
        return [step for step in range(first, last + 1) if reporter.step(step, **values) is not None]


def entries(folder: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_entry_has_the_documented_keys_and_consistent_numbers(tmp_path: Path) -> None:
    assert run(make(tmp_path), data_epoch=3) == [1, 4, 8, 10]
    written = entries(tmp_path)
    assert [entry["step"] for entry in written] == [1, 4, 8, 10]
    for entry in written:
        assert list(entry)[:4] == ["step", "loss", "grad_norm", "lr"]
        assert set(entry) == {
            *("step", "loss", "grad_norm", "lr", "tokens_per_second", "mfu", "step_seconds", "data_wait_share"),
            *("peak_memory_bytes", "memory_share", "tokens_seen", "data_epoch"),
        }
        assert (entry["loss"], entry["grad_norm"], entry["lr"], entry["data_epoch"]) == (2.0, 1.5, 1e-3, 3)
        assert entry["tokens_seen"] == entry["step"] * 1000
        assert entry["tokens_per_second"] * entry["step_seconds"] == pytest.approx(1000)
        assert entry["mfu"] == pytest.approx(entry["tokens_per_second"] * 50 / 1e6)
        assert (entry["peak_memory_bytes"], entry["memory_share"]) == (300, 0.25)
        assert entry["data_wait_share"] == 0.0


def test_a_peak_is_measured_between_steps_and_takes_none_of_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("torchtitan.metrics.reporter.perf_counter", lambda: now[0])

    class Slow(Peak):
        measured = 0

        @property
        def uncertain(self) -> bool:
            return self.measured < 3

        def measure(self) -> None:
            self.measured += 1
            now[0] += 5.0

    peak = Slow(1e6, "of this test")
    with make(tmp_path, peak=peak) as reporter:
        for step in range(1, 9):
            now[0] += 1.0
            reporter.step(step, loss=1.0, grad_norm=1.0, lr=1.0)
            reporter.after_step()
    assert peak.measured == 3
    assert [entry["step_seconds"] for entry in entries(tmp_path)] == pytest.approx([1.0] * 3)


def test_time_covers_the_steps_since_the_report_before(tmp_path: Path) -> None:
    start = time.perf_counter()
    with make(tmp_path) as reporter:
        for step in range(1, 9):
            time.sleep(0.02 if step <= 4 else 0.002)
            reporter.step(step, loss=1.0, grad_norm=1.0, lr=1.0)
    elapsed = time.perf_counter() - start
    first, slow, fast = entries(tmp_path)
    assert slow["step_seconds"] >= 0.02 and fast["step_seconds"] >= 0.002
    assert first["step_seconds"] + 3 * slow["step_seconds"] + 4 * fast["step_seconds"] <= elapsed


def test_tokens_per_second_are_per_device(tmp_path: Path) -> None:
    run(make(tmp_path, world_size=4), last=1)
    [entry] = entries(tmp_path)
    assert entry["tokens_per_second"] * entry["step_seconds"] == pytest.approx(1000 / 4)
    assert entry["tokens_seen"] == 1000


def test_waiting_for_data_and_pauses(tmp_path: Path) -> None:
    start = time.perf_counter()
    with make(tmp_path, total_steps=2, metrics=Metrics(log_freq=1)) as reporter:
        with reporter.waiting_for_data():
            time.sleep(0.03)
        time.sleep(0.01)
        reporter.step(1, loss=1.0, grad_norm=1.0, lr=1.0)
        with reporter.pause():
            time.sleep(0.2)
        with reporter.waiting_for_data():
            time.sleep(0.002)
        reporter.step(2, loss=1.0, grad_norm=1.0, lr=1.0)
    elapsed = time.perf_counter() - start
    waited, paused = entries(tmp_path)
    assert 0.03 / waited["step_seconds"] <= waited["data_wait_share"] < 1
    assert waited["step_seconds"] + paused["step_seconds"] <= elapsed - 0.2
    assert 0 < paused["data_wait_share"] <= 1


def test_readings_are_taken_only_when_a_report_is_due(tmp_path: Path) -> None:
    taken: list[str] = []

    def reading(name: str) -> Any:
        return lambda: taken.append(name) or torch.tensor([7.0])

    run(make(tmp_path), last=4, loss=reading("loss"), grad_norm=torch.tensor(2.5), extra=reading("extra"))
    assert taken == ["loss", "extra"] * 2  # steps 1 and 4
    assert entries(tmp_path)[0]["loss"] == 7.0 and entries(tmp_path)[0]["grad_norm"] == 2.5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_null_with_a_warning(value: float, tmp_path: Path, log: list[str]) -> None:
    run(make(tmp_path), last=1, loss=torch.tensor(value))
    [entry] = entries(tmp_path)
    assert entry["loss"] is None and entry["grad_norm"] == 1.5
    assert f"WARNING step 1: loss is {value}; written as null" in log
    assert any(f"loss {value:.4f}" in line for line in log)  # the console shows the measured value


def test_unknown_peak(tmp_path: Path, log: list[str]) -> None:
    run(make(tmp_path, peak=None), last=1)
    [entry] = entries(tmp_path)
    assert entry["mfu"] is None
    assert "MFU unknown" in log[-1]


def test_console_line(tmp_path: Path, log: list[str]) -> None:
    run(make(tmp_path, total_steps=8), last=8)
    first, last = log[0], log[-1]
    for fragment in (
        "INFO step 1/8 | ",
        "loss 2.0000",
        "grad norm 1.500",
        "lr 1.00e-03",
        "tokens/s",
        "MFU ",
        "data wait 0.0%",
    ):
        assert fragment in first
    assert "left" not in first and "left" in log[1] and "left" not in last


def test_validation_has_an_entry_of_its_own(tmp_path: Path, log: list[str]) -> None:
    with make(tmp_path) as reporter:
        reporter.validation(6, loss=lambda: torch.tensor(1.25))
    assert entries(tmp_path) == [{"step": 6, "validation_loss": 1.25, "tokens_seen": 6000}]
    assert log[-1] == "INFO step 6 | validation loss 1.2500"


def test_resume_reports_at_the_same_steps_and_counts_only_its_own_time(tmp_path: Path) -> None:
    run(make(tmp_path), last=8)
    half_the_batch_before: dict[str, Any] = {"start_step": 6, "start_tokens": 3000}
    assert run(make(tmp_path, **half_the_batch_before), first=7) == [8, 10]
    written = entries(tmp_path)
    assert [entry["step"] for entry in written] == [1, 4, 8, 10]
    assert all(entry["tokens_per_second"] * entry["step_seconds"] == pytest.approx(1000) for entry in written)
    assert [entry["tokens_seen"] for entry in written] == [1000, 4000, 5000, 7000]


def test_only_rank_0_writes_the_file(tmp_path: Path) -> None:
    assert run(make(tmp_path, rank=1, world_size=2)) == [1, 4, 8, 10]  # it takes part in collective readings
    assert os.listdir(tmp_path) == []


def test_times_are_those_of_the_steps_since_the_last_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the test sets: of two seconds, each step waits half a second for data."""
    now = [100.0]
    monkeypatch.setattr("torchtitan.metrics.reporter.perf_counter", lambda: now[0])
    with make(tmp_path, Metrics(log_freq=4), world_size=4, total_steps=8) as reporter:
        for step in range(1, 9):
            with reporter.waiting_for_data():
                now[0] += 0.5
            now[0] += 1.5
            if step == 4:  # the window of steps 2 to 4 has three steps and six seconds
                slowest = reporter.slowest_rank(step, [1.0, 1.0, 1.5, 1.9])
                assert slowest["slowest_rank"] == 3 and slowest["slowest_rank_ratio"] == pytest.approx(1.9)
                assert slowest["slowest_rank_wait_share"] == pytest.approx((1.9 - 3.5 / 3) * 3 / 6)
            reporter.step(step, loss=1.0, grad_norm=1.0, lr=1.0)
    for entry in entries(tmp_path):
        assert entry["step_seconds"] == pytest.approx(2.0)
        assert entry["data_wait_share"] == pytest.approx(0.25)
        assert entry["tokens_per_second"] == pytest.approx(1000 / 2 / 4)  # of a device


@pytest.mark.parametrize(
    ("all_ranks", "folders"), [(False, {"0": "board"}), (True, {"0": "board/rank_0", "1": "board/rank_1"})]
)
def test_tensorboard_has_the_numbers_of_the_file(all_ranks: bool, folders: dict[str, str], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(log_freq=4, enable_tensorboard=True, save_tb_folder="board", save_for_all_ranks=all_ranks)
    for rank in (0, 1):
        run(make(tmp_path, metrics, rank=rank, world_size=2))
    written = {str(file.parent.relative_to(tmp_path)) for file in tmp_path.rglob("events.out.*")}
    assert written == set(folders.values())
    events = EventAccumulator(str(tmp_path / folders["0"]))
    events.Reload()
    for name in ("loss", "grad_norm", "lr", "tokens_per_second", "mfu", "tokens_seen", "data_wait_share"):
        expected = [(entry["step"], pytest.approx(entry[name], rel=1e-6)) for entry in entries(tmp_path)]
        assert [(event.step, event.value) for event in events.Scalars(name)] == expected


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"job\.dump_folder: metrics cannot be written to .*file/run"):
        make(tmp_path / "file" / "run")


def test_duration() -> None:
    shown = [duration(seconds) for seconds in (0, 59.6, 61, 3600, 3 * 3600 + 61, 50 * 3600)]
    assert shown == ["0:00", "1:00", "1:01", "1:00:00", "3:01:01", "2d 2h"]
