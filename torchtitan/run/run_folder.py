"""What a run writes to its dump folder, apart from checkpoints and metrics."""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.checkpoint.tokenizer_copy import COPY, copy_tokenizer
from torchtitan.config import JobConfig, to_toml
from torchtitan.errors import public
from torchtitan.files import is_remote, joined
from torchtitan.launcher.folder_lock import is_removed
from torchtitan.logging import logger
from torchtitan.metrics.writers import JSONLWriter, set_files_aside, step_of
from torchtitan.parallel.object_collectives import from_rank_0
from torchtitan.registry import deferred

_write_report = deferred("torchtitan.tools.report.page:write_at_end")
_add_chat_files = deferred("torchtitan.run.chat_files:add_chat_files")

RECORD_FILES = ("metrics.jsonl", "skipped_updates.jsonl", "events.jsonl", "samples.jsonl")


class RunFolder:
    """The files `config.toml` (with all decisions made at startup), `conversion.json`, `skipped_updates.jsonl`,
    `events.jsonl` (starts, checkpoints), `samples.jsonl` (texts of the model) and `sample_ids/rank_R.jsonl` of a
    run.

    Attributes:
        changed: keys that had another value when the checkpoint was saved, and [old, new], as text.
        has_begun: whether files of the run are written.
    """

    def __init__(self, path: Path, config: JobConfig, conversion: str = "", table: str = "") -> None:
        self.path = path
        self.config = config
        self.conversion = conversion
        self.texts = {"conversion": table} if table else {}
        self.changed: dict[str, list[str]] = {}
        self.has_begun = False
        self._writers: dict[str, JSONLWriter] = {}  # this rank's writers: what they record -> writer

    def write_config(self) -> None:
        """Acts on rank 0 only."""
        if dist.get_rank() == 0:
            (self.path / "config.toml").write_text(to_toml(self.config, public), encoding="utf-8")

    def _copy_tokenizer(self, folder: Path) -> None:
        copy_tokenizer(self.config.model.tokenizer_path, folder)
        if self.config.training.train_on or self.config.stage.entries:
            _add_chat_files(self.config, folder)

    def restore_config(self) -> None:
        """Rewrites `config.toml` if it was removed during the run."""
        path = self.path / "config.toml"
        if dist.get_rank() == 0 and is_removed(path):
            logger.warning(f"{path} was removed, perhaps with other files of this run; writing it again")
            with contextlib.suppress(OSError):
                self.path.mkdir(parents=True, exist_ok=True)
                self.write_config()

    def begin(self, step: int, sample_ids: bool) -> None:
        """Call when training is about to begin after `step`, and no earlier: a start that fails changes nothing here.
        At step 0 it renames what another run has left, its configuration with its metrics. From `step` on, lines
        replace earlier processes' lines. `sample_ids`: this rank records them. Collective."""
        self.has_begun, rank = True, dist.get_rank()
        if rank == 0:
            records = [*(self.path / name for name in RECORD_FILES), *self.path.glob("sample_ids/rank_*[0-9].jsonl")]
            if step == 0 and any(path.exists() and path.stat().st_size for path in records):
                others = (
                    "config.toml",
                    "conversion.json",
                    "report.html",
                    "tracker_id.txt",
                    self.config.metrics.save_tb_folder,
                )
                set_files_aside([*records, *(self.path / name for name in others)])
            self.write_config()
            self._copy_tokenizer(self.path / COPY)
            checkpoints = joined(self.path, self.config.checkpoint.folder)
            # Checkpoints in an object store may be used without this machine.
            if self.config.checkpoint.enable_checkpoint and is_remote(checkpoints):
                try:
                    self._copy_tokenizer(checkpoints / COPY)
                except OSError as error:
                    logger.warning(f"the tokenizer could not be copied to {checkpoints / COPY} ({error.strerror})")
            file = self.path / "conversion.json"
            if self.conversion:
                file.write_text(self.conversion, encoding="utf-8")
            else:  # an earlier run in this folder left them
                file.unlink(missing_ok=True)
        dist.barrier()
        if sample_ids:
            path = self.path / "sample_ids" / f"rank_{rank}.jsonl"
            path.parent.mkdir(exist_ok=True)
            self._writers["sample_ids"] = JSONLWriter(path, step)
        for name in ("skipped_updates", "events", "samples") if rank == 0 else ():
            self._writers[name] = JSONLWriter(self.path / f"{name}.jsonl", step)

    def _record(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        if name in self._writers:
            self._writers[name].write(step, values if name == "samples" else public(dict(values)))

    def recorded(self, step: int) -> set[str]:
        """Keys of what is recorded for `step` in metrics.jsonl, and "samples" if there are some. Collective."""

        def read() -> set[str]:
            keys = set()
            for name, extra in (("metrics.jsonl", ()), ("samples.jsonl", ("samples",))):
                with contextlib.suppress(OSError), (self.path / name).open("rb") as lines:
                    for line in lines:
                        if line.endswith(b"\n") and b'"step": %d,' % step in line and step_of(line) == step:
                            keys |= {*json.loads(line), *extra}
            return keys

        return from_rank_0(read)

    def record_skipped_update(self, step: int, values: Mapping[str, Any]) -> None:
        """Acts on rank 0 only."""
        self._record("skipped_updates", step, values)

    def record_event(self, step: int, event: str, **values: object) -> None:
        """Records an event that the report marks on its time axis. Acts on rank 0 only."""
        self._record("events", step, {"event": event, "time": round(time.time(), 3), **values})

    def record_samples(self, step: int, samples: Sequence[tuple[str, str | None]]) -> None:
        """Records prompts and their continuations, which the report shows. Acts on rank 0 only."""
        for prompt, text in samples:
            self._record("samples", step, {"prompt": prompt, "text": text})

    def write_report(self) -> None:
        """Writes `report.html` if `metrics.report` is set and this process has trained. Acts on rank 0 only."""
        if self.config.metrics.report and "events" in self._writers:
            _write_report(self.path)

    def record_sample_ids(self, step: int, rows: list[list[str]]) -> None:
        """Records the sample ids of each row that this rank has trained on."""
        self._record("sample_ids", step, {"ids": rows})
