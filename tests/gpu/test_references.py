"""What runs on a GPU are compared with is made before, where there is no GPU."""

from pathlib import Path
from typing import Any

import place as places
import pytest
from place import SHAPE, STEPS, Place
from runs import ROOT, losses


def no_run(*_: Any) -> None:
    pytest.fail("the CPU trains")


def test_a_carried_reference_is_used_if_it_was_made_with_the_same_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried = tmp_path / "carried"
    monkeypatch.setattr(places, "CARRIED", carried)
    Place("cpu", tmp_path, tmp_path / "before").carry()
    assert not any(str(path) in file.read_text() for file in carried.rglob("*.*") for path in (ROOT, tmp_path))
    monkeypatch.setattr(Place, "on_cpu", no_run)
    there = Place("cpu", tmp_path, tmp_path / "there")
    assert list(losses(there.reference)) == list(range(1, STEPS + 1))
    monkeypatch.setitem(SHAPE, "cpu", (*SHAPE["cpu"], "--optimizer.lr=1e-3"))
    with pytest.raises(pytest.fail.Exception, match="the CPU trains"):
        print(there.reference)


def test_it_is_said_why_a_reference_is_made_on_the_machine_with_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "CARRIED", tmp_path)
    monkeypatch.setattr(Place, "on_cpu", lambda *_: "")
    experts = Place("cuda", tmp_path, tmp_path / "shared").of("experts")
    with pytest.warns(UserWarning, match="The reference experts is missing"):
        assert experts.reference == tmp_path / "shared" / "experts" / "reference"
    (tmp_path / "experts").mkdir()
    (tmp_path / "experts" / "made_with.json").write_text("{}")
    with pytest.warns(UserWarning, match="The reference experts was made with other flags"):
        assert experts.reference
