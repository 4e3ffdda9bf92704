"""What a run writes into its dump folder, beside checkpoints and metrics."""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.config import JobConfig, to_toml
from torchtitan.logging import logger
from torchtitan.metrics.writers import JSONLWriter


class RunFolder:
    """The files `config.toml`, `skipped_updates.jsonl`, `events.jsonl` (starts, checkpoints) and
    `sample_ids/rank_R.jsonl` of a run.

    Args:
        config: as it runs, with all that was decided at its start.
    """

    def __init__(self, path: Path, config: JobConfig) -> None:
        self.path = path
        self.config = config
        self._skipped_updates: JSONLWriter | None = None
        self._events: JSONLWriter | None = None
        self._sample_ids: JSONLWriter | None = None

    def write_config(self) -> None:
        """On rank 0."""
        if dist.get_rank() == 0:
            (self.path / "config.toml").write_text(to_toml(self.config), encoding="utf-8")

    def restore_config(self) -> None:
        """Writes `config.toml` again where somebody has removed it during the run."""
        path = self.path / "config.toml"
        if dist.get_rank() == 0 and not path.exists():
            logger.warning(f"{path} was removed, perhaps with other files of this run; it is written again")
            with contextlib.suppress(OSError):
                self.path.mkdir(parents=True, exist_ok=True)
                self.write_config()

    def open_records(self, step: int, sample_ids: bool) -> None:
        """Before the first step after `step`. What earlier processes of the run recorded of later steps is dropped.

        Args:
            sample_ids: whether this rank records them.
        """
        rank = dist.get_rank()
        if sample_ids:
            path = self.path / "sample_ids" / f"rank_{rank}.jsonl"
            path.parent.mkdir(exist_ok=True)
            self._sample_ids = JSONLWriter(path, step)
        if rank == 0:
            self._skipped_updates = JSONLWriter(self.path / "skipped_updates.jsonl", step)
            self._events = JSONLWriter(self.path / "events.jsonl", step)

    def record_skipped_update(self, step: int, values: Mapping[str, Any]) -> None:
        """On rank 0."""
        if self._skipped_updates is not None:
            self._skipped_updates.write(step, values)

    def record_event(self, step: int, event: str, **values: Any) -> None:
        """What the report marks on its time axis. On rank 0."""
        if self._events is not None:
            self._events.write(step, {"event": event, "time": round(time.time(), 3), **values})

    def write_report(self) -> None:
        """`report.html`, where `metrics.report` asks for it and this process has trained. On rank 0."""
        if self.config.metrics.report and self._events is not None:
            from torchtitan.report import write_at_end  # needs packages that training does not

            write_at_end(self.path)

    def record_sample_ids(self, step: int, rows: list[list[str]]) -> None:
        """Of each row that this rank has trained on."""
        if self._sample_ids is not None:
            self._sample_ids.write(step, {"ids": rows})
