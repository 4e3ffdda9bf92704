"""Processes with a simulated GPU, in which the tests of this folder run their functions."""

import atexit
import dataclasses
import functools
import importlib
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import pytest
from lowered import Lowered
from lowering import SIMULATED, start

PATIENCE = 280  # seconds; allows for busy machines

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="no triton for this platform, so no code for GPUs can be looked at"
)


@dataclasses.dataclass
class Report:
    """Of the last of several training steps, except `lowered`.

    Attributes:
        lowered: all graphs that were compiled.
        waits: what made the host wait for the device, and where.
        masks: dense masks outside compiled code.
        calls: operations outside compiled code.
        bytes: that these read and wrote.
        spilling: kernels that spill registers, of each the first configuration, where they were looked for.
        fused: collectives that asynchronous tensor parallelism fused into GEMMs, and those that it did not.
    """

    lowered: list[Lowered]
    waits: list[str]
    masks: list[str]
    calls: Counter[str]
    bytes: int
    spilling: dict[str, str] = dataclasses.field(default_factory=dict)
    fused: tuple[int, int] = (0, 0)


def on_gpu(name: str, function: str, *arguments: Any, **options: Any) -> Any:
    """What a function, such as "steps.train", returns in a process with this simulated GPU. Functions of
    "interpreted" have Triton's interpreter, too; functions of "lowered_step" share no process with others, whose graphs
    they would count."""
    module = function.partition(".")[0]
    process = _process(name, module if module in ("interpreted", "lowered_step") else "")
    result = process.submit(_call, function, arguments, options).result(PATIENCE)
    assert "steps" not in sys.modules  # it would change the compiler of the other tests
    return result


def _call(function: str, arguments: Any, options: Any) -> Any:
    module, name = function.split(".")
    return getattr(importlib.import_module(module), name)(*arguments, **options)


@functools.cache
def _process(name: str, module: str) -> ProcessPoolExecutor:
    initargs = (name, module == "interpreted")
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin, initargs=initargs)
    atexit.register(pool.shutdown, wait=False, cancel_futures=True)
    return pool


def _begin(name: str, interpreter: bool) -> None:
    if interpreter:
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    start(SIMULATED[name])
