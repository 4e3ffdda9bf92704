"""torchrun with short messages: `python -m torchtitan.launch train.py --job.config_file=... --section.key=value`.

It starts NGPU processes on this machine (by default one for each GPU, or one), and ends with the exit status of the
process that failed first. Each process has said itself what was wrong, so torchrun's own report of it is left out.
SIGTERM and SIGUSR1 are handed on, and the processes given the time that they need to save.
`torchrun train.py ...` works just as well, and is the way to start a run of several machines.
"""

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.errors import EXIT_STATUS, INTERRUPTED
from torchtitan.signals import STOP_SIGNALS

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def launch(arguments: list[str]) -> int:
    """Runs `arguments` in NGPU processes and returns the exit status."""
    # Until torchrun takes signals over; a KeyboardInterrupt inside torch's import would be a traceback, or be lost.
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    for number in STOP_SIGNALS:
        signal.signal(number, _hand_on)
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
        # torchrun would end the processes 30 seconds after a SIGTERM, whatever they are doing, and itself on SIGUSR1.
        torchrun(
            ["--standalone", "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT", f"--nproc-per-node={processes}", *arguments]
        )
    except ChildFailedError as error:
        return _status(error)
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED
    return 0


def _hand_on(number: int, frame: object) -> None:
    """Sends a signal on to the processes of the run; where there are none yet, there is nothing to end but this one."""
    children = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _parent(pid) == os.getpid()]
    if not children:
        print(f"Stopped by {signal.Signals(number).name} before the run has begun.", file=sys.stderr)
        os._exit(0)
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, number)


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended meanwhile
        return None


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
    if -failure.exitcode in STOP_SIGNALS:  # handed on before the process could take it, so before it had begun
        print(f"Stopped by {name} before the run has begun.", file=sys.stderr)
        return 0
    hint = " (often: out of memory)" if name == "SIGKILL" else ""
    print(f"Error: the process of rank {rank} was ended by {name}{hint}.", file=sys.stderr)
    return 128 - failure.exitcode


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
