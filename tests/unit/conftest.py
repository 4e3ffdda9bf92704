"""Fixtures for the unit tests."""

import functools
import logging
from collections.abc import Iterator

import pytest

from torchtitan.logging import logger


@functools.cache
def files_of_shipped_tokenizer(add_bos: bool | None, add_eos: bool) -> dict[str, bytes]:
    from torchtitan.interchange.tokenizer_files import tokenizer_files

    return tokenizer_files(None, add_bos, add_eos)


@pytest.fixture
def tokenizer_exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports compare all ids of the shipped tokenizer once in this process, which takes half a second. Any other
    tokenizer is compared each time, as `tokenizer_files` does."""

    def files(path: str | None, add_bos: bool | None = None, add_eos: bool = True) -> dict[str, bytes]:
        from torchtitan.interchange.tokenizer_files import tokenizer_files

        return files_of_shipped_tokenizer(add_bos, add_eos) if path is None else tokenizer_files(path, add_bos, add_eos)

    monkeypatch.setattr("torchtitan.interchange.model._tokenizer_files", files)


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
