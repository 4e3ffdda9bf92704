"""Trains a model: `torchrun train.py --job.config_file=FILE.toml --section.key=value ...`, or `./run_train.sh`."""

import errno
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # Until `Stop` listens: a KeyboardInterrupt inside an import would print a traceback, or be swallowed.
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher has blocked it

from torchtitan.config import ConfigManager, JobConfig, to_toml
from torchtitan.errors import EXIT_STATUS, ConfigError, DataError, LostRankError, UserError
from torchtitan.launcher.imports import check_versions, quick_imports
from torchtitan.launcher.processes import refuse_lone_tasks
from torchtitan.launcher.signals import STARTED_AGAIN, Stop, exit_now, exit_with_launcher, ignore_stop_signals
from torchtitan.logging import outlive_readers

PATIENCE = 10  # seconds
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


def run(config: JobConfig, stop: Stop | None = None, notices: Sequence[str] = ()) -> None:
    """Runs one training run from its configuration to the end, or until `stop` asks it to save and exit.

    Args:
        notices: messages about the configuration; logged first.
    """
    check_versions()
    with quick_imports():  # torch is imported only now, so that --help and typos do not wait for it
        from torchtitan.build_trainer import build_trainer
        from torchtitan.device import find_device
        from torchtitan.engine.config_checks import check, global_batch_size, is_plan
        from torchtitan.engine.model_args import register_models
        from torchtitan.engine.watchdog import watch_progress
        from torchtitan.launcher.folder_lock import FolderLock
        from torchtitan.logging import init_logging, logger
        from torchtitan.parallel.process_group import named_failures

    init_logging(RANK, WORLD_SIZE, color=not config.metrics.disable_color_printing)
    for notice in notices:
        logger.info(notice)
    register_models(config)
    device = find_device(int(os.environ.get("LOCAL_RANK", 0)))
    if is_plan(config):
        from torchtitan.plan.planner import plan

        return plan(config, device)
    if "RANK" not in os.environ:
        refuse_lone_tasks()
    dims = check(config, WORLD_SIZE, device.type)
    if config.job.print_args:
        logger.info(f"configuration:\n{to_toml(config)}")
    stop = stop or Stop(RANK)
    with (
        watch_progress(stop.progress, RANK),
        named_failures(config.comm, Path(config.job.dump_folder)),
        FolderLock(Path(config.job.dump_folder)) as lock,
        build_trainer(config, dims, global_batch_size(config, dims), device, stop, lock) as trainer,
    ):
        trainer.train()


def status_of(error: Exception, stop: Stop) -> int:
    """The exit status. On 1 torchrun restarts the processes while restarts are left; on EXIT_STATUS it gives up.

    A restart cannot fix a user error. But data or files that were readable earlier in this run may be unavailable only
    temporarily.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    started_again = STARTED_AGAIN in os.environ or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    environmental = any(isinstance(cause, DataError | OSError) for cause in (error, error.__cause__, error.__context__))
    return 1 if restarts and environmental and (stop.has_trained or started_again) else EXIT_STATUS


if __name__ == "__main__":
    outlive_readers()
    faulthandler.register(signal.SIGUSR2)  # prints the stacks of all threads, even if none gets to run
    stop = Stop(RANK)
    stop.listen()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        exit_with_launcher()
    prefix = f"[rank {RANK}] " if WORLD_SIZE > 1 else ""
    try:
        manager = ConfigManager()
        run(manager.parse_args(), stop, manager.notices)
        ignore_stop_signals()
    except UserError as error:
        stop.failed = True
        if RANK > 0:  # usually every rank has the same error: let rank 0 report it and end the others
            if stop.requested:
                exit_now(EXIT_STATUS)
            time.sleep(PATIENCE)
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        print("\n".join(f"{prefix if RANK else ''}Error: {problem}" for problem in problems), file=sys.stderr)
        exit_now(status_of(error, stop))
    except LostRankError as error:
        stop.failed = True
        if stop.requested:  # the lost rank got the signal too, and exited first
            stop.give_up()
        print(f"{prefix}Error: {error}", file=sys.stderr)
        exit_now(1)
    except Exception as error:
        stop.failed = True
        if stop.requested and not stop.has_trained:  # for example from a compiler process that got the signal too
            stop.give_up()
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            print(f"{prefix}Error: {error.filename or 'a file'} cannot be written: {error.strerror}.", file=sys.stderr)
            exit_now(status_of(error, stop))
        print("".join(f"{prefix}{line}\n" for line in traceback.format_exc().splitlines()), file=sys.stderr, end="")
        exit_now(1)
