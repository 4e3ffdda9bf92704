"""Extrapolates from simulations of few layers, pipeline micro-batches and stages to a large job.

Layers are identical, except for the first, dense ones of a model with mixtures of experts, or they alternate with a
period. So what a step holds and sends is an affine function of the number of the others, or of their periods:
f(n) = f(a) + (n - a) * (f(a + 1) - f(a)). This holds for sums, and for the peak at each labelled moment
(`Simulation._label_blocks`), but not for the peak over all moments, which may move.
tests/unit/test_plan_extrapolation.py verifies it against full simulations.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torchtitan.config import JobConfig
from torchtitan.logging import Waiting
from torchtitan.models.hf_config import period
from torchtitan.parallel.dims import ParallelDims
from torchtitan.parallel.pipeline import pipeline_stage_numbers
from torchtitan.protocols import ModelArgs
from torchtitan.tools.plan.devices import PlannedDevice
from torchtitan.tools.plan.simulation import Measures, Simulation, fake_process_group
from torchtitan.tools.plan.step_model import microbatches


def extrapolate(measured: Sequence[Measures], steps: float) -> Measures:
    """The affine function through two measures (at 0 and 1), at `steps`; of only one, which is constant. Drops moments
    that only one of them has."""
    first, second = measured[0], measured[-1]
    keys = [key for key in {**first, **second} if key[0] != "peak" or (key in first and key in second)]
    return {key: first.get(key, 0) + steps * (second.get(key, 0) - first.get(key, 0)) for key in keys}


def dense_layers(args: ModelArgs) -> int:
    """How many of the first layers have no mixture of experts, of a model that has some."""
    return 0 if args.moe is None else args.moe.n_dense_layers


@dataclass(frozen=True)
class SimulatedRank:
    """What is simulated: one rank of a pipeline of `ranks` ranks."""

    ranks: int
    rank: int
    layers: tuple[int, ...]  # layers of each of its pipeline stages
    before: tuple[int, ...]  # how many layers precede each of its stages, modulo `Job.period`
    dense: tuple[int, ...]  # how many of them, the first ones, are dense layers of a model with mixtures of experts
    microbatches: int  # of a pipeline, in a forward and backward pass
    all_layers: int  # layers of the rank in the job; fewer may be simulated


@dataclass(frozen=True)
class SimulatedJob:
    """A job whose ranks are to be measured."""

    config: JobConfig
    dims: ParallelDims
    args: ModelArgs
    layers: Sequence[int]  # number of layers of each stage
    alike: bool  # whether all layers are identical, but for the first, dense ones
    device: PlannedDevice
    full: bool = False  # simulate everything, however long it takes

    @property
    def rows(self) -> int:
        """Sequences in an optimizer step."""
        return self.config.training.sequences_per_step(self.dims.dp)

    @property
    def grad_accumulation_steps(self) -> int:
        """Forward and backward passes in a step."""
        return self.rows // (self.config.training.local_batch_size * self.dims.dp)

    @property
    def microbatches(self) -> int:
        """Pipeline micro-batches in a grad-accumulation step."""
        return microbatches(self.config, self.dims)

    @property
    def period(self) -> int:
        return period_of_layers(self.config, self.args)

    @property
    def is_single_stage_schedule(self) -> bool:
        """Whether each rank has one stage, and its neighbours differ only in how many micro-batches are in flight."""
        return not self.config.parallelism.pipeline_parallel_schedule_csv and self._schedule in ("1f1b", "gpipe")

    @property
    def simulated_accumulation_steps(self) -> int:
        """Three are enough: all but the first find gradients, and weights that stay gathered; all but the last keep
        separate copies."""
        return self.grad_accumulation_steps if self.full else min(self.grad_accumulation_steps, 3)

    @property
    def _schedule(self) -> str:
        return self.config.parallelism.pipeline_parallel_schedule.lower()

    def own_stages(self, rank: int) -> list[int]:
        """Indices of the stages on a pipeline rank."""
        return pipeline_stage_numbers(rank, self.dims.pp, len(self.layers), self._schedule) if self.dims.pp > 1 else [0]

    def simulated_rank(self, rank: int) -> SimulatedRank:
        """The simulated equivalent of a rank. Of the preceding ranks only their existence matters. With 1F1B a rank has
        no more micro-batches in flight than ranks follow it; after one more to end the warm-up, another shows the cost
        of each additional one."""
        ranks, own = self.dims.pp, self.own_stages(rank)
        layers = tuple(self.layers[stage] for stage in own)
        before = tuple(sum(self.layers[:stage]) % self.period for stage in own)
        dense = tuple(
            min(self.layers[stage], max(0, dense_layers(self.args) - sum(self.layers[:stage]))) for stage in own
        )
        whole = SimulatedRank(ranks, rank, layers, before, dense, self.microbatches, sum(layers))
        if self.full or not self.is_single_stage_schedule:
            return whole
        ranks = ranks - max(0, rank - 1)
        few = min(self.microbatches, ranks + 2) if self._schedule == "1f1b" else self.microbatches
        return dataclasses.replace(whole, ranks=ranks, rank=min(rank, 1), microbatches=few)

    def with_fewer_ranks(self, probe: SimulatedRank) -> list[SimulatedRank]:
        """The rank itself, or two equivalents in shorter pipelines."""
        least = 3 if 0 < probe.rank < probe.ranks - 1 else 2
        if self.full or not self.is_single_stage_schedule or probe.ranks <= least + 1:
            return [probe]
        fewer = int(self._schedule == "1f1b")  # micro-batches, for each rank
        return [
            dataclasses.replace(probe, ranks=ranks, microbatches=probe.microbatches - fewer * (probe.ranks - ranks))
            for ranks in (least, least + 1)
        ]

    def with_fewer_layers(self, probe: SimulatedRank) -> list[SimulatedRank]:
        """The rank itself, or two equivalents with fewer layers. Blocks at the ends (`edges`) may differ from those in
        between, and both equivalents need at least one in between. Dense layers all stay."""
        count = probe.layers[0]
        least = probe.dense[0] + 2 * (self.period + 1) + 1
        base = least + (count - least) % self.period
        if self.full or len(probe.layers) > 1 or not self.alike or count <= base + self.period:
            return [probe]
        return [dataclasses.replace(probe, layers=(layers,)) for layers in (base, base + self.period)]

    def simulated_ranks(self) -> list[SimulatedRank]:
        """Everything that `measure` simulates."""
        shorter = [probe for rank in range(self.dims.pp) for probe in self.with_fewer_ranks(self.simulated_rank(rank))]
        return list(dict.fromkeys(smaller for probe in shorter for smaller in self.with_fewer_layers(probe)))


def period_of_layers(config: JobConfig, args: ModelArgs) -> int:
    """Number of layers after which both activation checkpointing and what attention declares repeat."""
    option = config.activation_checkpoint.selective_ac_option
    checkpointed = int(option) if config.activation_checkpoint.mode == "selective" and option.isdecimal() else 1
    return math.lcm(checkpointed, period([args.attention_spec(layer) for layer in range(args.n_layers)]))


def measure(job: SimulatedJob, waiting: Waiting | None = None) -> list[Measures]:
    """What the rank of each pipeline stage holds and sends, with a single key ("peak",) for memory."""

    @functools.cache
    def simulate(probe: SimulatedRank) -> Measures:
        measures = _simulation(job, probe, lambda it: it.simulate(job.simulated_accumulation_steps))
        if waiting is not None:
            waiting.done += 1
        return measures

    # Ranks in the middle of a pipeline ask for the same.
    bytes_kept = functools.cache(lambda probe: _simulation(job, probe, Simulation.bytes_before_last))
    with_all_layers = functools.cache(functools.partial(_extrapolate_layers, job, simulate))
    of_ranks = []
    for probe in map(job.simulated_rank, range(job.dims.pp)):
        shorter = job.with_fewer_ranks(probe)
        measures = extrapolate(list(map(with_all_layers, shorter)), probe.ranks - shorter[0].ranks)
        of_ranks.append(_extrapolate_microbatches(job, probe, measures, bytes_kept))
    return of_ranks


def _extrapolate_layers(
    job: SimulatedJob, simulate: Callable[[SimulatedRank], Measures], probe: SimulatedRank
) -> Measures:
    """The measures of a simulated rank with all its layers, with a single key ("peak",) for memory."""
    fewer = job.with_fewer_layers(probe)
    measures = extrapolate(list(map(simulate, fewer)), (probe.layers[0] - fewer[0].layers[0]) / job.period)
    peak = max(value for key, value in measures.items() if key[0] == "peak")
    return {key: value for key, value in measures.items() if key[0] != "peak"} | {("peak",): peak}


def _extrapolate_microbatches(
    job: SimulatedJob, probe: SimulatedRank, measures: Measures, bytes_kept: Callable[[SimulatedRank], int]
) -> Measures:
    """The measures of a full step with all grad-accumulation steps and micro-batches, from a simulated rank's.
    `bytes_kept`: `Simulation.bytes_before_last` of a rank."""
    more = job.microbatches - probe.microbatches
    times = {
        "each accumulation step": job.grad_accumulation_steps - job.simulated_accumulation_steps,
        "each pipeline micro-batch": job.grad_accumulation_steps * more,
    }
    total = {key: value for key, value in measures.items() if key[0] not in times}
    for (prefix, *key), value in measures.items():
        if prefix in times:
            total[tuple(key)] = total.get(tuple(key), 0) + times[prefix] * value
    if more:
        # torch's stages allocate buffers for all received micro-batches at the start. Since 2.15 they do so one
        # micro-batch at a time, but the last stage's losses keep their inputs alive.
        ranks = probe.rank + (1 if probe.ranks - probe.rank == 1 else 2)
        small = dataclasses.replace(probe, ranks=ranks, layers=(1,), dense=(min(1, *probe.dense),), all_layers=1)
        fewer, one_more = (
            bytes_kept(dataclasses.replace(small, microbatches=count)) for count in (ranks + 1, ranks + 2)
        )
        total["peak",] += more * (one_more - fewer)
    return total


T = TypeVar("T")


def _simulation(job: SimulatedJob, probe: SimulatedRank, look: Callable[[Simulation], T]) -> T:
    """The result of `look` on the simulation of a rank."""
    config, dims = job.config, dataclasses.replace(job.dims, pp=probe.ranks)
    local = config.training.local_batch_size
    if job.dims.pp > 1:
        local = probe.microbatches * config.parallelism.pipeline_parallel_microbatch_size
    # Compiled code cannot be simulated, and no tensor may be in host memory.
    config = config.changed(training={"compile": False, "enable_cpu_offload": False, "local_batch_size": local})
    if probe.ranks == job.dims.pp:
        layers, own = [1] * len(job.layers), job.own_stages(probe.rank)
    else:
        layers, own = [1] * probe.ranks, [probe.rank]
    for stage, count in zip(own, probe.layers, strict=True):
        layers[stage] = count
    for stage, before in sorted(zip(own, probe.before, strict=True)):
        if stage > 0 and stage - 1 not in own:  # lengths of own stages are true up to whole periods
            layers[stage - 1] += (before - sum(layers[:stage])) % job.period
    args: Any = job.args
    if dense_layers(args):
        ends = [sum(layers[:stage]) + count for stage, count in zip(own, probe.dense, strict=True) if count]
        args = dataclasses.replace(args, moe=dataclasses.replace(args.moe, n_dense_layers=max(ends, default=0)))
    with fake_process_group(probe.rank * dims.world_size // dims.pp, dims.world_size):
        rows = local * dims.dp * job.simulated_accumulation_steps
        edges = (probe.dense[0] + job.period + 1, job.period + 1)
        return look(Simulation(config, dims, rows, args, layers, edges, job.device, probe.all_layers))
