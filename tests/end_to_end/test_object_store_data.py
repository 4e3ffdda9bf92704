"""Runs that read an S3 server."""

import shutil
from pathlib import Path

import pytest
from object_store import S3Server
from runs import ROOT, TINY, failure, into, losses, train

from torchtitan.files import any_path

LOCAL = ROOT / "docs"


@pytest.mark.full
def test_losses_of_two_processes_equal_local_files(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    from torchtitan.data.tokenizer import SHIPPED

    (tmp_path / "data").mkdir()
    for file in LOCAL.glob("*.md"):
        shutil.copy(file, tmp_path / "data")
        any_path(f"s3://bucket/data/{file.name}").write_bytes(file.read_bytes())
    any_path("s3://bucket/tokenizer.model").write_bytes(SHIPPED.read_bytes())
    flags = (*TINY, "--training.steps=4", "--checkpoint.enable_checkpoint", "--checkpoint.interval=2")
    train(*flags, f"--training.dataset_path={tmp_path / 'data'}", into(tmp_path / "local"), processes=2)
    stored = ("--training.dataset_path=s3://bucket/data", "--model.tokenizer_path=s3://bucket/tokenizer.model")
    train(*flags, *stored, into(tmp_path / "stored"), processes=2)
    assert losses(tmp_path / "stored") == losses(tmp_path / "local")
    shutil.rmtree(tmp_path / "local" / "checkpoint" / "step-4")
    train(*flags, *stored, into(tmp_path / "local"), processes=2)  # goes on with the copy in the bucket
    assert losses(tmp_path / "stored") == losses(tmp_path / "local")


def test_data_that_are_not_in_the_store_are_one_sentence(s3: S3Server, tmp_path: Path) -> None:
    status, output = failure(*TINY, "--training.dataset_path=s3://nowhere/data", into(tmp_path))
    assert status == 2
    assert "training.dataset_path: s3://nowhere/data cannot be read (there is no such bucket: correct" in output
    assert "Traceback" not in output
