"""Fixtures for the unit tests."""

import functools
import logging
import time
from collections.abc import Iterator

import pytest

from torchtitan.logging import Waiting, logger


@functools.cache
def files_of_shipped_tokenizer(add_bos: bool | None, add_eos: bool) -> dict[str, bytes]:
    from torchtitan.tools.interchange.tokenizer_files import tokenizer_files

    return tokenizer_files(None, add_bos, add_eos)


@pytest.fixture
def tokenizer_exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports compare all ids of the shipped tokenizer once in this process, which takes half a second. Any other
    tokenizer is compared each time, as `tokenizer_files` does."""

    def files(path: str | None, add_bos: bool | None = None, add_eos: bool = True) -> dict[str, bytes]:
        from torchtitan.tools.interchange.tokenizer_files import tokenizer_files

        return files_of_shipped_tokenizer(add_bos, add_eos) if path is None else tokenizer_files(path, add_bos, add_eos)

    monkeypatch.setattr("torchtitan.tools.interchange.model._tokenizer_files", files)


@pytest.fixture
def waits_are_said(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    """What says how far it has come takes until that is in the log, however fast it is done."""
    end = Waiting.__exit__

    def end_when_said(waiting: Waiting, *error: object) -> None:
        deadline = time.monotonic() + 60
        while not any(f" {waiting.title}: " in line for line in log) and time.monotonic() < deadline:
            time.sleep(0.005)
        end(waiting, *error)

    monkeypatch.setattr(Waiting, "INTERVAL", 0.005)
    monkeypatch.setattr(Waiting, "__exit__", end_when_said)


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What "torchtitan" logs during the test, as "LEVEL message". Handlers and level are restored afterwards."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    yield lines
    logger.handlers, logger.level, logger.propagate = before
