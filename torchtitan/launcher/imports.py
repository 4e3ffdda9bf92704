"""Importing torch and its dependencies: checks versions first, and saves time."""

import contextlib
import gc
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from torchtitan.errors import UserError

OLDEST_VERSIONS = {"torch": (2, 11), "torchao": (0, 18)}
"""The oldest tested versions (docs/versions.md), as in pyproject.toml."""


def check_versions() -> None:
    """Raises a UserError if torch or torchao is too old. Reads package metadata: importing an old version may fail
    anywhere."""
    for name, least in OLDEST_VERSIONS.items():
        wanted = f"{name} {'.'.join(map(str, least))} or later is required"
        remedy = f"run pip install '{name}>={'.'.join(map(str, least))}'"
        try:
            installed = version(name)
        except PackageNotFoundError:
            raise UserError(f"{wanted}, but it is not installed; {remedy}.") from None
        if tuple(int(number) for number in re.findall(r"\d+", installed)[:2]) < least:
            raise UserError(f"{wanted}, but {installed} is installed; {remedy}.")


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Disables garbage collection during imports, and exempts the imported objects from later collections."""
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # again, it would keep the garbage of an earlier run in this process for good
            gc.freeze()
        gc.enable()
