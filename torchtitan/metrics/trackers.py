"""Trackers hand a run's metrics to programs outside it. `TRACKERS` has all that `metrics.trackers` may name."""

import contextlib
import hashlib
import html
import importlib
import io
import logging
import os
import queue
import re
import secrets
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar

from torchtitan.config.compare import flat
from torchtitan.config.output import Metrics
from torchtitan.errors import ConfigError, counted, install, printable, public, public_arguments
from torchtitan.logging import Waiting, logger
from torchtitan.metrics.writers import Value, Writer
from torchtitan.registry import Registry
from torchtitan.strict_json import named

BEGINNING, ENDING = 10.0, 30.0  # seconds that a run waits for its trackers
LONGEST_QUEUE = 1000  # reports
RUNNING, FINISHED, FAILED, KILLED = "running", "finished", "failed", "killed"  # states of a run


@dataclass
class TrackedRun:
    """What a tracker is told about a run."""

    id: str  # the same in all starts; its first 8 digits are the Unix time of the first start, in hexadecimal
    name: str  # for people; unique as well
    folder: Path  # the dump folder, absolute; a tracker writes its files there
    config: dict[str, Any]  # section -> keys, JSON-able, without passwords; and `rank` and `world_size`
    state: str = RUNNING  # how it has ended, before `close` is called: killed by a signal, to resume perhaps

    @classmethod
    def of(cls, file: Path, resumes: bool, rank: int, config: Mapping[str, Any]) -> "TrackedRun":
        """The run whose id is in `file`, or a new one."""
        known = file.read_text(encoding="utf-8", errors="replace") if resumes and file.exists() else ""
        run_id = known if re.fullmatch("[0-9a-f]{14}", known) else f"{int(time.time()):08x}{secrets.token_hex(3)}"
        name = f"{file.parent.resolve().name}-{run_id[8:]}" + (f"-rank{rank}" if rank else "")
        return cls(run_id, name, file.parent.resolve(), public(named(config)))


@dataclass(frozen=True)
class Names:
    """What a tracker takes as the name of a metric. A name of ours that it would refuse is changed, and then ends with
    a hash of ours: two of them stay different, and are the same after a restart."""

    refused: str  # a regular expression of what is replaced by "_"
    longest: int = 250  # characters
    are_paths: bool = False  # refuses parts between slashes that are empty, "." or ".."

    def of(self, name: str) -> str:
        changed = re.sub(self.refused, "_", name)
        if self.are_paths:
            changed = "/".join(part for part in changed.split("/") if part not in ("", ".", ".."))
        if changed == name and len(name) <= self.longest:
            return name
        digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:6]
        return f"{changed[: self.longest - 7]}-{digest}"


class Tracking:
    """A tracker in a thread of its own: whatever happens to it, training neither waits for it nor ends. The first
    failure is reported, and how many there were at the end; `metrics.jsonl` has all values. A metric that the tracker
    refuses, with a ValueError or TypeError, is reported and no longer sent; the others of its step are.

    Args:
        file: receives the run's id with the first values; until then, it may be another run's.
        texts: written when the tracker begins, by name.
    """

    def __init__(self, name: str, run: TrackedRun, file: Path, texts: Mapping[str, str]) -> None:
        self.name, self.run, self.file = name, run, file
        self.failures, self.has_id, self.waited, self.begun = 0, False, False, Event()
        self.refused: ConfigError | None = None
        self.names, self.refused_metrics = NAMES.get(name, ANY_NAME), set[str]()
        self.calls: queue.Queue[Callable[[Writer], object] | None] = queue.Queue(LONGEST_QUEUE)
        self.calls.put(lambda tracker: None)  # begins at once
        for title, text in texts.items():
            self.write_text(0, title, text)
        self.thread = Thread(target=self._work, args=(TRACKERS.get(name),), daemon=True, name=name)
        self.thread.start()

    def wait(self, deadline: float) -> None:
        """Until the tracker has begun, or a time of `time.monotonic`. Raises a ConfigError if the user must act."""
        if not self.begun.wait(max(0, deadline - time.monotonic())):
            logger.info(f"{self.name} has not answered in {BEGINNING:g} s; training does not wait for it")
        self.waited = True
        if self.refused is not None:
            raise self.refused

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        if not self.has_id:
            self.has_id = True
            try:
                self.file.write_text(self.run.id, encoding="utf-8")
            except OSError as error:
                self._fail(error)
        known: dict[str, Value] = {self.names.of(name): value for name, value in values.items() if value is not None}
        self._put(lambda tracker: self._send(tracker, step, known))

    def write_text(self, step: int, name: str, text: str) -> None:
        self._put(lambda tracker: tracker.write_text(step, name, text))

    def close(self, state: str = FINISHED) -> None:
        def end(tracker: Writer) -> None:
            self.run.state = state
            tracker.close()

        with Waiting(f"{self.name}: sending the last values"), contextlib.suppress(queue.Full):
            self.calls.put(end, timeout=ENDING)
            self.calls.put(None, timeout=ENDING)
            self.thread.join(ENDING)
        if lost := self.failures + self.thread.is_alive() * self.calls.qsize():
            logger.warning(f"{self.name}: {counted(lost, 'write')} failed or did not end")

    def _put(self, call: Callable[[Writer], object]) -> None:
        try:
            self.calls.put_nowait(call)
        except queue.Full:
            self._fail(TimeoutError(f"{LONGEST_QUEUE} reports are waiting for it"))

    def _work(self, begin: Callable[[TrackedRun], Writer]) -> None:
        tracker: Writer | None = None
        for call in iter(self.calls.get, None):
            try:
                tracker = tracker or begin(self.run)
                call(tracker)
            except Exception as error:  # each library has its own
                self._fail(error)
            self.begun.set()

    def _send(self, tracker: Writer, step: int, values: dict[str, Value]) -> None:
        values = {name: value for name, value in values.items() if name not in self.refused_metrics}
        try:
            tracker.write(step, values)
        except OSError:  # some libraries' are ValueErrors too
            raise
        except (ValueError, TypeError) as error:
            if len(values) > 1:
                for name, value in values.items():
                    self._send(tracker, step, {name: value})
                return
            self.failures += 1
            self.refused_metrics |= values.keys()
            logger.warning(
                f"{self.name} refuses the metric {', '.join(values)} ({_first_line(error)}): it no longer gets that "
                "one. Training continues."
            )

    def _fail(self, error: Exception) -> None:
        if isinstance(error, ImportError):
            error = ConfigError(f"metrics.trackers: {self.name} cannot be imported ({error}): {install(self.name)}.")
        if isinstance(error, ConfigError) and not self.waited:
            self.refused = error
        elif self.failures == 0:
            logger.warning(f"{self.name} cannot be written ({_first_line(error)}). Training continues.")
        self.failures += 1


def _first_line(error: Exception) -> str:
    return printable(next(iter(str(error).splitlines()), "") or type(error).__name__)


class Wandb:
    """Weights & Biases. Its own step may only grow, also over starts without a network: it is the time since the run
    began, in ms. Curves are drawn over a metric `step`, which may go back when a run resumes."""

    EXIT_CODES: ClassVar = {FINISHED: 0, FAILED: 1, KILLED: 255}  # 255 is what it gives a run that Ctrl-C has ended

    def __init__(self, run: TrackedRun) -> None:
        for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
            os.environ.setdefault(name, str(run.folder / "wandb"))
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", f"{ENDING:g}")
        os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "1")  # seconds that a power failure costs
        os.environ.setdefault("WANDB_SILENT", "true")  # no lines in the log, and no prompt
        import wandb

        self.tracked = run
        arguments, sys.argv = sys.argv, [sys.argv[0], *public_arguments(sys.argv[1:])]  # W&B sends sys.argv
        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "torchtitan"),
                dir=os.environ.get("WANDB_DIR", str(run.folder)),
                name=os.environ.get("WANDB_NAME", run.name),
                id=os.environ.get("WANDB_RUN_ID", run.id),
                resume="allow",
                config=run.config,
                allow_val_change=True,
                settings=wandb.Settings(console="off"),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"metrics.trackers: {reason}; run `wandb login`, or set WANDB_MODE=offline.") from error
        finally:
            sys.argv = arguments
        self.run.define_metric("*", step_metric="step")
        self.html: Callable[[str], Any] = wandb.Html
        self.began, self.last = int(run.id[:8], 16), self.run.step - 1

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self.last = max(self.last + 1, int(1000 * (time.time() - self.began)))
        self.run.log({"step": step, **values}, step=self.last, commit=True)

    def write_text(self, step: int, name: str, text: str) -> None:
        self.write(step, {name: self.html(f"<pre>{html.escape(text)}</pre>")})

    def close(self) -> None:
        self.run.finish(self.EXIT_CODES[self.tracked.state])


class MLflow:
    """MLflow: a database in the dump folder unless MLFLOW_TRACKING_URI is set. Its parameters cannot change, and so
    stay as at the first start; the artifact `config.json` is the newest start's."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # telemetry writes to the home folder
        from mlflow import MlflowClient, entities
        from mlflow.exceptions import MlflowException

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            importlib.import_module("alembic")  # only the complete package installs it
            database, new = run.folder / "mlflow.db", run.folder / "mlflow.db.tmp"
            if not database.exists():  # made whole: a kill in between would leave one that MLflow cannot open
                new.unlink(missing_ok=True)
                MlflowClient(f"sqlite:///{new}").search_experiments()
                new.rename(database)
            uri, artifacts = f"sqlite:///{database}", str(run.folder / "mlartifacts")
        self.tracked = run
        self.client, self.entities = MlflowClient(uri), entities
        self.exception: Any = MlflowException
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "torchtitan")
        known = self.client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self.client.create_experiment(name, artifacts)
        if runs := self.client.search_runs([experiment], f"tags.torchtitan_id = '{run.id}'"):
            self.id = runs[0].info.run_id
            self.client.update_run(self.id, "RUNNING")
        else:
            self.id = self.client.create_run(experiment, None, {"torchtitan_id": run.id}, run.name).info.run_id
            parameters = flat(run.config).items()
            rows = [entities.Param(NAMES["mlflow"].of(key), str(value)[:500]) for key, value in parameters]
            for first in range(0, len(rows), 100):  # a request may have 100 entries
                self.client.log_batch(self.id, params=rows[first : first + 100])
        self.client.log_dict(self.id, run.config, "config.json")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        now = int(1000 * time.time())
        rows = [self.entities.Metric(name, value, now, step) for name, value in values.items()]
        try:
            self.client.log_batch(self.id, metrics=rows)
        except self.exception as error:
            if error.get_http_status_code() == HTTPStatus.BAD_REQUEST:
                raise ValueError(error.message) from error
            raise

    def write_text(self, step: int, name: str, text: str) -> None:
        self.client.log_text(self.id, text, f"{name}/step-{step}.txt")

    def close(self) -> None:
        self.client.set_terminated(self.id, self.tracked.state.upper())


class Trackio:
    """Hugging Face's trackio: files in the dump folder unless TRACKIO_DIR or TRACKIO_SPACE_ID is set. Its runs have no
    state; it gets an alert if one has not finished."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.folder / "trackio"))
        with contextlib.redirect_stdout(io.StringIO()):  # what it prints is lost; the log keeps its own stream
            import trackio

            project = os.environ.get("TRACKIO_PROJECT", "torchtitan")
            self.run: Any = trackio.init(project, run.name, config=run.config, resume="allow", embed=False)
        self.tracked, self.levels = run, trackio.AlertLevel
        self.markdown: Callable[[str], Any] = trackio.Markdown

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self.run.log(dict(values), step=step)

    def write_text(self, step: int, name: str, text: str) -> None:
        self.write(step, {name: self.markdown(textwrap.indent(text, "    ", lambda line: True))})

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            if self.tracked.state == FAILED:
                self.run.alert("the run has failed", level=self.levels.ERROR)
            elif self.tracked.state == KILLED:
                self.run.alert("the run was killed", level=self.levels.WARN)
            self.run.finish()


TRACKERS: Registry[Callable[[TrackedRun], Writer]] = Registry(
    "tracker", "metrics.trackers", {"wandb": Wandb, "mlflow": MLflow, "trackio": Trackio}
)

ANY_NAME = Names(r"[\x00-\x1f\x7f\ud800-\udfff]")  # what is no text in UTF-8, such as of a file's name
NAMES: dict[str, Names] = {
    "wandb": Names(rf"^_|{ANY_NAME.refused}"),  # an underscore begins W&B's own names
    "mlflow": Names(r"[^\w\-. :/]", are_paths=True),  # `mlflow.utils.validation`, which stores may keep as files
    "trackio": Names(rf"^(?:project|run|timestamp|step|time|metrics)$|^__|{ANY_NAME.refused}"),  # `trackio.utils`
}
"""The rules of each tracker in `TRACKERS`; others take any text."""


def begin_trackers(
    metrics: Metrics,
    dump_folder: Path,
    rank: int,
    world_size: int,
    resumes: bool,
    config: Mapping[str, Any],
    texts: Mapping[str, str],
) -> list[Tracking]:
    """The trackers of this rank, for all stages of a start. Raises a ConfigError if a package or a login is missing."""
    if not metrics.trackers or not (rank == 0 or metrics.save_for_all_ranks):
        return []
    with contextlib.suppress(OSError):  # the other writers will report it
        dump_folder.mkdir(parents=True, exist_ok=True)
    file = dump_folder / (f"tracker_id_{rank}.txt" if rank else "tracker_id.txt")
    run = TrackedRun.of(file, resumes, rank, {**config, "rank": rank, "world_size": world_size})
    trackers = [Tracking(name, run, file, texts) for name in dict.fromkeys(metrics.trackers)]
    deadline = time.monotonic() + BEGINNING
    for tracker in trackers:
        tracker.wait(deadline)
    return trackers
