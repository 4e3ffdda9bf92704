"""The old name of `python -m torchtitan.convert to-hf`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from torchtitan.convert import main
from torchtitan.errors import run_command

if __name__ == "__main__":
    sys.argv.insert(1, "to-hf")
    run_command(main)
