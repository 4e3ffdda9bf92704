"""The compiler's cache as files that can be copied to another machine, for gpu.py.

A first line of JSON says which torch and which GPU it was made with; then come the compressed artifacts of
`torch.compiler.save_cache_artifacts`, one for each process. torch runs code that is in them, so only load own files.
What goes over the limit is in further files, FILE.1, FILE.2, ...
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

LIMIT = 16 * 2**20  # bytes of a file


def files(path: Path) -> Iterator[Path]:
    """`path`, then FILE.1, FILE.2, ..., whether they are there or not."""
    yield path
    yield from (path.with_name(f"{path.name}.{number}") for number in count(1))


def save_cache(path: Path, artifacts: Sequence[bytes], made_with: Mapping[str, str], limit: int = LIMIT) -> list[Path]:
    """Writes the files, of at most `limit` bytes each, and deletes those that an earlier call wrote beyond them."""
    packed = [zlib.compress(one) for one in artifacts]
    head = json.dumps({**made_with, "bytes": [len(one) for one in packed]}).encode() + b"\n"
    content, written = head + b"".join(packed), []
    path.parent.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(files(path)):
        part = content[number * limit : (number + 1) * limit]
        if part:
            file.write_bytes(part)
            written.append(file)
        elif file.exists():
            file.unlink()
        else:
            return written
    raise AssertionError("the files never end")


def load_cache(path: Path, made_with: Mapping[str, str]) -> tuple[list[bytes], str]:
    """The artifacts, and a sentence: how many there are, or why none is used."""
    content = b""
    for file in files(path):
        if not file.exists():
            break
        content += file.read_bytes()
    if not content:
        return [], f"{path} is not there yet: everything is compiled"
    try:
        head, packed = content.split(b"\n", 1)
        about = json.loads(head)
        lengths: list[int] = about.pop("bytes")
        if about != made_with:
            return [], f"{path} is not used: it is of {described(about)}, but this is {described(made_with)}"
        if sum(lengths) != len(packed):
            return [], f"{path} is not used: {len(packed)} of its {sum(lengths)} bytes are there"
        artifacts, start = [], 0
        for length in lengths:
            artifacts.append(zlib.decompress(packed[start : start + length]))
            start += length
    except (ValueError, KeyError, AttributeError, zlib.error) as error:
        return [], f"{path} is not used: it is no cache ({error})"
    return artifacts, f"{path}: {sum(map(len, artifacts)) / 2**20:.1f} MiB of compiled code, of {described(made_with)}"


def described(made_with: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in made_with.items())
