"""The cache folder that runs share; compiled code only where no other user can write."""

import atexit
import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan.logging import logger

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
LOOK_SECONDS = 0.1  # how often a process looks at what others have written


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchtitan"


_of_this_process: dict[tuple[str, str], dict[str, Any]] = {}  # cache folder and name -> counters


def cached_results(name: str) -> dict[str, Any]:
    """Measurements by key: those in the file, if it can be read, and those that only this process keeps."""
    return {**_saved_results(name), **_of_this_process.get((os.environ.get("XDG_CACHE_HOME", ""), name), {})}


def _saved_results(name: str) -> dict[str, Any]:
    try:
        saved = json.loads((cache_folder() / name).read_text())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: this user has no home folder
        return {}
    return saved if isinstance(saved, dict) else {}


def cache_result(name: str, key: str, value: float, keep: bool = True) -> None:
    """Caches a measurement, for later runs too if `keep`. If that fails, they measure again."""
    if not keep:
        _of_this_process.setdefault((os.environ.get("XDG_CACHE_HOME", ""), name), {})[key] = value
        return
    with contextlib.suppress(OSError, RuntimeError):
        file = cache_folder() / name
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({**_saved_results(name), key: value}, indent=1))
        temporary.replace(file)


def write_once(
    path: Path, write: Callable[[BinaryIO], None], written: Callable[[], bool] | None = None, target: Path | None = None
) -> bool:
    """Writes a file and renames it to `target`, unless it is `written` (it exists), or another process is writing it.
    Returns whether this process wrote it."""
    new = path.with_suffix(".new")
    try:
        with new.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (written or path.exists)():
                return False
            file.truncate(0)
            write(file)
            file.flush()
            os.fsync(file.fileno())
            new.replace(target or path)
            return True
    except BlockingIOError:
        return False
    except FileNotFoundError:
        if new.parent.exists():
            raise
        return False  # another process has removed the folder, because the index is complete


def private_folder(name: str) -> Path:
    """A folder in the cache that only this user can access. Raises an OSError if it cannot be created or others can
    write to it, and a RuntimeError if this user has no home folder."""
    folder = cache_folder() / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owned(folder)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} is not writable")
    return folder


def check_owned(folder: Path) -> None:
    """Raises an OSError unless this user owns the folder, and others can neither write to it nor replace it."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a folder, or is a link, or belongs to another user")
    if others_can_write(about):
        raise PermissionError(f"other users can write to {folder}")
    for place in (folder, *folder.parents):
        mode, owner = place.stat().st_mode, place.stat().st_uid
        if owner not in (0, os.geteuid()) or (mode & stat.S_IWOTH and not mode & stat.S_ISVTX):
            raise PermissionError(f"other users can write to {place}")


def others_can_write(about: os.stat_result) -> bool:
    """Whether anyone but the owner can change a file or folder. A group whose number is the user's own has no other
    members: many systems make one for each user."""
    of_group = about.st_mode & stat.S_IWGRP and about.st_gid != os.geteuid()
    return bool(about.st_mode & stat.S_IWOTH or of_group)


def keep_compiled_code_private() -> None:
    """Sets inductor's cache folder, and on GPUs what it must not generate; call it before the first compilation. By
    default inductor uses a predictable path in /tmp, and would load whatever another user has put there."""
    from torchtitan.compat import inductor  # imports the compiler

    given = os.environ.get(INDUCTOR)
    # The compiler sets it to its default when it is imported.
    os.environ[INDUCTOR] = folder = _inductor_folder(None if given == inductor.default_cache_dir() else given)
    inductor.keep_precompiled_headers_in(folder)
    inductor.avoid_nan_instructions()
    inductor.separate_loops()


def _inductor_folder(given: str | None) -> str:
    try:
        if given is None:
            return str(private_folder("inductor-2"))  # 2: with what `compat.inductor` changes in generated code
        Path(given).mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owned(Path(given))
        return given
    except (OSError, RuntimeError) as error:
        logger.warning(
            f"compiled code is cached in a temporary folder for this run only; no safe cache folder: {error}"
        )
        folder = tempfile.mkdtemp(prefix="torchtitan-inductor-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder
