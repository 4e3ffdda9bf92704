"""Runs as each tracker's own files have them: their metrics and their ends, and one across a kill and a resume. Without
a network."""

import json
import os
import shutil
import signal
import sqlite3
import struct
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from object_store import S3Server
from runs import CHECKPOINTS, HELPERS, ROOT, SMALL, TINY, Run, checkpoint_steps, into, last_step, lines_of, started
from workers import PATIENCE

from torchtitan.files import any_path
from torchtitan.metrics.trackers import NAMES

NEEDED = ("wandb", "mlflow", "trackio", "sqlalchemy", "alembic")  # only found, because importing them takes seconds
MISSING = [name for name in NEEDED if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} is not installed")

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


def wandb_steps(folder: Path, name: str) -> list[int]:
    """The steps of a metric in the only .wandb file, as far as it was written."""
    rows = []
    for file in (folder / "wandb").glob("offline-run-*/*.wandb"):
        for record in records(file):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows += [items["step"]] if name in items else []
    return rows


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


def alerts_of(folder: Path) -> list[str]:
    """The titles of trackio's alerts."""
    with sqlite3.connect(folder / "trackio" / "torchtitan.db") as database:
        return [title for (title,) in database.execute("select title from alerts")]


def mlflow_steps(folder: Path) -> list[int]:
    """The steps of the loss that MLflow has, in their order; none while its database is being made."""
    if not (folder / "mlflow.db").exists():
        return []
    try:
        rows = sqlite3.connect(folder / "mlflow.db").execute(
            "select step from metrics where key = 'loss' order by step"
        )
        return [step for (step,) in rows]
    except sqlite3.OperationalError:
        return []


def mlflow_run(folder: Path) -> tuple[str, dict[str, list[int]]]:
    """The state of MLflow's only run, and the steps of each metric."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("torchtitan").experiment_id])
    steps = {name: [row.step for row in client.get_metric_history(run.info.run_id, name)] for name in run.data.metrics}
    return run.info.status, steps


# A run that ends in its third step as END says: with an error, by a signal, or not before it is killed.
ENDS_IN_STEP_3 = """
import os, signal, time, tiny
from torchtitan.data.datasets import DATASETS
from torchtitan.data.paths import open_path
from torchtitan.errors import DataError
from torchtitan.protocols import Hook
from torchtitan.run.hooks import HOOKS

class End(Hook):
    def after_step(self, run):
        if run.step == 3 and os.environ["END"] == "status 2":
            raise DataError("the data are gone.")
        if run.step == 3 and os.environ["END"] == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
            while not run.stop.requested:  # a thread takes the signal
                time.sleep(0.01)
        while run.step == 3 and os.environ["END"] == "SIGKILL":
            time.sleep(0.1)

HOOKS.register("end", End)
DATASETS.register("owner/name", lambda path, column: open_path("data", column))  # named as one of the Hub
"""
# End: exit status, last step, MLflow's state, W&B's exit code, trackio's alerts.
ENDS: dict[str, tuple[int, int, str, int | None, list[str]]] = {
    "none": (0, 4, "FINISHED", 0, []),
    "status 2": (2, 3, "FAILED", 1, ["the run has failed"]),
    "SIGTERM": (0, 3, "KILLED", 255, ["the run was killed"]),
    "SIGKILL": (137, 3, "RUNNING", None, []),
}


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's, which takes long to make; two tests below make their own."""
    from mlflow import MlflowClient

    file = tmp_path_factory.mktemp("empty") / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("end", ENDS)
def test_every_source_and_every_end_reach_every_tracker(
    end: str, s3: S3Server, empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is not stopped has all sources, the others one."""
    status, last, state, exit_code, alerts = ENDS[end]
    folder, working = tmp_path / "run", tmp_path / "working"
    text = "".join(
        json.dumps({"text": f"Once upon a time {number} hens laid eggs. " * 9}) + "\n" for number in range(200)
    )
    for data in (working / "data", working / "more", tmp_path / "beside"):
        data.mkdir(parents=True)
        (data / "x.jsonl").write_text(text)
    any_path("s3://bucket/data/x.jsonl").write_text(text)
    (working / "ends.py").write_text(ENDS_IN_STEP_3)
    sources = ["more", "./more", "../beside", str(tmp_path / "beside"), "s3://bucket/data", "owner/name"]
    if end != "none":
        del sources[1:]
        folder.mkdir()
        shutil.copy(empty_database, folder)
    variables = {
        **s3.environment,
        "WANDB_MODE": "offline",
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        "END": end,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)  # for a fork, which imports the trackers itself
    flags = (
        *(*SMALL, "--model.name=tiny", "--model.flavor=narrow", "--experimental.custom_import=ends", into(folder)),
        *("--metrics.trackers=wandb,mlflow,trackio", "--training.steps=4"),
        f"--training.dataset_mixture={json.dumps([f'{source}:1' for source in sources])}",
    )
    names = {f"epoch/{source}" for source in sources} | {"loss", "lr", "grad_norm"}
    steps = [*range(1, last + 1)]

    def is_sent() -> bool:
        """Whether each tracker has the last step."""
        in_trackio = [step for _, step, metrics in trackio_rows(folder) if "loss" in metrics]
        in_mlflow = mlflow_steps(folder)
        return in_trackio[-1:] == wandb_steps(folder, "loss")[-1:] == in_mlflow[-1:] == [last]

    with started(*flags, processes=None, folder=working) as run:
        if end == "SIGKILL":
            run.wait_until(is_sent)
            os.kill(run.process.pid, signal.SIGKILL)
        ended, output = run.finish()
    assert ended == status and "cannot be written" not in output and "refuses" not in output, output

    for name in names:
        assert wandb_steps(folder, name) == steps, name
        assert [step for _, step, metrics in trackio_rows(folder) if name in metrics] == steps, name
    found, metrics = mlflow_run(folder)
    assert {NAMES["mlflow"].of(name) for name in names} <= metrics.keys()
    # A source has a loss in steps that have a row of it.
    assert {tuple(of_name) for name, of_name in metrics.items() if not name.startswith("loss/")} == {tuple(steps)}
    assert (found, alerts_of(folder)) == (state, alerts)
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    assert [record.exit.exit_code for record in records(file) if record.HasField("exit")] == (
        [] if exit_code is None else [exit_code]
    )


# A user's tracker writes how the run has ended, and a hook ends the run in step HOW.
TELLS = """
import os, signal, time, tiny
from pathlib import Path
from torchtitan.metrics.trackers import TRACKERS
from torchtitan.protocols import Hook
from torchtitan.run.hooks import HOOKS

class Tells:
    def __init__(self, run):
        self.run = run
    def write(self, step, values): ...
    def write_text(self, step, name, text): ...
    def close(self):
        with open(self.run.folder / "state", "a") as file:
            file.write(self.run.state + " ")

class End(Hook):
    def on_start(self, run):
        if HOW == "SIGINT":  # before the first step, where it ends the process at once
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
    def after_step(self, run):
        if run.step == 1 and HOW == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        if run.step == 1 and HOW == "disk":
            folder = Path(run.config.job.dump_folder, "checkpoint")
            folder.rename(folder.with_name("elsewhere"))
            folder.write_text("")
    def before_save(self, run):
        if HOW == "error":
            1 / 0

TRACKERS.register("tells", Tells)
HOOKS.register("end", End)
"""


@pytest.mark.parametrize(
    ("how", "status", "state"),
    [
        ("nothing", 0, "finished"),
        ("SIGTERM", 0, "killed"),
        ("SIGINT", 130, "killed"),
        ("error", 1, "failed"),
        ("disk", 2, "failed"),  # found after the last step
    ],
)
def test_a_tracker_is_told_how_the_run_has_ended(how: str, status: int, state: str, tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(f"HOW = {how!r}\n{TELLS}")
    sizes = "--training.global_batch_size=4@0, 2@1"  # between which nothing ends
    flags = (
        *(*SMALL, sizes, "--model.name=tiny", "--model.flavor=narrow", "--experimental.custom_import=tells"),
        *("--metrics.trackers=tells", "--training.steps=2", *CHECKPOINTS, into(tmp_path / "run")),
    )
    with started(*flags, processes=None, folder=tmp_path) as run:
        ended, output = run.finish()
    assert ended == status, output
    assert (tmp_path / "run" / "state").read_text() == f"{state} "


# In step 2 the last rank ends as END says; the first one goes on only when it has been asked to stop.
ENDS_IN_THE_LAST_RANK = """
import os, signal, time
from torchtitan.converters import CONVERTERS, ConverterEntry
from torchtitan.launcher import signals

class EndOfOne(End):
    def after_step(self, run):
        if run.step == 2 and os.environ["RANK"] == "1":
            if HOW == "error":
                1 / 0
            os.kill(os.getpid(), signal.SIGKILL if HOW == "SIGKILL" else signal.SIGTERM)
        while run.step == 2 and not run.stop.requested:
            time.sleep(0.01)

class Stuck:
    steps = 0
    def convert(self, model): ...
    def post_optimizer_hook(self, models):
        self.steps += 1
        if self.steps == 2 and HOW == "no boundary":
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)

signals.GRACE = 1
HOOKS.replace("end", EndOfOne)
CONVERTERS.register("stuck", ConverterEntry("", lambda section, target: Stuck()))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "status", "state"),
    [
        ("error", 1, "failed"),
        ("SIGKILL", 137, "failed"),
        ("SIGTERM", 0, "killed"),
        ("no boundary", 143, "killed"),
    ],
)
def test_a_run_that_is_stopped_because_a_rank_has_failed_has_failed(
    how: str, status: int, state: str, tmp_path: Path
) -> None:
    """The launcher ends the ranks that are left by the signal by which a scheduler ends a run."""
    (tmp_path / "tells.py").write_text(f"HOW = {how!r}\n{TELLS}\n{ENDS_IN_THE_LAST_RANK}")
    flags = (
        *(*SMALL, "--model.name=tiny", "--model.flavor=narrow", "--experimental.custom_import=tells"),
        *("--model.converters=stuck", "--metrics.trackers=tells", "--training.steps=4", into(tmp_path / "run")),
    )
    with started(*flags, processes=2, folder=tmp_path) as run:
        ended, output = run.finish()
    assert ended == status, output
    assert (tmp_path / "run" / "state").read_text() == f"{state} "


# Steps take their time, as trackers do to write what they are sent.
PACED = """
import time, tiny
from torchtitan.protocols import Hook
from torchtitan.run.hooks import HOOKS

class Pace(Hook):
    def after_step(self, run):
        time.sleep(0.2)

HOOKS.register("pace", Pace)
"""


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_one_run_each_across_a_kill_and_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start is in a fresh interpreter, which shows all that libraries write; the second is a fork."""
    folder, home, working, modules = (tmp_path / name for name in ("run", "home", "working", "modules"))
    for new in (home, working, modules):
        new.mkdir()
    (modules / "paced.py").write_text(PACED)
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
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HELPERS), str(modules)]),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def is_far_enough() -> bool:
        """Whether checkpoints are behind what the trackers have, so that a resume repeats steps."""
        if not checkpoint_steps(folder) or not (folder / "mlflow.db").exists():
            return False
        (logged,) = sqlite3.connect(folder / "mlflow.db").execute("select max(step) from metrics").fetchone()
        sent = min(logged or 0, max((step for _, step, _ in trackio_rows(folder)), default=0))
        return bool(sent > checkpoint_steps(folder)[-1] > 0)

    first = (f"--training.steps={LAST}", "--experimental.custom_import=paced")
    run: Run
    with started(*flags, *first, processes=None, folder=working, fresh=True) as run:
        run.wait_until(is_far_enough)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        for _ in range(PATIENCE * 20):  # W&B's own process writes what it has got, and ends
            if not run.pids():
                break
            time.sleep(0.05)
    reached, resumed = last_step(folder), checkpoint_steps(folder)[-1]
    last = reached + 5
    with started(*flags, f"--training.steps={last}", processes=None, folder=working) as run:
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
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
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
