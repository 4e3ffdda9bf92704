"""Collectives of one rank whose group is simulated: copies on the same GPU, which take as long as links would.

FSDP runs as in a group of that size: the rank has its shard of weights and states, gathers all weights, and reduces all
gradients. What other ranks would send is a copy of this rank's: an all-gather repeats its shard, a reduce-scatter
averages equal gradients. So numbers are finite and of the usual size, and time and memory are a rank's, but the loss
is of no use. Not simulated are the multiprocessors that NCCL's kernels take from computation, what they read and write
in memory beyond such a copy, waiting for slower ranks, and latencies.
"""

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtitan.device import Device
from torchtitan.hardware import GPUS, find_gpu
from torchtitan.tools.plan.devices import link_bytes
from torchtitan.tools.plan.step_model import LINKS

USUAL_CLOCK = 1.98e9  # Hz, of an H100's and an H200's multiprocessors; measured before it matters
REMEMBERED = 256  # collectives whose duration is compared with what it should be


def seconds_on_links(nbytes: int, ranks: int, rate: float) -> float:
    """How long an all-gather into a tensor of this size, or a reduce-scatter of one, takes within a machine. `rate`:
    bytes/s in one direction that collectives reach on a GPU's links."""
    within, _ = link_bytes("all-gather", nbytes, ranks, 1)
    return within / rate


def rate_of_links(device: Device) -> float:
    """Bytes/s in one direction that NCCL reaches between GPUs of this kind; of an unknown device, an H100's."""
    gpu = GPUS.get(find_gpu(device.name)) if device.type == "cuda" else None
    return LINKS * ((gpu and gpu.within_node) or GPUS["H100"].within_node or 0.0)


class Links:
    """A GPU's links, on which one collective runs at a time, as those of one NCCL communicator. On a CPU they take no
    time.

    Attributes:
        rate: bytes/s in one direction.
        cycles_per_second: the clock of what makes a collective last.
    """

    def __init__(self, ranks: int, device: Device) -> None:
        self.ranks, self.rate = ranks, rate_of_links(device)
        self.cycles_per_second = USUAL_CLOCK
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._timed: deque[tuple[float, int, Any, Any]] = deque(maxlen=REMEMBERED)  # seconds, cycles, two events

    @contextmanager
    def busy(self, nbytes: int) -> Iterator[None]:
        """The current stream goes on after as long as a collective of this many bytes takes, and after what it does
        itself meanwhile."""
        if self.stream is None:
            yield
            return
        seconds = seconds_on_links(nbytes, self.ranks, self.rate)
        cycles = int(seconds * self.cycles_per_second)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
        yield
        current.wait_stream(self.stream)
        self._timed.append((seconds, cycles, start, end))

    def calibrate(self) -> None:
        """Takes the clock from the last collectives: it falls when the GPU is at its limit of power. Waits for the
        device."""
        if self._timed:
            torch.cuda.synchronize()
            # The median, since a few of the first steps waited for the host between two events.
            clocks = (cycles / start.elapsed_time(end) * 1e3 for _, cycles, start, end in self._timed)
            self.cycles_per_second = statistics.median(clocks)
        self._timed.clear()

    def asked_and_taken(self) -> tuple[float, float]:
        """Seconds of the last collectives: as they should have been, and as the GPU measured them. Waits for it."""
        if self._timed:
            torch.cuda.synchronize()
        taken = sum(start.elapsed_time(end) / 1e3 for *_, start, end in self._timed)
        return sum(seconds for seconds, *_ in self._timed), taken


class _Collective:
    """What FSDP asks for in `AllGather` and `ReduceScatter`."""

    def __init__(self, links: Links) -> None:
        self.links = links

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class RepeatShard(_Collective):
    """An all-gather in which all ranks have this rank's shard."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        with self.links.busy(output_tensor.nbytes):
            others = output_tensor.view(self.links.ranks, -1)[1:]  # the input is the first part of the output
            others.copy_(input_tensor.expand_as(others))


class KeepOwnPart(_Collective):
    """A reduce-scatter in which all ranks have this rank's gradients."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise NotImplementedError(f"a simulated reduce-scatter with {op}")
        with self.links.busy(input_tensor.nbytes):
            output_tensor.copy_(input_tensor.view(self.links.ranks, -1)[0])
            if op == dist.ReduceOp.SUM:
                output_tensor.mul_(self.links.ranks)


def simulate_links(model: nn.Module, links: Links) -> None:
    """From now on, FSDP's collectives of this model are simulated."""
    replaced: dict[str, Callable[[], Any]] = {
        "set_custom_all_gather": lambda: RepeatShard(links),
        "set_custom_reduce_scatter": lambda: KeepOwnPart(links),
    }
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for method, make in replaced.items():
                getattr(module, method)(make())
