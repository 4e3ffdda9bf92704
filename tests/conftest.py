"""What all tests share; the modules that they import are in `helpers`."""

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, and inherited by child processes: tiny models gain nothing from a second thread, and
# spinning threads lose a factor of ten next to another process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# For this process alone, where the idle one of two threads would spin: fifteen times the CPU time of small tensors.
os.environ["OMP_WAIT_POLICY"] = "passive"

import pytest
import tiny  # noqa: F401  registers its models, for every test and in every order
import torch
from object_store import s3 as s3  # a fixture

del os.environ["OMP_WAIT_POLICY"]  # torch has read it

# Child processes find train.py and the tests' modules.
TESTS = Path(__file__).parent
PATHS = [str(TESTS.parent), str(TESTS / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """For code that divides its work between threads explicitly."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` only tests/gpu is imported: a machine with a GPU may lack what other tests need."""
    folder = collection_path.relative_to(Path(__file__).parent).parts[:1]
    return True if config.option.markexpr == "gpu" and folder not in ((), ("gpu",), ("conftest.py",)) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order", help="shuffle the files, and the tests of each file, by this text")
    parser.addoption("--turn", help="of the tests marked `full`, only each N-th, from the K-th on: K/N, as 1/2")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--turn` each file keeps its share of the long tests, and neighbors, which resemble each other, take turns.
    With `--order` the order is another one, in which the tests of a file stay together: they share fixtures. With
    `--cov` only the unit tests' lines count: counting takes as long as Python itself, and what other tests start is
    not counted anyway."""
    if turn := config.getoption("turn"):
        first, shares = map(int, turn.split("/"))
        seen: Counter[Path] = Counter()
        others = set()
        for item in items:
            if item.get_closest_marker("full"):
                seen[item.path] += 1
                if (seen[item.path] - first) % shares:
                    others.add(item)
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    if order := config.getoption("order"):
        shuffled = random.Random(order)
        places = {path: shuffled.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (places[item.path], shuffled.random()))
    if config.pluginmanager.hasplugin("_cov"):
        for item in items:
            if "unit" not in item.path.parts:
                item.add_marker("no_cover")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The number of workers for `-n auto`: one more than cores, because tests of signals and faults wait. A single file
    finishes before two workers have started, and shares fixtures."""
    one_file = len(config.args) == 1 and ".py" in config.args[0]
    return 0 if one_file else min(4, len(os.sched_getaffinity(0)) + 1)  # a test may start 8 processes


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Reports what this machine could not test, such as kernels for a unit that its CPU lacks."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.getreports("skipped"))
    for reason, count in reasons.items():
        terminalreporter.write_line(f"NOT TESTED HERE: {count} x {reason.removeprefix('Skipped: ')}", yellow=True)
