"""Verifies files, each once on a machine; the cache folder keeps the result."""

from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from torchtitan.cache import cache_folder
from torchtitan.data.file_versions import Stamp, sample_of
from torchtitan.data.hashes import REMAKE, Check
from torchtitan.data.sources import digest
from torchtitan.data.write_once import write_once
from torchtitan.files import sha256_of

INTACT = b"intact"  # in the cache folder


def fault_found_by_one(path: Path, check: Check, stamp: Stamp) -> str | None:
    """What is wrong with a file, which one process of the machine finds; None while another is at it. Raises an OSError
    if the file cannot be read, and a DataError if it has changed."""

    def fault() -> str:
        found = check.fault()
        stamp.check(path)
        return found

    def write_fault(file: BinaryIO) -> None:
        file.write(fault().encode() or INTACT)

    with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home folder
        place = cache_folder() / "verified" / digest([str(path.absolute()), stamp, sample_of(path), check.rule])
        place.parent.mkdir(parents=True, exist_ok=True)
        write_once(place, write_fault)
        if not place.exists():
            return None
        if place.read_bytes() == INTACT:
            return ""
    return fault()


def by_sha256(path: Path, sha256: str) -> Check:
    def fault() -> str:
        same = sha256_of(path) == sha256
        return "" if same else f"{path} does not have the SHA-256 that metadata.json beside it says; {REMAKE}."

    return Check(sha256, fault)
