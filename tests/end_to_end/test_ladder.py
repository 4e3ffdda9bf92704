"""A ladder as a user climbs it: real runs, an interruption, a second call, and its results."""

import json
import signal
import sys
from pathlib import Path

import matplotlib.image
import pytest
from runs import ROOT, SMALL, Run, lines_of

FILE = ROOT / "train_configs" / "ladder_cpu.toml"
COMMAND = [
    *(sys.executable, "-m", "torchtitan.ladder", str(FILE), "--sizes", "13K,30K,53K,107K", "--tokens", "10K"),
    *("--predict", "166K", "--verify", "--folder", "ladder", "--evaluation.limit=2"),
    *(flag for flag in SMALL if "lr_scheduler" not in flag),
]


def test_a_ladder_goes_on_after_an_interruption_and_predicts(tmp_path: Path) -> None:
    folder = tmp_path / "ladder"
    second = folder / "30K-10K" / "metrics.jsonl"
    first = Run(COMMAND, {"PYTHON": sys.executable}, tmp_path)
    try:
        first.wait_until(lambda: any("loss" in line for line in lines_of(second)))
        first.process.send_signal(signal.SIGTERM)
        status, output = first.finish()
        assert first.pids() == []
    finally:
        first.kill()
    assert status == 128 + signal.SIGTERM, output
    assert "Stopped during 30K-10K. The same command goes on from there." in output
    finished = (folder / "13K-10K" / "metrics.jsonl").read_bytes()

    again = Run(COMMAND, {"PYTHON": sys.executable}, tmp_path)
    try:
        status, output = again.finish()
    finally:
        again.kill()
    assert status == 0, output
    assert "13K-10K: training" not in output and "30K-10K: training" in output
    assert (folder / "13K-10K" / "metrics.jsonl").read_bytes() == finished
    steps = [line["step"] for line in lines_of(second) if "loss" in line]
    assert steps == [*range(1, 40)]  # 10,000 tokens, 4 x 64 in a step
    assert (folder / "30K-10K.log").read_text().count("training finished after step 39") == 1

    result = json.loads((folder / "ladder.json").read_text())
    assert result["law"] == "E + A / N^alpha"
    assert [run["name"] for run in result["runs"]] == ["13K-10K", "30K-10K", "53K-10K", "107K-10K"]
    prediction = result["prediction"]
    assert prediction["low"] <= prediction["value"] <= prediction["high"]
    assert prediction["value"] == pytest.approx(prediction["measured"], rel=0.1)
    evaluation = [line for line in lines_of(folder / "166K-10K" / "metrics.jsonl") if "held_out/bits_per_byte" in line]
    assert [line["held_out/bits_per_byte"] for line in evaluation] == [prediction["measured"]]
    assert "measured" in (folder / "ladder.txt").read_text()
    assert matplotlib.image.imread(folder / "ladder.png").std() > 0

    changed = Run([*COMMAND, "--optimizer.lr=1e-4"], {}, tmp_path)
    status, output = changed.finish()
    assert status == 2
    assert "13K-10K.toml is of a ladder with another configuration; choose another --folder" in output
