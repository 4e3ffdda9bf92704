"""A guarantee about the code of a plain run: no wait for the device in a step."""

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import TINY, into, train_here
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchtitan.run.trainer

FLAGS = (*TINY, "--checkpoint.enable_checkpoint", "--checkpoint.interval=2", "--training.local_batch_size=4")
LOW_PRECISION = ("--float8.emulate", "--training.mixed_precision_param=bfloat16")


class HostReads(TorchDispatchMode):
    """Records the torchtitan functions that read a tensor with `item()` or similar, which on a GPU waits for the
    device."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # a DTensor decomposes the operation first
        if func is torch.ops.aten._local_scalar_dense.default:
            stack = reversed(traceback.extract_stack())
            self.readers.append(next(frame.name for frame in stack if "/torchtitan/" in frame.filename))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_a_step_does_not_wait_for_the_device_to_know_whether_it_is_skipped(
    implementation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits only if the optimizer cannot read the decision on the device."""
    from torchtitan.engine.engine import train_step

    readers = []

    def watched(*arguments: Any) -> Any:
        with HostReads() as reads:
            result = train_step(*arguments)
        readers.append(set(reads.readers) - {"_cross_entropy_in_rows"})  # reads only on CPU, where there is no wait
        return result

    monkeypatch.setattr(torchtitan.run.trainer, "train_step", watched)
    train_here(*FLAGS, into(tmp_path), "--training.steps=4", f"--optimizer.implementation={implementation}")
    assert readers == [set() if implementation == "fused" else {"optimizer_step"}] * 4
