"""Cost as a function of size: tokens/s and memory over sequence length, model size, accumulation, vocabulary and number
of processes; start-up and checkpoint time over model size. A table, a figure and JSON.

python -m benchmarks scaling [--quick] [--axes sequence,size] --output docs/figures/scaling.png --json scaling.json

One parameter varies at a time, starting from a Llama of 6 million parameters (`benchmarks/sizes.py`), bf16, sequences
of 512 tokens. The number of tokens in a step is constant along an axis, unless it is what varies. Each point is a
separate run, and its rate is the median over its measured steps. `--quick` omits the largest points: a few minutes on
two cores. With `--json`, axes already in the file, from the same machine, are reused and not run again.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import machine
from benchmarks.runs import DEBUG_MODEL, FIRST_STEP, Variant, on_gpu, train
from benchmarks.tables import markdown, write_json

WARMUP = 2
GIB = 2**30
BASE = {
    "experimental.custom_import": "benchmarks.sizes",
    "model.name": "sizes",
    "model.flavor": "6M",
    "training.seq_len": 512,
    "training.local_batch_size": 4,
    "lr_scheduler.warmup_steps": 1,
}


@dataclass(frozen=True)
class Point:
    """One run.

    Attributes:
        x: the varied parameter.
        flags: added to BASE.
        in_quick: whether `--quick` includes it.
    """

    x: float
    flags: dict[str, Any] = field(default_factory=dict)
    processes: int = 1
    in_quick: bool = True


@dataclass(frozen=True)
class Axis:
    """Attributes: label: of x. saves: whether each run also saves a checkpoint and times it."""

    label: str
    points: list[Point]
    saves: bool = False


def batch(seq_len: int, rows: int, microbatches: int = 1) -> dict[str, int]:
    return {
        "training.seq_len": seq_len,
        "training.local_batch_size": rows,
        "training.global_batch_size": rows * microbatches,
    }


def axes(processes: Sequence[int]) -> dict[str, Axis]:
    lengths = [(128, True), (256, True), (512, True), (1024, True), (2048, True), (4096, False)]
    sizes = [("1M", 1, True), ("6M", 6, True), ("25M", 25, True), ("100M", 100, True), ("320M", 320, False)]
    vocabularies = [(4096, True), (16384, True), (65536, False), (128256, True)]
    return {
        "sequence": Axis(
            "tokens in a sequence",
            [Point(n, batch(n, max(1, 2048 // n)), in_quick=quick) for n, quick in lengths],
        ),
        "size": Axis(
            "million parameters",
            [Point(n, {"model.flavor": name, **batch(512, 1)}, in_quick=quick) for name, n, quick in sizes],
            saves=True,
        ),
        "accumulation": Axis("micro-batches in a step", [Point(n, batch(512, 1, n)) for n in (1, 2, 4, 8)]),
        "vocabulary": Axis(
            "vocabulary",
            [Point(n, {"model.flavor": f"vocabulary_{n}"}, in_quick=quick) for n, quick in vocabularies],
        ),
        "processes": Axis(
            "processes",
            [Point(n, batch(512, max(1, 4 // n)) | {"training.global_batch_size": 4}, n) for n in processes],
        ),
    }


def run(axis: Axis, point: Point, steps: int, flags: Sequence[str]) -> dict[str, float | None]:
    """The figures of a point: tokens/s of all processes, bytes of the largest process (on a GPU of torch's allocator),
    seconds to the first step, and of a blocking checkpoint."""
    settings = BASE | point.flags
    own = [f"--{key}={value}" for key, value in settings.items()]
    variant = Variant(f"{axis.label} {point.x}", {"NGPU": str(point.processes)}, own)
    last = WARMUP + steps
    saving = {"checkpoint__enable_checkpoint": "true", "checkpoint__interval": last} if axis.saves else {}
    with tempfile.TemporaryDirectory() as folder:
        seen = train(
            variant, DEBUG_MODEL, flags, Path(folder),
            training__steps=last, metrics__log_freq=1, **saving,
        )  # fmt: skip
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        saved = sum(path.stat().st_size for path in Path(folder).glob("checkpoint/*/*"))
    records = [json.loads(line) for line in lines][WARMUP:]
    step, stored = seen.when(rf"\bstep +{last}/"), seen.when(r"\bsaved ")
    return {
        "x": point.x,
        "rate": point.processes * statistics.median(record["tokens_per_second"] for record in records),
        "memory": max(record["peak_memory_bytes"] for record in records) if on_gpu(seen) else seen.memory,
        "first_step": seen.when(FIRST_STEP),
        "checkpoint_seconds": stored - step if stored and step else None,
        "checkpoint_bytes": saved or None,
    }


def table(axis: Axis, points: Sequence[dict[str, Any]]) -> str:
    columns = [axis.label, "tokens/s", "memory, GiB", "first step, s"]
    columns += ["checkpoint, s", "checkpoint, GB"] if axis.saves else []
    rows = []
    for point in points:
        cells = [
            f"{point['x']:,}",
            f"{point['rate']:,.0f}",
            f"{point['memory'] / GIB:.2f}",
            f"{point['first_step']:.1f}",
        ]
        if axis.saves:
            cells += [f"{point['checkpoint_seconds']:.2f}", f"{point['checkpoint_bytes'] / 1e9:.2f}"]
        rows.append(cells)
    return markdown(columns, rows)


def draw(results: dict[str, list[dict[str, Any]]], labels: dict[str, str], title: str, output: Path) -> None:
    """A column for each axis: tokens/s above, memory below; then start-up and checkpoint over size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sized = "size" in results
    columns = len(results) + sized
    figure, panels = plt.subplots(2, columns, figsize=(3.1 * columns, 5.6), squeeze=False, layout="constrained")
    for column, (name, points) in enumerate(results.items()):
        xs = [point["x"] for point in points]
        for row, (key, unit, scale) in enumerate((("rate", "tokens/s", 1.0), ("memory", "GiB", GIB))):
            panels[row][column].plot(xs, [point[key] / scale for point in points], marker="o")
            dress(panels[row][column], labels[name], unit if column == 0 else "", xs)
    if sized:
        points = results["size"]
        for row, (key, unit) in enumerate((("first_step", "s to the first step"), ("checkpoint_seconds", "s to save"))):
            xs = [point["x"] for point in points]
            panels[row][-1].plot(xs, [point[key] for point in points], marker="o", color="tab:orange")
            dress(panels[row][-1], labels["size"], unit, xs)
    figure.suptitle(title, fontsize=9)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def dress(panel: Any, label: str, unit: str, xs: Sequence[float]) -> None:
    panel.set(xscale="log", xlabel=label, ylabel=unit)
    panel.set_ylim(0, 1.1 * max(panel.dataLim.y1, 1e-9))
    panel.set_xticks(xs, [f"{x:,.0f}" for x in xs], fontsize=7, rotation=45)
    panel.minorticks_off()
    panel.grid(alpha=0.3)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="omit the largest points")
    parser.add_argument("--axes", default="sequence,size,accumulation,vocabulary,processes", help="(%(default)s)")
    parser.add_argument("--processes", default="1,2,4", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="measured steps per point (%(default)s)")
    parser.add_argument("--gemm-sizes", default="", help="sizes of the bf16 GEMMs that measure the machine")
    parser.add_argument("--output", type=Path, help="PNG file for the figure")
    parser.add_argument("--json", type=Path, help="JSON file for all results; axes already in it are kept")
    parser.add_argument("flags", nargs="*", help="flags for all runs, after --")
    arguments = parser.parse_args(argv)
    known = axes([int(number) for number in arguments.processes.split(",")])
    wanted = arguments.axes.split(",")
    if set(wanted) - set(known):
        sys.exit(f"unknown axis {', '.join(sorted(set(wanted) - set(known)))}; known: {', '.join(known)}")
    here = machine.ask(sizes=arguments.gemm_sizes)
    results = earlier(arguments.json, here.device, here.versions)
    for name in wanted:
        if name in results:
            continue
        points = [point for point in known[name].points if point.in_quick or not arguments.quick]
        measured = []
        for point in points:
            measured.append(run(known[name], point, arguments.steps, arguments.flags))
            print(f"{name} {point.x:,}: {measured[-1]['rate']:,.0f} tokens/s", file=sys.stderr, flush=True)
        results[name] = measured
        if arguments.json:
            write_json(arguments.json, {"machine": asdict(here), "flags": arguments.flags, "axes": results})
    results = {name: results[name] for name in known if name in results}
    print(f"{here}\n")
    for name, points_found in results.items():
        print(f"{table(known[name], points_found)}\n")
    if arguments.output:
        title = f"{here.device}, {here.threads} threads, torch {here.versions['torch']}"
        draw(results, {name: axis.label for name, axis in known.items()}, title, arguments.output)


def earlier(path: Path | None, device: str, versions: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """The axes in an existing file of this machine."""
    if path is None or not path.exists():
        return {}
    content = json.loads(path.read_text())
    if (content["machine"]["device"], content["machine"]["versions"]) != (device, versions):
        sys.exit(f"{path} is from another machine or other versions, which a table never mixes; set another file")
    axes: dict[str, list[dict[str, Any]]] = content["axes"]
    return axes


if __name__ == "__main__":
    main()
