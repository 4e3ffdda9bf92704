"""Loss of each recipe against bf16, on the debug model and the same data: a table and a plot.

python benchmarks/low_precision.py --output docs/figures/low_precision.png [--steps 300]

A recipe's loss is the mean over the last 20 steps. Runs that are there already (in --folder) are not run again.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAST = 20
INT8 = ["--model.converters=int8"]
RECIPES: dict[str, list[str]] = {
    "bf16": [],
    "float8 tensorwise": ["--model.converters=float8"],
    "float8 rowwise": ["--model.converters=float8", "--float8.recipe_name=rowwise"],
    "float8 rowwise_with_gw_hp": ["--model.converters=float8", "--float8.recipe_name=rowwise_with_gw_hp"],
    "int8 rowwise": INT8,
    "int8 tensorwise": [*INT8, "--int8.recipe_name=tensorwise"],
    "int8 rowwise, output too": [*INT8, "--int8.filter_fqns="],
    "int8 rowwise, int8 all-gather": [*INT8, "--int8.enable_fsdp_int8_all_gather"],
    "mx mxfp8 (emulated)": ["--model.converters=mx", "--mx.emulate"],
}


def run(name: str, flags: list[str], steps: int, folder: Path) -> Path:
    """The dump folder of a finished run."""
    dump = folder / name.replace(" ", "_").replace(",", "")
    metrics = dump / "metrics.jsonl"
    if metrics.exists() and json.loads(metrics.read_text().splitlines()[-1])["step"] == steps:
        return dump
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        f"--job.config_file={ROOT / 'train_configs' / 'debug_model.toml'}",
        f"--job.dump_folder={dump}",
        f"--training.steps={steps}",
        "--training.seq_len=128",
        "--training.local_batch_size=8",
        "--metrics.log_freq=1",
        *flags,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(done.stdout)
    return dump


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, default=Path("outputs/low_precision"))
    parser.add_argument("--output", default="low_precision.png")
    arguments = parser.parse_args()
    import torch

    results = {}
    for name, flags in RECIPES.items():
        dump = run(name, flags, arguments.steps, arguments.folder)
        entries = [json.loads(line) for line in (dump / "metrics.jsonl").read_text().splitlines()]
        loss = statistics.mean(entry["loss"] for entry in entries[-LAST:])
        rate = statistics.median(entry["tokens_per_second"] for entry in entries)
        results[name] = (dump, loss, rate)
        print(f"{name}: loss {loss:.4f}, {rate:,.0f} tokens/s", file=sys.stderr, flush=True)
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    print(f"CPU, {os.cpu_count()} cores, {threads} threads, torch {torch.__version__}, {arguments.steps} steps\n")
    print("| recipe | loss | against bf16 | tokens/s against bf16 |\n|---|---|---|---|")
    _, base_loss, base_rate = results["bf16"]
    for name, (_, loss, rate) in results.items():
        print(f"| {name} | {loss:.4f} | {loss / base_loss - 1:+.2%} | {rate / base_rate:.2f} |")
    plot = [sys.executable, str(ROOT / "scripts" / "plot_run.py"), *(str(dump) for dump, _, _ in results.values())]
    Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([*plot, "--smooth", "20", "--output", arguments.output], check=True)


if __name__ == "__main__":
    main()
