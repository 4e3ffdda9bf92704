"""Prints what pyproject.toml requires and this Python lacks, a requirement a line.

python scripts/missing.py [EXTRA ...]
"""

import argparse
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

try:  # what pip reads requirements with; pip brings both to an environment that has nothing else
    from packaging.requirements import Requirement
    from packaging.version import Version
except ModuleNotFoundError:
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]
    from pip._vendor.packaging.version import Version  # type: ignore[assignment]
if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

PROJECT: dict[str, Any] = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def expanded(lines: list[str]) -> Iterator[Requirement]:
    """The requirements of these lines, with the requirements of the project's own extras in place of their names."""
    for requirement in map(Requirement, lines):
        if requirement.name != PROJECT["name"]:
            yield requirement
        for extra in requirement.extras if requirement.name == PROJECT["name"] else ():
            yield from expanded(PROJECT["optional-dependencies"][extra])


def fits(requirement: Requirement) -> bool:
    """Whether it is installed, or not required here. A vendor's 2.11.0a0 counts as 2.11."""
    if requirement.marker and not requirement.marker.evaluate():
        return True
    try:
        return Version(version(requirement.name)).base_version in requirement.specifier
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", metavar="EXTRA")
    extras = parser.parse_args().extras
    if unknown := [*filter(lambda extra: extra not in PROJECT["optional-dependencies"], extras)]:
        parser.error(f"pyproject.toml has no extra {unknown[0]}")
    wanted = expanded([*PROJECT["dependencies"], f"{PROJECT['name']}[{','.join(extras)}]"])
    print("\n".join(str(requirement) for requirement in wanted if not fits(requirement)))
