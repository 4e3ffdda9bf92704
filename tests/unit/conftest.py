"""Fixtures for the unit tests."""

import logging
from collections.abc import Iterator

import pytest

from torchtitan.logging import logger


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
