"""Each recipe on several kinds of CPU, as far as this one has their instructions: tokens/s, and time to the first step.
oneDNN and torch are limited to the instructions of each kind.

python -m benchmarks cpu_kinds [--steps 4] [--rounds 2] [--kinds laptop,...] [-- FLAGS]
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import ask
from benchmarks.runs import DEBUG_MODEL, Result, Variant, timed
from benchmarks.tables import markdown, spread

KINDS = {
    "AVX2, a laptop": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "AVX-512 without VNNI": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512"},
    "AVX-512 with bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "ATEN_CPU_CAPABILITY": "avx512"},
    "all that this CPU has": {},
}
FLOAT8 = ["--model.converters=float8"]
RECIPES = {
    "none": [],
    "float8 tensorwise": FLOAT8,
    "float8 rowwise": [*FLOAT8, "--float8.recipe_name=rowwise"],
    "float8 delayed": [*FLOAT8, "--float8.recipe_name=delayed"],
    "int8 rowwise": ["--model.converters=int8"],
    "mx (emulated)": ["--model.converters=mx", "--mx.emulate"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after two of warm-up")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kinds", help="only kinds whose names contain one of these comma-separated words")
    parser.add_argument("--recipes", help="the same for recipes")
    parser.add_argument("flags", nargs="*", help="flags of every run, after --")
    arguments = parser.parse_args()
    rows = []
    for cpu, environment in _named(KINDS, arguments.kinds).items():
        variants = [Variant(name, environment, flags) for name, flags in _named(RECIPES, arguments.recipes).items()]
        results: dict[str, list[Result]] = {variant.name: [] for variant in variants}
        for _ in range(arguments.rounds):
            for variant in variants:
                results[variant.name].append(timed(variant, DEBUG_MODEL, arguments.flags, 2, arguments.steps))
        reference = results[variants[0].name]
        for name, runs in results.items():
            ratios = [run.rate / base.rate for run, base in zip(runs, reference, strict=True)]
            rates, firsts = [run.rate for run in runs], [run.first_step or 0.0 for run in runs]
            row = [cpu, name, f"{statistics.median(rates):,.0f}", f"{statistics.median(ratios):.2f}"]
            rows.append([*row, spread(ratios, "{:.2f}"), f"{statistics.median(firsts):.1f}"])
            print(f"{cpu}, {name}: {row[2]} tokens/s, {row[3]}", file=sys.stderr, flush=True)
    print(ask(sizes="1024"))
    print(markdown(["instructions", "recipe", "tokens/s", "relative to none", "spread", "s to the first step"], rows))


def _named(table: dict[str, dict[str, str]] | dict[str, list[str]], words: str | None) -> dict:  # type: ignore[type-arg]
    return {name: value for name, value in table.items() if not words or any(w in name for w in words.split(","))}


if __name__ == "__main__":
    main()
