"""One run for each tracker, across a kill and a resume, read back from each library's own files. Without a network."""

import json
import os
import signal
import sqlite3
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import TESTS, TINY, Run, checkpoint_steps, into, last_step, lines_of, started
from workers import PATIENCE

wandb = pytest.importorskip("wandb")
mlflow = pytest.importorskip("mlflow")
pytest.importorskip("trackio")
pytest.importorskip("sqlalchemy")
pytest.importorskip("alembic")

SAMPLE = "sample 1"
LAST = 1000  # steps that the first start does not reach


def records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format (https://github.com/google/leveldb/blob/main/doc/log_format.md)
    after a header of 7 bytes, as far as it was written."""
    from wandb.proto import wandb_internal_pb2

    Record: Any = vars(wandb_internal_pb2)["Record"]  # made at run time

    data, position, whole = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # the end of a block
            position += 32768 - position % 32768
            continue
        _, length, record_type = struct.unpack_from("<IHB", data, position)
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if record_type in (1, 4):  # full, or the last part
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def trackio_rows(folder: Path) -> list[tuple[str, int, dict[str, Any]]]:
    """(run, step, metrics), in the order of writing."""
    file = folder / "trackio" / "torchtitan.db"
    if not file.exists():
        return []
    try:
        rows = sqlite3.connect(file).execute("select run_name, step, metrics from metrics order by id").fetchall()
    except sqlite3.OperationalError:  # it is being made
        return []
    return [(run, step, json.loads(metrics)) for run, step, metrics in rows]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_one_run_each_across_a_kill_and_a_resume(tmp_path: Path) -> None:
    folder, home, working = tmp_path / "run", tmp_path / "home", tmp_path / "working"
    home.mkdir()
    working.mkdir()
    flags = (
        *(*TINY, into(folder)),
        *("--model.converters=int8", "--metrics.trackers=mlflow,trackio", "--metrics.enable_wandb"),
        *("--checkpoint.enable_checkpoint", "--checkpoint.interval=3", "--checkpoint.keep_latest_k=0"),
        *("--validation.enabled", "--validation.freq=5", "--validation.sample_prompts=Once", "--validation.steps=1"),
    )
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    variables = {
        "WANDB_MODE": "offline",
        "HOME": str(home),
        "XDG_CACHE_HOME": cache,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
    }

    def start(steps: int) -> Any:
        flag = f"--training.steps={steps}"
        return started(*flags, flag, processes=None, folder=working, fresh=True, **variables)

    def is_far_enough() -> bool:
        """Whether checkpoints are behind what the trackers have, so that a resume repeats steps."""
        if not checkpoint_steps(folder) or not (folder / "mlflow.db").exists():
            return False
        (logged,) = sqlite3.connect(folder / "mlflow.db").execute("select max(step) from metrics").fetchone()
        sent = min(logged or 0, max((step for _, step, _ in trackio_rows(folder)), default=0))
        return bool(sent > checkpoint_steps(folder)[-1] > 0)

    run: Run
    with start(LAST) as run:
        run.wait_until(is_far_enough)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        for _ in range(PATIENCE * 20):  # W&B's own process writes what it has got, and ends
            if not run.pids():
                break
            time.sleep(0.05)
    reached, resumed = last_step(folder), checkpoint_steps(folder)[-1]
    last = reached + 5
    with start(last) as run:
        status, output = run.finish()
    assert status == 0, output
    losses = {line["step"]: line["loss"] for line in lines_of(folder / "metrics.jsonl") if "loss" in line}
    steps = [*range(1, last + 1)]
    assert [*losses] == steps and resumed < last
    # Nothing elsewhere, and nothing on the screen that is not in the log.
    assert not [*working.iterdir()] and not [path for path in home.rglob("*") if path.is_file()]
    assert not [line for line in output.splitlines() if line.startswith(("wandb:", "*", "INFO"))], output
    assert "cannot be written" not in output and "failed" not in output

    # Weights & Biases: two files of one run, whose own step only grows.
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    starts = [[*records(file)] for file in files]
    assert len(files) == 2 and len({record.run.run_id for all_ in starts for record in all_ if record.run.run_id}) == 1
    history = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        | {"own step": record.history.step.num}
        for all_ in starts
        for record in all_
        if record.HasField("history")
    ]
    own_steps = [row["own step"] for row in history]
    assert own_steps == sorted({*own_steps})
    assert {row["step"]: row["loss"] for row in history if "loss" in row} == losses
    assert {row["step"] for row in history if SAMPLE in row} >= {5} and any("conversion" in row for row in history)
    config = {item.key: json.loads(item.value_json) for record in starts[0] for item in record.run.config.update}
    assert config["training"]["steps"] == LAST and config["world_size"] == 1
    metrics = [record.metric for record in starts[1] if record.HasField("metric")]
    assert any(metric.glob_name == "*" and metric.step_metric == "step" for metric in metrics)

    # MLflow: one run; a step that was trained twice has the newest value last.
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("torchtitan").experiment_id])
    assert len(runs) == 1 and runs[0].info.status == "FINISHED"
    assert runs[0].data.params["training.steps"] == f"{LAST}"
    written = sorted(client.get_metric_history(runs[0].info.run_id, "loss"), key=lambda metric: metric.timestamp)
    assert {metric.step: metric.value for metric in written} == losses
    artifacts = folder / "mlartifacts" / runs[0].info.run_id / "artifacts"
    assert json.loads((artifacts / "config.json").read_text())["training"]["steps"] == last
    assert "int8 rowwise" in (artifacts / "conversion" / "step-0.txt").read_text()
    assert (artifacts / SAMPLE / "step-5.txt").read_text().startswith("Once")

    # trackio: likewise.
    rows = trackio_rows(folder)
    assert len({run for run, _, _ in rows}) == 1
    assert {step: metrics["loss"] for _, step, metrics in rows if "loss" in metrics} == losses
    assert any(SAMPLE in metrics for _, _, metrics in rows) and any("conversion" in metrics for _, _, metrics in rows)
