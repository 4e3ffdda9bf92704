"""The work of a compiled training step, counted in the code that a GPU would get."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from compiler import on_lowered, remember
from torch import nn
from watch import Watch, plus, work_of_graph

from torchtitan.checks.config_checks import check
from torchtitan.compat.dispatch import FakeTensorMode
from torchtitan.config import ConfigManager
from torchtitan.converters.linear_converter import LinearConverter
from torchtitan.data import Batch
from torchtitan.device import find_device
from torchtitan.engine.engine import build_engine, train_step
from torchtitan.engine.model_args import find_model_args
from torchtitan.parallel.dims import build_meshes
from torchtitan.tools.plan.extrapolation import dense_layers, period_of_layers
from torchtitan.tools.plan.recorder import tensors_in
from torchtitan.tools.plan.simulation import assume_load, fake_process_group
from torchtitan.tools.plan.step_model import Work


def work_of(flags: list[str], world_size: int) -> Work:
    """Of rank 0 in a step of the configured model, in a process with a simulated GPU of its own."""
    watch = Watch()

    def take(graph: Any, code: str) -> Callable[[list[Any]], None]:
        work = work_of_graph(graph)
        first: list[int] = []

        def add(inputs: list[Any]) -> None:
            # Graphs for several sizes round and copy: their work is proportional to their inputs.
            size = sum(tensor.nbytes for tensor in tensors_in(inputs))
            first.append(size)
            watch.work = plus(watch.work, work, size / max(first[0], 1))

        return add

    on_lowered(take)
    torch.compiler.reset()
    config = ConfigManager().parse_args(flags)
    LinearConverter.check_swap = lambda self: None  # type: ignore[method-assign]  # there are no numbers to compare
    args = find_model_args(config.model)
    dense = dense_layers(args)
    training = config.training
    tokens = torch.zeros(training.local_batch_size, training.seq_len, dtype=torch.int64)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        device = find_device(0)
    dims = check(config, world_size, device.type)
    rows = config.training.sequences_per_step(dims.dp)
    passes = rows // training.local_batch_size // dims.dp
    documents = torch.zeros_like(tokens) if training.document_mask else None
    batch = Batch(tokens, tokens, documents, None)
    # Simulated, beside the first, dense layers. A step's work is affine in the number of layers, in steps of the period
    # of activation checkpointing, and in the number of its passes.
    period = period_of_layers(config, args)
    periods, least = divmod(args.n_layers - dense - 1, period)
    by_layers: list[Work] = []

    def allocate(model: object, stages: Sequence[nn.Module], *_: object) -> None:
        for stage in stages:
            stage.to_empty(device=device.torch_device)

    # Blocks of both models are the same graphs.
    with fake_process_group(0, world_size), remember([], {}):
        meshes = build_meshes(dims, device.type, args)
        for layers in (least + 1, least + 1 + period)[: min(periods, 1) + 1]:
            with mode:
                engine = build_engine(
                    config, meshes, device, dataclasses.replace(args, n_layers=dense + layers), rows, allocate=allocate
                )
                assume_load(engine.model, config.job.simulate_expert_load)
                by_passes: list[Work] = []
                for count_of_passes in (1, 1, 2)[: 3 if passes > 1 else 2]:  # the first step compiles
                    watch.work = Work()
                    with watch:
                        train_step(engine, [batch] * count_of_passes, 1e-4)
                    by_passes.append(watch.work)
            by_layers.append(extrapolate(by_passes[1:], passes))
    return extrapolate(by_layers, periods + 1)


def extrapolate(simulated: list[Work], number: int) -> Work:
    """Of `number` passes or periods of layers, from the work of one, and of two where there are more."""
    if number == 1:
        return simulated[0]
    single, double = simulated
    return plus(single, plus(double, single, -1), number - 1)
