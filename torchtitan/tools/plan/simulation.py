"""One rank's training step in fake tensors: what it holds and sends, without a device or waiting.

Building the model and the step run the training code. Data, weight values and checkpoints are left out.
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.compat.dispatch import FakeTensorMode, clear_sharding_cache, fake_store
from torchtitan.compat.distributed import ranks_of_group
from torchtitan.config import JobConfig
from torchtitan.converters import Target
from torchtitan.data import Batch
from torchtitan.device import Device
from torchtitan.engine.conversion import conversion_target
from torchtitan.engine.engine import Engine, after_optimizer_step, build_engine, forward_backward, train_step
from torchtitan.engine.forward import sum_over_ranks
from torchtitan.models import MODELS, ModelSpec
from torchtitan.models.expert_parallel import dispatches
from torchtitan.models.mtp import mtp_inputs
from torchtitan.optim.combined import optimizers_in
from torchtitan.optim.matrix_owners import buckets
from torchtitan.optim.muon import Muon
from torchtitan.optim.orthogonalize import flops
from torchtitan.optim.skip_step import Skip
from torchtitan.optim.weight_average import begin_averages
from torchtitan.parallel.dims import Meshes, ParallelDims, build_meshes
from torchtitan.parallel.sharded_tensors import local_tensor
from torchtitan.protocols import Decoder, ModelArgs
from torchtitan.tools.plan.devices import PlannedDevice
from torchtitan.tools.plan.kernel_substitutes import kernel_substitutes
from torchtitan.tools.plan.recorder import Recorder

Measures = dict[tuple[Any, ...], float]
"""Results of a simulation, by key: ("parameters",), ("gradients",), ("optimizer",): bytes; ("largest weight",),
("largest shard",): bytes in float32; ("flops",), ("flops_8bit",); ("count", group, kind) and ("bytes", group, kind) of
collectives; ("peak", label): total bytes, at moments with this label. The numbers are per step; with
("each accumulation step", ...) or ("each pipeline micro-batch", ...) in front, for one of several identical ones."""


@contextlib.contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """A process group in which this process has the given rank, and collectives do nothing."""
    clear_sharding_cache()  # it caches meshes, and so process groups, of the previous world
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' local shards."""
    return sum(local.nbytes for local in map(local_tensor, tensors))


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state on this rank."""
    parameters = list(model.parameters())
    states = (state for single in optimizers_in(optimizer) for state in single.state.values())
    return {
        "parameters": local_bytes(parameters),
        "gradients": local_bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer": local_bytes(
            value for state in states for value in state.values() if isinstance(value, torch.Tensor)
        ),
    }


class Simulation:
    """A rank of a simulated world.

    Args:
        layers: number of layers of each pipeline stage; they sum to the model's.
        all_layers: how many layers this rank has in the job, of which it may simulate fewer.
        edge_blocks: number of blocks at the start and at the end of a stage that are identified individually.
        planned: the device to simulate. Tensors claim to be on CPU; what GPU kernels save is emulated.
    """

    def __init__(
        self,
        config: JobConfig,
        dims: ParallelDims,
        rows: int,
        args: ModelArgs,
        layers: Sequence[int],
        edge_blocks: tuple[int, int],
        planned: PlannedDevice,
        all_layers: int,
    ) -> None:
        device = Device("cpu", planned.name, torch.device("cpu"))
        self.config = config
        self.edge_blocks = edge_blocks
        self.planned = planned
        self.all_layers = all_layers
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        meshes = build_meshes(dims, device.type, args)
        self.recorder = Recorder(name_of_group(meshes, args.moe is not None), self.fake_mode, planned.type)
        self.gradient_bytes = 0
        self._accumulation_steps: list[Measures] = []
        self._microbatches: list[Measures] = []
        self.engine = build_engine(
            config,
            meshes,
            device,
            dataclasses.replace(args, n_layers=sum(layers)),
            rows,
            target=target_on(planned, config, MODELS.get(config.model.name), dims),
            first_layers=[0, *itertools.accumulate(layers[:-1])],
            allocate=self._allocate,
        )
        assume_load(self.engine.model, config.job.simulate_expert_load)
        self._label_blocks()
        self.muons = [single for single in optimizers_in(self.engine.optimizer) if isinstance(single, Muon)]
        for muon in self.muons:
            self._count_once(muon)

    def _allocate(self, model: Decoder, stages: Sequence[Decoder], config: JobConfig, device: Device) -> None:
        with self.fake_mode, self.recorder:
            for stage in stages:
                stage.to_empty(device="cpu")

    def simulate(self, accumulation_steps: int) -> Measures:
        """A training step of `accumulation_steps` forward and backward passes (each of a pipeline's micro-batches)."""
        with self._step_around():
            self._step(accumulation_steps)
            measures: Measures = {
                (key,): size for key, size in state_bytes(self.engine.model, self.engine.optimizer).items()
            }
        measures[("gradients",)] = self.gradient_bytes
        weights = list(self.engine.model.parameters())
        measures[("largest weight",)] = 4 * max(weight.numel() for weight in weights)
        measures[("largest shard",)] = 4 * max(local_tensor(weight).numel() for weight in weights)
        measures |= self._traffic()
        for muon in self.muons:
            self._add_muon(muon, measures)
        measures |= {("peak", label): peak for label, peak in self.recorder.peaks.items()}
        for prefix, marks in (
            ("each accumulation step", self._accumulation_steps),
            ("each pipeline micro-batch", self._microbatches),
        ):
            if len(marks) > 1:
                before, after = marks[-2:]
                measures |= {(prefix, *key): after[key] - before.get(key, 0) for key in after}
        return measures

    def _count_once(self, muon: Muon) -> None:
        """Leaves the work of Muon's updates out of the record: how matrices divide among ranks depends on their number,
        so many layers cannot be extrapolated from few."""
        recorder, before = self.recorder, []

        def enter(*_: object) -> None:
            before.append((recorder.count.copy(), recorder.bytes.copy(), copy.deepcopy(recorder.work)))

        def leave(*_: object) -> None:
            recorder.count, recorder.bytes, recorder.work = before.pop()

        muon.register_step_pre_hook(enter)
        muon.register_step_post_hook(leave)

    def _add_muon(self, muon: Muon, measures: Measures) -> None:
        """Adds the work of Muon's update of all layers, in place."""
        names = {parameter: name for name, parameter in self.engine.model.named_parameters()}
        layers = [list(stage.layers) for stage in self.engine.pipeline_stages.values()]
        simulated = sum(map(len, layers))
        shardings = []
        for parameter, sharding in zip(muon.parameters(), muon.shardings, strict=True):
            first = names[parameter].startswith(f"layers.{layers[0][0]}.")
            if simulated == self.all_layers or not names[parameter].startswith("layers."):
                shardings.append(sharding)
            elif first:  # all layers are alike
                shardings += [sharding] * self.all_layers

        def add(value: float, *key: str) -> None:
            measures[key] = measures.get(key, 0) + value

        rank = dist.get_rank()
        for bucket in buckets(shardings, rank):
            add(sum(flops(*matrix.shape, len(muon.polynomials)) for matrix in bucket.owned()), "flops")
            for moves in map(bucket.moves, (True, False) if bucket.is_sent else ()):
                group = names_by_ranks(self.engine.meshes)(bucket.ranks)
                numbers = max(sum(piece.numel() for ends, piece in moves if ends[end] != rank) for end in (0, 1))
                add(1, "count", group, "all-to-all")
                add(numbers * muon.dtype.itemsize, "bytes", group, "all-to-all")

    def bytes_before_last(self) -> int:
        """Live bytes when the first block starts on the last micro-batch."""
        live: list[int] = []
        first_block = next(iter(next(iter(self.engine.pipeline_stages.values())).layers.values()))
        first_block.register_forward_pre_hook(lambda *_: live.append(self.recorder.current), prepend=True)
        with self._step_around():
            self._step(1)
        return live[-1]

    def _step(self, accumulation_steps: int) -> None:
        """A step with reporting."""
        training = self.config.training
        tokens = torch.zeros(training.local_batch_size, training.seq_len, dtype=torch.int64)
        ids = torch.zeros(training.local_batch_size, training.seq_len + 1, dtype=torch.int64)
        mtp = mtp_inputs(ids, tokens, ids, training.mtp_layers) if training.mtp_layers else {}
        documents = torch.zeros_like(tokens) if training.document_mask else None
        batch = Batch(tokens, tokens.clone(), documents, None, mtp=mtp)
        batches = [batch] * accumulation_steps
        loss, _ = train_step(self.engine, batches, 0.0, self._should_skip, run_pass=self._forward_backward)
        sum_over_ranks(self.engine, loss)  # a report adds a few numbers of each rank to it

    def _should_skip(
        self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, saturated: torch.Tensor | None, ids: list[str]
    ) -> Skip:
        """Runs the collectives of `UpdateGuard`."""
        training = self.config.training
        if training.skip_nonfinite or training.skip_grad_norm_outliers is not None or saturated is not None:
            dist.all_reduce(torch.stack([loss, loss]))
        return Skip()

    @contextlib.contextmanager
    def _step_around(self) -> Iterator[None]:
        gc.collect()
        gc.disable()  # training does the same: live memory must not depend on when the collector runs
        try:
            with self.fake_mode, self.recorder, kernel_substitutes(self.planned.type):
                self._make_optimizer_state()
                self.recorder.clear()
                yield
        finally:
            gc.enable()

    def _make_optimizer_state(self) -> None:
        """Runs an update to create optimizer and converter state, as in every step after the first."""
        for parameter in self.engine.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.engine.optimizer.step()
        begin_averages(self.engine.optimizer, paused=True)
        self.engine.model.zero_grad()
        after_optimizer_step(self.engine, 0.0, Skip())

    def _forward_backward(self, engine: Engine, batch: Batch) -> torch.Tensor:
        """Labels the pass, and measures the gradients after it."""
        self.recorder.enter(("start", len(self._accumulation_steps)))
        self._accumulation_steps.append(self._traffic())
        loss = forward_backward(engine, batch)
        self.gradient_bytes = state_bytes(engine.model, engine.optimizer)["gradients"]
        self.recorder.enter(("update",))
        return loss

    def _traffic(self) -> Measures:
        """Collectives and FLOPs of the step so far."""
        recorder = self.recorder
        measures: Measures = {("count", *key): count for key, count in recorder.count.items()}
        measures |= {("bytes", *key): size for key, size in recorder.bytes.items()}
        return measures | {("flops",): recorder.work.flops, ("flops_8bit",): recorder.work.flops_8bit}

    def _label_blocks(self) -> None:
        """Labels the moments between which only complete blocks are allocated and freed, so that peaks can be
        extrapolated from fewer identical blocks. A label is the block's distance from the first or last, and how often
        it has run."""
        for number, stage in self.engine.pipeline_stages.items():
            blocks = list(getattr(stage, "layers", nn.ModuleDict()).values())
            for index, block in enumerate(blocks):
                first, last = self.edge_blocks
                places = [index] if index < first else []
                places += [index - len(blocks)] if index >= len(blocks) - last else []
                _label(block, self.recorder, [(number, place) for place in places] or [(number, "between")])
            if blocks:
                blocks[0].register_forward_pre_hook(lambda *_: self._microbatches.append(self._traffic()))


def _label(block: nn.Module, recorder: Recorder, places: list[tuple[Hashable, ...]]) -> None:
    visits = Counter[str]()  # visits to each moment

    def enter(moment: str) -> None:
        recorder.enter(*((moment, *place, visits[moment]) for place in places))
        visits[moment] += 1

    def before(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        enter("forward")
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda grad: enter("after backward"))

    def after(module: nn.Module, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        enter("after forward")
        if out.requires_grad:
            out.register_hook(lambda grad: enter("backward"))

    block.register_forward_pre_hook(before)
    block.register_forward_hook(after)


def names_by_ranks(meshes: Meshes, has_experts: bool = False) -> Callable[[tuple[int, ...]], str]:
    """Maps the ranks of a process group to a mesh dimension, "cp", "expert_fsdp" (ranks that shard the same experts),
    "stage" (all ranks of one), or "world". Groups are compared by their ranks, because DTensor and converters create
    their own."""
    groups = {}
    mesh, dims = meshes.mesh, meshes.dims
    if meshes.context_mesh is not None:
        groups["cp"] = meshes.context_mesh.get_group()
    for name in mesh.mesh_dim_names or ():
        if mesh[name].size() > 1:
            groups[name] = mesh.get_group(name)
    by_ranks = {tuple(dist.get_process_group_ranks(group)): name for name, group in groups.items()}
    pp, replica, fsdp, tp = mesh.get_coordinate() or ()
    if has_experts:
        experts = mesh.mesh[pp, replica].view(-1, dims.ep)[:, (fsdp * dims.tp + tp) % dims.ep]
        by_ranks.setdefault(tuple(experts.tolist()), "expert_fsdp")
    by_ranks.setdefault(tuple(mesh.mesh.flatten().tolist()), "world")
    by_ranks.setdefault(tuple(mesh.mesh.flatten(1)[pp].tolist()), "stage")

    return lambda ranks: by_ranks.get(ranks, f"{len(ranks)} ranks")


def name_of_group(meshes: Meshes, has_experts: bool = False) -> Callable[[str], str]:
    """The same from a process group's own name."""
    by_ranks = names_by_ranks(meshes, has_experts)
    return functools.cache(lambda group: by_ranks(tuple(ranks_of_group(group))))


def target_on(planned: PlannedDevice, config: JobConfig, spec: ModelSpec, dims: ParallelDims) -> Target:
    """Where a converted model will run. "meta": kernels are not tried out, because nothing is computed."""
    return dataclasses.replace(
        conversion_target(config, spec, None, shards=dims.fsdp),
        device_name=planned.name,
        compute_capability=planned.compute_capability,
        amd=planned.amd,
    )


def assume_load(model: nn.Module, load: float) -> None:
    """Gives this rank's experts `load` times the rows that it sends."""
    for dispatch in dispatches(model):
        dispatch.assumed_load = load
