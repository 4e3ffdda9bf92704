"""Pipeline schedules.

- `schedules._PipelineScheduleRuntime`, `_load_csv`: run a schedule from a CSV file
- `schedules._ComputationType`, `pipeline_order_with_comms`: how often a stage runs forward and backward
"""

from collections import Counter
from typing import Any

from torch.distributed.pipelining.schedules import _ComputationType as ComputationType
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as PipelineScheduleRuntime

__all__ = ["ComputationType", "PipelineScheduleRuntime", "computations", "load_csv"]


def load_csv(schedule: Any, path: str) -> None:
    """Loads a schedule. Errors are torch's: AssertionError, ValueError, KeyError, RuntimeError."""
    schedule._load_csv(path)


def computations(schedule: Any, rank: int, stage: int) -> Counter[ComputationType]:
    """How often a rank runs each `ComputationType` of one of its stages per step."""
    order = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    counts: Counter[ComputationType] = Counter()
    for action in order.get(rank, []):
        for part in (getattr(action, "sub_actions", None) or [action]) if action is not None else []:
            if part.stage_index == stage:
                counts[part.computation_type] += 1
    return counts
