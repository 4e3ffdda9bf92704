"""The lock of a folder in an object store."""

import contextlib
import json
import platform
import time
from pathlib import Path
from typing import Any

from torchtitan.files import store_errors
from torchtitan.launcher.folder_lock import FolderLock


class ObjectLock(FolderLock):
    """The lock of a folder in an object store. Its holder writes it every few seconds; one that stays the same for
    `LOCK_SILENCE` is of a dead run, and so is one of this run's dump folder, which is locked itself."""

    POLL = 1.0

    def __init__(self, folder: Path, key: str, dump_folder: Path) -> None:
        super().__init__(folder, key)
        place = dump_folder.resolve()
        status = place.stat()  # tells containers with folders of the same name apart
        self._me["run"] = f"{platform.node()}:{place}:{status.st_dev}:{status.st_ino}"

    def _prepare(self) -> None:
        pass

    def _lock(self) -> None:
        return None

    def _state(self) -> tuple[dict[str, Any], int]:
        return self._holder(), 0  # its time is that of its last write

    def _holder(self) -> dict[str, Any]:
        place: Any = self.path
        try:
            with store_errors(self.path):  # one request reads both: a holder may write between two
                content = json.loads(place.fs.cat_file(place.path))
        except FileNotFoundError as error:
            if "bucket" in str(error.strerror):
                raise
            return {}
        except (ValueError, RecursionError):
            return {"name": "another program"}
        return content if isinstance(content, dict) else {}

    def _claim(self, holder: dict[str, Any]) -> bool:
        if holder:
            self._remove()
        try:
            self._renew(holder, mode="create")
            return True
        except FileExistsError:
            return False

    def _renew(self, holder: dict[str, Any], mode: str = "overwrite") -> None:
        content = json.dumps({**self._me, "time": time.time()}).encode()
        place: Any = self.path
        with store_errors(self.path):
            place.fs.pipe_file(place.path, content, mode=mode)

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError), store_errors(self.path):
            self.path.unlink()
