"""How fast FSDP's copy of bfloat16 gradients into the float32 buffer of a reduce-scatter is, beside other ways.

python -m benchmarks copies [--output FILE] [--smoke]

FSDP2 calls `torch._chunk_cat`, whose kernel casts one element at a time. For the parameters of one block of Llama 3 8B
and of Qwen3 30B-A3B, with 1 and 8 shards, the same bits are written by `torch._foreach_copy_` into views of the buffer,
and into its contiguous pieces, of which a parameter has one for each shard; by one `copy_` each; and by compiled code.
Bytes are those that must be moved: 2 read and 4 written for each element. A plain copy of as many on the device is the
bound. A JSON line for each. `--smoke`: small blocks, uncompiled, on a CPU too.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.runs import ROOT
from benchmarks.tables import markdown
from torchtitan.device import Device, find_device
from torchtitan.models import MODELS
from torchtitan.models.args import TransformerArgs

BLOCKS = {"Llama 3 8B": ("llama3", "8B"), "Qwen3 30B-A3B": ("qwen3_moe", "30B-A3B")}
SHARDS = (1, 8)
BYTES = 6  # for each element
CALLS = 20  # timed together

Way = Callable[[torch.Tensor, Sequence[torch.Tensor]], object]
"""Takes the buffer, float32 of (shards, elements of a shard), and the gradients in bfloat16; a shard has a part of the
rows of each, one gradient after another."""


def shapes(family: str, flavor: str) -> list[torch.Size]:
    """Of the parameters of one block."""
    spec = MODELS.get(family)
    args = spec.flavor(flavor)
    assert isinstance(args, TransformerArgs)
    with torch.device("meta"):
        model = spec.build(replace(args, n_layers=1, vocab_size=1))
    return [parameter.shape for parameter in model.layers["0"].parameters()]


def views(buffer: torch.Tensor, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each gradient's place in the buffer: (shards, elements of a shard)."""
    return list(buffer.split([gradient.numel() // len(buffer) for gradient in gradients], 1))


def by_foreach_copy(buffer: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
    torch._foreach_copy_(views(buffer, gradients), [gradient.view(len(buffer), -1) for gradient in gradients])


def by_foreach_copy_of_pieces(buffer: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
    places = [piece for view in views(buffer, gradients) for piece in view.unbind()]
    torch._foreach_copy_(places, [piece for gradient in gradients for piece in gradient.view(len(buffer), -1).unbind()])


def one_by_one(buffer: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
    for view, gradient in zip(views(buffer, gradients), gradients, strict=True):
        view.copy_(gradient.view(len(buffer), -1))


WAYS: dict[str, Way] = {
    "_chunk_cat": lambda buffer, gradients: torch._chunk_cat(list(gradients), 0, len(buffer), out=buffer),
    "_foreach_copy_": by_foreach_copy,
    "_foreach_copy_ of pieces": by_foreach_copy_of_pieces,
    "copy_ each": one_by_one,
    "compiled": one_by_one,
}


def seconds_of(device: Device, call: Callable[[], object], calls: int) -> float:
    """Mean seconds of a call."""
    call()
    device.synchronize()
    start = perf_counter()
    for _ in range(calls):
        call()
    device.synchronize()
    return (perf_counter() - start) / calls


def measure(device: Device, sizes: Sequence[torch.Size], shards: int, smoke: bool) -> dict[str, tuple[float, bool]]:
    """By way: bytes moved in a second, and whether what is written is equal to the bit to what `_chunk_cat` writes."""
    calls = 1 if smoke else CALLS
    where = device.torch_device
    torch.manual_seed(0)
    gradients = [torch.randn(size, dtype=torch.bfloat16, device=where) for size in sizes]
    elements = sum(gradient.numel() for gradient in gradients)
    buffer = torch.empty(shards, elements // shards, device=where)
    expected, results = None, {}
    for name, way in WAYS.items():
        run = torch.compile(way, fullgraph=True, dynamic=False) if name == "compiled" and not smoke else way
        buffer.fill_(torch.nan)
        seconds = seconds_of(device, lambda run=run: run(buffer, gradients), calls)  # type: ignore[misc]
        written = buffer.view(torch.int32)
        expected = written.clone() if expected is None else expected
        results[name] = (BYTES * elements / seconds, torch.equal(written, expected))
    source, copied = (torch.zeros(BYTES // 2 * elements, dtype=torch.uint8, device=where) for _ in range(2))
    results["plain copy"] = (BYTES * elements / seconds_of(device, lambda: copied.copy_(source), calls), True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "copies.jsonl")
    parser.add_argument("--smoke", action="store_true", help="small blocks, uncompiled, any device")
    arguments = parser.parse_args()
    device = find_device(0)
    if device.type != "cuda" and not arguments.smoke:
        sys.exit("no CUDA device; --smoke times small blocks on a CPU")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    cells = []
    with arguments.output.open("w", encoding="utf-8") as file:
        for block, (family, flavor) in BLOCKS.items():
            sizes = shapes(family, "debugmodel" if arguments.smoke else flavor)
            for shards in SHARDS:
                results = measure(device, sizes, shards, arguments.smoke)
                bound = results["plain copy"][0]
                for way, (rate, equal) in results.items():
                    row = {"device": device.name, "block": block, "shards": shards, "way": way}
                    print(json.dumps({**row, "bytes_per_second": rate, "equal": equal}), file=file, flush=True)
                    verdict = "equal" if equal else "other bits"
                    cells.append([block, f"{shards}", way, f"{rate / 1e9:,.0f}", f"{rate / bound:.0%}", verdict])
    print(f"{device.name}\n\n{markdown(['block of', 'shards', 'way', 'GB/s', 'of a plain copy', 'bits'], cells)}")


if __name__ == "__main__":
    main()
