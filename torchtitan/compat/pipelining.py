"""Pipeline schedules.

- `schedules._PipelineScheduleRuntime`, `_load_csv`: run a schedule from a CSV file
- `schedules._ComputationType`, `pipeline_order_with_comms`: how often a stage runs forward and backward; leaving the
  backward passes out
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch.distributed.pipelining.schedules import _ComputationType as ComputationType
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as PipelineScheduleRuntime

__all__ = ["ComputationType", "PipelineScheduleRuntime", "computations", "keep_forward", "load_csv"]


def load_csv(schedule: Any, path: str) -> None:
    """Loads a schedule. Errors are those of torch and of `csv`."""
    schedule._load_csv(path)


def computations(schedule: Any, rank: int, stage: int) -> Counter[ComputationType]:
    """How often a rank runs each `ComputationType` of one of its stages per step."""
    order = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    counts: Counter[ComputationType] = Counter()
    for action in _single(filter(None, order.get(rank, []))):
        if action.stage_index == stage:
            counts[action.computation_type] += 1
    return counts


def keep_forward(schedule: Any) -> None:
    """Leaves only forward passes in a schedule, which is then for `eval` alone. Without this, `eval` of a schedule with
    two neighboring stages on one rank fails: it passes a gradient between them that was never computed."""
    Type = ComputationType
    forward = {Type.FORWARD, Type.SEND_F, Type.RECV_F, Type.UNSHARD, Type.RESHARD}
    for rank, actions in schedule.pipeline_order_with_comms.items():
        kept = [action for action in _single(actions) if action.computation_type in forward]
        schedule.pipeline_order_with_comms[rank] = kept


def _single(actions: Iterable[Any]) -> Iterator[Any]:
    """The actions, with the two of an overlapped forward and backward pass one by one."""
    for action in actions:
        yield from getattr(action, "sub_actions", None) or [action]
