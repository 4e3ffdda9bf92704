"""Copies, in the cache folder, of files in object stores that must lie on this machine: tables and tokenizers."""

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from torchtitan.cache import private_folder
from torchtitan.data.blocks import grown
from torchtitan.data.file_versions import Stamp, file_system_of
from torchtitan.data.sources import digest
from torchtitan.data.write_once import INDEX_LOOK_SECONDS, write_once
from torchtitan.files import store_errors
from torchtitan.logging import Waiting


def copied(root: Path, names: Sequence[str]) -> Path:
    """A folder with files of a folder in an object store, in this version; of the same name, because ids contain it.
    The processes of a machine make it once, or, without a cache folder, each for itself. Raises a DataError if a file
    changes while it is copied."""
    versions = [(name, Stamp.of(root / name)) for name in names]
    try:
        folder = private_folder("blocks")
    except (OSError, RuntimeError):  # RuntimeError: this user has no home folder
        folder = Path(tempfile.mkdtemp(prefix="torchtitan-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder = folder / digest([str(root), versions]) / root.name

    def fetch(source: Path, stamp: Stamp, file: BinaryIO) -> None:
        store, inside = file_system_of(source)
        with store_errors(source):
            store.get_file(inside, file.name)
            stamp.check(source)

    doing = f"{root}: copying {sum(stamp.size for _, stamp in versions) / 1e9:,.1f} GB into the cache folder"
    for name, stamp in Waiting.over(versions, doing, "files"):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        while not place.exists():
            if write_once(place, partial(fetch, root / name, stamp)):
                grown(stamp.size)
            else:
                time.sleep(INDEX_LOOK_SECONDS)
        os.utime(place, ns=(time.time_ns(), place.stat().st_mtime_ns))  # it is used
    return folder
