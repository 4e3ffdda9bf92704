"""Trains a model: `python -m torchtitan.train --job.config_file=FILE.toml --section.key=value ...`, or by torchrun."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchtitan.launcher.imports import check_versions, quick_imports
from torchtitan.launcher.rank_process import rank_process
from torchtitan.launcher.signals import Stop
from torchtitan.registry import deferred, load

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

_manager = deferred("torchtitan.config:ConfigManager")


def run(config: "JobConfig", stop: Stop | None = None, notices: Sequence[str] = ()) -> None:
    """Runs one training run from its configuration to the end, or until `stop` asks it to save and exit. First logs
    `notices`, messages about the configuration."""
    check_versions()
    with quick_imports():  # torch is imported only now, so that --help and typos do not wait for it
        train_or_plan = load("torchtitan.run.build_trainer:train_or_plan")
    train_or_plan(config, stop, notices)


def main() -> None:
    with rank_process() as stop:
        manager = _manager()
        run(manager.parse_args(), stop, manager.notices)


if __name__ == "__main__":
    main()
