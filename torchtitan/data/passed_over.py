"""Passes over the data of `training.skip_steps`."""

from collections.abc import Sequence
from multiprocessing.pool import ThreadPool

from torchtitan.data.loader import next_windows
from torchtitan.data.packing import Row
from torchtitan.logging import Waiting, logger


def pass_over(rows: Sequence[Row], threads: ThreadPool | None) -> None:
    """Draws what is in `Corpus.passed_over`, if that is next."""
    while skip := next((skip for skip in rows[0].corpus.passed_over if rows[0].windows + 1 in skip), None):
        doing = f"training.skip_steps: passing over the data of steps {rows[0].windows + 1} to {skip.stop - 1}"
        logger.info(doing)
        for _ in Waiting.over(range(rows[0].windows + 1, skip.stop), doing, "steps"):
            next_windows(rows, threads)
            for row in rows:
                row.passed_over += 1
