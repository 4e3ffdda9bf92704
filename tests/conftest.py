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
# CPU seconds of half of the long tests, of the files that take longest. Each is the first work of a worker, and the
# others take from the end of that one's work, which is short: so a file keeps its reference runs and its compilers.
LONGEST = {
    "distributed/test_layouts.py": 410,
    "cross/test_steps.py": 300,
    "distributed/test_converter_layouts.py": 170,
    "cross/test_step_by_hand.py": 85,
    "cross/test_streams.py": 80,
    "distributed/test_plan.py": 75,
    "distributed/test_weight_classes.py": 60,
    "unit/test_plan_extrapolation.py": 55,
}
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


@pytest.hookimpl(trylast=True)  # after `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--turn` each file keeps its share of the long tests, and neighbors, which resemble each other, take turns.
    With `--order` the order is another one, in which the tests of a file stay together: they share fixtures. With
    `--cov` only the unit tests' lines count: counting takes as long as Python itself, and what other tests start is
    not counted anyway. Several workers each begin with some of the longest files."""
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
    items[:] = longest_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    if config.pluginmanager.hasplugin("_cov"):
        for item in items:
            if "unit" not in item.path.parts:
                item.add_marker("no_cover")


def longest_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """In the order in which `--dist worksteal` deals: as many tests to each worker, one worker after the other."""
    if workers == 1:
        return items
    files: dict[str, list[pytest.Item]] = {name: [] for name in LONGEST}
    short: list[pytest.Item] = []
    for item in items:
        files.get(item.path.relative_to(TESTS).as_posix(), short).append(item)
    seconds, shares = [0] * workers, [list[pytest.Item]() for _ in range(workers)]
    for name, of_file in files.items():
        if of_file:
            worker = seconds.index(min(seconds))
            seconds[worker] += LONGEST[name]
            shares[worker] += of_file
    left = len(items)
    for place, share in enumerate(shares):
        room = max(left // (workers - place) - len(share), 0)
        share += short[:room]
        short = short[room:]
        left -= len(share)
    return [item for share in shares for item in share]


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
