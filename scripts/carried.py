"""Packages that were carried to a machine without a network, made by scripts/carry_for_gpu.sh.

python scripts/carried.py [peer]     unpacks those for this Python, if there are any, and prints their folder

The folder is for PYTHONPATH, so pip is not needed. With `peer` it is the folder of the trainer for comparison.
"""

import argparse
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "carried" / f"{sys.version_info.major}.{sys.version_info.minor}"


def unpacked(folder: Path) -> Path | None:
    """The folder of the packages; None if nothing was carried for this Python."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        return None
    site = folder / "site"
    if not site.is_dir():
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as file:
                    file.extractall(unfinished)
            try:
                Path(unfinished).rename(site)
            except OSError:
                if not site.is_dir():  # another process was faster
                    raise
    return site


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", nargs="?", default="", help="of the trainer for comparison")
    print(unpacked(FOLDER / parser.parse_args().peer) or "")
