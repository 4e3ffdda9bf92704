"""Lies here so that pytest puts this folder on the path: tests of all kinds share `runs.py` and `tiny.py`."""

import os
from collections import Counter
from collections.abc import Iterator

# Before torch is imported, and for all that a test starts: tiny models gain nothing from a second thread, and threads
# that spin for each other lose a factor of ten beside another process.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture
def two_threads() -> Iterator[None]:
    """For what splits its work between threads by hand."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Of `-n auto`. A file is done sooner than two workers have started, and shares what its tests share."""
    one_file = len(config.args) == 1 and ".py" in config.args[0]
    return 0 if one_file else min(4, len(os.sched_getaffinity(0)))  # a test may start 8 processes


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what this machine could not test, such as kernels for a unit that its CPU does not have."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.getreports("skipped"))  # type: ignore[index]
    for reason, count in reasons.items():
        terminalreporter.write_line(f"NOT TESTED HERE: {count} x {reason.removeprefix('Skipped: ')}", yellow=True)
