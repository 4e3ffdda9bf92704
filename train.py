"""Trains a model: `torchrun train.py --job.config_file=FILE.toml --section.key=value ...`, or `./run_train.sh`."""

import os
import signal
import sys
import threading
import traceback
from typing import Any

from torchtitan.config import ConfigManager, JobConfig, to_toml
from torchtitan.config.extension import import_user_module
from torchtitan.errors import EXIT_STATUS, ConfigError, UserError

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C has stopped
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


def main() -> None:
    config = ConfigManager().parse_args()
    run(config)


def run(config: JobConfig) -> None:
    """One run, from a configuration to the end of training."""
    from torchtitan.checks import check, global_batch_size  # imports torch, which --help and typos need not wait for
    from torchtitan.device import find_device
    from torchtitan.logging import init_logging, logger
    from torchtitan.trainer import Trainer

    init_logging(RANK, WORLD_SIZE, color=not config.metrics.disable_color_printing)
    if config.experimental.custom_import:
        import_user_module(config.experimental.custom_import, "experimental.custom_import")
    device = find_device(int(os.environ.get("LOCAL_RANK", 0)))
    dims = check(config, WORLD_SIZE, device.type)
    if config.job.print_args:
        logger.info(f"configuration:\n{to_toml(config)}")
    with Trainer(config, dims, global_batch_size(config, dims), device) as trainer:
        trainer.train()


class Interruption:
    """Ends the process on Ctrl-C or SIGTERM with a short message, whatever it is doing.

    The first signal raises KeyboardInterrupt; where that does not end the process (it may be waiting for a rank that
    is gone), a timer does.
    """

    SECONDS = 5

    def __init__(self) -> None:
        self.happened = False
        self.by = ""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self)

    def __call__(self, number: int, frame: Any) -> None:
        if self.happened:
            return
        self.happened = True
        self.by = signal.Signals(number).name
        timer = threading.Timer(self.SECONDS, os._exit, [INTERRUPTED])
        timer.daemon = True
        timer.start()
        raise KeyboardInterrupt


def end(status: int) -> None:
    """Ends the process at once: threads and groups of a run that has failed are not waited for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    interruption = Interruption()
    prefix = f"[rank {RANK}] " if WORLD_SIZE > 1 else ""
    try:
        main()
    except KeyboardInterrupt:
        if RANK == 0:
            print(
                f"\nStopped by {interruption.by}. The same command goes on from the last checkpoint, if there is one.",
                file=sys.stderr,
            )
        end(INTERRUPTED)
    except ConfigError as error:  # the same on every rank
        if RANK == 0:
            print("\n".join(f"Error: {problem}" for problem in error.problems), file=sys.stderr)
        end(EXIT_STATUS)
    except UserError as error:
        print(f"{prefix}Error: {error}", file=sys.stderr)
        end(EXIT_STATUS)
    except BrokenPipeError:  # `train.py --help | head`
        end(0)
    except Exception:
        if interruption.happened:  # a collective that failed because other ranks were interrupted too
            end(INTERRUPTED)
        print("".join(f"{prefix}{line}\n" for line in traceback.format_exc().splitlines()), file=sys.stderr, end="")
        end(1)
