"""Which layers gain in 8 bits, beside what `auto_filter_small_kn` decides: bf16 and each recipe at real shapes.

python -m benchmarks gemms [--minutes 9] [--recipes "float8 tensorwise,float8 rowwise"] [--output FILE] [--smoke]

Layers of Llama 3 70B on a rank of 8 in tensor parallelism, whose K or N is an eighth, of 8B and of 1B, with 4,096 to
65,536 rows (M). Timed are, as in kernels.py, the forward GEMM, and both of the backward pass together, with everything
that a recipe does around them. The most telling shapes come first. A JSON line is written as each is done; the table
at the end has those for which there was time. It says which layers the filter converts, by the sizes on a rank
(auto_filter_small_kn) and by those of the whole layer, as torchao judges (auto_filter_small_kn_full), and where a layer
that it converts is slower than in bf16, or one that it leaves out is faster. Last come wq, wk and wv as one GEMM, and
w1 and w3: TFLOP/s tell whether fusing them would pay. `--smoke` times small sizes, uncompiled, on a CPU too; judged are
the real ones.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kernels import PASSES, RECIPES, build, measure
from benchmarks.machine import measure_machine
from benchmarks.runs import ROOT
from benchmarks.tables import markdown
from torchtitan.converters import Target
from torchtitan.device import find_device
from torchtitan.logging import init_logging, logger
from torchtitan.models import MODELS
from torchtitan.models.args import TransformerArgs

TIMED = ("float8 tensorwise", "float8 rowwise", "int8 rowwise", "float8 rowwise_with_gw_hp")
ROWS = (8192, 65536, 4096, 32768, 16384)  # by worth
SMOKE_ROWS, SMALLER = 32, 32  # rows of a smoke run, and what divides its K and N
H100 = Target("cuda", "NVIDIA H100 80GB HBM3", (9, 0))  # where the filter's thresholds were measured


@dataclass(frozen=True)
class Layer:
    """Layers of one shape: a GEMM of (M, k) x (k, n) on a rank; `full_k` and `full_n` before ranks divide it."""

    name: str
    k: int
    n: int
    full_k: int
    full_n: int


def layers() -> Iterator[Layer]:
    """Those on which the two judgements differ come first."""
    for model, family, flavor, tp in (("70B, TP 8", "llama3", "70B", 8), ("8B", "llama3", "8B", 1)):
        yield from layers_of(model, family, flavor, tp)
    yield from layers_of("1B", "llama3.2", "1B", 1)
    for flavor in ("8B", "1B"):
        yield from fused_layers_of(flavor)


def fused_layers_of(flavor: str) -> Iterator[Layer]:
    args = MODELS.get("llama3").flavor(flavor)
    assert isinstance(args, TransformerArgs)
    inputs, heads = args.dim, (args.n_heads + 2 * args.n_kv_heads) * args.head_dim
    for name, outputs in (("wq, wk, wv as one", heads), ("w1, w3 as one", 2 * args.ffn_dim)):
        yield Layer(f"{flavor} {name}", inputs, outputs, inputs, outputs)


def layers_of(model: str, family: str, flavor: str, tp: int) -> Iterator[Layer]:
    args = MODELS.get(family).flavor(flavor)
    assert isinstance(args, TransformerArgs)
    heads, kv = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    for name, inputs, outputs in (
        ("wk, wv", args.dim, kv),
        ("wq", args.dim, heads),
        ("w1, w3", args.dim, args.ffn_dim),
    ):
        yield Layer(f"{model} {name}", inputs, outputs // tp, inputs, outputs)
    for name, inputs, outputs in (("wo", heads, args.dim), ("w2", args.ffn_dim, args.dim)):
        if (name, tp, inputs) != ("wo", 1, outputs):  # the same GEMM as wq's
            yield Layer(f"{model} {name}", inputs // tp, outputs, inputs, outputs)


def judged(recipe: str, m: int, k: int, n: int) -> bool | None:
    """Whether the filter converts a layer of this size; None if the recipe has no thresholds."""
    rule = build(recipe, H100).row.small_kn
    return None if rule is None else rule(m, k, n) is None


def rows_of(layer: Layer, m: int, seconds: dict[str, Any], recipes: Sequence[str]) -> list[list[str]]:
    """A line for each recipe: its speed relative to bf16, what the filters decide, and which of them is wrong."""
    rows = []
    for recipe in recipes:
        shape = [layer.name, f"{m}", f"{layer.k}", f"{layer.n}", recipe]
        if isinstance(seconds[recipe], str):
            rows.append([*shape, *[""] * (len(PASSES) + 1), *["", ""], seconds[recipe]])
            continue
        base = seconds[f"bf16 beside {recipe}"]
        ratios = {name: base[name] / seconds[recipe][name] for name in PASSES}
        verdicts = {
            "auto_filter_small_kn": judged(recipe, m, layer.k, layer.n),
            "auto_filter_small_kn_full": judged(recipe, m, layer.full_k, layer.full_n),
        }
        gains = ratios["both"] > 1
        wrong = [name for name, converts in verdicts.items() if converts is not None and converts != gains]
        rate = f"{2 * m * layer.k * layer.n * PASSES['both'] / base['both'] / 1e12:.3g}"
        said = ["no thresholds" if verdict is None else "yes" if verdict else "no" for verdict in verdicts.values()]
        rows.append([*shape, rate, *(f"{ratio:.2f}" for ratio in ratios.values()), *said, ", ".join(wrong)])
    return rows


COLUMNS = [
    *("layers", "M", "K", "N", "recipe", "bf16, TFLOP/s", *(f"{name}, to bf16" for name in PASSES)),
    *("small_kn converts", "small_kn_full converts", "the measurement disagrees with"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no further shape starts (%(default)s)")
    parser.add_argument("--recipes", default=",".join(TIMED), help=f"from {', '.join(RECIPES)} (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    output = ROOT / "benchmarks" / "results" / "gemms.jsonl"
    parser.add_argument("--output", type=Path, default=output, help="a JSON line for each shape")
    parser.add_argument("--smoke", action="store_true", help="small sizes, uncompiled, any device")
    arguments = parser.parse_args()
    recipes = [name.strip() for name in arguments.recipes.split(",")]
    if unknown := [name for name in recipes if name not in RECIPES]:
        sys.exit(f"unknown: {', '.join(unknown)}; recipes are {', '.join(RECIPES)}")
    end = time.monotonic() + 60 * arguments.minutes
    init_logging(0, 1, color=False)
    logger.setLevel("WARNING")
    device = find_device(0)
    if device.type != "cuda" and not arguments.smoke:
        sys.exit("no CUDA device; --smoke times small sizes on a CPU")
    machine = measure_machine(sizes=(256,) if arguments.smoke else ())
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    rows, dropped, longest = [], 0, 0.0
    with arguments.output.open("w", encoding="utf-8") as file:
        print(json.dumps({"machine": asdict(machine)}), file=file, flush=True)
        for m in (SMOKE_ROWS,) if arguments.smoke else ROWS:
            for layer in layers():
                start = time.monotonic()
                if start + longest > end:
                    dropped += 1
                    continue
                k, n = (max(16, size // SMALLER) if arguments.smoke else size for size in (layer.k, layer.n))
                rounds = 1 if arguments.smoke else arguments.rounds
                seconds = measure(device, m, k, n, recipes, compile=not arguments.smoke, rounds=rounds)
                longest = max(longest, time.monotonic() - start)
                print(json.dumps({**asdict(layer), "m": m, "seconds": seconds}), file=file, flush=True)
                rows += rows_of(layer, m, seconds, recipes)
    print(f"{machine}\n\n{markdown(COLUMNS, rows)}")
    if arguments.smoke:
        print(f"\nA rehearsal: timed were K and N divided by {SMALLER}, so rates and ratios mean nothing.")
    if dropped:
        print(f"\nNot measured, no time left: {dropped} shapes.")


if __name__ == "__main__":
    main()
