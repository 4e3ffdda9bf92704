"""One rank's training step in fake tensors."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from torchtitan.config import JobConfig
from torchtitan.data import Batch
from torchtitan.device import Device
from torchtitan.parallel.dims import ParallelDims
from torchtitan.parallel.record import Recorder
from torchtitan.as_on_gpu import *
from torchtitan.trainer import Trainer


@contextlib.contextmanager
def pretended_world(rank: int, world_size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Simulation(Trainer):
    def __init__(self, config: JobConfig, dims: ParallelDims, rows: int, args: Any) -> None:
        self._begin(config, dims, rows, Device("cpu", "", torch.device("cpu")))
        self.args = args
        self._build_meshes()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.recorder = Recorder(self._group_names(), self.fake)
        self._build()

    def _group_names(self) -> dict[str, str]:
        names = {dist.group.WORLD.group_name: "world"}
        for name in self.mesh.mesh_dim_names:
            names[self.mesh.get_group(name).group_name] = name
        if self.context_mesh is not None:
            names[self.context_mesh.get_group().group_name] = "cp"
        return names

    def _find(self): pass
    def _materialize(self, model):
        with self.fake, self.recorder:
            for stage in self.stages.values():
                stage.to_empty(device="cpu")

    def _report_conversion(self):
        pass

    def run(self, rounds):
        tr = self.config.training
        with self.fake, self.recorder, gpu_kernels():
            tokens = torch.zeros(tr.local_batch_size, tr.seq_len, dtype=torch.int64)
            batch = Batch(tokens, tokens.clone(), None, None)
            self._train_step([batch], Rep())
            self.start = self.recorder.current
            self.recorder.peaks.clear()
            self.recorder.count.clear()
            self.recorder.bytes.clear()
            self._train_step([batch] * rounds, Rep())


class Rep:
    def step(self, step, loss, **_):
        loss()
