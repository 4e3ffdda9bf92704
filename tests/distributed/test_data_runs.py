"""Runs on data that are packed with padding, or that fail for a while on one rank."""

import json
import math
from pathlib import Path

import pytest
from runs import TINY, into, losses, reports, train

HICCUP = """
import os, time
from torchtitan.data import DATASETS, Document
from torchtitan.errors import DataError

class Hiccup:
    fingerprint, read, began = "hiccup", 0, 0.0

    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 500

    def __getitem__(self, index):
        self.read += 1
        if self.read > 40 and os.environ["RANK"] == "1":
            self.began = self.began or time.monotonic()
            if time.monotonic() < self.began + self.seconds:
                raise DataError(f"document {index} cannot be read.") from ConnectionResetError()
        return Document(f"This is document {index}: " + "word " * (index % 30), str(index))

DATASETS.register("steady", lambda path, column: Hiccup(0))
DATASETS.register("hiccup", lambda path, column: Hiccup(18))
"""


def test_padding_counts_in_no_loss_on_any_number_of_processes(tmp_path: Path) -> None:
    words = ("a", "of it", "and then some", "one two three four five six seven")
    lines = [json.dumps({"text": f"{n} {words[n % 4] * 8}"}) + "\n" for n in range(400)]
    (tmp_path / "short.jsonl").write_text("".join(lines))
    best_fit = (f"--training.dataset_path={tmp_path}/short.jsonl", "--training.packing=best_fit")
    flags = (*TINY, *best_fit, "--training.document_mask", "--training.steps=4")
    for processes in (1, 2):
        train(*flags, into(tmp_path / str(processes)), processes=processes)
    alone, two = (reports(tmp_path / number) for number in ("1", "2"))
    for key in ("loss", "grad_norm", "padding_share", "cut_share"):
        assert [report[key] for report in two] == pytest.approx([report[key] for report in alone], rel=1e-5)
    assert 0.02 < alone[0]["padding_share"] < 0.5
    # Before training, every token is about as likely as any other.
    assert alone[0]["loss"] == pytest.approx(math.log(4096), rel=0.02)


@pytest.mark.full
def test_all_ranks_wait_for_one_that_reads_again_longer_than_a_collective_may_take(tmp_path: Path) -> None:
    (tmp_path / "hiccups.py").write_text(HICCUP)
    flags = [flag for flag in TINY if "custom_import" not in flag and "model." not in flag]
    flags += ["--model.dim=32", "--model.n_layers=1", "--experimental.custom_import=hiccups", "--training.steps=14"]
    flags += ["--comm.train_timeout_seconds=8"]
    outputs = {
        name: train(*flags, f"--training.dataset={name}", into(tmp_path / name), processes=2, PYTHONPATH=str(tmp_path))
        for name in ("steady", "hiccup")
    }
    assert "Reading again in" in outputs["hiccup"] and "Reading again" not in outputs["steady"]
    assert losses(tmp_path / "hiccup") == losses(tmp_path / "steady")
