"""One run at a time per dump or checkpoint folder: a second one would rename and truncate the files of the first.

Rank 0 locks the file `.lock` there; in an object store it is an object, created only if there is none. Within a machine
the kernel decides: it releases the lock when the process ends, for whatever reason. Across machines, some file systems
have no such locks, and others keep the locks of a dead machine: so the holder also touches the file every few seconds,
and other machines look only at that.
"""

import contextlib
import errno
import fcntl
import json
import os
import platform
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from torchtitan.errors import EXIT_STATUS, ConfigError
from torchtitan.files import store_errors
from torchtitan.launcher.monitor import with_timeout
from torchtitan.launcher.signals import exit_now
from torchtitan.logging import logger

TOUCH_INTERVAL = 5.0  # seconds between two touches
LOCK_SILENCE = 30.0  # seconds without a touch after which a holder on another machine is presumed dead
HOLDER_PATIENCE = 3.0  # seconds to wait for a holder on this machine to exit; its launcher may have been killed
VISIBLE = 10.0  # seconds within which a network file system shows other machines a new file
HELD = (errno.EACCES, errno.EAGAIN)
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
LOCAL = (None, "localhost", "127.0.0.1", "::1")  # the same on every machine, so they identify no launcher
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def is_removed(path: Path) -> bool:
    """Whether nothing is there any more; False where that cannot be seen, as without permissions."""
    try:
        path.stat()
    except OSError as error:
        return error.errno in GONE
    return False


class FolderLock(contextlib.AbstractContextManager["FolderLock"]):
    """Use as a context around a run; inside it, rank 0 calls `take`. Held until the context or the process ends. The
    folder is created if it does not exist; `key` names it in messages."""

    POLL = 0.1  # seconds between two looks at a lock that another run holds

    def __init__(self, folder: Path, key: str = "job.dump_folder") -> None:
        self.path = folder / ".lock"
        self.key = key
        # For a multi-node run: the same across restarts, whichever machine has rank 0.
        launcher = [os.environ.get(name) for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
        self.token = uuid.uuid4().hex  # identifies this holder, in the file
        self._me = {
            "id": self.token,
            "name": f"process {os.getpid()} on {platform.node()}",
            "kernel": BOOT_ID.read_text().strip() if BOOT_ID.exists() else platform.node(),
            "launcher": None if launcher[1] in LOCAL else launcher,
        }
        self._file = -1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True, name="folder lock")
        self.others = contextlib.ExitStack()  # locks of the same run, released before this one

    def take(self) -> None:
        """Takes the lock; waits for a holder that may be dead or about to exit. Raises a ConfigError if another run
        holds it, or the file cannot be written."""
        try:
            self._prepare()
            self._wait()
        except (OSError, NotImplementedError) as error:
            reason = getattr(error, "strerror", None) or "nothing can be written there"
            raise ConfigError(f"{self.key}: {self.path} cannot be written ({reason}); choose another folder.") from None
        self._thread.start()

    def sees(self, token: str) -> bool:
        """Whether this machine sees the folder that the holder with this token has locked. Call it in other processes
        than the holder's. A network file system may show the file late."""
        deadline = time.monotonic() + VISIBLE
        while True:
            with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
                with store_errors(self.path):
                    holder = json.loads(self.path.read_bytes())
                if holder.get("id") == token:
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)

    def __exit__(self, error_type: Any, error: BaseException | None, trace: Any) -> None:
        self.others.__exit__(error_type, error, trace)
        self._stop.set()
        if error is None:
            self._release()
        else:  # an object store may be why, and not answer
            with_timeout(HOLDER_PATIENCE, self._release)

    def _release(self) -> None:
        if self._thread.ident is not None:  # taken; the thread may have ended already
            self._thread.join()
            with contextlib.suppress(OSError):
                if self._holder().get("id") == self.token:
                    self._remove()  # so that another machine does not wait
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _wait(self) -> None:
        """Takes the lock once no other run holds it."""
        started, first, logged = time.monotonic(), self._state(), False
        while True:
            state, locked = self._state(), self._lock()
            holder, waited = state[0], time.monotonic() - started
            if locked is not None and holder.get("kernel", self._me["kernel"]) == self._me["kernel"]:
                free, refused = locked, waited > HOLDER_PATIENCE
            else:
                mine = any(self._me.get(key) and self._me[key] == holder.get(key) for key in ("run", "launcher"))
                refused = state != first
                free = not holder or mine or (waited > LOCK_SILENCE and not refused)
            if free:
                if self._claim(holder):
                    return
            elif refused:
                raise ConfigError(self._refusal(holder))
            if not logged and waited > HOLDER_PATIENCE:
                logged = True
                logger.info(
                    f"{holder.get('name')} has not released its lock on {self.path.parent}: waiting {LOCK_SILENCE:g} s "
                    "to see whether it is still running"
                )
            time.sleep(self.POLL)

    def _refusal(self, holder: dict[str, Any]) -> str:
        return (
            f"{self.key}: another run ({holder.get('name', 'just started')}) is writing to {self.path.parent}; "
            f"wait until it ends, stop it, or choose another --{self.key}."
        )

    def _keep(self) -> None:
        """Renews the lock. Ends this run if another has taken the folder, as happens after a long suspension."""
        while not self._stop.wait(TOUCH_INTERVAL):
            with contextlib.suppress(OSError):  # the disk is full, or the store does not answer for a while
                self._prepare()
                self._lock()
                holder = self._holder()
                if holder and holder.get("id") != self.token:
                    print(f"Error: {self._refusal(holder)}", file=sys.stderr)
                    exit_now(EXIT_STATUS)
                self._renew(holder)

    # What differs in an object store

    def _prepare(self) -> None:
        """Opens the file, again if the folder was removed."""
        in_place = self._file >= 0 and not is_removed(self.path)
        if in_place and os.path.samestat(os.stat(self.path), os.fstat(self._file)):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        removed, self._file = self._file, os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        if removed >= 0:
            os.close(removed)

    def _lock(self) -> bool | None:
        """Whether this process has the kernel's lock; None if the file system has no locks. Forked processes, which
        may outlive this one, do not inherit the lock. Closing any descriptor of the file releases it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            return False if error.errno in HELD else None

    def _state(self) -> tuple[dict[str, Any], int]:
        """The holder, and something that changes while it lives."""
        return self._holder(), os.fstat(self._file).st_mtime_ns

    def _holder(self) -> dict[str, Any]:
        try:
            content = json.loads(os.pread(self._file, 4096, 0))
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def _claim(self, holder: dict[str, Any]) -> bool:
        """Writes this process into the lock in place of `holder`; False if another one was faster."""
        content = json.dumps(self._me).encode()
        os.pwrite(self._file, content, 0)
        os.ftruncate(self._file, len(content))
        os.fsync(self._file)
        return True

    def _renew(self, holder: dict[str, Any]) -> None:
        if not holder:
            self._claim(holder)
        os.utime(self._file)

    def _remove(self) -> None:
        os.ftruncate(self._file, 0)
