"""Tensor parallelism of Qwen3: a rank normalizes the heads that it has."""

from torchtitan.models.parallelize import TENSOR_PARALLEL_PLAN
from torchtitan.parallel.dims import Style

PLAN: dict[str, Style] = {**TENSOR_PARALLEL_PLAN, "attention.q_norm": "heads", "attention.k_norm": "heads"}
