"""What each rank prints."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from clock import Clock

from torchtitan.logging import NOISY_LOGGERS, Waiting, init_logging, logger

pytestmark = pytest.mark.usefixtures("log")  # restores the logger


def say(capsys: pytest.CaptureFixture[str]) -> list[str]:
    logger.info("all is well")
    logger.warning("look here")
    logger.error("it broke")
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.splitlines()


def test_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    init_logging(rank=0, world_size=1, color=True)  # no terminal here, so no colors
    info, warning, error = say(capsys)
    assert info.endswith(" all is well") and info[:4].isdigit()
    assert warning.startswith("WARNING ") and warning.endswith(" look here")
    assert error.startswith("ERROR ") and error.endswith(" it broke")
    logger.info("a name of a file: \x1b[31m")
    assert capsys.readouterr().out.endswith("a name of a file: \\x1b[31m\n")


def test_something_slow_says_how_far_it_has_come(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    clock, said = Clock(), ["", ""]

    def until(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not done():
            assert time.monotonic() < deadline, said
            time.sleep(0.01)
            said[:] = map("".join, zip(said, capsys.readouterr(), strict=True))

    monkeypatch.setattr("torchtitan.logging.time", clock)
    monkeypatch.setattr(Waiting, "INTERVAL", 0.05)
    monkeypatch.setattr(logger, "handlers", [])
    for number in Waiting.over(range(4), "plan", "simulations"):
        if number == 1:
            clock.now = 0.4
            until(lambda: "plan: 1 of 4 simulations, 0 s so far, about 1 s left\n" in said[1])  # no log: stderr
    init_logging(rank=0, world_size=1, color=False)
    with Waiting("export"):
        until(lambda: "export: 0 s so far\n" in said[0])
    assert "export" not in said[1]
    until(lambda: all(thread.name != "progress" for thread in threading.enumerate()))  # it says no more


def test_rank_0_of_several(capsys: pytest.CaptureFixture[str]) -> None:
    init_logging(rank=0, world_size=4, color=False)
    info, warning, _ = say(capsys)
    assert "rank" not in info
    assert warning.startswith("[rank 0] WARNING ")


def test_other_ranks_speak_up_only_when_something_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    init_logging(rank=3, world_size=4, color=False)
    lines = say(capsys)
    assert [line.split(" ")[2] for line in lines] == ["WARNING", "ERROR"]
    assert all(line.startswith("[rank 3] ") for line in lines)


def test_two_calls_do_not_double_lines(capsys: pytest.CaptureFixture[str]) -> None:
    init_logging(rank=1, world_size=2, color=False)
    init_logging(rank=0, world_size=1, color=False)
    assert len(say(capsys)) == 3


def test_a_configured_root_logger_does_not_double_lines(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    other = logging.StreamHandler()
    root.addHandler(other)
    try:
        init_logging(rank=0, world_size=1, color=False)
        assert len(say(capsys)) == 3
    finally:
        root.removeHandler(other)


def test_colors_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    init_logging(rank=0, world_size=1, color=True)
    assert all("\033[" in line and line.count("\033[") % 2 == 0 for line in say(capsys))
    init_logging(rank=0, world_size=1, color=False)
    assert not any("\033[" in line for line in say(capsys))


def test_noisy_libraries_are_quiet() -> None:
    init_logging(rank=0, world_size=1, color=False)
    assert all(not logging.getLogger(name).isEnabledFor(logging.WARNING) for name in NOISY_LOGGERS)
