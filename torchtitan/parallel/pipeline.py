"""Pipeline parallelism: the layers of a model in stages on different ranks, microbatches flowing through them.

Schedules are torch's (torch.distributed.pipelining): GPipe (arXiv 1811.06965), 1F1B (arXiv 1806.03377), its
interleaved form (arXiv 2104.04473), zero-bubble forms (arXiv 2401.10241).
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from torchtitan.config.system import Parallelism
from torchtitan.errors import ConfigError

SCHEDULES = (
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "LoopedBFS",
    "DualPipeV",
)
V_SHAPED = ("zbvzerobubble", "dualpipev")
SPLITS_BACKWARD = ("interleavedzerobubble", *V_SHAPED)


def splits_backward(parallelism: Parallelism) -> bool:
    """Whether the schedule computes the gradients of inputs and of weights one after the other."""
    name = parallelism.pipeline_parallel_schedule.lower()
    return parallelism.pipeline_parallel_degree > 1 and name in SPLITS_BACKWARD


def stages_per_rank(schedule: str) -> int:
    """How many stages a rank has where the configuration leaves it open."""
    return 2 if issubclass(get_schedule_class(schedule), PipelineScheduleMulti) else 1


def stages_of(rank: int, ranks: int, stages: int, schedule: str) -> list[int]:
    """Numbers of the stages on a rank: round robin, or down and up again for V-shaped schedules."""
    if schedule.lower() in V_SHAPED:
        return [rank, stages - 1 - rank]
    return list(range(rank, stages, ranks))


def first_layers(costs: Sequence[float], stages: int) -> list[int]:
    """Divides layers into so many stages that the most expensive stage is as cheap as can be.

    Args:
        costs: of each layer, in order. There must be as many as stages.

    Returns:
        The number of the first layer of each stage.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[i] = (cost of the dearest stage, firsts) for the layers from i on, in so many stages as rounds have passed
    best: dict[int, tuple[float, list[int]]] = {i: (sums[-1] - sums[i], [i]) for i in range(len(costs))}
    for _ in range(stages - 1):
        best = {
            i: min(
                (max(sums[j] - sums[i], best[j][0]), [i, *best[j][1]]) for j in range(i + 1, len(costs)) if j in best
            )
            for i in range(len(costs) - 1)
            if any(j in best for j in range(i + 1, len(costs)))
        }
    return best[0][1]


def find_first_layers(parallelism: Parallelism, costs: Sequence[float]) -> list[int]:
    """The first layer of each stage, as the configuration says: at split points, every so many layers, or by cost."""
    if parallelism.pipeline_parallel_split_points:
        return [0, *(int(point.removeprefix("layers.")) for point in parallelism.pipeline_parallel_split_points)]
    if parallelism.pipeline_parallel_layers_per_stage:
        return list(range(0, len(costs), parallelism.pipeline_parallel_layers_per_stage))
    per_rank = stages_per_rank(parallelism.pipeline_parallel_schedule)
    return first_layers(costs, parallelism.pipeline_parallel_degree * per_rank)


def layer_costs(model: Any, seq_len: int) -> list[float]:
    """Multiplications for one token in each layer of a model; the output layer counts to the last.

    Those of attention are 2 for each channel and each token that a token sees: half of the sequence on average.
    """

    def weights(module: nn.Module) -> int:
        return sum(linear.weight.numel() for linear in module.modules() if isinstance(linear, nn.Linear))

    attention = model.args.n_heads * model.args.head_dim * seq_len
    costs = [float(weights(layer) + attention) for layer in model.layers.values()]
    costs[-1] += model.output.weight.numel()
    return costs


def split(model: Any, firsts: Sequence[int], numbers: Sequence[int]) -> dict[int, Any]:
    """The stages with these numbers, by number, and leaves in the model the modules of them alone.

    A stage is a view: it shares its modules with the model, under the same names; so optimizer and checkpoints go on
    working with the model. The first stage of all has the embedding, the last the norm and the output layer; what a
    stage does not have is None there.

    Args:
        model: with `tok_embeddings`, a ModuleDict `layers` by number, `norm` and `output`.
        firsts: first layer of each stage.
    """
    layers, last = dict(model.layers.items()), len(firsts) - 1
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
        if number != last:
            stage.norm = stage.output = None
        stages[number] = stage
    model.layers = nn.ModuleDict({name: layer for stage in stages.values() for name, layer in stage.layers.items()})
    for name in ("tok_embeddings", "norm", "output"):
        if all(getattr(stage, name) is None for stage in stages.values()):
            setattr(model, name, None)
    return stages


class Pipeline:
    """Runs batches through the stages. All ranks of a pipeline call it together.

    Args:
        modules: the stages on this rank, by number.
        stages: how many there are in all.
        tokens, hidden: tensors on the meta device like what the first stage is given for a microbatch, and what a stage
            gives the next.
        microbatches: that a batch is cut into.
        scale: of the loss before backward.

    Raises:
        ConfigError: the CSV file does not hold a schedule for these stages.
    """

    def __init__(
        self,
        modules: dict[int, nn.Module],
        stages: int,
        group: dist.ProcessGroup,
        parallelism: Parallelism,
        device: torch.device,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        microbatches: int,
        scale: float = 1.0,
    ) -> None:
        self.scale = scale
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
        options: dict[str, Any] = {
            "n_microbatches": microbatches,
            "loss_fn": lambda loss, _: loss * scale,
            "scale_grads": False,
        }
        csv = parallelism.pipeline_parallel_schedule_csv
        kind: Any = _PipelineScheduleRuntime if csv else get_schedule_class(parallelism.pipeline_parallel_schedule)
        self.schedule = kind(own[0] if issubclass(kind, PipelineScheduleSingle) else own, **options)
        if csv:
            try:
                self.schedule._load_csv(csv)
            except (AssertionError, ValueError, KeyError, RuntimeError) as error:
                raise ConfigError(
                    f"parallelism.pipeline_parallel_schedule_csv: {csv} is no schedule of {stages} stages on "
                    f"{group.size()} ranks for {microbatches} microbatches ({error}); a line for each rank, an action "
                    "such as 0F3 (stage 0, forward, microbatch 3) in each column."
                ) from None

    def train(self, tokens: torch.Tensor, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Forward and backward. Gradients are left in the parameters.

        Args:
            tokens, labels: (rows, seq).
            inputs: by name, for every stage; (rows, ...).

        Returns:
            The summed loss, on the rank of the last stage; elsewhere 0.
        """
        return self._run(self.schedule.step, tokens, labels, **inputs)

    def evaluate(self, tokens: torch.Tensor, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """`train` without backward."""
        return self._run(self.schedule.eval, tokens, labels, **inputs)

    def _run(self, run: Any, tokens: torch.Tensor, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        if self.is_last:
            inputs["labels"] = labels
        run(
            *([tokens] if self.is_first else []),
            target=labels if self.is_last else None,
            losses=losses,
            return_outputs=False,
            **inputs,
        )
        if not self.is_last:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum() / self.scale
