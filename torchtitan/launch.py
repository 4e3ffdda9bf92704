"""torchrun with short messages: `python -m torchtitan.launch train.py --job.config_file=... --section.key=value`.

It starts NGPU processes on this machine (by default one for each GPU, or one), and ends with the exit status of the
process that failed first. Each process has said itself what was wrong, so torchrun's own report of it is left out.
`torchrun train.py ...` works just as well, and is the way to start a run of several machines.
"""

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from torchtitan.errors import EXIT_STATUS, INTERRUPTED

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

PLANS = ("--job.plan", "--memory_estimation.enabled")


def launch(arguments: list[str]) -> int:
    """Runs `arguments` in NGPU processes and returns the exit status."""
    # Until torchrun takes signals over; a KeyboardInterrupt inside torch's import would be a traceback, or be lost.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(INTERRUPTED))
    if any(argument.split("=")[0] in PLANS and not argument.endswith("=false") for argument in arguments):
        _plan(arguments)
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        processes = int(os.environ.get("NGPU") or max(1, torch.cuda.device_count()))
        if processes < 1:
            raise ValueError
    except ValueError:
        print(f"Error: NGPU must be a number of processes above 0, not {os.environ['NGPU']!r}.", file=sys.stderr)
        return EXIT_STATUS
    gpus = torch.cuda.device_count()
    if 0 < gpus < processes:
        print(f"Error: NGPU is {processes}, but this machine has {gpus} GPUs.", file=sys.stderr)
        return EXIT_STATUS
    # torchrun would give each process one thread, however many cores there are.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    for name in list(logging.root.manager.loggerDict):  # each has a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        torchrun(["--standalone", f"--nproc-per-node={processes}", *arguments])
    except ChildFailedError as error:
        return _status(error)
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED
    return 0


def _plan(arguments: list[str]) -> NoReturn:
    """One process plans for NGPU, where the size of the world is not given."""
    given = any(argument.startswith("--job.simulate_world_size") for argument in arguments)
    if "NGPU" in os.environ and not given:
        arguments = [*arguments, f"--job.simulate_world_size={os.environ['NGPU']}"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.execv(sys.executable, [sys.executable, *arguments])


def _status(error: "ChildFailedError") -> int:
    """A process that was killed decides (it could not say so itself, and the others failed for want of it), or else
    the first failure. SIGTERM is what the others are ended by."""
    rank, failure = min(
        error.failures.items(),
        key=lambda item: (item[1].exitcode >= 0 or item[1].exitcode == -signal.SIGTERM, item[1].timestamp),
    )
    if failure.exitcode >= 0:
        return failure.exitcode
    name = signal.Signals(-failure.exitcode).name
    hint = " (often: out of memory)" if name == "SIGKILL" else ""
    print(f"Error: the process of rank {rank} was ended by {name}{hint}.", file=sys.stderr)
    return 128 - failure.exitcode


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
