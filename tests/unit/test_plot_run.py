"""scripts/plot_run.py: curves of runs as a PNG, and its errors."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_run.py"


def run_folder(folder: Path, losses: list[float | None], **more: Any) -> str:
    folder.mkdir(parents=True)
    entries: list[dict[str, Any]] = [
        {"step": step, "loss": loss, "lr": 0.1, "tokens_seen": 512 * step, **more}
        for step, loss in enumerate(losses, start=1)
    ]
    entries.append({"step": len(losses), "validation_loss": 2.5, "tokens_seen": 512 * len(losses)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(folder)


def plot(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", ["plot_run.py", *argv])
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    losses: dict[str, list[float | None]] = {"a": [8.0, 7.0, 6.0], "b": [8.0, None, 5.0]}
    return [run_folder(tmp_path / name, values) for name, values in losses.items()]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--keys", "loss,lr", "--smooth", "2"],
        ["--x", "tokens_seen"],
        ["--x", "lr"],  # which the validation entries lack
        ["--keys", "validation_loss"],
    ],
)
def test_runs_become_a_png(
    options: list[str], runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib.image

    output = tmp_path / "plots" / "loss.png"
    plot(monkeypatch, *runs, "--output", str(output), *options)
    image = matplotlib.image.imread(output)
    assert image.shape[0] > 300 and image.shape[1] > 900
    assert image.std() > 0.01  # something was drawn


def test_a_file_and_a_line_being_written(runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(runs[0]) / "metrics.jsonl"
    with file.open("a") as appended:
        appended.write('{"step": 4, "lo')
    plot(monkeypatch, str(file), "--output", str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_curves_hold_the_numbers_of_the_file(runs: list[str]) -> None:
    script = runpy.run_path(str(SCRIPT))
    entries = script["load"](Path(runs[0]) / "metrics.jsonl")
    assert script["points"]("a", entries, "step", "loss") == ([1, 2, 3], [8, 7, 6])
    assert script["points"]("a", entries, "tokens_seen", "validation_loss") == ([1536], [2.5])
    assert script["moving_average"]([8.0, 7.0, 6.0], 2) == [8.0, 7.5, 6.5]


def test_runs_of_equal_name_are_told_apart(tmp_path: Path) -> None:
    files = [tmp_path / name / "out" / "metrics.jsonl" for name in ("a", "b")]
    assert runpy.run_path(str(SCRIPT))["labels"](files) == ["a/out", "b/out"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no/such/run"], "no such run: no/such/run does not exist; pass the dump folder of a run"),
        (["a", "a"], "the same run is given twice"),
        (["a", "--keys", "los"], "a has no key los; it has loss, lr, step, tokens_seen, validation_loss"),
        (["a", "--keys", ","], "--keys is empty"),
        (["a", "--smooth", "0"], "--smooth 0: must be at least 1"),
        (["a", "--x", "steps"], "a has no key steps"),
        (["a", "--keys", "validation_loss", "--x", "lr"], "a has no entry with both lr and validation_loss"),
        (["empty"], "empty/metrics.jsonl holds no entries yet"),
        (["a", "--output", "a/metrics.jsonl/x.png"], "--output a/metrics.jsonl/x.png cannot be written"),
    ],
)
def test_mistakes_of_a_user(
    argv: list[str],
    message: str,
    runs: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        plot(monkeypatch, *argv)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("plot_run.py: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "loss.png").exists()
