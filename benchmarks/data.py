"""Tokens/s of the loader from every kind of source, beside other loaders, and what it costs the thread beside it.

python -m benchmarks data [--seconds 2] [--kinds JSONL,Parquet] [--run-steps 0] [--json FILE]

The text is Python's standard library in pieces of 4,000 characters, with the tokenizer shipped here, in sequences of
2,048 tokens, 8 a step. Three tables: the rate of each kind of source as fast as one process gives it; the share of the
time that a consumer of a given rate waits; and a process that launches small operations from Python, as a run on a GPU
does, beside the thread that reads and tokenizes. Conversations are these pieces as questions and answers, with the
shipped tokenizer as a tokenizer.json, which texts beside them have, too. With `--run-steps` a fourth table: a run of
the debug model, whose stages of so many steps have text and conversations in turns.

nanochat's loader is its algorithm, written here: batches of 128 documents of Parquet row groups, encoded by 4 threads
of the tokenizer, in a deque of tokens. The loader of `datasets` is its stream of documents, encoded one by one.
"""

import argparse
import gzip
import json
import statistics
import struct
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks.tables import markdown, write_json
from torchtitan.config.training import Training
from torchtitan.data import Document, Loader, build_loader, load_tokenizer
from torchtitan.data.datasets import documents_of
from torchtitan.data.packing import tokens_of
from torchtitan.data.tokenizer import SHIPPED
from torchtitan.tools.interchange.tokenizer_files import tokenizer_files

SEQ_LEN, ROWS = 2048, 8
TOKENS = SEQ_LEN * ROWS  # of a step
CHARACTERS, PIECE = 6_000_000, 4_000
AT_ONCE, THREADS = 128, 4  # documents and threads of nanochat's loader
RATES = (60_000, 500_000)  # tokens/s of a process
OPERATIONS, ROUNDS = 2_000, 5
TOKENIZER = load_tokenizer(None)
TEMPLATE = """{% for message in messages %}{{ message['role'] }}: {% if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}

{% endfor %}"""


def texts() -> list[str]:
    whole = (document.text for document in documents_of("python_stdlib", "text"))
    pieces = chain.from_iterable((text[at : at + PIECE] for at in range(0, len(text), PIECE)) for text in whole)
    return list(islice(pieces, CHARACTERS // PIECE))


def write_text(folder: Path, documents: Sequence[str]) -> None:
    for number in range(0, len(documents), 50):
        (folder / f"{number}.txt").write_text("\n".join(documents[number : number + 50]), encoding="utf-8")


def write_jsonl(folder: Path, documents: Sequence[str], name: str = "a.jsonl") -> None:
    content = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


def write_parquet(folder: Path, documents: Sequence[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": documents}), folder / "a.parquet", row_group_size=1024)


def write_arrow(folder: Path, documents: Sequence[str]) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": documents}).save_to_disk(str(folder))


def add_tokenizer(folder: Path) -> None:
    """A tokenizer.json with the ids of the shipped tokenizer."""
    (folder / "tokenizer").mkdir()
    for name, content in tokenizer_files(None).items():
        if name != "tokenizer.model":
            (folder / "tokenizer" / name).write_bytes(content)


def write_text_beside_conversations(folder: Path, documents: Sequence[str]) -> None:
    write_jsonl(folder, documents)
    add_tokenizer(folder)


def write_conversations(folder: Path, documents: Sequence[str]) -> None:
    """Two questions and answers in each piece of text."""
    add_tokenizer(folder)
    (folder / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    quarters = [[text[at : at + PIECE // 4] for at in range(0, PIECE, PIECE // 4)] for text in documents]
    turns = [zip(("user", "assistant") * 2, parts, strict=True) for parts in quarters]
    lines = [{"messages": [{"role": role, "content": content} for role, content in of_text]} for of_text in turns]
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write_megatron(folder: Path, documents: Sequence[str]) -> None:
    """Tokens as uint16 in `.bin`, and their index."""
    tokens = [np.array(tokens_of(Document(text, ""), TOKENIZER), "<u2") for text in documents]
    lengths = np.array([len(document) for document in tokens], "<i4")
    (folder / "a.bin").write_bytes(np.concatenate(tokens).tobytes())
    (folder / "a.idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(tokens), len(tokens) + 1)
        + lengths.tobytes()
        + (2 * (np.cumsum(lengths, dtype="<i8") - lengths)).tobytes()
        + np.arange(len(tokens) + 1, dtype="<i8").tobytes()
    )


TEXT, CONVERSATIONS = "JSONL with tokenizer.json", "conversations"
Write = Callable[[Path, Sequence[str]], None]
KINDS: dict[str, Write] = {
    "text files": write_text,
    "JSONL": write_jsonl,
    "compressed JSONL": partial(write_jsonl, name="a.jsonl.gz"),
    "Parquet": write_parquet,
    "Arrow": write_arrow,
    TEXT: write_text_beside_conversations,
    CONVERSATIONS: write_conversations,
}
SHARDS = "token shards"
if find_spec("torchtitan.data.shards"):
    KINDS[SHARDS] = write_megatron


def loader_of(folder: Path, **changes: Any) -> Loader:
    own = folder / "tokenizer"
    if (own / "chat_template.jinja").exists():
        changes |= {"train_on": "assistant"}
    files = f"{folder}/*.jsonl" if own.exists() else str(folder)
    training = Training(dataset_path=files, seq_len=SEQ_LEN, local_batch_size=ROWS, **changes)
    tokenizer = load_tokenizer(str(own)) if own.exists() else TOKENIZER
    return build_loader(training, tokenizer, dp_rank=0, dp_size=1, global_batch_size=ROWS, hold_out=False)


def ours(folder: Path, **changes: Any) -> Iterator[torch.Tensor]:
    loader = loader_of(folder, **changes)
    try:
        while True:
            yield loader.next()[0].tokens
    finally:
        loader.close()


def batches_from(documents: Iterator[Sequence[int]]) -> Iterator[torch.Tensor]:
    """Documents one after the other in (ROWS, SEQ_LEN) inputs; the labels are left out."""
    buffer: deque[int] = deque()
    while True:
        while len(buffer) <= TOKENS:
            buffer.extend(next(documents))
        step = torch.tensor([buffer.popleft() for _ in range(TOKENS)])
        yield step.view(ROWS, SEQ_LEN)


def nanochat(folder: Path) -> Iterator[torch.Tensor]:
    import pyarrow.parquet as pq
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(SHIPPED))

    def documents() -> Iterator[list[int]]:
        while True:
            with pq.ParquetFile(folder / "a.parquet") as file:
                for group in range(file.num_row_groups):
                    column = file.read_row_group(group).column("text").to_pylist()
                    for first in range(0, len(column), AT_ONCE):
                        yield from processor.encode(
                            column[first : first + AT_ONCE], add_bos=True, add_eos=True, num_threads=THREADS
                        )

    return batches_from(documents())


def of_datasets(folder: Path) -> Iterator[torch.Tensor]:
    import datasets

    def documents() -> Iterator[Any]:
        while True:
            files = str(folder / "a.parquet")
            for record in datasets.load_dataset("parquet", data_files=files, split="train", streaming=True):
                yield tokens_of(Document(record["text"], ""), TOKENIZER)

    return batches_from(documents())


def rate(batches: Iterator[torch.Tensor], seconds: float) -> tuple[float, float]:
    """Tokens/s, and cores in use."""
    next(batches)
    start, cpu, steps = perf_counter(), process_time(), 0
    while perf_counter() - start < seconds:
        next(batches)
        steps += 1
    elapsed = perf_counter() - start
    cores = (process_time() - cpu) / elapsed
    batches.close()  # type: ignore[attr-defined]
    return steps * TOKENS / elapsed, cores


def wait_share(folder: Path, tokens_per_second: float, seconds: float) -> float:
    """Of a consumer that takes as long for a step as a model of this rate."""
    loader = loader_of(folder)
    loader.next()
    sleep(TOKENS / tokens_per_second)
    waited, start = loader.wait_seconds, perf_counter()
    while perf_counter() - start < seconds:
        loader.next()
        sleep(TOKENS / tokens_per_second)
    share = (loader.wait_seconds - waited) / (perf_counter() - start)
    loader.close()
    return share


def launch(value: torch.Tensor) -> None:
    for _ in range(OPERATIONS):
        value = value * 1.0


def beside(folder: Path, tokens_per_second: float, seconds: float) -> float:
    """Seconds that launching OPERATIONS small operations takes beside a loader of this rate; 0: without one."""
    loader = loader_of(folder) if tokens_per_second else None
    value, taken, times = torch.zeros(16), 0, []
    start = perf_counter()
    while (now := perf_counter()) - start < seconds:
        launch(value)
        times.append(perf_counter() - now)
        while loader is not None and taken < tokens_per_second * (perf_counter() - start):
            loader.next()
            taken += TOKENS
    if loader is not None:
        loader.close()
    return statistics.mean(times)


def in_a_run(folders: Mapping[str, Path], steps: int) -> dict[str, tuple[float, float]]:
    """Of the debug model, which trains on each in turns: tokens/s, and the share of the time that it waits for data;
    the median of steps but the first two of each stage."""
    kinds = [TEXT, CONVERSATIONS] * ROUNDS
    stages = "".join(
        f'[[stage]]\nname = "{number}"\nuntil = {steps * (number + 1)}\n'
        f'training.dataset_path = "{folders[kind]}/*.jsonl"\n'
        + ('training.train_on = "assistant"\n' if kind == CONVERSATIONS else "")
        for number, kind in enumerate(kinds)
    )
    run = folders[TEXT] / "run"
    run.mkdir()
    (run / "run.toml").write_text(stages, encoding="utf-8")
    flags = [f"--job.config_file={run}/run.toml", f"--job.dump_folder={run}", f"--training.steps={steps * len(kinds)}"]
    flags += [f"--model.tokenizer_path={folders[CONVERSATIONS]}/tokenizer", "--metrics.log_freq=1"]
    flags += ["--model.flavor=debugmodel", "--training.seq_len=512", "--training.local_batch_size=4"]
    train = Path(__file__).resolve().parent.parent / "train.py"
    subprocess.run([sys.executable, train, *flags], check=True, stdout=subprocess.DEVNULL)
    reports = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    shares: dict[str, tuple[float, float]] = {}
    for kind in (TEXT, CONVERSATIONS):
        own = [report for report in reports if kinds[report["stage"] - 1] == kind and (report["step"] - 1) % steps > 1]
        speed, waits = ([report[key] for report in own] for key in ("tokens_per_second", "data_wait_share"))
        shares[kind] = statistics.median(speed), statistics.median(waits)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    parser.add_argument("--kinds", default=",".join(KINDS), help=", ".join(KINDS))
    parser.add_argument("--run-steps", type=int, default=0, help="steps of each stage of a run; 0: no run")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    forms, seconds = arguments.kinds.split(","), arguments.seconds
    if unknown := [form for form in forms if form not in KINDS]:
        parser.error(f"unknown kind {unknown[0]!r}; known: {', '.join(KINDS)}")
    if arguments.run_steps and not {TEXT, CONVERSATIONS} <= set(forms):
        parser.error(f"--run-steps: a run has {TEXT!r} and {CONVERSATIONS!r}; add them to --kinds")
    torch.set_num_threads(1)
    documents = texts()
    with tempfile.TemporaryDirectory() as name:
        folders = {form: Path(name) / form.replace(" ", "_") for form in {*forms, "Parquet"}}
        for form, folder in folders.items():
            folder.mkdir()
            KINDS[form](folder, documents)
        loaders = {form: partial(ours, folders[form]) for form in forms}
        loaders[f"{forms[-1]}, best fit"] = partial(ours, folders[forms[-1]], packing="best_fit")
        loaders["nanochat's loader, Parquet"] = partial(nanochat, folders["Parquet"])
        loaders["`datasets`, Parquet"] = partial(of_datasets, folders["Parquet"])
        rates = {form: rate(batches(), seconds) for form, batches in loaders.items()}
        [*_, other, last] = rates
        rows = [
            [form, f"{speed:,.0f}", f"{cores:.1f}", f"{speed / rates[other][0]:.2f}", f"{speed / rates[last][0]:.2f}"]
            for form, (speed, cores) in rates.items()
        ]
        print(markdown(["source", "tokens/s", "cores", "relative to nanochat's", "to `datasets`"], rows))

        of_text_and_shards = [form for form in ("JSONL", SHARDS) if form in forms]
        waiting = [form for form in ("JSONL", SHARDS, TEXT, CONVERSATIONS) if form in forms]
        waits = {form: [wait_share(folders[form], speed, seconds) for speed in RATES] for form in waiting}
        columns = ["waiting for data", *(f"at {speed:,} tokens/s" for speed in RATES)]
        print(
            "", markdown(columns, [[form, *map("{:.1%}".format, shares)] for form, shares in waits.items()]), sep="\n"
        )

        settings = [("", 0), *((form, speed) for form in of_text_and_shards for speed in RATES)]
        times: dict[tuple[str, int], list[float]] = {setting: [] for setting in settings}
        for _ in range(ROUNDS):
            for form, speed in settings:
                times[form, speed].append(beside(folders.get(form, Path()), speed, seconds / 2))
        # Other load on the machine only adds to a time.
        alone = min(times["", 0])
        costs = {
            form: [f"{min(times[form, speed]) / alone - 1:+.0%}" for speed in RATES] for form in of_text_and_shards
        }
        columns = [f"time to launch {OPERATIONS:,} operations ({1e3 * alone:.1f} ms alone)", *columns[1:]]
        print("", markdown(columns, [[form, *cells] for form, cells in costs.items()]), sep="\n")
        runs = in_a_run(folders, arguments.run_steps) if arguments.run_steps else {}
        if runs:
            rows = [[kind, f"{speed / runs[TEXT][0]:.2f}", f"{wait:.1%}"] for kind, (speed, wait) in runs.items()]
            print("", markdown(["in a run", "tokens/s, relative", "waiting for data"], rows), sep="\n")
    if arguments.json:
        figures = {
            "tokens_per_second": rates,
            "wait_share": waits,
            "launching": {str(k): v for k, v in times.items()},
            "run": runs,
        }
        write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
