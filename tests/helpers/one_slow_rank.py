"""A user's module, `--experimental.custom_import=one_slow_rank`: rank 1 is late with each forward pass, and a minute
takes half a second. Contains the models of tiny.py."""

import functools
import os
import time
from typing import Any

import tiny  # noqa: F401  registers its models

from torchtitan.engine import engine
from torchtitan.metrics import reporter

reporter.SLOW_SECONDS = 0.5
undisturbed = engine.forward_backward


@functools.wraps(undisturbed)
def disturbed(*arguments: Any) -> Any:
    if os.environ.get("RANK") == "1":
        time.sleep(1)  # more than a busy machine costs the other one
    return undisturbed(*arguments)


engine.forward_backward = disturbed  # type: ignore[assignment]
