"""A user's module, `--experimental.custom_import=held`: a run waits before its first step, or after another one, for as
long as a test says so with `runs.hold`. Contains the models of tiny.py."""

import time
from pathlib import Path
from typing import Any

import tiny  # noqa: F401  registers its models

from torchtitan.protocols import Hook
from torchtitan.run.hooks import HOOKS


class Held(Hook):
    def on_start(self, run: Any) -> None:
        self.after_step(run)

    def after_step(self, run: Any) -> None:
        file = Path(f"{run.config.job.dump_folder}.held")
        while (step := _content(file)) is not None and (not step or run.step >= int(step)):
            time.sleep(0.02)


def _content(file: Path) -> str | None:
    """None if there is no file; "" while it is written."""
    try:
        return file.read_text()
    except FileNotFoundError:
        return None


HOOKS.register("held", Held)
