"""Degrees of parallelism compared with the number of processes."""

from typing import Any

import pytest

from torchtitan.config.system import Parallelism
from torchtitan.parallel.dims import ParallelDims, find_dims


def find(world_size: int, **degrees: Any) -> tuple[ParallelDims | None, list[str]]:
    problems: list[str] = []
    return find_dims(Parallelism(**degrees), world_size, problems), problems


@pytest.mark.parametrize(
    ("world_size", "degrees", "expected", "shown"),
    [
        (1, {}, ParallelDims(), "one process"),
        (8, {}, ParallelDims(dp_shard=8), "FSDP 8"),
        (8, {"data_parallel_shard_degree": 8}, ParallelDims(dp_shard=8), "FSDP 8"),
        (8, {"data_parallel_replicate_degree": 8}, ParallelDims(dp_replicate=8), "DDP 8"),
        (
            8,
            {"data_parallel_replicate_degree": 2},
            ParallelDims(dp_replicate=2, dp_shard=4),
            "HSDP 2 x 4 (replicate x shard)",
        ),
        (2, {"tensor_parallel_degree": 2}, ParallelDims(tp=2), "TP 2"),
        (
            512,
            {"tensor_parallel_degree": 8, "pipeline_parallel_degree": 8},
            ParallelDims(pp=8, dp_shard=8, tp=8),
            "FSDP 8 x TP 8 x PP 8",
        ),
        (8, {"context_parallel_degree": 4}, ParallelDims(dp_shard=2, cp=4), "FSDP 2 x CP 4"),
    ],
)
def test_degrees_that_fit(world_size: int, degrees: dict[str, int], expected: ParallelDims, shown: str) -> None:
    dims, problems = find(world_size, **degrees)
    assert problems == []
    assert dims is not None
    assert (dims, str(dims)) == (expected, shown)


def test_weights_are_sharded_over_ranks_that_share_a_sequence_too() -> None:
    dims = ParallelDims(dp_replicate=2, dp_shard=3, cp=4, tp=5)
    assert (dims.dp, dims.fsdp) == (6, 12)


SHARD, REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"
TENSOR, PIPELINE = "tensor_parallel_degree", "pipeline_parallel_degree"


@pytest.mark.parametrize(
    ("world_size", "degrees", "fragments"),
    [
        (8, {SHARD: 4}, ["multiply to 4", "8 processes", "data_parallel_shard_degree to 8"]),
        (8, {SHARD: 2, TENSOR: 2}, ["multiply to 4", "tensor_parallel_degree to 4", "data_parallel_shard_degree to 4"]),
        (1, {SHARD: 2}, ["multiply to 2", "there is 1 process;", "start 2 processes"]),
        (8, {REPLICATE: 3}, ["not a multiple of the product of the degrees, 3", "to 1 or 2 or 4 or 8"]),
        (12, {TENSOR: 8, PIPELINE: 2}, ["product of the degrees, 16", "tensor_parallel_degree to 1 or 2 or 3 or 6"]),
    ],
)
def test_degrees_that_do_not_fit(world_size: int, degrees: dict[str, int], fragments: list[str]) -> None:
    dims, problems = find(world_size, **degrees)
    assert dims is None
    assert len(problems) == 1 and problems[0].startswith("parallelism")
    assert [fragment for fragment in fragments if fragment not in problems[0]] == [], problems[0]


def test_problems_are_added_to_those_found_before() -> None:
    problems = ["training.steps: an earlier one"]
    assert find_dims(Parallelism(data_parallel_shard_degree=3), 2, problems) is None
    assert len(problems) == 2
