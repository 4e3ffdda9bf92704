"""The process group: set up with a long timeout, which training shortens; failures name the lost rank."""

import contextlib
import ipaddress
import os
import pickle
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from torchtitan.compat.distributed import default_store, flight_recorder_trace, process_groups, set_group_timeout
from torchtitan.config.system import Comm
from torchtitan.device import Device
from torchtitan.errors import EXIT_STATUS, ConfigError, LostRankError
from torchtitan.launcher.processes import raise_limit_of_open_files
from torchtitan.launcher.signals import Stop, before_exit
from torchtitan.logging import logger
from torchtitan.registry import deferred
from torchtitan.world import world

if TYPE_CHECKING:
    from torchtitan.parallel.heartbeat import Heartbeat

_new_heartbeat: "Callable[..., Heartbeat]" = deferred("torchtitan.parallel.heartbeat:Heartbeat")
_heartbeat: "Heartbeat | None" = (
    None  # created at start: no new connection is possible once the store's machine is gone
)
GLOO_CLOSED = "Application timeout caused pair closure"  # raised by collectives that follow one that timed out
MASTER = ("MASTER_ADDR", "MASTER_PORT")
TRACES = "comm_traces"  # in the dump folder; one file rank_N per rank


def heartbeat() -> "Heartbeat | None":
    """The heartbeats of all ranks; None before they have met, and for a single one."""
    return _heartbeat


def on_one_machine() -> bool:
    """Whether all ranks run on this machine, as far as their launchers tell."""
    return world().local_size == world().size


def init_process_group(device: Device, comm: Comm, dump_folder: Path, stop: Stop | None = None) -> None:
    """Creates the default group; without torchrun, a group of this process alone. From then on, a request to `stop`
    that reaches any rank is forwarded to all. The flight recorder writes to `comm_traces` in the dump folder. Raises a
    LostRankError if a rank does not join in time, and a ConfigError if another program uses the port of `MASTER_PORT`.
    """
    # torch's flight recorder of recent collectives. NCCL's watchdog dumps it; for gloo, `named_failures` does.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(comm.trace_buf_size))
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(dump_folder / TRACES / "rank_"))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1" if comm.trace_buf_size else "0")
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    _stay_on_this_machine()
    _warn_of_loopback()
    raise_limit_of_open_files()
    if "RANK" not in os.environ:
        dist.init_process_group(device.backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
        return
    try:
        _wait_for_master(comm.init_timeout_seconds)
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        start = _rendezvous(store, rank, world_size, comm.init_timeout_seconds)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):  # only where no launcher holds the store
            raise ConfigError(
                f"MASTER_PORT={os.environ['MASTER_PORT']} is in use on this machine: set another one."
            ) from None
        missing = "rank 0, or torchrun's store on its machine," if world().rank else "another rank"
        raise LostRankError(
            f"{missing} did not respond within comm.init_timeout_seconds = {comm.init_timeout_seconds} "
            f"(RANK={world().rank}, WORLD_SIZE={world().size}, {' and '.join(f'{k}={os.environ[k]}' for k in MASTER)})."
        ) from None
    if device.type == "cuda":  # the watchdog does not create the folder
        (dump_folder / TRACES).mkdir(parents=True, exist_ok=True)
    dist.init_process_group(
        device.backend, timeout=timeout, store=dist.PrefixStore(start, store), rank=rank, world_size=world_size
    )
    if world_size > 1:
        global _heartbeat
        _heartbeat = _new_heartbeat(default_store(), rank, world_size, stop)
        _heartbeat.start()


def leave_process_group() -> None:
    """Destroys the groups. Call it when this rank has finished; others may go on for a while."""
    dist.destroy_process_group()
    if _heartbeat is not None:
        _heartbeat.end(_heartbeat.FINISHED)


def _stay_on_this_machine() -> None:
    """If all ranks run on one machine, makes them listen on loopback only. By default gloo listens on the address of
    the host name, NCCL on a network interface's."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback and on_one_machine():
        for backend in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{backend}_SOCKET_IFNAME", loopback[0])


def _warn_of_loopback() -> None:
    """gloo listens on the address of this machine's name, which Debian and Ubuntu declare to be 127.0.1.1."""
    if on_one_machine() or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        address = ""
    if not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        logger.warning(
            f"this machine's name, {name}, leads to {address or 'no address'}, where other machines cannot reach this "
            "rank: set GLOO_SOCKET_IFNAME to a network interface that they reach, such as eth0, or correct /etc/hosts"
        )


def _wait_for_master(seconds: int) -> None:
    """A cluster may learn the name of rank 0's machine later than the others start. torch would print stack frames."""
    deadline, address = time.monotonic() + seconds, os.environ["MASTER_ADDR"]
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError):
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"MASTER_ADDR={address} is the name of no machine, or was not within comm.init_timeout_seconds = "
                    f"{seconds}: set it to the name or address of rank 0's machine."
                ) from None
        time.sleep(0.5)


def _rendezvous(store: dist.Store, rank: int, world_size: int, seconds: int) -> str:
    """Waits for all ranks and returns a name for this start of the run, the same on every rank.

    torchrun passes the same store to every restart, with the addresses of dead processes in it, and machines may
    disagree on the number of restarts. So rank 0 draws a name and answers each rank's hello with it. The hello may be
    left over from an earlier start, so rank 0 repeats this until the rank confirms.
    """
    me = uuid.uuid4().hex
    if rank > 0:
        store.set(f"hello/{rank}", me)
        start = store.get(f"welcome/{me}").decode()
        store.set(f"{start}/here/{rank}", "")
        store.wait([f"{start}/absent"], timedelta(seconds=seconds + 10))  # rank 0 may have started later
        absent = store.get(f"{start}/absent").decode()
    else:
        start, waiting, deadline = me, list(range(1, world_size)), time.monotonic() + seconds
        while waiting and time.monotonic() < deadline:
            for other in waiting:
                if store.check([f"hello/{other}"]):
                    store.set(f"welcome/{store.get(f'hello/{other}').decode()}", start)
            time.sleep(0.05)
            waiting = [other for other in waiting if not store.check([f"{start}/here/{other}"])]
        absent = ", ".join(map(str, waiting))
        store.set(f"{start}/absent", absent)
    if absent:
        raise LostRankError(
            f"of {world_size} ranks, these did not join within comm.init_timeout_seconds = {seconds}: {absent}."
        )
    return start


def set_timeout(seconds: int) -> None:
    """Sets the timeout of collectives of the default group and of meshes. Call it on all ranks at the same point. Other
    groups keep their timeout: a checkpoint written in the background may take longer than a step."""
    dist.barrier()  # nobody gets the shorter timeout while others are still starting up
    for group in process_groups():
        if group.group_desc == "default_pg" or group.group_desc.startswith("mesh_"):
            set_group_timeout(group, timedelta(seconds=seconds))


@contextlib.contextmanager
def named_failures(comm: Comm, dump_folder: Path) -> Iterator[None]:
    """Wraps a run: turns a collective that failed because of another rank into a LostRankError that names the rank.
    With NCCL nothing is raised: its watchdog dumps the flight recorder and ends the process."""

    def say_that_it_stops(status: int) -> None:
        if _heartbeat is not None and status not in (1, EXIT_STATUS):
            _heartbeat.end(_heartbeat.STOPPED)

    try:
        with before_exit(say_that_it_stops):
            yield
    except Exception as error:
        if _heartbeat is None:
            raise
        failure = failed_collective(error)
        _heartbeat.end(_heartbeat.LOST if failure else type(error).__name__)
        if not failure:
            raise
        where = _dump_flight_recorder(comm, dump_folder)
        raise LostRankError(f"{_describe_failure(failure, comm)} {_heartbeat.account()}{where}") from error


def failed_collective(error: BaseException | None) -> str:
    """The message of the failed collective anywhere in the chain of causes; '' for other errors."""
    while error is not None:
        if isinstance(error, dist.DistError) or "gloo/transport" in str(error) or GLOO_CLOSED in str(error):
            return str(error)
        error = error.__cause__ or error.__context__
    return ""


def _describe_failure(message: str, comm: Comm) -> str:
    milliseconds = re.search(r"[Tt]imed out waiting (\d+) ?ms", message)
    if milliseconds is None:
        return "lost the connection to another rank."
    seconds = int(milliseconds[1]) // 1000
    keys = {comm.init_timeout_seconds: "init", comm.save_timeout_seconds: "save", comm.train_timeout_seconds: "train"}
    key = keys.get(seconds, "init")
    return f"a collective took longer than comm.{key}_timeout_seconds = {seconds}."


def _dump_flight_recorder(comm: Comm, dump_folder: Path) -> str:
    """Dumps this rank's recent collectives, as NCCL's watchdog does by itself. Returns a sentence that says where."""
    if not comm.trace_buf_size or dist.get_backend() != "gloo":
        return ""
    trace = pickle.loads(flight_recorder_trace())  # the trace is this process's memory, not a file
    trace["pg_config"] = {  # empty with gloo, but required by torchfrtrace
        group.group_name: {
            "name": group.group_name,
            "desc": group.group_desc,
            "ranks": str(dist.get_process_group_ranks(group)),
        }
        for group in process_groups()
    }
    path = dump_folder / TRACES / f"rank_{dist.get_rank()}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(trace))
    except OSError as error:
        return f" ({path} could not be written: {error.strerror}.)"
    return f" Traces of the last collectives are in {path.parent}."
