"""Packages that were carried to a machine without a network, made by scripts/carry_for_gpu.sh.

python scripts/carried.py     unpacks those for this Python, if there are any, and prints their folder
"""

import sys
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "carried" / f"{sys.version_info.major}.{sys.version_info.minor}"


def unpacked(folder: Path = FOLDER) -> Path | None:
    """The folder to put on PYTHONPATH, so that pip is not needed; None if nothing was carried for this Python."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        return None
    site = folder / "site"
    if not site.is_dir():
        unfinished = folder / "unfinished"
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as file:
                file.extractall(unfinished)
        unfinished.rename(site)
    return site


if __name__ == "__main__":
    print(unpacked() or "")
