"""Breaks down the time of a step, from the traces that `[profiling]` writes.

python -m benchmarks step_split TRACE.json ...      prints the breakdown of each

- `data`, `forward`, `backward`, `optimizer`: the spans with these names (`engine.engine`), on a GPU from the first
  to the last of the kernels that any thread launched meanwhile: autograd has its own. The chunked loss computes the
  gradient of the output layer in the forward pass, so `forward` includes it; `optimizer` includes clipping. A pipeline
  has one span, `forward and backward`.
- `rest`: the step minus these: converter hooks, reports, transfers, and the Python code in between.
- `communication_wait`: only collectives run. On a GPU: NCCL kernels without any other concurrent kernel; on a CPU:
  gloo's work while the training thread runs no operation of its own. It is part of the spans above.
"""

import json
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PHASES = ("data", "forward", "backward", "forward and backward", "optimizer")
FRAMES = ("autograd", "c10d", "_c10d_functional", "c10d_functional", "profiler")
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
COMMUNICATION = re.compile(r"nccl|c10d|spin_kernel", re.IGNORECASE)  # spin_kernel: a simulated one (gpu_links.py)
Intervals = list[tuple[float, float]]
Event = dict[str, Any]


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """The same time as sorted intervals without overlaps."""
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def without(intervals: Intervals, others: Intervals) -> Intervals:
    """The parts of `intervals` that are in no interval of `others`; both as returned by `union`."""
    left: Intervals = []
    first = 0
    for start, end in intervals:
        while first < len(others) and others[first][1] <= start:
            first += 1
        at = first
        while at < len(others) and others[at][0] < end:
            if others[at][0] > start:
                left.append((start, others[at][0]))
            start = max(start, others[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)


def step_split(path: Path) -> dict[str, float]:
    """Seconds of a traced step: `step`, the phases, `rest`, `communication_wait`."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    steps = [event for event in of_kind(events, "user_annotation") if event["name"].startswith("ProfilerStep")]
    if not steps:
        sys.exit(f"{path} contains no step")
    on_gpu = any(event["cat"] in GPU_WORK for event in events)
    split = {"step": length(spans(steps))}
    annotations = of_kind(events, "user_annotation")
    launched = launches(events)
    for phase in PHASES:
        intervals = spans(event for event in annotations if event["name"] == phase)
        # Waiting for data runs no kernel.
        split[phase] = length(on_device(intervals, launched) if on_gpu and phase != "data" else intervals)
    split["rest"] = max(0.0, split["step"] - sum(split[phase] for phase in PHASES))
    working, communicating = gpu_work(events) if on_gpu else cpu_work(events, steps[0]["tid"])
    split["communication_wait"] = length(without(communicating, working))
    return {name: microseconds / 1e6 for name, microseconds in split.items()}


def of_kind(events: Iterable[Event], category: str) -> list[Event]:
    return [event for event in events if event.get("cat") == category]


def spans(events: Iterable[Event]) -> Intervals:
    return union((event["ts"], event["ts"] + event["dur"]) for event in events)


def launches(events: Sequence[Event]) -> list[tuple[float, Event]]:
    """When the host launched each kernel, and the kernel."""
    calls = (event for event in events if event.get("cat") in LAUNCHES)
    times = {event["args"]["correlation"]: event["ts"] for event in calls if "correlation" in event.get("args", {})}
    kernels = (event for event in events if event.get("cat") in GPU_WORK)
    return [(times[n], kernel) for kernel in kernels if (n := kernel["args"].get("correlation")) in times]


def on_device(phases: Intervals, launched: Sequence[tuple[float, Event]]) -> Intervals:
    """From the first to the last kernel launched in each interval."""
    busy = []
    for start, end in phases:
        kernels = [kernel for time, kernel in launched if start <= time < end]
        if kernels:
            busy.append((min(k["ts"] for k in kernels), max(k["ts"] + k["dur"] for k in kernels)))
    return union(busy)


def gpu_work(events: Sequence[Event]) -> tuple[Intervals, Intervals]:
    """(all other kernels, NCCL kernels)."""
    kernels = [event for event in events if event.get("cat") in GPU_WORK]
    is_nccl = [COMMUNICATION.search(event["name"]) is not None for event in kernels]
    others = spans(event for event, nccl in zip(kernels, is_nccl, strict=True) if not nccl)
    return others, spans(event for event, nccl in zip(kernels, is_nccl, strict=True) if nccl)


def cpu_work(events: Sequence[Event], thread: int) -> tuple[Intervals, Intervals]:
    """(operations of the training thread, gloo's work)."""
    operations = [event for event in of_kind(events, "cpu_op") if event["tid"] == thread]
    waits = [event for event in operations if "c10d" in event["name"]]
    gloo = [event for event in events if event["name"].startswith("gloo:")]
    return without(spans(filter(computes, operations)), spans(waits)), spans(gloo)


def computes(operation: Event) -> bool:
    """Whether a CPU operation does work itself, rather than wrapping it: autograd's nodes, in whose hooks FSDP waits,
    or a compiled region."""
    namespace, colons, _ = operation["name"].partition("::")
    return is_compiled(operation) or bool(colons and namespace not in FRAMES)


def is_compiled(operation: Event) -> bool:
    return str(operation["name"]).startswith("CompiledFunction")


# Class of the first pattern found in the name of a kernel, or of a CPU operation. The compiler's loops are named after
# what is in them, and its own GEMMs start with triton_tem. Rounding: the kernels that torchtitan/kernels launches; the
# compiler's loops round, too. The optimizer's are clipping and update; FSDP copies with the same template.
CLASSES = (
    ("communication", COMMUNICATION.pattern),
    ("compiled loops", r"^triton_(?!tem)|CompiledFunction"),
    ("attention", r"flash|fmha|sdpa|attention"),
    ("rounding", r"^((swiglu_)?(round|amax)|round_rows|survey|nvfp4_pack|mx_pack)_kernel"),
    ("GEMMs", r"gemm|nvjet|cutlass|cublas|mm\b|matmul|linear|^triton_tem|^(grouped|over_rows)_kernel"),
    ("chunk_cat", r"chunk_cat"),
    ("optimizer", r"adam|(multi_tensor|foreach)(?!.*copy)"),
    ("copies", r"memcpy|memset|copy|split_with_sizes|aten::(to|contiguous|clone|cat|zero_)$"),
    ("other", r""),
)
KINDS = tuple(name for name, _ in CLASSES)


def time_by_class(path: Path) -> tuple[dict[str, float], list[tuple[str, float, int]]]:
    """(seconds by class of kernel, [(name, seconds, calls)] of all of them, the longest first) in a trace."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event["cat"] in GPU_WORK] or cpu_kernels(events)
    by_name: dict[str, tuple[float, int]] = {}
    for event in kernels:
        seconds, calls = by_name.get(event["name"], (0.0, 0))
        by_name[event["name"]] = seconds + event["dur"] / 1e6, calls + 1
    by_class = dict.fromkeys(KINDS, 0.0)
    for name, (seconds, _) in by_name.items():
        by_class[next(label for label, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE))] += seconds
    order = sorted(by_name.items(), key=lambda item: -item[1][0])
    return by_class, [(name, seconds, calls) for name, (seconds, calls) in order]


def cpu_kernels(events: Iterable[Event]) -> list[Event]:
    """The outermost operations. Those within a compiled region count separately, and its remaining time as its
    loops."""
    working = list(filter(computes, of_kind(events, "cpu_op")))
    regions = outermost(event for event in working if is_compiled(event))
    operations = outermost(event for event in working if not is_compiled(event))
    own = without(spans(regions), spans(operations))
    return operations + [{**regions[0], "ts": start, "dur": end - start} for start, end in own]


def outermost(operations: Iterable[Event]) -> list[Event]:
    """Those not contained in another operation of their thread."""
    outer: list[Event] = []
    for event in sorted(operations, key=lambda event: (event["tid"], event["ts"], -event["dur"])):
        if not outer or outer[-1]["tid"] != event["tid"] or event["ts"] >= outer[-1]["ts"] + outer[-1]["dur"]:
            outer.append(event)
    return outer


def medians(splits: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each part over several traced steps."""
    return {name: statistics.median(split[name] for split in splits) for name in splits[0]}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        split = step_split(Path(argument))
        shares = ", ".join(f"{name} {seconds / split['step']:.1%}" for name, seconds in split.items() if name != "step")
        print(f"{argument}: {split['step'] * 1e3:.1f} ms: {shares}")
