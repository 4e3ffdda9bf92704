"""A ladder as a user climbs it: finished runs, one that is interrupted, and the results."""

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import HELD, ROOT, SMALL, Run, hold, let_go, lines_of, reports
from workers import PATIENCE

FILE = ROOT / "train_configs" / "ladder_cpu.toml"
STAGES = """
[[stage]]
name = "stable"
until = 0.5
lr_scheduler.decay_ratio = 0.0
[[stage]]
name = "long"
training.seq_len = 128
training.global_batch_size = 2
lr_scheduler.warmup_steps = 0
"""
COMMAND = [
    *(sys.executable, "-m", "torchtitan.tools.ladder", "file.toml", "--sizes", "13K,30K,53K,107K", "--tokens", "10K"),
    *("--predict", "166K", "--verify", "--folder", "ladder", "--evaluation.limit=2"),
    *(flag for flag in SMALL if "lr_scheduler" not in flag),
    *HELD,
]
STEPS = 39  # 10,000 tokens, 4 x 64 in a step
FINISHED = {"13K-10K": 2.75, "30K-10K": 2.72, "53K-10K": 2.70}  # to save time, runs that seem to be finished


def climb(folder: Path, *flags: str) -> Run:
    return Run([*COMMAND, *flags], {"PYTHON": sys.executable}, folder)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.full
@pytest.mark.parametrize(("number", "stages"), [(signal.SIGUSR1, STAGES), (signal.SIGKILL, "")])
def test_a_ladder_goes_on_after_an_interruption_and_predicts(
    number: signal.Signals, stages: str, tmp_path: Path
) -> None:
    import matplotlib.image

    (tmp_path / "file.toml").write_text(FILE.read_text() + stages)
    folder = tmp_path / "ladder"
    for name, loss in FINISHED.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "metrics.jsonl").write_text(json.dumps({"step": STEPS, "held_out/bits_per_byte": loss}) + "\n")
    metrics = folder / "107K-10K" / "metrics.jsonl"
    hold(metrics.parent, 3)
    first = climb(tmp_path)
    try:
        first.wait_until(lambda: any("loss" in line for line in lines_of(metrics)))
        first.process.send_signal(number)
        until(lambda: "the run stops after this step" in (folder / "107K-10K.log").read_text())
        let_go(metrics.parent)
        status, output = first.finish()
        if number == signal.SIGKILL:  # its run has noticed, and saves
            until(lambda: not first.pids())
        assert not first.pids()
    finally:
        first.kill()
    assert status == 128 + number, output
    if number != signal.SIGKILL:
        assert "Stopped during 107K-10K. The same command goes on from there." in output
    assert "its checkpoint is saved" in (folder / "107K-10K.log").read_text()

    again = climb(tmp_path)
    try:
        status, output = again.finish()
    finally:
        again.kill()
    assert status == 0, output
    assert [line.split(":")[0] for line in output.splitlines() if ": training" in line] == ["107K-10K", "166K-10K"]
    assert [line["step"] for line in lines_of(metrics) if "loss" in line] == [*range(1, STEPS + 1)]
    starts = [line["step"] for line in lines_of(metrics.with_name("events.jsonl")) if line["event"] == "start"]
    assert len(starts) == 2 and starts[1] > 0  # resumed, not repeated
    for name in ("107K-10K", "166K-10K") if stages else ():
        assert [line["stage"] for line in reports(folder / name)] == [1] * 20 + [2] * 19

    result = json.loads((folder / "ladder.json").read_text())
    assert result["law"] == "E + A / N^alpha"
    assert {run["name"]: run["loss"] for run in result["runs"][:3]} == FINISHED
    evaluation = [line for line in lines_of(folder / "166K-10K" / "metrics.jsonl") if "held_out/bits_per_byte" in line]
    prediction = result["prediction"]
    assert [line["held_out/bits_per_byte"] for line in evaluation] == [prediction["measured"]]
    assert prediction["low"] <= prediction["value"] <= prediction["high"]
    assert f"measured {prediction['measured']:.4f}" in (folder / "ladder.txt").read_text()
    assert matplotlib.image.imread(folder / "ladder.png").std() > 0

    status, output = climb(tmp_path, "--optimizer.lr=1e-4").finish()
    assert status == 2
    assert "13K-10K.toml is of a ladder with another configuration; choose another --folder" in output
