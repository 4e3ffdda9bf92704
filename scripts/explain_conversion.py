"""The old name of `python -m torchtitan.explain`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from torchtitan.errors import run_command
from torchtitan.explain import main

if __name__ == "__main__":
    run_command(main)
