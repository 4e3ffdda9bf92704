"""The old name of `python -m torchtitan.generate`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from torchtitan.errors import run_command
from torchtitan.generate import main

if __name__ == "__main__":
    run_command(main)
