"""torchrun with short messages: `python -m torchtitan.launch train.py --section.key=value`, or `-m torchtitan.train`.

Starts NGPU processes on this machine (default: one per GPU, or one) and exits with the status of the process that
failed first. Each process reports its own error, so torchrun's failure report is omitted. A single process needs no
torchrun: the launcher becomes that process. torchrun's options may precede train.py, or be set in the environment
variables that it reads (`PET_MAX_RESTARTS=3`); they set up multi-node runs (docs/multinode.md).
`torchrun train.py ...` works just as well.
"""

import os
import runpy
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from torchtitan.container import available_cores
from torchtitan.errors import EXIT_STATUS, UserError, tell_of_imports
from torchtitan.launcher.imports import check_versions, quick_imports
from torchtitan.launcher.monitor import watch
from torchtitan.launcher.processes import find_processes, raise_limit_of_open_files, refuse_lone_tasks
from torchtitan.launcher.signals import STARTER, STOP_SIGNALS, exit_before_start, set_signal_handlers, when_gone
from torchtitan.logging import ignore_broken_pipes
from torchtitan.registry import deferred, load

_parse_args = deferred("torch.distributed.run:parse_args")
_local_world_size: Callable[[str], int] = deferred("torch.distributed.run:determine_local_world_size")

PLANS = ("--job.plan", "--memory_estimation.enabled")  # now and formerly
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA; AMD; either on Windows. Present if there is a GPU.


def launch(arguments: list[str]) -> int:
    """Runs `arguments` in NGPU processes and returns the exit status."""
    # Until the agent handles signals: a KeyboardInterrupt in torch's import would print a traceback, or be swallowed.
    set_signal_handlers(STOP_SIGNALS, lambda number, _: exit_before_start(number))
    ignore_broken_pipes()
    tell_of_imports()
    if any(argument.split("=")[0] in PLANS and not argument.lower().endswith("=false") for argument in arguments):
        _plan(arguments)
    if STARTER in os.environ:
        watch(when_gone(int(os.environ[STARTER]), lambda: os.kill(os.getpid(), signal.SIGTERM)))
    raise_limit_of_open_files()  # ranks connect to the launcher's store
    try:
        if _is_single(arguments):
            _run_alone(arguments)
        check_versions()
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return EXIT_STATUS
    # torch's C++ part prints a page of stack frames per lost connection. It reads this variable once, when imported.
    level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = level or "ERROR"
    with quick_imports():
        run_torchrun: Callable[[list[str]], int] = load("torchtitan.launcher.agent:run_torchrun")
    if level is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # the processes should not inherit it
    try:
        arguments = ["--signals-to-handle=SIGQUIT", *arguments]
        if os.environ.get("NGPU") or not os.environ.get("PET_NPROC_PER_NODE"):
            arguments = [f"--nproc-per-node={find_processes()}", *arguments]  # the last of two flags counts
        options = _parse_args(arguments)
        if not options.no_python:
            _check_program(options.training_script, options.module)
        if options.nnodes in ("1", "1:1"):
            refuse_lone_tasks()
        if options.log_dir is None and {options.redirects, options.tee} == {"0"}:
            # torchrun would make a folder for logs that nobody writes, and leave it there when it is killed.
            arguments = [f"--log-dir={os.devnull}", *arguments]
        _set_threads(_local_world_size(options.nproc_per_node))
    except (UserError, ValueError) as error:  # ValueError: no such kind of device to count
        print(f"Error: {error}", file=sys.stderr)
        return EXIT_STATUS
    return run_torchrun(arguments)


def _is_single(arguments: list[str]) -> bool:
    """Whether torchrun would start just one process, and no torchrun options were given."""
    processes = os.environ.get("NGPU") or ("all" if any(map(os.path.exists, GPU_DRIVERS)) else "1")
    # If a cluster sets ranks (or the environment sets torchrun's options), torchrun has to read them.
    is_managed = any(name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") or name.startswith("PET_") for name in os.environ)
    is_plain = arguments[:2] == ["-m", "torchtitan.train"] or (bool(arguments) and arguments[0].endswith(".py"))
    return processes == "1" and is_plain and not is_managed


def _check_program(name: str, is_module: bool) -> None:
    """Raises a UserError if there is no such script or module."""
    try:
        exists = find_spec(name) is not None if is_module else Path(name).exists()
    except (ModuleNotFoundError, ValueError):  # it has no such parent, or no name
        exists = False
    if not exists:
        raise UserError(
            f"there is no {'module' if is_module else 'file'} {name} (working directory: {Path.cwd()}); what trains is "
            "train.py in a checkout, `-m torchtitan.train` anywhere."
        )


def _run_alone(arguments: list[str]) -> NoReturn:
    """Becomes the one process, which saves a second import of torch. It replaces these signal handlers once it can."""
    _set_threads(1)
    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    _check_program(sys.argv[0], is_module)
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


def _set_threads(processes: int) -> None:
    """torchrun would give each process one thread, regardless of the number of cores."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // processes)))


def _plan(arguments: list[str]) -> NoReturn:
    """Replaces this process with one that plans the run; the world size defaults to NGPU."""
    given = any(argument.startswith("--job.simulate_world_size") for argument in arguments)
    if "NGPU" in os.environ and not given:
        arguments = [*arguments, f"--job.simulate_world_size={os.environ['NGPU']}"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
