"""Speed of single linear layers in each recipe, for the (M, K, N) of real models: TFLOP/s, and ratios to bf16.

python -m benchmarks kernels [--models 1B,3B,8B] [--tokens 8192] [--no-compile] [--json FILE] [--minutes 5]

A layer's forward pass is one GEMM, its backward pass two (input gradient, weight gradient). Each is timed with
everything the recipe does around it: computing scales, rounding, transposing. (torchao computes both gradients
together, so they have no separate times.) Times are medians of interleaved rounds, measured by the code of
`auto_filter_measured`. Ratios are relative to the bf16 layer timed in the same rounds: above 1 the recipe is faster.
Shapes for which no time is left are dropped, and the table says so. On devices without MX it is emulated to study
numerics, and cannot be faster.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.machine import measure_machine
from benchmarks.tables import markdown, write_json
from torchtitan.config.low_precision import MX, Float8, Int8
from torchtitan.converters import CONVERTERS, Target
from torchtitan.converters.measured_filter import layer_seconds
from torchtitan.device import Device, find_device
from torchtitan.errors import ConfigError
from torchtitan.logging import init_logging, logger
from torchtitan.models import MODELS
from torchtitan.models.args import TransformerArgs

MODELS_BY_NAME = {
    "debug": ("llama3", "debugmodel"),
    "1B": ("llama3.2", "1B"),
    "3B": ("llama3.2", "3B"),
    "8B": ("llama3", "8B"),
    "qwen3-0.6B": ("qwen3", "0.6B"),
    "qwen3-8B": ("qwen3", "8B"),
}
RECIPES: dict[str, tuple[str, Any]] = {
    "float8 tensorwise": ("float8", Float8(recipe_name="tensorwise")),
    "float8 rowwise": ("float8", Float8(recipe_name="rowwise")),
    "float8 rowwise_with_gw_hp": ("float8", Float8(recipe_name="rowwise_with_gw_hp")),
    "int8 rowwise": ("int8", Int8()),
    "int8 tensorwise": ("int8", Int8(recipe_name="tensorwise")),
    "mx mxfp8": ("mx", MX()),
}
PASSES = {"forward": 1, "backward": 2, "both": 3}  # GEMMs in each


def layers(names: list[str], output: bool) -> Iterator[tuple[str, int, int]]:
    """(models and layers, K, N) of each distinct shape."""
    shapes: dict[tuple[int, int], list[str]] = {}
    for name in names:
        family, flavor = MODELS_BY_NAME[name]
        args = MODELS.get(family).flavor(flavor).with_vocab_size(4096)
        assert isinstance(args, TransformerArgs) and args.vocab_size is not None
        heads, kv = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
        of_model = {
            "wq": (args.dim, heads),
            "wo": (heads, args.dim),
            "wk, wv": (args.dim, kv),
            "w1, w3": (args.dim, args.ffn_dim),
            "w2": (args.ffn_dim, args.dim),
            **({"output": (args.dim, args.vocab_size)} if output else {}),
        }
        for layer, shape in of_model.items():
            shapes.setdefault(shape, []).append(f"{name} {layer}")
    for (k, n), users in shapes.items():
        yield "; ".join(users), k, n


def build(recipe: str, target: Target) -> Any:
    """The converter of a recipe. MX is emulated if the device has no MX GEMMs. None if the recipe is not possible."""
    name, section = RECIPES[recipe]
    for keys in (section, MX(emulate=True) if name == "mx" else None):
        try:
            return CONVERTERS.get(name).build(keys, target) if keys else None
        except ConfigError:
            continue
    return None


def measure(device: Device, m: int, k: int, n: int, names: list[str], compile: bool, rounds: int) -> dict[str, Any]:
    """Median seconds by recipe (including "bf16") and pass. A recipe that fails has the reason instead."""
    capability = torch.cuda.get_device_capability() if device.type == "cuda" else None
    target = Target(device.type, device.name, capability, tokens=m, compile=compile)
    seconds: dict[str, Any] = {}
    for name in names:
        converter = build(name, target)
        if converter is None:
            seconds[name] = "not on this device"
            continue
        try:
            pair = layer_seconds([None, converter], m, k, n, rounds, compiled=compile)
        except Exception as error:  # for example, a kernel that does not support this shape
            seconds[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        finally:
            torch.compiler.reset()
        for label, times in zip((f"bf16 beside {name}", name), pair, strict=True):
            forward, backward = (statistics.median(column) for column in zip(*times, strict=True))
            seconds[label] = {"forward": forward, "backward": backward, "both": forward + backward}
    return seconds


def rows_of(users: str, m: int, k: int, n: int, seconds_of: dict[str, Any], names: list[str]) -> list[list[str]]:
    """A line for bf16 and one for each recipe: TFLOP/s of each pass, then their ratios to bf16."""

    def rates(seconds: dict[str, float]) -> list[str]:
        return [f"{2 * m * k * n * gemms / seconds[pass_name] / 1e12:.3g}" for pass_name, gemms in PASSES.items()]

    shape = [users, f"{m}", f"{k}", f"{n}"]
    bases = {name: seconds_of[f"bf16 beside {name}"] for name in names if f"bf16 beside {name}" in seconds_of}
    rows = []
    if bases:
        typical = {pass_name: statistics.median(base[pass_name] for base in bases.values()) for pass_name in PASSES}
        rows.append([*shape, "bf16", *rates(typical), *["1"] * len(PASSES)])
    for name in names:
        if name in bases:
            ratios = [f"{bases[name][pass_name] / seconds_of[name][pass_name]:.2f}" for pass_name in PASSES]
            rows.append([*shape, name, *rates(seconds_of[name]), *ratios])
        else:
            rows.append([*shape, name, *["failed"] * len(PASSES), *[""] * len(PASSES)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="debug,1B", help=f"from {', '.join(MODELS_BY_NAME)} (%(default)s)")
    parser.add_argument("--tokens", type=int, help="M; default: 8192 on a GPU, 512 on a CPU")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--no-compile", action="store_true", help="eager mode, which is not typical for training on a GPU"
    )
    parser.add_argument("--output-layer", action="store_true", help="include the shape of the output layer")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--json", type=Path, help="JSON file to write all results to")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    init_logging(0, 1, color=False)
    logger.setLevel("WARNING")
    device = find_device(0)
    m = arguments.tokens or (8192 if device.type == "cuda" else 512)
    names = [name.strip() for name in arguments.recipes.split(",")]
    models = [name.strip() for name in arguments.models.split(",")]
    unknown = [name for name in names if name not in RECIPES] + [name for name in models if name not in MODELS_BY_NAME]
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; models are {', '.join(MODELS_BY_NAME)}, recipes {', '.join(RECIPES)}")
    machine = measure_machine()
    rows: list[list[str]] = []
    figures: list[dict[str, Any]] = []
    failures: set[str] = set()
    dropped: list[str] = []
    longest = 0.0
    for users, k, n in layers(models, arguments.output_layer):
        start = time.monotonic()
        if start + longest > end:
            dropped.append(users)
            continue
        seconds = measure(device, m, k, n, names, not arguments.no_compile, arguments.rounds)
        figures.append({"layers": users, "m": m, "k": k, "n": n, "seconds": seconds})
        failures |= {f"{name}: {value}" for name, value in seconds.items() if isinstance(value, str)}
        rows += rows_of(users, m, k, n, seconds, names)
        longest = max(longest, time.monotonic() - start)
        print(f"{users}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    print(f"{machine}, {'eager' if arguments.no_compile else 'compiled'}\n")
    columns = ["layers", "M", "K", "N", "recipe", *(f"{pass_name}, TFLOP/s" for pass_name in PASSES)]
    print(markdown([*columns, *(f"{pass_name}, to bf16" for pass_name in PASSES)], rows))
    for failure in sorted(failures):
        print(f"\n{failure}")
    if dropped:
        print(f"\nNot measured, no time left: {'; '.join(dropped)}.")
    if arguments.json:
        write_json(arguments.json, {"machine": asdict(machine), "rows": figures, "dropped": dropped})


if __name__ == "__main__":
    main()
