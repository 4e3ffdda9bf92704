"""Missing private names of torch are reported if their absence would otherwise silently change behaviour."""

import pytest

from torchtitan.compat import require
from torchtitan.errors import UserError


class OfTorch:
    def _monitor_workers(self) -> None: ...


def test_an_override_of_nothing_is_an_error() -> None:
    require(OfTorch, ("_monitor_workers",), "the launcher")
    with pytest.raises(UserError, match=r"torch .* has no OfTorch\._invoke_run, which the launcher needs; install"):
        require(OfTorch, ("_monitor_workers", "_invoke_run"), "the launcher")
