"""Pretraining of Llama-class models, from a laptop to hundreds of GPUs."""

import sys
from pathlib import Path

__version__ = "0.2.0"
DISTRIBUTION = "torchtitan-toml"
"""Its name for pip: `torchtitan` on PyPI is another project, which has modules of the same names."""

for _record in Path(__file__).parents[1].glob("torchtitan-*.dist-info/RECORD"):
    if "\ntorchtitan/__init__.py," in f"\n{_record.read_text()}":
        print(
            f"Error: in {Path(__file__).parent} are files of two projects, as torchtitan and {DISTRIBUTION} are both "
            f"installed there: run `pip uninstall torchtitan {DISTRIBUTION}`, and install one of them.",
            file=sys.stderr,
        )
        sys.exit(2)
