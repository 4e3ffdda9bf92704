"""A model of 117 million parameters trained on one GPU: bf16, and the fastest low precision, from the same weights.

python -m benchmarks gpu_model tokens SOURCE [SOURCE ...] [--folder outputs/gpu_model] [--vocabulary 16384]
python -m benchmarks gpu_model train [--minutes 6] [--folder outputs/gpu_model] [--output FOLDER] [--smoke]

`tokens` makes a tokenizer and token shards of texts in FOLDER/tokens, which can be copied to a machine without a
network. SOURCE is what training.dataset_path takes. `train` times each recipe for some steps. bf16 and the fastest of
the others then train on the same batches, for as many steps as the minutes allow to both. Another call goes on from
their checkpoints. --output gets the table, the seconds of each recipe's steps, and what `python -m
torchtitan.tools.report OUTPUT/bf16 OUTPUT/NAME` makes a page of. `--smoke`: a tiny model, uncompiled, on any device.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu import carried
from benchmarks.runs import ROOT
from benchmarks.tables import markdown, write_json

TOKENIZER_DOCUMENTS = 1500  # that the tokenizer is trained on
TIMED = 30  # steps of a recipe before the fastest is chosen; the first third is not counted
LAST_SHARE = 0.05  # of the steps, over which a run's training loss is averaged
STOPPING = 30.0  # seconds in which a run that is out of time saves a checkpoint
BASE = "bf16"
RECIPES = {  # `output` stays in bf16, as filter_fqns has it
    BASE: (),
    "float8 tensorwise": ("--model.converters=float8",),
    "float8 delayed": ("--model.converters=float8", "--float8.recipe_name=delayed"),
    "int8 rowwise": ("--model.converters=int8", "--int8.enable_fsdp_int8_all_gather"),
}
REPORTED = ("metrics.jsonl", "events.jsonl", "config.toml")  # files of a dump folder that the page of a run is made of
COMMON = (
    *("--experimental.custom_import=benchmarks.sizes", "--model.name=sizes", "--optimizer.lr=1e-3"),
    *("--lr_scheduler.decay_ratio=0.2", "--checkpoint.enable_checkpoint", "--checkpoint.interval=1000000"),
    *("--training.mixed_precision_param=bfloat16", "--activation_checkpoint.mode=none", "--checkpoint.keep_latest_k=2"),
)
FULL = ("--model.flavor=100M", "--training.seq_len=1024", "--training.local_batch_size=64", "--training.compile")
SMOKE = (
    "--model.flavor=1M",
    "--training.seq_len=64",
    "--training.local_batch_size=4",
    "--validation.local_batch_size=1",
)


def make_tokens(sources: Sequence[str], folder: Path, vocabulary: int) -> None:
    """A tokenizer trained on the first source, and token shards of all."""
    tokens = folder / "tokens"
    model = f"{tokens / 'tokenizer.model'}"
    train = [sys.executable, str(ROOT / "scripts" / "train_tokenizer.py"), f"--dataset={sources[0]}"]
    train += [f"--documents={TOKENIZER_DOCUMENTS}", f"--vocab_size={vocabulary}", f"--output={model}"]
    shards = ["-o", str(tokens / "shards"), f"--tokenizer={model}"]
    for command in (train, [sys.executable, "-m", "torchtitan.tools.tokenize", *sources, *shards]):
        if status := subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode:
            sys.exit(status)


class Training:
    """Runs of train.py that share a folder, tokens and a deadline.

    Args:
        deadline: on the monotonic clock.
        output: gets a copy of the results.
    """

    def __init__(self, folder: Path, output: Path, deadline: float, smoke: bool) -> None:
        self.folder, self.output, self.deadline = folder, output, deadline
        tokens = folder / "tokens"
        data = (f"--training.dataset_path={tokens / 'shards'}", f"--model.tokenizer_path={tokens / 'tokenizer.model'}")
        self.flags = (*COMMON, *(SMOKE if smoke else FULL), *data)

    def run(self, name: str, recipe: str, steps: int, *flags: str) -> list[dict[str, Any]]:
        """Trains up to `steps` steps in the dump folder `name`, from its newest checkpoint if it has one. Returns the
        lines of metrics.jsonl. A run that is out of time is told to save and stop."""
        dump = self.dump(name)
        command = [sys.executable, str(ROOT / "train.py"), f"--job.dump_folder={dump}", f"--training.steps={steps}"]
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH"), carried()])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        process = subprocess.Popen([*command, *self.flags, *RECIPES[recipe], *flags], env=environment)
        try:
            process.wait(max(1.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(STOPPING)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        file = dump / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        if process.returncode != 0:
            print(f"{name}: exited with status {process.returncode}", flush=True)
        return lines

    def seconds_of_a_step(self) -> dict[str, float]:
        """Of each recipe that runs, the slowest last. They are kept in the folder, so that another call need not time
        them again."""
        file = self.folder / "seconds.json"
        seconds: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
        for recipe in RECIPES:
            if recipe in seconds:
                continue
            shutil.rmtree(self.folder / "timed", ignore_errors=True)
            lines = self.run("timed", recipe, TIMED, "--metrics.log_freq=1")
            counted = [line["step_seconds"] for line in lines if "loss" in line][TIMED // 3 :]
            if counted:
                seconds[recipe] = statistics.median(counted)
                write_json(file, seconds)
        return seconds

    def all(self) -> str:
        """The table of both runs."""
        seconds = self.seconds_of_a_step()
        if BASE not in seconds or len(seconds) < 2:
            sys.exit("bf16 and one more recipe must have run to be compared.")
        fastest = min((recipe for recipe in seconds if recipe != BASE), key=seconds.__getitem__)
        done = max((self.last_step(recipe) for recipe in (BASE, fastest)), default=0)
        left = self.deadline - time.monotonic() - 2 * STOPPING
        steps = done + max(10, int(left / (seconds[BASE] + seconds[fastest])) // 10 * 10)
        every = max(10, steps // 20)
        results: dict[str, list[dict[str, Any]]] = {}
        for recipe in (BASE, fastest):
            flags = ("--metrics.log_freq=10", "--validation.enabled", f"--validation.freq={every}")
            warmup = f"--lr_scheduler.warmup_steps={max(1, min(100, steps // 10))}"
            results[recipe] = self.run(recipe, recipe, steps, warmup, *flags)
            self.hand_out(self.dump(recipe))
            self.output.mkdir(parents=True, exist_ok=True)
            write_json(self.output / "gpu_model.json", {"seconds_of_a_step": seconds, "steps": steps})
            table = self.table(results, seconds)
            (self.output / "gpu_model.md").write_text(table + "\n")
        return table

    def dump(self, name: str) -> Path:
        return self.folder / name.replace(" ", "_")

    def hand_out(self, dump: Path) -> None:
        """Copies what the report reads to the output folder."""
        folder = self.output / dump.name
        for file in REPORTED if folder != dump else ():
            if (dump / file).exists():
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(dump / file, folder / file)

    def last_step(self, recipe: str) -> int:
        checkpoints = (self.dump(recipe) / "checkpoint").glob("step-*")
        return max((int(path.name.removeprefix("step-")) for path in checkpoints), default=0)

    def table(self, results: dict[str, list[dict[str, Any]]], seconds: dict[str, float]) -> str:
        cells = []
        for recipe, lines in results.items():
            reports = [line for line in lines if "loss" in line]
            validated = [line["validation_loss"] for line in lines if "validation_loss" in line]
            if not reports:
                cells.append([recipe, "0", "", "", "", "", "", ""])
                continue
            last = reports[-max(1, int(LAST_SHARE * len(reports))) :]
            mfu = [line["mfu"] for line in reports if line["mfu"] is not None]
            cells.append(
                [
                    recipe,
                    f"{reports[-1]['step']}",
                    f"{reports[-1]['tokens_seen'] / 1e6:.1f}",
                    f"{statistics.mean(line['loss'] for line in last):.4f}",
                    f"{validated[-1]:.4f}" if validated else "",
                    f"{statistics.median(line['tokens_per_second'] for line in reports):,.0f}",
                    f"{statistics.median(mfu):.1%}" if mfu else "",
                    f"{seconds[BASE] / seconds[recipe]:.2f}",
                ]
            )
        columns = ["recipe", "steps", "million tokens", "training loss", "validation loss", "tokens/s", "MFU"]
        return markdown([*columns, "speed against bf16, timed first"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    tokens, train = (commands.add_parser(name) for name in ("tokens", "train"))
    tokens.add_argument("sources", nargs="+", metavar="SOURCE")
    tokens.add_argument("--vocabulary", type=int, default=16384)
    for command in (tokens, train):
        command.add_argument("--folder", type=Path, default=ROOT / "outputs" / "gpu_model")
    train.add_argument("--minutes", type=float, default=6.0, help="of both runs and their timing (%(default)s)")
    train.add_argument("--output", type=Path, help="folder for the results; default: --folder")
    train.add_argument("--smoke", action="store_true", help="a tiny model, any device")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.command == "tokens":
        return make_tokens(arguments.sources, folder, arguments.vocabulary)
    deadline = time.monotonic() + 60 * arguments.minutes
    if not (folder / "tokens" / "shards").is_dir():
        sys.exit(f"{folder / 'tokens' / 'shards'} is missing; `gpu_model tokens SOURCE` makes it.")
    print(Training(folder, (arguments.output or folder).resolve(), deadline, arguments.smoke).all())


if __name__ == "__main__":
    main()
