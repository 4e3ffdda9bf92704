"""No longer there; says what to use instead."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from torchtitan.errors import ConfigError, run_command


def main() -> None:
    raise ConfigError(
        "search_precision.py is no longer there: its mixtures of recipes could not be told from float8 in all layers. "
        "scripts/numerics_report.py measures the errors of each layer and proposes filter_fqns; what the search has "
        "written still works."
    )


if __name__ == "__main__":
    run_command(main)
