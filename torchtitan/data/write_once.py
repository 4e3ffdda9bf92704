"""Files in the cache folder that one of several processes writes."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

INDEX_LOOK_SECONDS = 0.1  # how often a process looks at what others have finished


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
