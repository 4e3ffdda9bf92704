"""From simulations of few layers, microbatches and stages to those of a large job.

Layers are alike, so what a step holds and sends is an affine function of how many there are: f(n) = f(a) + (n - a) *
(f(a + 1) - f(a)). It holds for sums, and for the peak at each labelled moment (`Simulation._label_blocks`), though not
for the peak over all of them, which may move. tests/distributed/test_plan.py proves it against whole simulations.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torchtitan.config import JobConfig
from torchtitan.metrics.devices import PlannedDevice
from torchtitan.parallel.dims import ParallelDims
from torchtitan.parallel.pipeline import stages_of
from torchtitan.simulation import Measures, Simulation, pretended_world

FILLS_AND_DRAINS = ("1f1b", "gpipe")
"""Schedules of one stage a rank, in which a stage differs from its neighbours in how many microbatches it keeps."""


def along(first: Measures, second: Measures, steps: float) -> Measures:
    """The affine function through `first` (at 0) and `second` (at 1), at `steps`. Moments of one alone are left out."""
    keys = [key for key in {**first, **second} if key[0] != "peak" or (key in first and key in second)]
    return {key: first.get(key, 0) + steps * (second.get(key, 0) - first.get(key, 0)) for key in keys}


def plus(total: Measures, part: Measures, times: float, prefix: str) -> Measures:
    """`total`, and so many times what `part` says of `prefix` ("each round", "each microbatch")."""
    added = dict(total)
    for key, value in part.items():
        if key[0] == prefix:
            added[key[1:]] = added.get(key[1:], 0) + times * value
    return added


@dataclass(frozen=True)
class Job:
    """A job whose ranks are to be measured.

    Attributes:
        rows: sequences in an optimizer step.
        args: sizes of the model.
        layers: how many each stage has.
        alike: whether all layers are.
        whole: simulate everything, however long it takes.
    """

    config: JobConfig
    dims: ParallelDims
    rows: int
    args: Any
    layers: Sequence[int]
    alike: bool
    device: PlannedDevice
    whole: bool = False

    @property
    def rounds(self) -> int:
        """Forward and backward passes in a step."""
        return self.rows // (self.config.training.local_batch_size * self.dims.dp)

    @property
    def microbatches(self) -> int:
        """In each of them."""
        size = self.config.parallelism.pipeline_parallel_microbatch_size
        return self.config.training.local_batch_size // size if self.dims.pp > 1 else 1

    @property
    def period(self) -> int:
        """Layers after which layers are checkpointed in the same way again."""
        option = self.config.activation_checkpoint.selective_ac_option
        selective = self.config.activation_checkpoint.mode == "selective"
        return int(option) if selective and option.isdecimal() else 1

    @property
    def fills_and_drains(self) -> bool:
        parallelism = self.config.parallelism
        name = parallelism.pipeline_parallel_schedule.lower()
        return name in FILLS_AND_DRAINS and not parallelism.pipeline_parallel_schedule_csv

    @property
    def simulated_microbatches(self) -> int:
        """With 1F1B a stage keeps no more microbatches than there are stages after it: one more shows the rest."""
        is_1f1b = self.config.parallelism.pipeline_parallel_schedule.lower() == "1f1b" and self.fills_and_drains
        return min(self.microbatches, self.dims.pp + 1) if is_1f1b and not self.whole else self.microbatches

    @property
    def simulated_rounds(self) -> int:
        """All but the first find gradients there, all but the last keep copies apart: two show the rest."""
        return self.rounds if self.whole else min(self.rounds, 2)

    @property
    def skips_stages(self) -> bool:
        """Whether stages in the middle are told from two of them."""
        return self.fills_and_drains and self.dims.pp > 4 and not self.whole

    def own_stages(self, rank: int) -> list[int]:
        """Numbers of the stages on a rank of the pipeline."""
        if self.dims.pp == 1:
            return [0]
        return stages_of(rank, self.dims.pp, len(self.layers), self.config.parallelism.pipeline_parallel_schedule)

    def own_layers(self, rank: int) -> tuple[int, ...]:
        return tuple(self.layers[stage] for stage in self.own_stages(rank))

    def simulated_layers(self, layers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """How many layers to simulate for a rank that has so many: as many, or two smaller numbers.

        Blocks at either end may differ from those between, and one must lie between in both.
        """
        least = 2 * self.period + 1
        base = least + (layers[0] - least) % self.period
        if self.whole or len(layers) > 1 or not self.alike or layers[0] <= base + self.period:
            return [layers]
        return [(base,), (base + self.period,)]

    def says_what_is_simulated(self) -> str:
        """For people."""
        stages = [0, 1, 2, self.dims.pp - 1] if self.skips_stages else list(range(self.dims.pp))
        layers = sorted({n for rank in stages for own in self.simulated_layers(self.own_layers(rank)) for n in own})
        parts = [f"{' and '.join(map(str, layers))} layers"]
        if self.dims.pp > 1:
            parts.append(f"{self.simulated_microbatches} microbatches of {self.microbatches}")
            parts.append(f"ranks {', '.join(map(str, stages))} of the pipeline")
        parts.append(f"{self.simulated_rounds} of {self.rounds} passes in a step")
        return f"simulated: {'; '.join(parts)}. What is more of the same is computed from these, exactly"


def measure(job: Job) -> list[Measures]:
    """What the ranks of each place in the pipeline hold and send, with the one key ("peak",) for memory."""
    ranks = job.dims.pp

    @functools.cache
    def simulate(rank: int, layers: tuple[int, ...]) -> Measures:
        return _simulation(job, rank, layers, job.simulated_microbatches, lambda it: it.run(job.simulated_rounds))

    one = functools.cache(functools.partial(_measure_rank, job, simulate))
    if not job.skips_stages:
        return [_with_one_peak(one(rank, job.own_layers(rank))) for rank in range(ranks)]
    # Of stages in the middle, two show the rest: the further back, the fewer microbatches are kept.
    found = []
    for rank in range(ranks):
        layers = job.own_layers(rank)
        if rank in (0, ranks - 1):
            found.append(_with_one_peak(one(rank, layers)))
        else:
            first, second = (_with_one_peak(one(place, layers)) for place in (1, 2))
            found.append(along(first, second, rank - 1))
    return found


def _with_one_peak(measures: Measures) -> Measures:
    peaks = [value for key, value in measures.items() if key[0] == "peak"]
    return {**{key: value for key, value in measures.items() if key[0] != "peak"}, ("peak",): max(peaks)}


def _measure_rank(
    job: Job, simulate: Callable[[int, tuple[int, ...]], Measures], rank: int, layers: tuple[int, ...]
) -> Measures:
    """Of a rank with stages of so many layers."""
    sizes = job.simulated_layers(layers)
    measures = simulate(rank, sizes[0])
    if len(sizes) > 1:
        measures = along(measures, simulate(rank, sizes[1]), (layers[0] - sizes[0][0]) / job.period)
    more_microbatches = job.microbatches - job.simulated_microbatches
    total = plus(measures, measures, job.rounds - job.simulated_rounds, "each round")
    total = plus(total, measures, job.rounds * more_microbatches, "each microbatch")
    total = {key: value for key, value in total.items() if not key[0].startswith("each")}
    if more_microbatches:
        # Torch's stages take memory for all that they will receive from the beginning on.
        kept = [
            _simulation(job, rank, (1,), job.simulated_microbatches + more, Simulation.bytes_at_start)
            for more in (0, 1)
        ]
        each = more_microbatches * (kept[1] - kept[0])
        total = {key: value + each if key[0] == "peak" else value for key, value in total.items()}
    return total


T = TypeVar("T")


def _simulation(job: Job, rank: int, layers: tuple[int, ...], microbatches: int, look: Callable[[Simulation], T]) -> T:
    """What `look` makes of a rank with stages of so many layers."""
    config, dims = job.config, job.dims
    local = config.training.local_batch_size
    if dims.pp > 1:
        local = microbatches * config.parallelism.pipeline_parallel_microbatch_size
    # Compiled code cannot be simulated, and nothing lies in host memory.
    training = dataclasses.replace(config.training, compile=False, enable_cpu_offload=False, local_batch_size=local)
    config = dataclasses.replace(config, training=training)
    of_stages = [1] * len(job.layers)
    for stage, count in zip(job.own_stages(rank), layers, strict=True):
        of_stages[stage] = count
    world_size = dims.pp * dims.dp * dims.cp * dims.tp
    with pretended_world(rank * world_size // dims.pp, world_size):
        rows = local * dims.dp * job.simulated_rounds
        return look(Simulation(config, dims, rows, job.args, of_stages, job.period + 1, job.device))
