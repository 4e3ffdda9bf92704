"""Trains a model: `torchrun train.py --job.config_file=FILE.toml --section.key=value ...`, or `./run_train.sh`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # this checkout's, even if another torchtitan is installed

from torchtitan.train import main

if __name__ == "__main__":
    main()
