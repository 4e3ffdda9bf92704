"""Ranks that share a GPU: what `many_ranks.py` shows, as a test, and its rehearsal over gloo."""

from pathlib import Path

import many_ranks
import pytest
import torch
from many_ranks import LIFE, Rows, main, rows

from torchtitan.errors import UserError

REHEARSED = "PP 2 x EP 2, balance by loss | float32"


@pytest.mark.gpu
def test_every_layout_over_nccl_equals_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible")
    try:
        many_ranks.sharing(tmp_path)
    except UserError as error:
        pytest.skip(str(error))
    assert main([str(tmp_path), "--seconds=500"]) == 0, capsys.readouterr().out


def test_there_are_forty_rows_and_more() -> None:
    assert len(rows("cuda")) >= 40 and rows("cpu").keys() <= rows("cuda").keys()


@pytest.mark.full
@pytest.mark.parametrize("row", [REHEARSED, next(iter(LIFE))])
def test_a_row_of_each_kind_passes_a_rehearsal(row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--device=cpu", f"--only={row}"]) == 0, capsys.readouterr().out
    assert row in (tmp_path / "table.md").read_text()


@pytest.mark.full
def test_a_row_that_fails_is_said_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(many_ranks, "PATIENCE", 0.0)  # no row is that fast
    assert main([str(tmp_path), "--device=cpu", "--only=DDP 2"]) == 1
    done = Rows(tmp_path, "cpu", 0).done()
    assert list(done) == ["DDP 2 | float32", "DDP 2 | bf16"] and all(row["failed"] for row in done.values())
    assert "FAILED DDP 2 | bf16: no result" in capsys.readouterr().out
