"""Where checkpoints and exports lie: on a disk, or in an object store, where nothing can be renamed at once. Both are
folders with one file, of `MARKS`, that is written last and lists the others."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torchtitan.cache import private_folder
from torchtitan.errors import CheckpointError
from torchtitan.files import is_remote, store_errors
from torchtitan.logging import Waiting

MARKS = {"manifest.json", "SHA256SUMS"}  # the mark of a checkpoint, and that of an export
UNFINISHED = ".unfinished"  # in an object store: of what is being written or removed; written first, removed last
OWN_FOLDER = re.compile(r"step-\d+(-hf)?(\.abandoned-\d+)?")  # folders that a run writes


class Disk:
    """Folders appear and disappear as a whole: they are written as `NAME.tmp`, and renamed before they are removed."""

    def make(self, folder: Path) -> None:
        """Creates the folder that holds them."""
        folder.mkdir(parents=True, exist_ok=True)

    def names(self, folder: Path) -> Iterable[str]:
        """Names of everything in it."""
        return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []

    def published(self, folder: Path) -> Iterable[str]:
        """Names of the finished folders in it."""
        return [name for name in self.names(folder) if (folder / name).is_dir()]

    def left_overs(self, folder: Path) -> Iterable[Path]:
        """What interrupted saves and removals have left there."""
        return folder.glob("step-*.tmp")

    def exists(self, final: Path) -> bool:
        return final.exists()

    def staging(self, final: Path) -> Path:
        """Where the files are written that will be in `final`."""
        return final.with_name(f"{final.name}.tmp")

    def begin(self, final: Path, set_aside: Callable[[Path], None]) -> None:
        """Call before the first of them is written. `set_aside` renames what must give way."""
        staging = self.staging(final)
        if any(self.names(staging)):  # an interrupted export's; not an empty one, which other ranks may just have made
            shutil.rmtree(staging)
        staging.mkdir(parents=True, exist_ok=True)

    def publish(
        self, final: Path, finish: Callable[[Path], object], set_aside: Callable[[], None] = lambda: None
    ) -> None:
        """Call once they are written. `finish` writes the last file there; `set_aside` renames what must give way."""
        staging = self.staging(final)
        finish(staging)
        sync(staging)
        set_aside()
        staging.rename(final)
        sync(final.parent)

    def give_up(self, final: Path) -> None:
        """Removes what was written since `begin`, if that can be done."""
        shutil.rmtree(self.staging(final), ignore_errors=True)

    def rename(self, path: Path, new: Path) -> None:
        path.rename(new)

    def remove(self, path: Path) -> None:
        if not path.name.endswith(".tmp"):
            doomed = path.with_name(f"{path.name}.removed.tmp")  # so that not even a kill leaves a partial step-N
            path = path.rename(doomed)
        shutil.rmtree(path)


class ObjectStore(Disk):
    """Folders are written where they stay, and exist while they have a file of `MARKS`: it is written last, and removed
    first. A folder with `UNFINISHED` and no mark is left over from an
    interrupted save. A folder with neither is not ours, and is left alone."""

    def make(self, folder: Path) -> None:
        pass

    def names(self, folder: Path) -> Iterable[str]:
        return _folders(folder)

    def published(self, folder: Path) -> Iterable[str]:
        return [name for name, files in _folders(folder).items() if files & MARKS or not files & {UNFINISHED, ""}]

    def left_overs(self, folder: Path) -> Iterable[Path]:
        _abort_uploads(folder)
        unfinished = {name for name, files in _folders(folder).items() if files & {UNFINISHED, *MARKS} == {UNFINISHED}}
        return [folder / name for name in unfinished if OWN_FOLDER.fullmatch(name)]

    def exists(self, final: Path) -> bool:
        return not _files(final).isdisjoint(MARKS)

    def staging(self, final: Path) -> Path:
        return final

    def begin(self, final: Path, set_aside: Callable[[Path], None]) -> None:
        if self.exists(final):
            set_aside(final)
        files = _files(final)
        if files and UNFINISHED not in files:
            raise OSError(errno.EEXIST, "other files are there: remove them, or choose another folder", str(final))
        self.remove(final)  # what an interrupted save has left
        _mark(final)

    def publish(
        self, final: Path, finish: Callable[[Path], object], set_aside: Callable[[], None] = lambda: None
    ) -> None:
        set_aside()
        finish(final)
        _unmark(final)

    def give_up(self, final: Path) -> None:
        with contextlib.suppress(OSError):
            if UNFINISHED in _files(final):  # without it, `begin` found files of others there
                self.remove(final)

    def rename(self, path: Path, new: Path) -> None:
        files = _files(path) - {UNFINISHED}
        _mark(new)
        with store_errors(path):
            for names in filter(None, (files - MARKS, files & MARKS)):
                _fs(path).copy([_key(path / name) for name in names], [_key(new / name) for name in names])
        _unmark(new)
        self.remove(path)

    def remove(self, path: Path) -> None:
        files = _files(path)
        if not files:
            return
        _mark(path)
        with store_errors(path):
            for names in filter(None, (files & MARKS, files - MARKS - {UNFINISHED})):
                _fs(path).rm([_key(path / name) for name in names])
        _unmark(path)


@contextlib.contextmanager
def os_errors(message: str) -> Iterator[None]:
    """Within it, an OSError becomes a CheckpointError: the message, and the reason in brackets."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{message} ({error.strerror}).") from None


def store_of(path: Path) -> Disk:
    return ObjectStore() if is_remote(path) else Disk()


def sync(path: Path) -> None:
    """Waits until a file, or a folder's directory entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file in a folder; -1 for a link, a folder or a pipe."""
    if not is_remote(folder):
        with os.scandir(folder) as entries:
            return {
                entry.name: entry.stat(follow_symlinks=False).st_size if entry.is_file(follow_symlinks=False) else -1
                for entry in entries
            }
    with store_errors(folder):
        return {
            entry["name"].rpartition("/")[2]: entry["size"] if entry["type"] == "file" else -1
            for entry in _fs(folder).ls(_key(folder), detail=True)
            # not a folder's own entry, as consoles make it; nor the mark of a save killed after its last file
            if not entry["name"].endswith((f"{_key(folder)}/", f"/{UNFINISHED}"))
        }


def _fs(path: Path) -> Any:
    return path.fs  # type: ignore[attr-defined]  # of a UPath


def _key(path: Path) -> str:
    key: str = path.path  # type: ignore[attr-defined]  # of a UPath
    return key.rstrip("/")


def _files(folder: Path) -> set[str]:
    """Files in a folder and the folders in it, as paths from there."""
    with store_errors(folder):
        return {key[len(_key(folder)) + 1 :] for key in _fs(folder).find(_key(folder))} - {""}


def _mark(folder: Path) -> None:
    with store_errors(folder):
        _fs(folder).pipe_file(_key(folder / UNFINISHED), b"")


def _unmark(folder: Path) -> None:
    with store_errors(folder):
        _fs(folder).rm_file(_key(folder / UNFINISHED))


def _folders(folder: Path) -> dict[str, set[str]]:
    """The folders in a folder, and the files in each."""
    inner: dict[str, set[str]] = {}
    for file in _files(folder):
        name, _, rest = file.partition("/")
        inner.setdefault(name, set()).add(rest)
    return inner


def _abort_uploads(folder: Path) -> None:
    """Aborts uploads that were never completed: no listing shows them, but they cost money. gs:// drops them itself."""
    fs, (bucket, _, prefix) = _fs(folder), _key(folder).partition("/")
    if hasattr(fs, "list_multipart_uploads"):
        with contextlib.suppress(PermissionError), store_errors(folder):
            for upload in fs.list_multipart_uploads(bucket):
                if upload["Key"].startswith(f"{prefix}/step-".lstrip("/")):
                    fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])


def copy_tree(folder: Path, new: Path) -> None:
    """Copies a folder to this machine."""
    if not is_remote(folder):
        shutil.copytree(folder, new)
        return
    names = sorted(name for name in _files(folder) if name and not name.endswith("/") and name != UNFINISHED)
    for name in names:  # stores allow any name, also `../x` and `/x`, which would be written elsewhere
        if "\\" in name or "\0" in name or any(segment in ("", ".", "..") for segment in name.split("/")):
            reason = f"its object {name!r:.80} is refused: it would be copied to elsewhere"
            raise OSError(errno.EINVAL, reason, str(folder))
    for name in Waiting.over(names, f"copying {folder} to {new}", "files"):
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        with store_errors(folder / name):
            _fs(folder).get_file(_key(folder / name), str(new / name))


def fetched_folder(folder: Path, key: str = "") -> Path:
    """A folder that is read from here: itself, if it is on this machine or a checkpoint of this program, whose parts
    are read where they lie; or else its copy in this machine's cache, which all processes share. Raises a
    CheckpointError, with the `key` that names it, if there is nothing, or it cannot be read or copied."""
    prefix = f"{key}: " if key else ""
    if not is_remote(folder):
        if not folder.exists():
            raise CheckpointError(f"{prefix}{folder} does not exist.")
        return folder
    try:
        with store_errors(folder):
            objects = _fs(folder).find(_key(folder), detail=True)
        versions = {
            key[len(_key(folder)) + 1 :]: (about["size"], str(about.get("ETag") or about.get("mtime")))
            for key, about in objects.items()
            if not key.endswith("/")
        }
        if not versions:
            raise CheckpointError(f"{prefix}{folder} does not exist.")
        if "manifest.json" in versions or all("/" in name for name in versions):
            return folder
        content = json.dumps([str(folder), sorted((name, *version) for name, version in versions.items())])
        home = private_folder("fetched") / hashlib.sha256(content.encode()).hexdigest()[:16]
        home.mkdir(exist_ok=True)
        copy = home / folder.name  # the name may tell the step
        with (home / ".lock").open("wb") as lock:
            with Waiting(f"waiting for the copy of {folder}"):
                fcntl.lockf(lock, fcntl.LOCK_EX)
            if not copy.exists():
                temporary = home / f"{copy.name}.tmp"
                shutil.rmtree(temporary, ignore_errors=True)  # a process that was killed left it
                copy_tree(folder, temporary)
                temporary.rename(copy)
        return copy
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
        raise CheckpointError(
            f"{prefix}{folder} cannot be read ({getattr(error, 'strerror', None) or error})."
        ) from None
