"""Text to token shards: `python -m torchtitan.tools.tokenize` with 1 and 2 workers, beside datatrove on the same text.

python -m benchmarks tokenizing [--megabytes 60] [--rounds 3]

The text is Python's standard library, over and over, in JSONL files, one for each worker; the tokenizer is a byte-level
BPE trained on it. Each command runs as a whole, in turns; the table has the best of its runs. CPU seconds tell more
where others use the machine.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.tables import markdown
from torchtitan.container import available_cores
from torchtitan.data.sources import python_stdlib

VOCABULARY = 32_000
LONGEST_DOCUMENT = 4000  # bytes
END = "<|end_of_text|>"
DATATROVE = """
import json, pathlib, sys
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.tokens import DocumentTokenizer

def read(data, rank, world_size):
    for path in sorted(pathlib.Path(sys.argv[1]).iterdir())[rank::world_size]:
        with path.open("rb") as lines:
            for number, line in enumerate(lines):
                yield Document(text=json.loads(line)["text"], id=str(number))

if __name__ == "__main__":
    _, out, tokenizer, end, workers = sys.argv[1:]
    steps = [read, DocumentTokenizer(out, tokenizer, eos_token=end, shuffle_documents=False)]
    LocalPipelineExecutor(steps, tasks=int(workers), workers=int(workers), logging_dir=out + "/logs").run()
"""


def write_text(folder: Path, megabytes: int, files: int) -> None:
    source = python_stdlib().cut(1 << 30, LONGEST_DOCUMENT)
    lines = [json.dumps({"text": source[number].text}) + "\n" for number in range(len(source)) if source[number].text]
    folder.mkdir()
    for number in range(files):
        with (folder / f"{number}.jsonl").open("w") as file:
            while file.tell() < megabytes * 10**6 / files:
                file.writelines(lines)


def train_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    source = python_stdlib()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((source[number].text for number in range(0, len(source), 2)), trainer)
    tokenizer.save(str(path))


def cpu_seconds() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, out, tokenizer = folder / "text", folder / "out", folder / "tokenizer.json"
        write_text(text, arguments.megabytes, 2)
        train_tokenizer(tokenizer)
        (folder / "datatrove.py_").write_text(DATATROVE)
        ours = [
            sys.executable,
            "-m",
            "torchtitan.tools.tokenize",
            text,
            "-o",
            out,
            "--tokenizer",
            tokenizer,
            "--workers",
        ]
        peer = [sys.executable, folder / "datatrove.py_", text, out, tokenizer, END]
        commands: dict[str, list[Any]] = {
            "torchtitan.tools.tokenize, 1 worker": [*ours, "1"],
            "torchtitan.tools.tokenize, 2 workers": [*ours, "2"],
            "datatrove, 1 worker of several threads": [*peer, "1"],
            "datatrove, 2 workers": [*peer, "2"],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        spent: dict[str, list[float]] = {name: [] for name in commands}
        tokens: dict[str, int] = {}
        for name in [*commands] * arguments.rounds:
            shutil.rmtree(out, ignore_errors=True)
            start, cpu = perf_counter(), cpu_seconds()
            subprocess.run(
                commands[name], check=True, capture_output=True, env={**os.environ, "PYTHONPATH": os.getcwd()}
            )
            seconds[name].append(perf_counter() - start)
            spent[name].append(cpu_seconds() - cpu)
            tokens[name] = sum(path.stat().st_size for path in (*out.glob("*.bin"), *out.glob("*.ds"))) // 2
        rates = {name: tokens[name] / min(times) for name, times in seconds.items()}
        print(f"{available_cores()} cores, {arguments.megabytes} MB of text, load {os.getloadavg()[0]:.1f}\n")
        base = next(iter(rates.values()))
        rows = [
            [name, f"{tokens[name]:,}", f"{rate:,.0f}", f"{rate / base:.2f}", f"{tokens[name] / min(spent[name]):,.0f}"]
            for name, rate in rates.items()
        ]
        print(markdown(["command", "tokens", "tokens/s", "relative", "tokens per CPU second"], rows))


if __name__ == "__main__":
    main()
