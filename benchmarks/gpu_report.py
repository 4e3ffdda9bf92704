"""The report that gpu.py writes."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.tables import markdown, spread

GIB = 2**30
Result = dict[str, Any]


def report(about: dict[str, Any], results: Sequence[Result], base: str, user: Result) -> str:
    """Markdown: the machine, the table, the missing rows, and a breakdown of the device time.

    Args:
        about: `machine` and `settings`.
        base: the recipe that others are compared with, for the same shape.
        user: the run of train.py: its `command`, and the `last` report in its metrics.jsonl or why it `failed`; empty
            if there was none.
    """
    models = list(dict.fromkeys(result["model"] for result in results))
    results = sorted(results, key=lambda result: models.index(result["model"]))
    done = [result for result in results if "rate" in result]
    blocks = [
        f"# Training on {about['machine']['device']}",
        about["machine"]["text"] + ".",
        *([f"```\n{about['machine']['driver']}\n```"] if about["machine"]["driver"] else []),
        "The rows are a block's speed: steps on random tokens, without data, checks or logs. "
        + ", ".join(f"{key} {value}" for key, value in about["settings"].items())
        + ".",
        rates(done, about["machine"], base),
        "MFU: model FLOPs at this rate over the bf16 GEMM rate, measured or of the data sheet; `full` counts "
        "attention as if each token saw the whole sequence (torchtitan), `causal` half of that (Megatron). The range "
        "is over single steps.",
    ]
    if user:
        blocks.append(of_user(user))
    failed = [f"- {name(result)}: {result['failed']}" for result in results if "failed" in result]
    if failed:
        blocks.append("Rows without a figure:\n\n" + "\n".join(failed))
    notes = [f"- {name(result)}: {result['note']}" for result in done if result["note"]]
    if notes:
        blocks.append("Notes:\n\n" + "\n".join(notes))
    traced = [result for result in done if "device_seconds" in result]
    long = [result for result in done if "sustained" in result]
    if long:
        blocks += ["## Without a pause", sustained(long)]
    ranks = [result for result in done if "rank" in result]
    if ranks:
        blocks += ["## One rank of eight, beside what others published", beside_published(ranks), *links(ranks)]
    if traced:
        blocks += ["## Where a step's time goes", split(traced), device_time(traced), longest_kernels(traced)]
    return "\n\n".join(blocks) + "\n"


def of_user(user: Result) -> str:
    """What train.py says of its last steps."""
    if "failed" in user:
        return f"As a user starts it, no figure ({user['failed']}): `{user['command']}`"
    last = user["last"]
    mfu = "unknown" if last["mfu"] is None else f"{last['mfu']:.1%}"
    return (
        f"As a user starts it: {last['tokens_per_second']:,.0f} tokens/s, MFU {mfu} (full), waiting for data "
        f"{last['data_wait_share']:.1%}, {last['peak_memory_bytes'] / GIB:.1f} GiB, in steps up to {last['step']} of "
        f"`{user['command']}`"
    )


def name(result: Result) -> str:
    return f"{result['model']}, {result['recipe']}"


def rates(done: Sequence[Result], machine: dict[str, Any], base: str) -> str:
    against = {"": machine["gemm_rate"]}
    if machine["datasheet_rate"]:
        against["data sheet "] = machine["datasheet_rate"]
    bases = {shape_of(r): r["rate"] for r in reversed(done) if r["recipe"].split(", ")[0] == base}
    columns = ["model", "layers", "recipe", "tokens/s", "range", f"to {base}"]
    columns += [f"MFU {peak}{attention}" for peak in against for attention in ("full", "causal")]
    columns += ["host, of a step", "memory, GiB", "compilation, s", "converted layers"]
    rows = []
    for result in done:
        first, of_host = bases.get(shape_of(result)), result.get("host_seconds")
        tokens = result["rate"] * statistics.median(result["step_seconds"])
        rows.append(
            [
                result["model"],
                f"{result['layers']} of {result['all_layers']}",
                result["recipe"] + ("" if result["compiled"] or "eager" in result["recipe"] else " (not compiled)"),
                f"{result['rate']:,.0f}",
                spread([tokens / seconds for seconds in result["step_seconds"]], "{:,.0f}"),
                f"{result['rate'] / first:.2f}" if first else "",
                *(
                    f"{result['rate'] * result['flops_per_token'][attention] / rate:.1%}"
                    for rate in against.values()
                    for attention in ("full", "causal")
                ),
                f"{statistics.median(of_host) / statistics.median(result['step_seconds']):.0%}" if of_host else "",
                f"{result['memory'] / GIB:.1f}",
                compilation(result),
                result["converted"],
            ]
        )
    return markdown(columns, rows)


def compilation(result: Result) -> str:
    """Seconds, and whether the compiler's cache had its graphs."""
    if result["compile_seconds"] is None:
        return ""
    graphs = result.get("graphs", {})
    cached = f" ({graphs['cached']} of {sum(graphs.values())} graphs cached)" if graphs.get("cached") else ""
    return f"{result['compile_seconds']:.0f}{cached}"


def shape_of(result: Result) -> tuple[str, int, int]:
    """What rows must have in common to be compared."""
    return result["model"], result["layers"], result.get("micro_batches", 1)


def sustained(long: Sequence[Result]) -> str:
    """Tokens/s, clock and power, each the smallest, the median and the largest of about 2 s."""

    def three(values: Sequence[float]) -> str:
        return " / ".join(f"{f(values):,.0f}" for f in (min, statistics.median, max)) if values else "not read"

    rows = []
    for result in long:
        seen = result["sustained"]
        numbers = (three(seen[key]) for key in ("rates", "sm_clock_mhz", "power_watts"))
        ratio = f"{statistics.median(seen['rates']) / result['rate']:.2f}" if seen["rates"] else ""
        rows.append([name(result), f"{seen['seconds']:.0f}", f"{seen['steps']}", *numbers, ratio])
    columns = ["min / median / max", "s", "steps", "tokens/s", "SM clock, MHz", "power, W", "to the timed steps"]
    return markdown(columns, rows)


# (who, GPU, precision, how it was counted, tokens/s of a GPU), Llama 3 8B. Sources: NVIDIA-NeMo/Megatron-Bridge,
# docs/performance-summary-archive.md (25.11); pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1.
SMALLER = "H100 with 2.4 TB/s, 500 W"
STEP_90 = "8 GPUs, 2 sequences each, selective recomputation, step 90"
PUBLISHED: tuple[tuple[str, str, str, str, float], ...] = (
    (
        "Megatron-Bridge",
        "H100",
        "float8, one scale a tensor",
        "8 GPUs, 16 micro-batches of a sequence, no recomputation, bf16 sums over ranks, weights gathered in float8",
        14_451,
    ),
    ("bare PyTorch, FSDP2, torchao", "H100", "not stated", "", 12_414),
    ("torchtitan", "H200", "float8", "", 10_938),
    ("torchtitan", SMALLER, "float8", STEP_90, 8_532),
    ("torchtitan", SMALLER, "bf16", STEP_90, 6_667),
)
PEAK = 989e12  # FLOP/s of an H100's and an H200's data sheet, dense bf16


def beside_published(ranks: Sequence[Result]) -> str:
    """Tokens/s of a GPU; for ours the median without a pause, if there is one."""
    flops = ranks[0]["flops_per_token"]
    rows = []
    for result in ranks:
        long = result.get("sustained", {}).get("rates")
        how = f"1 GPU of {result['rank']['ranks']} simulated, {few(result['micro_batches'])}, float32 sums"
        how += f", random data, {'median of 60 s' if long else 'short burst'}"
        rate = statistics.median(long) if long else result["rate"]
        rows.append(["ours", "this one", name(result), how, rate])
    cells = []
    for *others, rate in (*PUBLISHED, *rows):
        mfus = (f"{rate * flops[attention] / PEAK:.1%}" for attention in ("full", "causal"))
        cells.append([*others, f"{rate:,.0f}", *mfus])
    return markdown(["who", "GPU", "precision", "how it was counted", "tokens/s", "MFU full", "causal"], cells)


def few(micro_batches: int) -> str:
    return "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"


def links(ranks: Sequence[Result]) -> list[str]:
    """What was simulated, and how exactly."""
    lines = []
    for result in ranks:
        rank, last = result["rank"], result["rank"]["last_collectives"]
        line = f"- {name(result)}: {rank['parameters']:,} parameters of {result['parameters']:,} on this rank"
        if last["seconds_taken"]:
            line += f"; the last collectives took {last['seconds_taken'] / last['seconds_asked']:.2f} of their time"
        lines.append(f"{line}; loss {result['first_loss_per_token']:.3f} at first, {result['loss_per_token']:.3f} last")
    rate = ranks[0]["rank"]["bytes_per_second_on_links"]
    return [
        f"MFU relative to {PEAK / 1e12:.0f} TFLOP/s. Collectives are copies that last as long as links with "
        f"{rate / 1e9:.0f} GB/s in one direction would take; NCCL's use of multiprocessors and memory, waiting for "
        "other ranks and latencies are not simulated, so these rows are an upper bound.",
        "\n".join(lines),
    ]


def longest_kernels(traced: Sequence[Result], number: int = 12) -> str:
    """The kernels that take the most time; the JSON file has all of them, with their full names."""
    rows = [
        [name(result), f"`{kernel[:100]}`", f"{1e3 * seconds:.2f}", f"{calls}"]
        for result in traced
        for kernel, seconds, calls in result.get("kernels", [])[:number]
    ]
    return markdown(["longest kernels", "name", "ms", "calls"], rows)


def split(traced: Sequence[Result]) -> str:
    """Fractions of a traced step."""
    phases = [phase for phase in traced[0]["split"] if phase != "step" and any(r["split"].get(phase) for r in traced)]
    rows = []
    for result in traced:
        seconds = result["split"]
        rows.append([name(result), *(f"{seconds.get(phase, 0.0) / seconds['step']:.1%}" for phase in phases)])
    return markdown(["share of a step", *(phase.replace("_", " ") for phase in phases)], rows)


def device_time(traced: Sequence[Result]) -> str:
    """Milliseconds by class of kernel, and the remainder of the median step that was timed: a traced step waits for the
    host."""
    classes = [label for label in traced[0]["device_seconds"] if any(r["device_seconds"][label] for r in traced)]
    rows = []
    for result in traced:
        seconds = result["device_seconds"]
        idle = max(0.0, statistics.median(result["step_seconds"]) - sum(seconds.values()))
        rows.append([name(result), *(f"{1e3 * seconds[label]:.0f}" for label in classes), f"{1e3 * idle:.0f}"])
    return markdown(["device time of a step, ms", *classes, "none, when not traced"], rows)
