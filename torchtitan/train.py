"""Trains a model: `python -m torchtitan.train --job.config_file=FILE.toml --section.key=value ...`, or by torchrun."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.launcher.rank_process import rank_process
from torchtitan.launcher.signals import Stop
from torchtitan.world import world

if TYPE_CHECKING:
    from torchtitan.config import JobConfig


def run(config: "JobConfig", stop: Stop | None = None, notices: Sequence[str] = ()) -> None:
    """Runs one training run from its configuration to the end, or until `stop` asks it to save and exit. First logs
    `notices`, messages about the configuration."""
    from torchtitan.launcher.imports import check_versions, quick_imports

    check_versions()
    with quick_imports():  # torch is imported only now, so that --help and typos do not wait for it
        from torchtitan.checks.config_checks import check_run, is_plan
        from torchtitan.device import find_device
        from torchtitan.engine.model_args import register_models
        from torchtitan.launcher.folder_lock import FolderLock
        from torchtitan.launcher.monitor import watching
        from torchtitan.launcher.processes import refuse_lone_tasks
        from torchtitan.logging import init_logging, logger
        from torchtitan.parallel.process_group import named_failures
        from torchtitan.run.build_trainer import build_trainer
        from torchtitan.run.watchdog import watch_progress

    place = world()
    init_logging(place.rank, place.size, color=not config.metrics.disable_color_printing)
    for notice in notices:
        logger.info(notice)
    register_models(config)
    device = find_device(place.local_rank)
    if is_plan(config):
        from torchtitan.plan.planner import plan

        return plan(config, device)
    refuse_lone_tasks()
    dims, stages = check_run(config, place.size, device.type)
    stop = stop or Stop(place.rank)
    with (
        watching(watch_progress(stop.progress, place.rank)),
        named_failures(config.comm, Path(config.job.dump_folder)),
        FolderLock(Path(config.job.dump_folder)) as lock,
        build_trainer(config, dims, stages, device, stop, lock) as trainer,
    ):
        trainer.train()


def main() -> None:
    with rank_process() as stop:
        from torchtitan.config import ConfigManager

        manager = ConfigManager()
        run(manager.parse_args(), stop, manager.notices)


if __name__ == "__main__":
    main()
