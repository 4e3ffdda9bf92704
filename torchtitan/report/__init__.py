"""A page to inspect runs: `python -m torchtitan.report RUN [RUN ...] -o report.html`. Does not import torch.

`run.py` reads dump folders, `series.py` down-samples curves, `compare.py` compares configurations, and `page.py` fills
`page.html`. See docs/report.md.
"""

from pathlib import Path

from torchtitan.errors import UserError
from torchtitan.logging import logger

REPORT = "report.html"


def write_at_end(dump_folder: Path) -> None:
    """Writes a run's `report.html` to its dump folder. Failures are only warnings, because the run itself succeeded."""
    try:
        from torchtitan.report.page import render, write_page
        from torchtitan.report.run import read_run

        write_page(render([read_run(dump_folder)]), dump_folder / REPORT)
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        logger.warning(f"metrics.report: {REPORT} could not be written ({reason})")
    else:
        logger.info(f"wrote {dump_folder / REPORT}")
