"""Degrees of parallelism against the number of processes."""

from typing import Any

import pytest

from torchtitan.config.system import Parallelism
from torchtitan.parallel.dims import ParallelDims, find_dims


def find(world_size: int, **degrees: Any) -> tuple[ParallelDims | None, list[str]]:
    problems: list[str] = []
    return find_dims(Parallelism(**degrees), world_size, problems), problems


@pytest.mark.parametrize(
    ("world_size", "replicate", "shard", "expected", "shown"),
    [
        (1, 1, -1, (1, 1), "one process"),
        (8, 1, -1, (1, 8), "FSDP 8"),
        (8, 1, 8, (1, 8), "FSDP 8"),
        (8, 8, 1, (8, 1), "DDP 8"),
        (8, 8, -1, (8, 1), "DDP 8"),
        (8, 2, -1, (2, 4), "HSDP 2 x 4 (replicate x shard)"),
        (8, 2, 4, (2, 4), "HSDP 2 x 4 (replicate x shard)"),
    ],
)
def test_degrees_that_fit(world_size: int, replicate: int, shard: int, expected: tuple[int, int], shown: str) -> None:
    dims, problems = find(world_size, data_parallel_replicate_degree=replicate, data_parallel_shard_degree=shard)
    assert problems == []
    assert dims == ParallelDims(*expected)
    assert (dims.dp, str(dims)) == (world_size, shown)


@pytest.mark.parametrize(
    ("world_size", "replicate", "shard", "problem"),
    [
        (8, 1, 4, "the degrees multiply to 4, but there are 8 processes"),
        (1, 1, 2, "the degrees multiply to 2, but there are 1 processes"),
        (8, 3, -1, "8 processes cannot be divided by the product of the degrees, 3"),
        (2, 4, -1, "2 processes cannot be divided by the product of the degrees, 4"),
        (8, 1, 0, "parallelism.data_parallel_shard_degree must be -1 or above 0, not 0."),
        (8, 1, -2, "parallelism.data_parallel_shard_degree must be -1 or above 0, not -2."),
    ],
)
def test_degrees_that_do_not_fit(world_size: int, replicate: int, shard: int, problem: str) -> None:
    dims, problems = find(world_size, data_parallel_replicate_degree=replicate, data_parallel_shard_degree=shard)
    assert dims is None
    assert len(problems) == 1 and problem in problems[0]
    assert problems[0].startswith("parallelism")


def test_problems_are_added_to_those_found_before() -> None:
    problems = ["training.steps: an earlier one"]
    assert find_dims(Parallelism(data_parallel_shard_degree=3), 2, problems) is None
    assert len(problems) == 2


@pytest.mark.parametrize("kind", ["tensor", "context", "pipeline"])
def test_parallelism_that_is_not_built_yet_is_refused(kind: str) -> None:
    _, problems = find(4, **{f"{kind}_parallel_degree": 2})
    assert any(f"parallelism.{kind}_parallel_degree" in problem for problem in problems)
