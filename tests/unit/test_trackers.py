"""Trackers: what the run sees of them. tests/end_to_end/test_tracked_runs.py has the libraries."""

import json
import posixpath
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from torchtitan.config.output import Metrics
from torchtitan.errors import ConfigError
from torchtitan.metrics import trackers
from torchtitan.metrics.reporter import make_writers
from torchtitan.metrics.trackers import TRACKERS, TrackedRun, begin_trackers
from torchtitan.metrics.writers import Value, Writer

CONFIG = {"training": {"steps": 3, "dataset_path": "https://me:geheim@host/data?token=geheim&x=1"}}


class Mine:
    """A user's tracker, which fails where it is told to."""

    runs: list[TrackedRun]
    written: list[tuple[object, ...]]
    fails_at: dict[int, Exception]
    hold: Event

    def __init__(self, run: TrackedRun) -> None:
        self.attempt(0)
        self.runs.append(run)

    def attempt(self, step: int) -> None:
        self.hold.wait()
        if step in self.fails_at:
            raise self.fails_at[step]

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        self.attempt(step)
        self.written.append((step, values))

    def write_text(self, step: int, name: str, text: str) -> None:
        self.written.append((step, name, text))

    def close(self) -> None:
        self.written.append(("closed",))


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Mine]]:
    class Own(Mine):
        """Each test has its own, since it may change it, and leave a thread behind."""

    Own.runs, Own.written, Own.fails_at, Own.hold = [], [], {}, Event()
    monkeypatch.setitem(TRACKERS._entries, "mine", Own)
    Own.hold.set()
    yield Own
    Own.hold.set()


def make(folder: Path, start_step: int = 0, **keys: Any) -> list[Writer]:
    metrics = Metrics(**({"trackers": ["mine"]} | keys))
    trackers = begin_trackers(metrics, folder, 0, 1, start_step > 0, CONFIG, {"conversion": "a table"})
    return [*trackers, *make_writers(metrics, folder, 0, start_step)]


def write(folder: Path, *steps: int, start_step: int = 0) -> None:
    writers = make(folder, start_step)
    for step in steps:
        for writer in writers:
            writer.write(step, {"loss": 1.0 * step, "mfu": None})
    for writer in writers:
        writer.close()


def test_a_run_keeps_its_id_and_another_one_gets_its_own(tmp_path: Path, mine: type[Mine]) -> None:
    write(tmp_path, 1, 2, 3)
    assert mine.written == [
        (0, "conversion", "a table"), *((step, {"loss": 1.0 * step}) for step in (1, 2, 3)), ("closed",)
    ]  # fmt: skip
    write(tmp_path, 3, 4, start_step=2)
    assert mine.runs[1] == mine.runs[0] and mine.runs[0].folder == tmp_path
    make(tmp_path)  # a start that fails before its first step
    write(tmp_path, 5, start_step=4)
    write(tmp_path, 1)
    ids = [run.id for run in mine.runs]
    assert ids[3] == ids[0] and len({*ids}) == 3


def test_passwords_are_not_handed_on(tmp_path: Path, mine: type[Mine], log: list[str]) -> None:
    mine.fails_at[2] = OSError("http://me:geheim@host/?write_token=geheim is down")
    write(tmp_path, 1, 2)
    assert mine.runs[0].config["training"] == {"steps": 3, "dataset_path": "https://***@host/data?token=***&x=1"}
    assert "http://***@host/?write_token=*** is down" in log[0]


def test_a_tracker_that_fails_costs_one_warning_and_no_run(tmp_path: Path, mine: type[Mine], log: list[str]) -> None:
    mine.fails_at = {0: ConnectionError("the server is down\nmore"), 3: OSError("No space left on device")}
    writers = make(tmp_path)
    writers[0].write(1, {})
    mine.fails_at.pop(0)  # the server is back
    for step in (2, 3, 4):
        for writer in writers:
            writer.write(step, {})
    for writer in writers:
        writer.close()
    assert [entry[0] for entry in mine.written][-3:] == [2, 4, "closed"]
    assert log[0] == "WARNING mine cannot be written (the server is down). Training continues."
    assert len(log) == 2 and "writes failed" in log[1]
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [2, 3, 4]


def test_a_tracker_that_does_not_answer_holds_nothing_up(
    tmp_path: Path, mine: type[Mine], log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"BEGINNING": 0.01, "ENDING": 0.01, "LONGEST_QUEUE": 5}.items():
        monkeypatch.setattr(trackers, name, value)
    mine.hold.clear()
    write(tmp_path, *range(1, 10))
    assert not mine.written
    assert "mine has not answered in 0.01 s" in log[0] and "5 reports are waiting for it" in log[1]
    assert len(log) == 3 and "failed or did not end" in log[2]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 9


def test_what_a_user_must_do_is_said_before_anything_is_written(tmp_path: Path, mine: type[Mine]) -> None:
    mine.fails_at[0] = ConfigError("run `mine login`")
    with pytest.raises(ConfigError, match="mine login"):
        make(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_tracker_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tmp_path / "metrics.jsonl").write_text("an earlier run's")
    with pytest.raises(ConfigError, match=r"metrics\.trackers: wandb .* `pip install 'torchtitan-toml\[wandb\]'`"):
        make(tmp_path, trackers=["wandb"])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == "an earlier run's"


def test_a_metric_that_is_refused_costs_no_other(tmp_path: Path, mine: type[Mine], log: list[str]) -> None:
    def write(self: Mine, step: int, values: Mapping[str, Value]) -> None:
        if values.keys() & {"lr", "mfu"}:
            raise ValueError(f"no {sorted(values)[0]}")
        self.written.append((step, values))

    mine.write = write  # type: ignore[method-assign]
    (tracker, *_) = make(tmp_path)
    for step in (1, 2):
        tracker.write(step, {"loss": 1.0, "lr": 2.0, "grad_norm": 3.0, "mfu": 4.0})
    tracker.close()
    assert mine.written[1:-1] == [(1, {"loss": 1.0}), (1, {"grad_norm": 3.0}), (2, {"loss": 1.0, "grad_norm": 3.0})]
    assert log[:2] == [
        f"WARNING mine refuses the metric {name} (no {name}): it no longer gets that one. Training continues."
        for name in ("lr", "mfu")
    ]


NASTY = ["epoch/data/x", "epoch//data/x", "epoch/./data/x", "epoch/../data/x", "epoch/s3://bucket/data", "epoch/a b/"]
NASTY += [
    f"epoch/{'x' * 260}",
    f"epoch/{'x' * 259}y",
    "epoch/a?b",
    "epoch/a!b",
    "epoch/\udcff",
    "__x",
    "step",
    "_runtime",
]


@pytest.mark.parametrize("name", ["mlflow", "wandb", "trackio"])
def test_names_stay_different_under_the_rules_of_each_tracker(name: str) -> None:
    names = trackers.NAMES[name]
    made = [names.of(name) for name in NASTY]
    assert made[0] == NASTY[0] and len({*made}) == len(NASTY)
    assert made == [*map(names.of, made)]  # they would not be changed again
    for changed in made:
        changed.encode()
        if name == "mlflow":
            assert re.fullmatch(r"[/\w.\- :]{1,250}", changed) and posixpath.normpath(changed) == changed
            assert not changed.startswith(("/", ".."))
        if name == "trackio":
            assert changed != "step" and not changed.startswith("__")


def test_wandb_without_a_login_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CACHE_DIR", "DATA_DIR", "FINISH_TIMEOUT", "SILENT"):  # so that they are unset again
        monkeypatch.setenv(f"WANDB_{name}", {"FINISH_TIMEOUT": "1", "SILENT": "true"}.get(name, str(tmp_path)))
    monkeypatch.setattr("torchtitan.metrics.trackers.BEGINNING", 100.0)
    with pytest.raises(ConfigError, match=r"metrics\.trackers: .*; run `wandb login`, or set WANDB_MODE=offline"):
        make(tmp_path, trackers=["wandb"])
