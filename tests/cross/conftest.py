"""`python -m pytest tests/cross --renew -m ''` records the figures again."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew", action="store_true", help="record kernels and bytes instead of comparing them")
