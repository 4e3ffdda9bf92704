"""Compares variants of a run: tokens/s, MFU, memory, time to the first step and breakdown of the step time.

python -m benchmarks throughput --variant "bf16:" --variant "int8: --model.converters=int8" -- --training.seq_len=512
python -m benchmarks throughput --variant "one:" --variant "FSDP 2: NGPU=2 --training.local_batch_size=2"
python -m benchmarks throughput --against "COMMAND OF ANOTHER TRAINER"

A variant is a name, then its own variables and flags; flags after -- apply to all. Runs alternate, A B A B, and ratios
are computed within a round, because the speed of a machine drifts. The columns:

- tokens/s: of all processes together. For a run the median over the steps after warm-up, then the median over rounds;
  `range` is over the rounds.
- MFU: model FLOP/s at that rate divided by the machine's GEMM rate, in bf16 or what its CPU multiplies faster, which is
  measured in the same call (benchmarks/machine.py; on a CPU with the threads of all processes; median over before each
  round and after the last). `full` counts attention as if each token attended to the entire sequence (torchtitan,
  PaLM), `causal` half of that (Megatron).
- memory: on a GPU the peak of torch's allocator in the measured steps, else the peak resident set of the largest
  process; for another trainer always the latter.
- first step: seconds from the command to the end of the first step, including imports, data and compilation.
- the breakdown of a step comes from traces of one more run (benchmarks/step_split.py), except `data`, which comes from
  the timed runs. The breakdown by kind of operation also comes from traces, with the rates of GEMMs and attention
  (model FLOPs; recomputation does not count). Operations within compiled blocks count by their kind, the rest of a
  block as compiled loops.

A run that compiles anything after its warm-up ends the benchmark with status 1.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import machine, model_size
from benchmarks.machine import Machine
from benchmarks.runs import DEBUG_MODEL, Result, Variant, split_of, timed, timed_other, variables_first
from benchmarks.step_split import KINDS, PHASES
from benchmarks.tables import markdown, median_of, spread, write_json

OTHER = "the other"
GIB = 2**30


def rates_table(
    results: dict[str, list[Result]],
    flops: dict[str, dict[str, float]],
    peaks: dict[str, float],
    datasheet: dict[str, float],
) -> str:
    """One line for each variant; ratios to the first. `flops` per token, `peaks` in FLOP/s of all its devices."""
    base = next(iter(results.values()))
    columns = ["variant", "tokens/s", "range", "ratio", "range", "MFU full", "causal"]
    columns += ["of the data sheet, full", "causal"] if datasheet else []
    columns += ["memory, GiB", "first step, s", "ratio"]
    rows = []
    for name, runs in results.items():
        rates = [result.rate for result in runs]
        rate = statistics.median(rates)
        ratios = [result.rate / first.rate for result, first in zip(runs, base, strict=True)]
        starts = [
            result.first_step / first.first_step if result.first_step and first.first_step else None
            for result, first in zip(runs, base, strict=True)
        ]
        mfus = [
            f"{rate * flops[name][attention] / peak[name]:.1%}" if name in flops and name in peak else ""
            for peak in (peaks, *([datasheet] if datasheet else []))
            for attention in ("full", "causal")
        ]
        rows.append(
            [
                name,
                f"{rate:,.0f}",
                spread(rates, "{:,.0f}"),
                f"{statistics.median(ratios):.2f}",
                spread(ratios, "{:.2f}"),
                *mfus,
                median_of([(run.device_memory or run.memory) / GIB for run in runs], "{:.2f}"),
                median_of([result.first_step for result in runs], "{:.1f}"),
                median_of(starts, "{:.2f}"),
            ]
        )
    return markdown(columns, rows)


def split_table(splits: dict[str, dict[str, float]], results: dict[str, list[Result]]) -> str:
    """Fractions of a step."""
    phases = [phase for phase in PHASES if phase == "data" or any(split[phase] for split in splits.values())]
    rows = []
    for name, split in splits.items():
        waits = [result.data_wait for result in results[name]]
        shares = [f"{split[phase] / split['step']:.1%}" for phase in phases if phase != "data"]
        others = [f"{split[key] / split['step']:.1%}" for key in ("rest", "communication_wait")]
        steps = [record["step_seconds"] for run in results[name] for record in run.records]
        slower = split["step"] / statistics.median(steps)
        rows.append(
            [name, median_of(waits, "{:.2%}"), *shares, *others, f"{split['step'] * 1e3:.0f} ms, {slower:.2f} x"]
        )
    columns = [
        "share of a step",
        *phases,
        "rest",
        "communication wait (included)",
        "traced step, relative to a timed one",
    ]
    return markdown(columns, rows)


def kinds_table(
    by_class: dict[str, dict[str, float]],
    splits: dict[str, dict[str, float]],
    results: dict[str, list[Result]],
    flops: dict[str, dict[str, float]],
) -> str:
    """Fractions of a step by kind of operation, and the TFLOP/s of GEMMs and attention, in model FLOPs."""
    rows = []
    for name, seconds in by_class.items():
        record = results[name][0].records[0]
        tokens = record["tokens_per_second"] * record["step_seconds"]  # of one process, like its trace
        attention = 2 * (flops[name]["full"] - flops[name]["causal"])
        done = {"GEMMs": flops[name]["full"] - attention, "attention": attention / 2}
        rates = [f"{tokens * done[label] / seconds[label] / 1e12:.2f}" if seconds[label] else "" for label in done]
        rows.append([name, *(f"{seconds[label] / splits[name]['step']:.1%}" for label in KINDS), *rates])
    return markdown(["share of a step", *KINDS, "GEMMs, TFLOP/s", "attention, causal"], rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEBUG_MODEL, help="TOML file (default: the debug model)")
    parser.add_argument(
        "--variant",
        action="append",
        type=Variant.parse,
        help="name, a colon, variables and flags; the first is the baseline; repeatable",
    )
    parser.add_argument("--against", help="command of another trainer, with the same sizes; may start with variables")
    parser.add_argument(
        "--against-pattern", default=r"tps: ([0-9,]+)", help="pattern of its tokens/s per process (%(default)s)"
    )
    parser.add_argument(
        "--against-first-step", default=r"step: +1\b", help="pattern of its first step's line (%(default)s)"
    )
    parser.add_argument(
        "--against-processes", type=int, help="number of processes it starts; default: the first variant's"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=4, help="unmeasured steps; reports, for the other trainer")
    parser.add_argument("--steps", type=int, default=12, help="measured steps")
    parser.add_argument("--gemm-sizes", default="", help="sizes of the GEMMs that measure the machine")
    parser.add_argument("--no-split", action="store_true", help="skip the traced run")
    parser.add_argument("--json", type=Path, help="JSON file to write all results to")
    parser.add_argument("flags", nargs="*", help="flags for all variants, after --")
    arguments = parser.parse_args(argv)
    arguments.variant = arguments.variant or [Variant("ours", {}, [])]
    if arguments.warmup < 1 or arguments.steps < 1 or arguments.rounds < 1:
        parser.error("--warmup, --steps and --rounds must be above 0")
    if len({variant.name for variant in arguments.variant}) < len(arguments.variant):
        parser.error("two variants have the same name")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    variants: list[Variant] = arguments.variant
    other = None
    if arguments.against:
        variables, words = variables_first(arguments.against)
        processes = arguments.against_processes or variants[0].processes
        other = Variant(OTHER, {**variables, "NGPU": str(processes)}, words)
    flops = {
        variant.name: model_size.ask([f"--job.config_file={arguments.config}", *arguments.flags, *variant.flags])
        for variant in variants
    }
    thread_counts = {variant.threads for variant in variants}
    machines: dict[int, list[Machine]] = {threads: [] for threads in thread_counts}

    def measure_machines() -> None:
        for threads, measurements in machines.items():
            measurements.append(machine.ask(threads, arguments.gemm_sizes))

    results: dict[str, list[Result]] = {name.name: [] for name in ([other] if other else []) + variants}
    for number in range(1, arguments.rounds + 1):
        measure_machines()
        if other:
            results[OTHER].append(
                timed_other(other, arguments.against_pattern, arguments.against_first_step, arguments.warmup)
            )
        for variant in variants:
            result = timed(variant, arguments.config, arguments.flags, arguments.warmup, arguments.steps)
            results[variant.name].append(result)
        rates = ", ".join(f"{name} {runs[-1].rate:,.0f}" for name, runs in results.items())
        print(f"round {number}: {rates} tokens/s", file=sys.stderr, flush=True)
    measure_machines()
    median = {threads: median_machine(measurements) for threads, measurements in machines.items()}
    peaks, datasheet = peaks_of(variants, median)
    traced = [] if arguments.no_split else variants
    found_in = {variant.name: split_of(variant, arguments.config, arguments.flags) for variant in traced}
    splits, by_class = ({name: pair[place] for name, pair in found_in.items()} for place in (0, 1))
    for measured in median.values():
        print(measured)
    print(f"{arguments.rounds} rounds, {arguments.steps} steps after {arguments.warmup}\n")
    print(rates_table(results, flops, peaks, datasheet))
    if splits:
        print(f"\n{split_table(splits, results)}\n\n{kinds_table(by_class, splits, results, flops)}")
    if arguments.json:
        write_json(
            arguments.json,
            {
                "machines": [asdict(run) for measured in machines.values() for run in measured],
                "flags": arguments.flags,
                "config": arguments.config.name,
                "model": flops,
                "peak_flops": peaks,
                "datasheet_flops": datasheet,
                "results": {
                    name: [{"rate": run.rate, **asdict(run)} for run in runs] for name, runs in results.items()
                },
                "splits": splits,
                "kinds": by_class,
            },
        )


def median_machine(measured: Sequence[Machine]) -> Machine:
    """The machine, measured several times, with the median of each rate."""
    rates = {size: statistics.median(run.gemm_rates[size] for run in measured) for size in measured[0].gemm_rates}
    return replace(measured[0], gemm_rates=rates, gemm_rate=statistics.median(run.gemm_rate for run in measured))


def peaks_of(variants: Sequence[Variant], machines: dict[int, Machine]) -> tuple[dict[str, float], dict[str, float]]:
    """FLOP/s of all devices of each variant: measured, and from the data sheet if known."""
    peaks, datasheet = {}, {}
    for variant in variants:
        device = machines[variant.threads]
        devices = variant.processes if device.kind == "cuda" else 1
        peaks[variant.name] = devices * device.gemm_rate
        if device.datasheet_rate:
            datasheet[variant.name] = devices * device.datasheet_rate
    return peaks, datasheet


if __name__ == "__main__":
    main()
