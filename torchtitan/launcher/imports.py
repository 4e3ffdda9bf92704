"""Importing torch, and all that comes with it: a version that fits, and in less time."""

import contextlib
import gc
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from torchtitan.errors import UserError

LEAST = {"torch": (2, 11), "torchao": (0, 18)}
"""The oldest versions that have been run (docs/versions.md); pyproject.toml has the same."""


def check_versions() -> None:
    """Refuses a torch or torchao older than promised, by what is installed: importing it might fail anywhere.

    Raises:
        UserError: with the version that is needed.
    """
    for name, least in LEAST.items():
        wanted = f"{name} {'.'.join(map(str, least))} or later is needed"
        remedy = f"pip install '{name}>={'.'.join(map(str, least))}'"
        try:
            found = version(name)
        except PackageNotFoundError:
            raise UserError(f"{wanted}, and none is installed; {remedy}.") from None
        if tuple(int(number) for number in re.findall(r"\d+", found)[:2]) < least:
            raise UserError(f"{wanted}, and {found} is installed; {remedy}.")


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Without the garbage collector, which would look again and again, now and later, through what modules keep."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
