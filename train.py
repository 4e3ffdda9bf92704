"""Trains a model: `torchrun train.py --job.config_file=FILE.toml --section.key=value ...`, or `./run_train.sh`."""

import os
import signal
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

from torchtitan.config import ConfigManager, JobConfig, to_toml
from torchtitan.config.extension import import_user_module
from torchtitan.errors import EXIT_STATUS, INTERRUPTED, ConfigError, UserError

if TYPE_CHECKING:
    from torchtitan.device import Device

PATIENCE = 5  # seconds
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


def run(config: JobConfig) -> None:
    """One run, from a configuration to the end of training."""
    from torchtitan.checks import check, global_batch_size, is_plan  # torch: --help and typos need not wait for it
    from torchtitan.device import find_device
    from torchtitan.logging import init_logging, logger
    from torchtitan.trainer import Trainer

    init_logging(RANK, WORLD_SIZE, color=not config.metrics.disable_color_printing)
    if config.experimental.custom_import:
        import_user_module(config.experimental.custom_import, "experimental.custom_import")
    device = find_device(int(os.environ.get("LOCAL_RANK", 0)))
    if is_plan(config):
        return plan(config, device)
    dims = check(config, WORLD_SIZE, device.type)
    if config.job.print_args:
        logger.info(f"configuration:\n{to_toml(config)}")
    with Trainer(config, dims, global_batch_size(config, dims), device) as trainer:
        trainer.train()


def plan(config: JobConfig, device: "Device") -> None:
    """What the run would hold and send."""
    import torch

    from torchtitan.checks import check, global_batch_size
    from torchtitan.plan import planned_device, run_plan

    job = config.job
    dtype = getattr(torch, config.training.mixed_precision_param)
    planned, why = planned_device(job.simulate_device, job.simulate_world_size is not None, device, dtype)
    dims = check(config, job.simulate_world_size or max(1, torch.cuda.device_count()), planned.type)
    run_plan(config, dims, global_batch_size(config, dims), planned, why)


def end_on_signals() -> None:
    """Ctrl-C or SIGTERM ends the process at once with a short message, whatever it is doing.

    A thread does it: the main thread may be inside a collective that waits for a rank that is gone, or inside an
    import that would swallow a KeyboardInterrupt. Every file is written in one piece or flushed line by line, so there
    is nothing to bring to an end.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def wait() -> None:
        name = signal.Signals(os.read(read_end, 1)[0]).name
        if RANK == 0:
            message = f"\nStopped by {name}. The same command goes on from the last checkpoint, if there is one."
            print(message, file=sys.stderr)
        end(INTERRUPTED)

    threading.Thread(target=wait, daemon=True).start()
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)  # written to by the signal itself, not by Python code
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)


def end_with_parent() -> None:
    """A process that torchrun started does not outlive it: a new start of the command would meet it in its folder."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        end(1)

    threading.Thread(target=watch, daemon=True).start()


def end(status: int) -> None:
    """Ends the process at once: threads and groups of a run that has failed are not waited for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    end_on_signals()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    prefix = f"[rank {RANK}] " if WORLD_SIZE > 1 else ""
    try:
        run(ConfigManager().parse_args())
    except ConfigError as error:
        if RANK > 0:  # most often the same on every rank: then rank 0 says so alone, and its end is that of all
            time.sleep(PATIENCE)
        print("\n".join(f"{prefix if RANK else ''}Error: {problem}" for problem in error.problems), file=sys.stderr)
        end(EXIT_STATUS)
    except UserError as error:
        print(f"{prefix}Error: {error}", file=sys.stderr)
        end(EXIT_STATUS)
    except BrokenPipeError:  # `train.py --help | head`
        end(0)
    except Exception:
        print("".join(f"{prefix}{line}\n" for line in traceback.format_exc().splitlines()), file=sys.stderr, end="")
        end(1)
