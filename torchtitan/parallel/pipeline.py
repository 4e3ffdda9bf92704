"""Pipeline parallelism: a model's layers are split into stages on different ranks; pipeline micro-batches flow through.

Schedules are torch's (torch.distributed.pipelining): GPipe (arXiv 1811.06965), 1F1B (arXiv 1806.03377), interleaved
1F1B (arXiv 2104.04473), zero bubble (arXiv 2401.10241). Checks give a sentence for each mistake.
"""

import contextlib
import copy
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from torchtitan.compat.pipelining import ComputationType, PipelineScheduleRuntime, computations, keep_forward, load_csv
from torchtitan.config.system import Parallelism
from torchtitan.config.training import Training, Validation
from torchtitan.errors import ConfigError, nearest, parsing
from torchtitan.files import regular_file
from torchtitan.logging import logger
from torchtitan.parallel.fsdp import require_parts
from torchtitan.protocols import Decoder, Passes, attended_channels

SCHEDULE = "parallelism.pipeline_parallel_schedule"
SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "LoopedBFS", "DualPipeV")
# Names that torch uses for schedules from a CSV file; there they only say whether a rank has one stage or several.
OF_CSV = ("PipelineScheduleSingle", "PipelineScheduleMulti", "_PipelineScheduleRuntime")
AFTER_LAYERS = ("norm", "output")
V_SHAPED = ("zbvzerobubble", "dualpipev")
SPLITS_BACKWARD = ("interleavedzerobubble", *V_SHAPED)  # input and weight gradients in separate passes


def stages_per_rank(schedule: str) -> int:
    """Default number of stages per rank."""
    if schedule.lower() in map(str.lower, OF_CSV):
        return 1 if schedule.lower() == OF_CSV[0].lower() else 2
    return 2 if issubclass(get_schedule_class(schedule), PipelineScheduleMulti) else 1


def pipeline_stage_numbers(rank: int, ranks: int, stages: int, schedule: str) -> list[int]:
    """The stage numbers of a rank: round robin, or down and back up for V-shaped schedules."""
    if schedule.lower() in V_SHAPED:
        return [rank, stages - 1 - rank]
    return list(range(rank, stages, ranks))


def first_layers(costs: Sequence[float], stages: int) -> list[int]:
    """The first layer of each stage, such that the most expensive stage is as cheap as possible. There are at least as
    many costs, one per layer, as stages."""
    sums = [0.0, *itertools.accumulate(costs)]

    @functools.cache
    def best(first: int, stages: int) -> tuple[float, list[int]]:
        """Of the layers from `first` on: the cost of the most expensive stage, and the first layers."""
        if stages == 1:
            return sums[-1] - sums[first], [first]
        later = ((second, *best(second, stages - 1)) for second in range(first + 1, len(costs) - stages + 2))
        return min((max(sums[second] - sums[first], cost), [first, *firsts]) for second, cost, firsts in later)

    return best(0, stages)[1]


def split_points(parallelism: Parallelism, layers: int) -> list[int] | None:
    """The configured first layer of each later stage; `layers` if it begins after them. None for an unknown name."""
    numbers = []
    for point in parallelism.pipeline_parallel_split_points:
        number = point.removeprefix("layers.")
        if not number.isdecimal() and point not in AFTER_LAYERS:
            return None
        numbers.append(layers if point in AFTER_LAYERS else int(number))
    return numbers


def count_stages(parallelism: Parallelism, layers: int) -> int:
    """How many stages the configuration gives a model with this many layers."""
    ranks = parallelism.pipeline_parallel_degree
    if parallelism.pipeline_parallel_split_points:
        return len(parallelism.pipeline_parallel_split_points) + 1
    if each := parallelism.pipeline_parallel_layers_per_stage:
        stages = -(-layers // each)
        # Add a stage for the output layer alone, and one for the embedding, if that makes the stages divide evenly.
        return next((count for count in (stages, stages + 1, stages + 2) if count % ranks == 0), stages)
    if csv := parallelism.pipeline_parallel_schedule_csv:
        with contextlib.suppress(OSError, ValueError):  # reported when the file is loaded
            return 1 + max(map(int, re.findall(r"\b(\d+)[A-Z]", regular_file(Path(csv)).read_text(encoding="utf-8"))))
    return ranks * stages_per_rank(parallelism.pipeline_parallel_schedule)


def find_first_layers(parallelism: Parallelism, costs: Sequence[float]) -> list[int]:
    """The first layer of each stage: from the configured split points, at a fixed number of layers, or by cost. If they
    are too few, the output layer becomes a stage (which begins after all layers), and then the embedding."""
    layers, stages = len(costs), count_stages(parallelism, len(costs))
    if parallelism.pipeline_parallel_split_points:
        return [0, *(split_points(parallelism, layers) or [])]
    if each := parallelism.pipeline_parallel_layers_per_stage:
        firsts = list(range(0, layers, each))
    else:
        firsts = first_layers(costs, min(stages, layers))
    return [0] * (stages - len(firsts) - 1) + firsts + [layers] * (stages > len(firsts))


def layer_costs(model: Decoder, seq_len: int) -> list[float]:
    """Multiplications per token in each layer of a model; the output layer is added to the last. Attention takes 2 per
    channel and visible token: half of `AttentionSpec.positions` on average. Only the experts of one token count."""
    require_parts(model)

    def weights(module: nn.Module) -> int:
        linears = sum(linear.weight.numel() for linear in module.modules() if isinstance(linear, nn.Linear))
        return linears + sum(getattr(child, "active_parameters", 0) for child in module.modules())

    args = model.args
    costs = [
        weights(layer) + attended_channels(args) * args.attention_spec(int(number)).positions(seq_len)
        for number, layer in model.layers.items()
    ]
    assert model.output is not None and isinstance(model.output.weight, torch.Tensor)  # a full model has them
    further: nn.ModuleDict = getattr(model, "mtp", nn.ModuleDict())  # layers of multi-token prediction
    costs[-1] += model.output.weight.numel() * (1 + len(further))
    for number, layer in enumerate(further.values(), len(costs)):
        costs[-1] += weights(layer) + attended_channels(args) * args.attention_spec(number).positions(seq_len)
    return costs


def split_pipeline_stages(model: Decoder, firsts: Sequence[int], numbers: Sequence[int]) -> dict[int, Decoder]:
    """Builds the stages with these numbers and removes other modules from the model. `firsts`: of each stage's layers.

    A stage is a view: it shares its modules with the model, under the same names, so the optimizer and checkpoints keep
    working with the model. The first stage has the embedding, the last one the norm and the output layer; in other
    stages `tok_embeddings`, `norm` and `output` are None, and `mtp` if the model has it.
    """
    layers, last = dict(model.layers.items()), len(firsts) - 1
    after = [name for name in ("norm", "output", "mtp") if hasattr(model, name)]
    ends = [*firsts[1:], len(layers)]
    stages = {}
    for number in numbers:
        stage = copy.copy(model)
        for name, value in vars(model).items():
            if isinstance(value, dict):  # modules, and hooks
                vars(stage)[name] = copy.copy(value)
        stage.layers = nn.ModuleDict({str(i): layers[str(i)] for i in range(firsts[number], ends[number])})
        if number != 0:
            stage.tok_embeddings = None
        for name in after if number != last else ():
            setattr(stage, name, None)
        stages[number] = stage
    model.layers = nn.ModuleDict({name: layer for stage in stages.values() for name, layer in stage.layers.items()})
    for name in ("tok_embeddings", *after):
        if all(getattr(stage, name) is None for stage in stages.values()):
            setattr(model, name, None)
    return stages


class Pipeline:
    """Runs micro-batches through the stages, each in `microbatches` parts. `scale` multiplies the loss before backward,
    which `forward_only` leaves out. `modules`: this rank's stages by number; `tokens` and `hidden`: meta tensors shaped
    like a part of the first stage's input and of a stage's output. Collective. Raises a ConfigError if the CSV file has
    no such schedule."""

    schedule: PipelineScheduleSingle | PipelineScheduleMulti

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        stages: int,
        group: dist.ProcessGroup,
        parallelism: Parallelism,
        device: torch.device,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        microbatches: int,
        scale: float = 1.0,
        forward_only: bool = False,
    ) -> None:
        self.group = group
        self.base_scale = scale
        self.scale: torch.Tensor | float = scale  # the running batch's
        self.device = device
        self.microbatches = microbatches
        self.is_first, self.is_last = 0 in modules, stages - 1 in modules
        own = [
            PipelineStage(
                module,
                number,
                stages,
                device,
                input_args=tokens if number == 0 else hidden.requires_grad_(),
                output_args=hidden.requires_grad_() if number < stages - 1 else torch.empty((), device="meta"),
                group=group,
            )
            for number, module in modules.items()
        ]
        csv = parallelism.pipeline_parallel_schedule_csv
        cls: Any = PipelineScheduleRuntime if csv else get_schedule_class(parallelism.pipeline_parallel_schedule)
        of_rank = own[0] if issubclass(cls, PipelineScheduleSingle) else own
        self.schedule = cls(of_rank, microbatches, loss_fn=lambda loss, _: loss * self.scale, scale_grads=False)
        if csv:
            given = f"{stages} stages on {group.size()} ranks for {microbatches} micro-batches"
            with parsing(
                lambda reason: ConfigError(
                    f"parallelism.pipeline_parallel_schedule_csv: {csv} is not a schedule of {given} ({reason}). It "
                    "needs one line per rank and one action per column, such as 0F3 (stage 0, forward, micro-batch 3)."
                )
            ):
                load_csv(self.schedule, csv)
        if forward_only and isinstance(self.schedule, PipelineScheduleRuntime):
            keep_forward(self.schedule)
        self._run: Callable[..., object] = self.schedule.eval if forward_only else self.schedule.step

    def passes(self, number: int) -> Passes:
        """Passes through this stage's layers per batch. With separate passes for input and weight gradients, torch runs
        the full backward pass of a linear layer in each."""
        if isinstance(self.schedule, PipelineScheduleSingle):
            return Passes(self.microbatches, self.microbatches)
        counts = computations(self.schedule, self.group.rank(), number)
        by_inputs = counts[ComputationType.BACKWARD_INPUT] if number > 0 else 0  # the first stage's inputs are tokens
        backward = counts[ComputationType.FULL_BACKWARD] + by_inputs + counts[ComputationType.BACKWARD_WEIGHT]
        return Passes(self.microbatches, backward)

    def run(
        self, tokens: torch.Tensor, labels: torch.Tensor, factor: torch.Tensor | float = 1.0, **inputs: torch.Tensor
    ) -> torch.Tensor:
        """Forward and backward of (rows, seq) tokens; leaves the gradients in the parameters. `factor` multiplies the
        loss as `scale` does; `inputs`, (rows, ...), go to every stage. Returns the summed loss on the rank of the last
        stage; 0 on the others."""
        losses: list[torch.Tensor] = []
        self.scale = self.base_scale * factor
        if self.is_last:
            inputs["labels"] = labels
        self._run(
            *([tokens] if self.is_first else []),
            target=labels if self.is_last else None,
            losses=losses,
            return_outputs=False,
            **inputs,
        )
        if not self.is_last:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum() / self.scale


def schedule_conflicts(parallelism: Parallelism) -> Iterator[str]:
    """Whether the schedule exists. With a CSV file, torch's names for schedules from files are allowed too."""
    name = parallelism.pipeline_parallel_schedule
    of_csv = name.lower() in map(str.lower, OF_CSV)
    known = name.lower() in map(str.lower, SCHEDULES) or (of_csv and parallelism.pipeline_parallel_schedule_csv)
    if not known:
        why = " without a pipeline_parallel_schedule_csv" if of_csv else nearest(name, list(SCHEDULES))
        yield f"{SCHEDULE}: unknown schedule {name!r}{why}; known: {', '.join(SCHEDULES)}."


def pipeline_conflicts(
    layers: int, parallelism: Parallelism, training: Training, validation: Validation | None, converted: bool
) -> Iterator[str]:
    """Whether stages and schedule fit each other, the model's layers and the batches. `validation` is None if the run
    does not validate; `converted`: whether it has converters."""
    schedule, ranks = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    name, key, degree = schedule.lower(), f"{SCHEDULE} = {schedule}", f"parallelism.pipeline_parallel_degree = {ranks}"
    points, csv = parallelism.pipeline_parallel_split_points, parallelism.pipeline_parallel_schedule_csv
    if name not in map(str.lower, [*SCHEDULES, *OF_CSV]):
        return  # reported by `schedule_conflicts`
    if points and parallelism.pipeline_parallel_layers_per_stage:
        yield "parallelism.pipeline_parallel_split_points and _layers_per_stage exclude each other; unset one."
        return
    splits = name in SPLITS_BACKWARD
    if splits and converted:
        logger.warning(
            f"{key} computes the backward GEMMs of low-precision layers twice; 1F1B or Interleaved1F1B are faster with "
            "converters"
        )
    stages, several = count_stages(parallelism, layers), stages_per_rank(schedule) > 1
    numbers = split_points(parallelism, layers)
    if name in V_SHAPED:
        fits, needed = stages == 2 * ranks, f"two stages per rank, {2 * ranks} in total"
    elif several:
        fits = stages > ranks and stages % ranks == 0
        needed = f"several stages per rank, in total {2 * ranks} or more and a multiple of {ranks}"
    else:
        fits, needed = stages == ranks, f"one stage per rank, {ranks} in total"
    if splits and training.compile:
        yield (
            f"{key} computes input and weight gradients separately, which compiled blocks do not support; unset "
            "training.compile, or use 1F1B or Interleaved1F1B."
        )
    if numbers is None or numbers != sorted({*numbers}) or max(numbers, default=0) > layers:
        yield (
            f"parallelism.pipeline_parallel_split_points must name layers from layers.0 to layers.{layers - 1}, or "
            f"norm, each the first of a stage, in order; not {','.join(points)}."
        )
    if csv and not os.path.isfile(csv):
        yield f"{SCHEDULE}_csv: there is no file {csv}."
    if csv and stages % ranks:
        yield f"{degree} does not divide the {stages} stages."
    if csv and validation and validation.local_batch_size != training.local_batch_size:
        yield (
            f"{SCHEDULE}_csv is for one number of micro-batches: set validation.local_batch_size to "
            f"training.local_batch_size = {training.local_batch_size}."
        )
    if not csv and not fits:
        yield (
            f"{key} needs {needed}, but there are {stages}; change pipeline_parallel_split_points or _layers_per_stage"
            f"{'' if several else ', or use Interleaved1F1B'}."
        )
    if layers + 2 < stages:
        yield (
            f"{degree} with {schedule} makes {stages} stages, but the model has only {layers} layers, an embedding and "
            "an output layer; lower it."
        )
    size, rotates = parallelism.pipeline_parallel_microbatch_size, name in ("interleaved1f1b", "interleavedzerobubble")
    least = stages if name in ("1f1b", "dualpipev") else 1
    for section, batch in (("training", training), ("validation", validation)):
        if batch is None:
            continue
        rows = batch.local_batch_size
        count, rounds = rows // size, max(1, rows // size // ranks)
        of_size = f"parallelism.pipeline_parallel_microbatch_size = {size}"
        makes = f"{section}.local_batch_size = {rows} makes {count} micro-batches of {of_size}"
        if rows % size:
            yield f"{section}.local_batch_size = {rows} is not a multiple of {of_size}."
            continue
        if count < least:
            yield f"{makes}, but {schedule} needs {least} or more, one for each stage; raise it to {least * size}."
        if several and rotates and count % rounds:
            yield (
                f"{makes}, which {schedule} cannot divide into {rounds} rounds of {ranks} ranks; use a multiple of "
                f"{ranks * size}."
            )
