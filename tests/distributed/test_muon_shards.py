"""Muon on sharded parameters: stacks of matrices, any placement, uneven shards, several buckets."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from workers import in_processes

from torchtitan.optim.matrix_owners import deal
from torchtitan.optim.muon import Muon

SHAPES = [(5, 12, 8), (4, 8, 6), (10, 8), (7, 12), (8, 8), (3, 16)]
PLACEMENTS: dict[str, list[list[Placement]]] = {
    "rows and columns": [[Shard(-2), Shard(-1)], [Shard(-1), Shard(-2)]],
    "replicas": [[Replicate(), Shard(-2)], [Shard(-1), Replicate()], [Replicate(), Replicate()]],
    "experts": [[Shard(0), Shard(-1)], [Shard(0), Replicate()], [Replicate(), Shard(0)]],
    "twice in one dimension": [[Shard(0), Shard(0)], [Shard(-1), Shard(-1)]],
}


def trained(parameters: list[nn.Parameter], **options: Any) -> tuple[Muon, list[torch.Tensor]]:
    """Three steps from the same weights with the same gradients, however they are sharded. Returns full weights."""
    optimizer = Muon(parameters, lr=0.1, dtype=torch.float32, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for parameter in parameters:
            full = torch.randn(parameter.shape, generator=generator)
            parameter.grad = _like(parameter, full)
        optimizer.step()
    return optimizer, [_full(parameter.detach()) for parameter in parameters]


def _like(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return full
    return distribute_tensor(full, parameter.device_mesh, parameter.placements)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def starts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def sharded(name: str, row_normalization: bool, bucket: int) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    choices = PLACEMENTS[name]
    parameters = []
    for number, start in enumerate(starts()):
        placements = choices[number % len(choices)]
        placements = [
            Shard(placement.dim % start.ndim) if isinstance(placement, Shard) else placement for placement in placements
        ]
        parameters.append(nn.Parameter(distribute_tensor(start, mesh, placements)))
    optimizer, weights = trained(parameters, row_normalization=row_normalization, bucket=bucket)
    states = [_full(optimizer.state_of(parameter)["momentum_buffer"]) for parameter in parameters]
    if row_normalization:
        states += [_full(optimizer.state_of(parameter)["row_mean_square"]) for parameter in parameters]
    return weights, states, len(optimizer.buckets)


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("row_normalization", [False, True])
def test_it_equals_one_process(name: str, row_normalization: bool) -> None:
    """With one bucket, and with a bucket for each matrix of a rank."""
    parameters = [nn.Parameter(start) for start in starts()]
    optimizer, expected = trained(parameters, row_normalization=row_normalization)
    momenta = [optimizer.state_of(parameter)["momentum_buffer"] for parameter in parameters]
    if row_normalization:
        momenta += [optimizer.state_of(parameter)["row_mean_square"] for parameter in parameters]
    bucket = 1 if row_normalization else 1 << 20
    for weights, states, count in in_processes(sharded, 4, name, row_normalization, bucket):
        assert (count > 1) == (bucket == 1)
        for left, right in zip([*weights, *states], [*expected, *momenta], strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def replicas_of_bfloat16() -> list[torch.Tensor]:
    """Local weights and states of every rank, all of them replicas."""
    mesh = init_device_mesh("cpu", (4,))
    parameters = [nn.Parameter(distribute_tensor(start.bfloat16(), mesh, [Replicate()])) for start in starts()]
    optimizer = Muon(parameters, lr=0.1, state_dtype=torch.bfloat16, seed=1, quantization="8bit")
    for parameter in parameters:
        parameter.grad = _like(parameter, torch.ones(parameter.shape, dtype=torch.bfloat16))
    optimizer.step()
    states = [value for parameter in parameters for value in optimizer.state_of(parameter).values()]
    return [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for tensor in [*map(torch.Tensor.detach, parameters), *states]
    ]


def test_replicas_stay_equal() -> None:
    """Rounded stochastically, with an owner elsewhere for most of the matrices."""
    first, *others = in_processes(replicas_of_bfloat16, 4)
    for other in others:
        assert all(torch.equal(left, right) for left, right in zip(first, other, strict=True))


def dealt() -> tuple[dict[int, int], list[int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    parameters = [nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Replicate(), Shard(0)])) for _ in range(12)]
    stack = nn.Parameter(distribute_tensor(torch.ones(6, 8, 4), mesh, [Replicate(), Shard(0)]))
    optimizer = Muon([*parameters, stack], lr=0.1)
    matrices = deal(optimizer.shardings)
    counts = {rank: sum(matrix.owner == rank and not matrix.place for matrix in matrices) for rank in range(4)}
    return counts, [next(matrix.owner for matrix in matrices if matrix.place == (place,)) for place in range(6)]


def test_work_is_divided_evenly_and_complete_matrices_stay_where_they_are() -> None:
    """Replicas share the work too."""
    counts, owners = in_processes(dealt, 4)[0]
    assert counts == {0: 3, 1: 3, 2: 3, 3: 3}
    assert [owner % 2 for owner in owners] == [0, 0, 0, 1, 1, 1]
    assert sorted(set(owners)) == [0, 1, 2, 3]
