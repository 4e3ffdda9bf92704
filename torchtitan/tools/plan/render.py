"""A plan as text and as a picture."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from torchtitan.converters.conversion_report import summary, to_table
from torchtitan.engine.stages import Stage
from torchtitan.errors import aligned, require_report_extra
from torchtitan.tools.plan.result import ExpectedStep, Plan

GIB, MIB = 2**30, 2**20


def stages_to_text(stages: Sequence[Stage], plans: Sequence[Plan]) -> str:
    """A row for each stage of a run."""
    rows = [["stage", "steps", "batch", "peak in GiB", "of device", "fits", "seconds per step, at least"]]
    for stage, plan in zip(stages, plans, strict=True):
        share, seconds = plan.peak / plan.device.memory_bytes, plan.step_seconds
        steps = f"{stage.first_step} to {stage.last_step}"
        size = plan.tokens_per_step // stage.config.training.seq_len
        batch, fits = f"{size} x {stage.config.training.seq_len}", "yes" if plan.fits else "no"
        times = "?" if seconds is None else f"{seconds:.3g}"
        rows.append([stage.title or "-", steps, batch, f"{plan.peak / GIB:.2f}", f"{share:.0%}", fits, times])
    return "stages of the run\n" + aligned(rows, left=0)


def to_text(plan: Plan) -> str:
    """The readable plan: memory, traffic, time, conversion, and the assumptions behind the numbers."""
    device = plan.device
    unit, scale = ("GiB", GIB) if plan.peak >= GIB else ("MiB", MIB)

    def sized(size: float) -> str:
        return f"{size / scale:.2f}" if size >= 0.005 * scale or size == 0 else f"{size / scale:.0e}"

    states, others = ["parameters", "gradients", "optimizer"], list(plan.ranks[0].peaks)[1:]
    memory = ["pipeline rank", "layers", *states, "activations and buffers", "peak", "of device"]
    rows = [[*memory, *(f"peak with {mode}" for mode in others)]]
    for rank in plan.ranks:
        peak = rank.peaks[plan.mode]
        sizes = (rank.parameters, rank.gradients, rank.optimizer, peak - rank.states, peak)
        of_others = (sized(rank.peaks[mode]) for mode in others)
        share = f"{peak / device.memory_bytes:.0%}"
        rows.append([str(rank.rank), "+".join(map(str, rank.layers)), *map(sized, sizes), share, *of_others])
    links = ["within a machine", "between machines"]
    traffic = [["pipeline rank", "dimension", "ranks", "collective", "count", unit, *links, "seconds"]]
    for lines, alike in itertools.groupby(plan.ranks, key=lambda rank: rank.traffic):
        first, *more = (rank.rank for rank in alike)
        names = f"{first} to {more[-1]}" if more else str(first)
        for line in lines:
            seconds = "?" if line.seconds is None else f"{line.seconds:.3f}"
            moved = map(sized, (line.bytes, line.within_node, line.between_nodes))
            traffic.append([names, line.dimension, str(line.ranks), line.kind, f"{line.count:,}", *moved, seconds])
    verdict = "It fits."
    if too_large := [rank for rank in plan.ranks if rank.peaks[plan.mode] > device.memory_bytes]:
        needed = sized(too_large[0].peaks[plan.mode])
        verdict = f"It does not fit: pipeline rank {too_large[0].rank} needs {needed} {unit}."
    active = f" ({plan.active_parameters:,} of a token)" if plan.active_parameters < plan.parameters else ""
    text = [
        f"plan of {plan.model}, {plan.parameters:,} parameters{active}, on {plan.world_size} x {device.name}: "
        f"{plan.layout}",
        f"{plan.batch}; {plan.flops_per_token:.4g} FLOPs per token, forward and backward",
        _forecast(plan),
        f"\nMemory per rank in {unit}, of {sized(device.memory_bytes)}; activation checkpointing: {plan.mode}\n"
        + aligned(rows, left=0),
        _kept_per_token(plan),
        verdict,
        _before_the_first_step(plan, sized, unit),
        "\nCollectives per rank and step\n" + aligned(traffic, left=0),
        *([_parts(plan.expected)] if plan.expected else []),
        "\n" + _time(plan),
        "\nConversion to low precision: "
        + (f"{summary(plan.conversion)}\n{to_table(plan.conversion)}" if plan.conversion else "no converters"),
        "\n" + "\n".join(f"- {note}" for note in plan.notes),
        f"planned in {plan.seconds_taken:.1f} s",
    ]
    return "\n".join(text)


def _kept_per_token(plan: Plan) -> str:
    by_mode = {mode: max(rank.kept_per_token[mode] for rank in plan.ranks) for mode in plan.ranks[0].kept_per_token}
    sizes = [f"{kept / 2**10:,.1f} KiB with {mode}" for mode, kept in by_mode.items()]
    of_ranks = " on the pipeline rank with the most" if len(plan.ranks) > 1 else ""
    return f"Activations and buffers per token of a rank's batch{of_ranks}: {', '.join(sizes)}."


def _before_the_first_step(plan: Plan, sized: Callable[[float], str], unit: str) -> str:
    drawing = max(plan.ranks, key=lambda rank: rank.parameters + rank.largest_weight)
    loading = max(plan.ranks, key=lambda rank: rank.parameters + rank.largest_shard)
    return (
        f"Weights: {sized(drawing.parameters + drawing.largest_weight)} {unit} while they are drawn (the shards, and "
        f"one full weight of at most {sized(drawing.largest_weight)} {unit} at a time), or at most "
        f"{sized(loading.parameters + loading.largest_shard)} {unit} while they are loaded from a published folder "
        f"(one shard of at most {sized(loading.largest_shard)} {unit} at a time)."
    )


def _time(plan: Plan) -> str:
    device = plan.device
    if plan.step_seconds is None:
        return "No lower bound of the step time: peak FLOP/s or bandwidths of this device are unknown."
    slowest = max(plan.ranks, key=lambda rank: rank.compute_seconds or 0)
    tokens = plan.tokens_per_step / plan.step_seconds / plan.world_size
    links = ""
    if device.within_node and device.between_nodes:
        within, between = device.within_node / 1e9, device.between_nodes / 1e9
        links = f", links of {within:,.0f} GB/s within a machine and {between:,.0f} GB/s per device between machines"
    return (
        f"A step takes at least {plan.step_seconds:.3g} s (at most {tokens:,.0f} tokens/s per device, "
        f"MFU {plan.mfu or 0:.0%}): GEMMs alone "
        f"{slowest.compute_seconds or 0:.3g} s ({(slowest.flops + slowest.flops_8bit) / 1e12:,.4g} TFLOP at "
        f"{(device.peak_flops or 0) / 1e12:,.4g} TFLOP/s, 8-bit GEMMs at twice that){links}."
    )


def _forecast(plan: Plan) -> str:
    if plan.expected is None:
        return f"{plan.notes[-1][0].upper()}{plan.notes[-1][1:]}."
    fast, slow = plan.expected.range
    rate = plan.tokens_per_step / plan.world_size
    full, causal = plan.expected.mfu
    return (
        f"Expected: {plan.expected.seconds:.3g} s a step ({fast:.3g} to {slow:.3g}), "
        f"{rate / plan.expected.seconds:,.0f} tokens/s a device ({rate / slow:,.0f} to {rate / fast:,.0f}), MFU "
        f"{causal:.0%} with causal attention ({full:.0%} with full)"
    )


def _parts(expected: ExpectedStep) -> str:
    rows = [["part", "ms", "share"]]
    rows += [
        [name, f"{1e3 * seconds:,.3g}", f"{seconds / expected.seconds:.0%}"]
        for name, seconds in expected.parts.items()
        if seconds > 0
    ]
    return f"\nThe expected step by part\n{aligned(rows, left=0)}"


def draw_plan(plan: Plan, path: Path) -> None:
    """Writes a PNG: memory of each pipeline rank relative to the device's, and the seconds of a step by cause. Raises a
    UserError if matplotlib is not installed."""
    require_report_extra("plan.png", "matplotlib")
    from matplotlib.figure import Figure  # needs no display and no global pyplot state

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    places = [rank.rank for rank in plan.ranks]
    memory = {
        "parameters": [rank.parameters for rank in plan.ranks],
        "gradients": [rank.gradients for rank in plan.ranks],
        "optimizer": [rank.optimizer for rank in plan.ranks],
        "activations and buffers": [max(0, rank.peaks[plan.mode] - rank.states) for rank in plan.ranks],
    }
    bottom = [0.0] * len(places)
    for name, sizes in memory.items():
        left.bar(places, [size / GIB for size in sizes], 0.6, bottom=bottom, label=name)
        bottom = [low + size / GIB for low, size in zip(bottom, sizes, strict=True)]
    for mode, marker in zip(list(plan.ranks[0].peaks)[1:], "v^", strict=False):
        heights = [rank.peaks[mode] / GIB for rank in plan.ranks]
        left.plot(places, heights, marker, color="black", label=f"peak with checkpointing {mode}")
    left.axhline(plan.device.memory_bytes / GIB, color="red", linestyle="--", label=plan.device.name)
    left.set_ylabel("GiB")
    left.set_title(f"Memory per rank (checkpointing: {plan.mode})")
    seconds: dict[str, list[float]] = {"GEMMs": [rank.compute_seconds or 0 for rank in plan.ranks]}
    for name in dict.fromkeys(line.dimension for rank in plan.ranks for line in rank.traffic):
        seconds[name] = [rank.seconds(name) for rank in plan.ranks]
    width = 0.8 / len(seconds)
    for number, (name, heights) in enumerate(seconds.items()):
        right.bar([place - 0.4 + (number + 0.5) * width for place in places], heights, width, label=name)
    if plan.step_seconds is not None:
        right.axhline(plan.step_seconds, color="red", linestyle="--", label="lower bound of the step")
    right.set_ylabel("s")
    right.set_title("Step time by cause (lower bounds)")
    for axes in (left, right):
        axes.set_xlabel("pipeline rank")
        axes.set_xticks(places)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)
    figure.suptitle(f"{plan.model} on {plan.world_size} x {plan.device.name}: {plan.layout}")
    figure.savefig(path, dpi=120, format="png")
