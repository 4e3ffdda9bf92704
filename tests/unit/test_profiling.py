"""Traces at multiples of `profile_freq`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan.config.output import Profiling
from torchtitan.metrics.profiling import Profiler

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def run(folder: Path, first: int, last: int, rank: int = 0, **keys: Any) -> None:
    with Profiler(Profiling(**keys), folder, rank=rank, device_type="cpu", start_step=first - 1) as profiler:
        for step in range(first, last + 1):
            with torch.profiler.record_function(f"work_of_step_{step}"):
                torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.after_step()


def traces(folder: Path) -> dict[str, set[str]]:
    """File -> the steps that it recorded."""
    recorded = {}
    for path in sorted(folder.rglob("*.json")):
        events = json.loads(path.read_text())["traceEvents"]
        names = {event["name"] for event in events if str(event.get("name")).startswith("work_of_step_")}
        recorded[str(path.relative_to(folder))] = names
    return recorded


@pytest.mark.parametrize("freq", [1, 2, 5])
def test_a_trace_of_each_multiple_and_of_nothing_else(freq: int, tmp_path: Path) -> None:
    run(tmp_path, 1, 6, rank=3, enable_profiling=True, profile_freq=freq, save_traces_folder="t")
    assert traces(tmp_path) == {
        f"t/iteration_{step}/rank3_trace.json": {f"work_of_step_{step}"} for step in range(freq, 7, freq)
    }


def test_steps_are_counted_from_the_start_of_the_run_after_a_resume(tmp_path: Path) -> None:
    run(tmp_path, 7, 9, enable_profiling=True, profile_freq=4)
    assert traces(tmp_path) == {"profile_traces/iteration_8/rank0_trace.json": {"work_of_step_8"}}


def test_steps_in_which_somebody_else_profiles_are_left_out(tmp_path: Path) -> None:
    profiling = Profiling(enable_profiling=True, profile_freq=1)
    with Profiler(profiling, tmp_path, rank=0, device_type="cpu", start_step=2, busy=[3]) as profiler:
        with torch.profiler.profile():
            torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.after_step()
        with torch.profiler.record_function("work_of_step_4"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.after_step()
    assert traces(tmp_path) == {"profile_traces/iteration_4/rank0_trace.json": {"work_of_step_4"}}


def test_a_run_too_short_for_a_trace_says_so(tmp_path: Path, log: list[str]) -> None:
    run(tmp_path, 1, 3, enable_profiling=True, profile_freq=10)
    assert traces(tmp_path) == {}
    assert log[-1].startswith("WARNING no trace was written: the run ended at step 3")


def test_an_error_in_the_run_comes_through(tmp_path: Path, log: list[str]) -> None:
    profiling = Profiling(enable_profiling=True, profile_freq=2)
    with pytest.raises(RuntimeError, match="of the run"):  # noqa: SIM117
        with Profiler(profiling, tmp_path, rank=0, device_type="cpu", start_step=0) as profiler:
            profiler.after_step()
            raise RuntimeError("of the run")
    assert traces(tmp_path) == {}
    assert not any(line.startswith("WARNING") for line in log)


def test_nothing_is_written_where_it_is_off(tmp_path: Path) -> None:
    run(tmp_path, 1, 20)
    assert list(tmp_path.iterdir()) == []
