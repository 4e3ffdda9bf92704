"""Makes a libnccl.so.2.xz small enough to be carried to a machine with one GPU, on which several ranks are tested.

python scripts/small_nccl.py FOLDER [ARCHITECTURE]     90 for H100 and H200, the default; 100 for B200

NCCL lets ranks share a GPU from 2.30 on, and torch 2.11 to 2.13 bring earlier ones along. A wheel of NCCL has 200 MB:
machine code for seven architectures. Zeros in place of the other six compress to nothing.

The code lies in "fat binaries", whose layout NVIDIA does not document; it is read here as cuobjdump shows it. Each
container begins with a header of 16 bytes: magic number, version, size of the header, size of the entries behind it.
An entry's header begins with its kind (1 for PTX, 2 for machine code), its own size and the size of its content; 28
bytes in stands the architecture.
"""

import argparse
import lzma
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VERSION = "2.30.4"
MAGIC = struct.pack("<I", 0xBA55ED50)
MACHINE_CODE = 2
SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")


class Entry(NamedTuple):
    """Code for one architecture: its kind, its architecture, and where its content lies in the library."""

    kind: int
    architecture: int
    content: slice


def sections(library: bytes) -> Iterator[slice]:
    """Where a 64-bit ELF file keeps its code for GPUs."""
    (table,) = struct.unpack_from("<Q", library, 40)
    size, count, of_names = struct.unpack_from("<3H", library, 58)
    headers = [struct.unpack_from("<2I4Q", library, table + number * size) for number in range(count)]
    names = headers[of_names][4]
    for name, _, _, _, start, length in headers:
        if library[names + name : library.index(0, names + name)] in SECTIONS:
            yield slice(start, start + length)


def entries(library: bytes) -> Iterator[Entry]:
    for section in sections(library):
        container = library.find(MAGIC, section.start, section.stop)
        while container >= 0:
            header, size = struct.unpack_from("<HQ", library, container + 6)
            at, end = container + header, container + header + size
            while at < end:
                (kind,) = struct.unpack_from("<H", library, at)
                own, content = struct.unpack_from("<IQ", library, at + 4)
                (architecture,) = struct.unpack_from("<I", library, at + 28)
                yield Entry(kind, architecture, slice(at + own, at + own + content))
                at += own + content
            container = library.find(MAGIC, end, section.stop)


def keep(library: bytearray, architecture: int) -> None:
    """Overwrites the code for all other architectures with zeros. Exits if there is none for this one."""
    found = list(entries(bytes(library)))
    if (MACHINE_CODE, architecture) not in {(entry.kind, entry.architecture) for entry in found}:
        known = sorted({entry.architecture for entry in found if entry.kind == MACHINE_CODE})
        sys.exit(f"Error: NCCL {VERSION} has no code for {architecture}, only for {', '.join(map(str, known))}.")
    for entry in found:
        if (entry.kind, entry.architecture) != (MACHINE_CODE, architecture):
            library[entry.content] = bytes(entry.content.stop - entry.content.start)


def main(folder: str, architecture: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        wheels = ["--only-binary=:all:", "--platform=manylinux_2_18_x86_64", f"--dest={scratch}"]
        subprocess.run([*command, *wheels, f"nvidia-nccl-cu13=={VERSION}"], check=True)
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            library = bytearray(wheel.read(next(name for name in wheel.namelist() if name.endswith("libnccl.so.2"))))
    keep(library, architecture)
    path = Path(folder) / "libnccl.so.2.xz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(library, preset=3))
    print(f"{path}: {path.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("architecture", metavar="ARCHITECTURE", nargs="?", type=int, default=90)
    arguments = parser.parse_args()
    main(arguments.folder, arguments.architecture)
