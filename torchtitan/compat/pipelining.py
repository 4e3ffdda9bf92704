"""Pipeline schedules.

- `schedules._PipelineScheduleRuntime`, `_load_csv`: run a schedule from a CSV file
- `schedules._ComputationType`, `pipeline_order_with_comms`: how often a stage runs forward and backward; leaving the
  backward passes out
"""

from collections import Counter
from typing import Any

from torch.distributed.pipelining.schedules import _ComputationType as ComputationType
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as PipelineScheduleRuntime

__all__ = ["ComputationType", "PipelineScheduleRuntime", "computations", "keep_forward", "load_csv"]


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


def keep_forward(schedule: Any) -> None:
    """Leaves only forward passes in a schedule, which is then for `eval` alone. Without this, `eval` of a schedule with
    two neighboring stages on one rank fails: it passes a gradient between them that was never computed."""
    kinds = ComputationType
    forward = {kinds.FORWARD, kinds.SEND_F, kinds.RECV_F, kinds.UNSHARD, kinds.RESHARD}
    for rank, actions in schedule.pipeline_order_with_comms.items():
        parts = [part for action in actions for part in (getattr(action, "sub_actions", None) or [action])]
        schedule.pipeline_order_with_comms[rank] = [part for part in parts if part.computation_type in forward]
