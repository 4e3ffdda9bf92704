"""Pretraining of Llama-class models, from a laptop to hundreds of GPUs."""

import signal
import sys
from pathlib import Path

__version__ = "0.2.0"
DISTRIBUTION = "torchtitan-toml"
"""Its name for pip: `torchtitan` on PyPI is another project, which has modules of the same names."""

_module = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] if "-m" in sys.orig_argv else []
if "".join(_module).startswith("torchtitan.") and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C that comes while a command imports prints no traceback

for _record in Path(__file__).parents[1].glob("torchtitan-*.dist-info/RECORD"):
    if "\ntorchtitan/__init__.py," in f"\n{_record.read_text()}":
        print(
            f"Error: in {Path(__file__).parent} are files of two projects, as torchtitan and {DISTRIBUTION} are both "
            f"installed there: run `pip uninstall torchtitan {DISTRIBUTION}`, and install one of them.",
            file=sys.stderr,
        )
        sys.exit(2)
