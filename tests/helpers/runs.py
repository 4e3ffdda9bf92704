"""Starts real runs, as a user does, and reads their output files."""

import atexit
import json
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from workers import PATIENCE, Forked, exit_status_of, on_ranks

from torchtitan.config import ConfigManager
from torchtitan.logging import logger
from torchtitan.metrics import flops
from torchtitan.models import MODELS

ROOT = Path(__file__).parents[2]
HELPERS = Path(__file__).parent
LAUNCHER = (sys.executable, "-m", "torchtitan.launch")

flops.MEASUREMENT_SECONDS = 0.001  # of the peak, five times per run; no MFU of these runs is looked at

# Small, every step in metrics.jsonl, and a learning rate that is independent of the number of steps.
SMALL = (
    "--training.seq_len=64",
    "--training.local_batch_size=2",
    "--training.global_batch_size=4",
    "--training.mixed_precision_param=float32",
    "--lr_scheduler.warmup_steps=2",
    "--lr_scheduler.decay_ratio=0",
    "--activation_checkpoint.mode=none",
    "--metrics.log_freq=1",
)
TINY = (*SMALL, "--experimental.custom_import=tiny", "--model.name=tiny", "--model.flavor=narrow")
CHECKPOINTS = ("--checkpoint.enable_checkpoint", "--checkpoint.interval=2")


def train_here(*flags: str) -> None:
    """Trains in this process, to avoid waiting for a new one to start."""
    from torchtitan.train import run

    before = logger.handlers, logger.level, logger.propagate
    models = dict(MODELS._entries)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in `Run`
    try:
        run(ConfigManager().parse_args(flags))
    finally:
        logger.handlers, logger.level, logger.propagate = before
        torch.set_num_threads(threads)
        MODELS._entries.update(models)  # without the sizes that `model.flavor = "auto"` has read
        if dist.is_initialized():  # a failed run leaves the group to be destroyed at process exit
            dist.destroy_process_group()


class Run:
    """A started run and all its processes, which are identified by an environment variable or the file they print to.

    Args:
        command: program and arguments.
        environment: added to this process's environment.
        folder: working directory.
        fork: whether it is a fork of a process that has imported torch, as are its ranks.
    """

    process: subprocess.Popen[bytes] | Forked

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: Path, fork: bool = False) -> None:
        self.mark = f"RUN_OF_A_TEST={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        self.screen = tempfile.NamedTemporaryFile()  # noqa: SIM115  no pipe: it would fill up, or wait for orphans
        # What this process has set for itself: a place among processes, and where its compiled code lies.
        own = ("RANK", "WORLD_SIZE", "NGPU", "TORCHINDUCTOR_CACHE_DIR")
        inherited = {key: value for key, value in os.environ.items() if key not in own}
        variables = {**inherited, "OMP_NUM_THREADS": "1", **environment, name: value}
        if fork:
            self.process = Forked(command, variables, folder, self.screen.name)
            return
        self.process = subprocess.Popen(
            command,
            env=variables,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self.screen,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a separate process group, as a shell creates for each command
        )

    def finish(self, patience: float = PATIENCE) -> tuple[int, str]:
        """Waits for the end. Returns (exit status, all output). A signal n gives status 128 + n."""
        status = self.process.wait(patience)
        return (status if status >= 0 else 128 - status), self.output()

    def output(self) -> str:
        """All output so far, stdout and stderr."""
        # The run writes at this file's position, so reading must not move it.
        screen = self.screen.fileno()
        return without_slow_imports(os.pread(screen, os.fstat(screen).st_size, 0).decode(errors="replace"))

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Waits until the condition holds. Fails if the run ends first."""
        for _ in range(PATIENCE * 50):
            if condition():
                return
            assert self.process.poll() is None, f"the run has ended:\n{self.output()}"
            time.sleep(0.02)
        raise AssertionError("the run does not get there")

    def signal_group(self, number: signal.Signals) -> None:
        """Signals the command's process group, as a terminal does for Ctrl-C."""
        os.killpg(self.process.pid, number)

    def pids(self) -> list[int]:
        """All living processes of the run, including orphans and those in other process groups."""
        pids = map(int, filter(str.isdecimal, os.listdir("/proc")))
        return [pid for pid in pids if self.mark in variables_of(pid) or screen_of(pid) == self.screen.name]

    def pid_of_rank(self, rank: int) -> int | None:
        """The process of a rank; None if it has not started yet."""
        pids = [pid for pid in self.pids() if f"RANK={rank}" in variables_of(pid) or rank_of(pid) == rank]
        return next((pid for pid in pids if parent_of(pid) not in pids), None)  # no compiler that it has started

    def kill(self) -> None:
        """SIGKILL to every process of the run, as in a power failure."""
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
            self.process.poll()


def takes(pid: int, number: signal.Signals) -> bool:
    """Whether a process has installed its own handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def variables_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:  # it has ended in the meantime
        return []


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if it has ended in the meantime."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def screen_of(pid: int) -> str:
    """The file that a process prints to."""
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""


def rank_of(pid: int) -> int | None:
    """The rank of a forked process, which `benchmarks.forks` names."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None
    return int(name.removeprefix("rank")) if name.startswith("rank") else None


@contextmanager
def started(
    *flags: str,
    processes: int | None = 1,
    command: Sequence[str] | None = None,
    folder: Path = ROOT,
    fresh: bool = False,
    **environment: str,
) -> Iterator[Run]:
    """Starts a run with `torchtitan.launch` and this many processes, or, with None, plain `python train.py`.

    Its processes are forks of one that has imported torch: a fresh interpreter of each takes 3 CPU seconds.

    Args:
        command: what to start instead; in a fresh interpreter, unless it is `torchtitan.launch` with options.
        folder: working directory.
        fresh: whether to start fresh interpreters; also where `environment` has more than options of torchrun, because
            libraries read variables when they are imported.
        environment: additional variables.
    """
    program = [str(ROOT / "train.py"), *flags]
    if command is not None:
        program = [*command, *flags]
    elif processes is not None:
        program = [*LAUNCHER, *program]
    else:
        program = [sys.executable, *program]
    options = all(name.startswith("PET_") or name == "TMPDIR" for name in environment)
    fork = options and not fresh and (command is None or tuple(command[:3]) == LAUNCHER)
    run = Run(program, {"NGPU": str(processes), **environment}, folder, fork)
    try:
        yield run
    finally:
        run.kill()
        run.process.wait()
        run.screen.close()


def train(*flags: str, patience: float = PATIENCE, **options: Any) -> str:
    """A run that must succeed within `patience` seconds. Returns its output.

    Without options other than `processes` and `folder` it runs in forked processes, because starting takes far longer
    than a few tiny steps. With any other option it is started as a user would.
    """
    if options.keys() <= {"processes", "folder"} and options.get("processes", 1):
        return output_of_ranks(train_here, *flags, **options)
    with started(*flags, **options) as run:
        status, output = run.finish(patience)
    assert status == 0, output
    return output


def output_of_ranks(function: Callable[..., object], *arguments: Any, processes: int = 1, folder: Path = ROOT) -> str:
    """Calls `function(*arguments)` in forked processes that have the variables of torchrun. Returns their output."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun does
    with tempfile.NamedTemporaryFile() as screen:
        try:
            on_ranks(processes, _as_rank, processes, store.port, screen.name, folder, function, arguments)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{Path(screen.name).read_text(errors='replace')}") from None
        return Path(screen.name).read_text(errors="replace")


def without_slow_imports(output: str) -> str:
    """The output of a command without what it says of imports that take more than 10 seconds on a busy machine."""
    return re.sub(r"^importing \S+: \d+ s so far\n", "", output, flags=re.MULTILINE)


def python(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `python *arguments` in the repository's root: a script, or `-m` and a module.

    In a forked process, because importing torch takes longer than most scripts.
    """
    command = [str(argument) for argument in arguments]
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        status = exit_status_of(_run_as_program, command, environment, out.name, err.name)
        outputs = [without_slow_imports(Path(file.name).read_text(errors="replace")) for file in (out, err)]
    return subprocess.CompletedProcess(command, status, *outputs)


def _run_as_program(command: list[str], environment: dict[str, str], out: str, err: str) -> None:
    _write_to(out, err)
    os.chdir(ROOT)
    for name in ("RANK", "WORLD_SIZE", "NGPU"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    sys.argv = command
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")


def _write_to(out: str, err: str) -> None:
    for descriptor, name in ((1, out), (2, err)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), descriptor)


def _as_rank(
    rank: int,
    world_size: int,
    port: int,
    screen: str,
    folder: Path,
    function: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0}
    if world_size > 1:
        os.environ.update({name: str(value) for name, value in (world | meeting | elastic).items()})
    _write_to(screen, screen)
    os.chdir(folder)
    function(*arguments)
    atexit._run_exitfuncs()  # a forked process skips them
    sys.stdout.flush()
    sys.stderr.flush()


def failure(*flags: str, **options: Any) -> tuple[int, str]:
    """A run that must fail. Returns (exit status, output).

    Without options other than `processes`, which is 1 or None, train.py runs in a forked process.
    """
    if options in ({}, {"processes": 1}, {"processes": None}):
        done = python("train.py", *flags)
        assert done.returncode != 0, done.stdout
        return done.returncode, done.stdout + done.stderr
    with started(*flags, **options) as run:
        status, output = run.finish()
        assert status != 0, output
        assert run.pids() == []
    return status, output


def into(folder: Path) -> str:
    return f"--job.dump_folder={folder}"


HELD = ("--experimental.custom_import=held",)  # a run that `hold` holds


def hold(folder: Path, step: int) -> None:
    """Lets the run with this dump folder, which is `HELD`, go no further than this step; 0 is before the first one. So
    what a test does to it comes neither too early nor too late, however fast or slow the machine is."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{folder}.held").write_text(f"{step}")


def let_go(folder: Path) -> None:
    Path(f"{folder}.held").rename(f"{folder}.let_go")


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a JSONL file; empty if it does not exist."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def reports(folder: Path) -> list[dict[str, Any]]:
    """The training steps in metrics.jsonl. Fails if there are none, or if a step is duplicated or out of order."""
    lines = [line for line in lines_of(folder / "metrics.jsonl") if "loss" in line]
    steps = [line["step"] for line in lines]
    assert steps and steps == sorted(set(steps))
    return lines


def losses(folder: Path) -> dict[int, float]:
    """Losses by step. Fails if one is not finite (null in the file): two diverging runs are not the same training."""
    by_step = {line["step"]: line["loss"] for line in reports(folder)}
    assert None not in by_step.values(), by_step
    return by_step


def grad_norms(folder: Path) -> list[float]:
    """The gradient norm of each step. Fails if one is not finite."""
    norms = [line["grad_norm"] for line in reports(folder)]
    assert None not in norms, norms
    return norms


def last_step(folder: Path) -> int:
    """The last step that the run has reported."""
    return max((line["step"] for line in lines_of(folder / "metrics.jsonl")), default=0)


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the existing checkpoints. Other names do not count."""
    names = [path.name for path in (folder / "checkpoint").glob("step-*")]
    return sorted(int(name.removeprefix("step-")) for name in names if name.removeprefix("step-").isdecimal())


def tensors_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, unsharded."""
    file = folder / "tensors.pt"
    dcp_to_torch_save(folder / "checkpoint" / f"step-{step}", file)
    tensors: dict[str, torch.Tensor] = torch.load(file)
    file.unlink()
    return tensors


def assert_equal_bit_for_bit(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left and left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


def fill(disk: Path) -> Path:
    """Fills the disk to the last byte; call it again if space has become free. Returns the file that occupies it."""
    path = disk / "filler"
    with open(path, "ab", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                pass
    return path


def all_equal(left: Iterable[torch.Tensor], right: Iterable[torch.Tensor]) -> bool:
    """Whether both sides have the same tensors bit for bit, and at least one."""
    pairs = list(zip(left, right, strict=True))
    return bool(pairs) and all(torch.equal(mine, other) for mine, other in pairs)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that is full, for files that this process writes beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
