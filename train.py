"""Trains a model: `torchrun train.py --job.config_file=FILE.toml --section.key=value ...`, or `./run_train.sh`."""

import errno
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

if __name__ == "__main__":
    # Until `Stop` listens: a KeyboardInterrupt inside an import would be a traceback, or be lost.
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

from torchtitan.config import ConfigManager, JobConfig, to_toml
from torchtitan.config.extension import import_user_module
from torchtitan.errors import EXIT_STATUS, ConfigError, LostRankError, UserError
from torchtitan.imports import quick_imports
from torchtitan.signals import Stop, end

PATIENCE = 5  # seconds
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


def run(config: JobConfig, stop: Stop | None = None) -> None:
    """One run, from a configuration to the end of training, or until `stop` says so."""
    with quick_imports():  # of torch: --help and typos need not wait for it
        from torchtitan.checks import check, global_batch_size, is_plan
        from torchtitan.device import find_device
        from torchtitan.logging import init_logging, logger
        from torchtitan.parallel.comm import named_failures
        from torchtitan.trainer import Trainer

    init_logging(RANK, WORLD_SIZE, color=not config.metrics.disable_color_printing)
    if config.experimental.custom_import:
        import_user_module(config.experimental.custom_import, "experimental.custom_import")
    device = find_device(int(os.environ.get("LOCAL_RANK", 0)))
    if is_plan(config):
        from torchtitan.plan.plan import plan

        return plan(config, device)
    dims = check(config, WORLD_SIZE, device.type)
    if config.job.print_args:
        logger.info(f"configuration:\n{to_toml(config)}")
    with (
        named_failures(config.comm, Path(config.job.dump_folder)),
        Trainer(config, dims, global_batch_size(config, dims), device, stop) as trainer,
    ):
        trainer.train()


def end_with_parent() -> None:
    """A process that torchrun started does not outlive it: a new start of the command would meet it in its folder."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        end(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    stop = Stop(RANK)
    stop.listen()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    prefix = f"[rank {RANK}] " if WORLD_SIZE > 1 else ""
    try:
        run(ConfigManager().parse_args(), stop)
    except UserError as error:
        stop.failed = True
        if RANK > 0:  # most often the same on every rank: then rank 0 says so alone, and its end is that of all
            if stop.requested:
                end(EXIT_STATUS)
            time.sleep(PATIENCE)
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        print("\n".join(f"{prefix if RANK else ''}Error: {problem}" for problem in problems), file=sys.stderr)
        end(EXIT_STATUS)
    except LostRankError as error:
        stop.failed = True
        if stop.requested and not stop.has_trained:  # the other got the signal too, and had less patience
            stop.end_untrained()
        print(f"{prefix}Error: {error}", file=sys.stderr)
        end(1)
    except BrokenPipeError:  # `train.py --help | head`
        end(0)
    except Exception as error:
        stop.failed = True
        if stop.requested and not stop.has_trained:  # such as a compiler that got the signal too
            stop.end_untrained()
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            print(f"{prefix}Error: {error.filename or 'a file'} cannot be written: {error.strerror}.", file=sys.stderr)
            end(EXIT_STATUS)
        print("".join(f"{prefix}{line}\n" for line in traceback.format_exc().splitlines()), file=sys.stderr, end="")
        end(1)
