"""Tokenizes text once, into shards that training reads, as do Megatron-LM, NeMo and GPT-NeoX.

python -m torchtitan.tools.tokenize SOURCE [SOURCE ...] -o FOLDER [--tokenizer FILE] [--workers N]

SOURCE is what training.dataset_path takes, or the name of a data set; PATH#COLUMN sets its text column. FOLDER gets
pairs of .bin and .idx files and metadata.json. Until it is complete it is FOLDER.partial; the same command goes on
where it was stopped. On a complete FOLDER, the command verifies the hashes of all files; without SOURCE, only those.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import takewhile, zip_longest
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchtitan.config.extension import add_custom_import, import_user_module
from torchtitan.config.training import Training
from torchtitan.container import available_cores
from torchtitan.data.datasets import cut_mark, for_rows, open_name_or_path
from torchtitan.data.packing import tokens_of
from torchtitan.data.paths import METADATA, first_names
from torchtitan.data.shards import MEGATRON_DTYPES, MEGATRON_HEADER, MEGATRON_MAGIC, PROGRESS
from torchtitan.data.sources import LONGEST, UNCOUNTED, AnySource, Document, Stamp, Vocabulary, sample_of
from torchtitan.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan.errors import ConfigError, DataError, command_parser, counted, parsing, run_command
from torchtitan.files import expand_any, is_remote, local_path, regular_file, sha256_of
from torchtitan.logging import Waiting, logger
from torchtitan.registry import load
from torchtitan.strict_json import natural

SHARD_BYTES, SHARD_DOCUMENTS = 1 << 29, 1 << 22  # a shard ends where it has as many; one that is stopped is made again
BATCH_TOKENS, BATCH_DOCUMENTS = 1 << 17, 1 << 10  # for a worker at a time, at most
FIRST_BATCH = 16  # documents, before their length is known
BATCHES_AHEAD = 4  # for each worker
COUNTS = ("documents", "empty", "tokens", "text_bytes")  # counts of all shards; each shard's record has its own
FLAG_OF_KEY = {
    "training.text_column (or validation.text_column)": "--text-column",
    "model.tokenizer_path": "--tokenizer",
    "training.add_eos = false": "--no-add-eos",
    "training.add_bos = true": "--add-bos",
    "training.add_bos": "--add-bos",
    "training.train_on": "--train-on",
    "training.chat_template": "--chat-template",
    "training.max_document_mb": "--max-document-mb",
}


class Portion(NamedTuple):
    """Some documents of one source."""

    source: int
    documents: Sequence[int] | Sequence[Document]  # their indexes, or those that were read in sequence
    positions: Sequence[Any]  # for each, the one after it


class Tokenized(NamedTuple):
    """Tokens of all documents of a task; for each document the number of its tokens, and of bytes of its text."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int64]


class TokenizeJob(NamedTuple):
    """What each process needs to know."""

    sources: list[tuple[str, str]]  # name, column
    tokenizer: tuple[str | None, bool | None, bool]  # arguments of `load_tokenizer`
    rows: int
    seq_len: int
    custom_import: str | None
    versions: list[object]  # the sources' versions
    max_document_mb: float = Training.max_document_mb
    train_on: str | None = None  # this key and the next one are those of [training]
    chat_template: str | None = None

    def open(self, number: int, tokenizer: Tokenizer) -> AnySource:
        LONGEST.size = int(self.max_document_mb * 1e6)
        name, column = self.sources[number]
        chat = self.chat(tokenizer)
        vocabulary = chat and Vocabulary(tokenizer.vocab_size, tokenizer.ids_fingerprint, [], None, chat=chat)
        return for_rows(open_name_or_path("SOURCE", name, column, vocabulary=vocabulary), self.rows, self.seq_len)

    def chat(self, tokenizer: Tokenizer) -> Any:
        """What makes tokens of conversations, of any length; None: they are not wanted."""
        chat_of = load("torchtitan.data.conversations:chat_of")
        return self.train_on and chat_of(tokenizer, self.train_on, self.chat_template, "truncate", None)


@dataclass
class Worker:
    """Tokenizes documents. In a process of its own, it opens the sources that have random access."""

    job: TokenizeJob
    tokenizer: Tokenizer
    opened: dict[int, AnySource]

    def work(self, task: Portion) -> Tokenized:
        tokens, sizes = [], []
        for item in task.documents:
            document = item if isinstance(item, Document) else self.source(task.source)[item]  # type: ignore[index]
            tokens.append(tokens_of(document, self.tokenizer))
            sizes.append(len(document.text.encode("utf-8", "replace")))
        joined, size = np.concatenate(tokens), self.tokenizer.vocab_size
        ids = joined % UNCOUNTED if self.job.train_on else joined
        if (top := ids.max(initial=0)) >= size:
            raise DataError(f"SOURCE: token id {top} is not below {size}, the tokenizer's size.")
        return Tokenized(
            joined.astype(dtype_of(self.tokenizer, self.job.train_on)), np.array([*map(len, tokens)]), np.array(sizes)
        )

    def source(self, number: int) -> AnySource:
        if number not in self.opened:
            self.opened[number] = self.job.open(number, self.tokenizer)
            if version(self.opened[number]) != self.job.versions[number]:
                raise DataError(f"{self.job.sources[number][0]} has changed; run the same command again.")
        return self.opened[number]


_worker: Worker  # this process's, if it is a worker's


def version(source: AnySource) -> object:
    return source.fingerprint, getattr(source, "stamps", None)


def dtype_of(tokenizer: Tokenizer, train_on: str | None) -> np.dtype[Any]:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 and not train_on else np.int32)


def _start(job: TokenizeJob) -> None:
    """In each worker's process."""
    global _worker

    def end_with_parent() -> None:  # a parent that was killed cannot end its workers
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    if job.custom_import:
        import_user_module(job.custom_import, "--custom-import")
    _worker = Worker(job, load_tokenizer(*job.tokenizer), {})


def _work(task: Portion) -> Tokenized:
    return _worker.work(task)


def results(tasks: Iterator[Portion], worker: Worker, workers: int) -> Iterator[tuple[Portion, Tokenized]]:
    """The tasks in order, with their results."""
    if workers == 1:
        yield from ((task, worker.work(task)) for task in tasks)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (worker.job,)) as pool:
        waiting: deque[Any] = deque()
        try:
            for task in tasks:
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # a worker inherits that
                try:
                    waiting.append((task, pool.submit(_work, task)))
                finally:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
                if len(waiting) > BATCHES_AHEAD * workers:
                    task, future = waiting.popleft()
                    yield task, future.result()
            for task, future in waiting:
                yield task, future.result()
        except BrokenProcessPool:
            raise DataError(
                "A worker has died, perhaps for lack of memory; run the command again, with fewer --workers: finished "
                "shards are kept."
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class TokenizeProgress(Waiting):
    """Also tells tokens per second."""

    tokens = 0

    def text(self) -> str:
        rate = self.tokens / max(time.monotonic() - self._start, 1e-3)
        return f"{super().text()}, {self.tokens:,} tokens, {rate:,.0f} tokens/s"


@dataclass
class Shards:
    """Writes shards to a folder, and a line to its file of progress after each."""

    folder: Path
    progress: BinaryIO
    done: list[dict[str, Any]]  # a record of each finished shard: counts, files, and where the sources go on
    dtype: np.dtype[Any]  # a token's type

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.file: BinaryIO | None = None
        self.hash, self.lengths = hashlib.sha256(), [np.zeros(0, np.int64)]
        self.counts: Counter[str] = Counter()

    def total(self, count: str) -> int:
        return self.counts[count] + sum(int(record[count]) for record in self.done)

    def add(self, task: Portion, result: Tokenized) -> None:
        """A shard ends before the first text for which it is full, whatever tasks it came in."""
        ends = np.cumsum(result.lengths)
        first = 0
        while first < len(ends):
            lengths = result.lengths[first:]
            before = self.counts["tokens"] + np.cumsum(lengths) - lengths
            full = before * self.dtype.itemsize >= SHARD_BYTES
            full |= self.counts["documents"] + np.arange(len(lengths)) >= SHARD_DOCUMENTS
            cut = np.flatnonzero(full & (before > 0) & (lengths > 0))
            last = first + int(cut[0]) if len(cut) else len(ends)
            if last > first:
                tokens = result.tokens[ends[first] - lengths[0] : ends[last - 1]]
                self.write(tokens, result.lengths[first:last], result.sizes[first:last])
                self.position = [task.source, task.positions[last - 1]]
            if len(cut):
                self.finish()
            first = last

    def write(self, tokens: NDArray[Any], lengths: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        if self.file is None:
            self.file = (self.folder / f"{self.name}.bin").open("wb")
        self.file.write(tokens.data)
        self.hash.update(tokens.data)
        self.lengths.append(lengths)
        empty = int((lengths == 0).sum())
        self.counts.update(documents=len(lengths), empty=empty, tokens=len(tokens), text_bytes=int(sizes.sum()))

    @property
    def name(self) -> str:
        return f"shard-{len(self.done):06}"

    def finish(self) -> None:
        """Both files of the shard are on the disk, then it counts as finished."""
        assert self.file is not None
        with self.file as file:
            sync_file(file)
        lengths = np.concatenate(self.lengths)
        pointers = (np.cumsum(lengths) - lengths) * self.dtype.itemsize
        documents = np.arange(len(lengths) + 1)
        code = next(code for code, name in MEGATRON_DTYPES.items() if np.dtype(name) == self.dtype)
        head = MEGATRON_HEADER.pack(MEGATRON_MAGIC, 1, code, len(lengths), len(documents))
        index = head + lengths.astype("<i4").tobytes() + pointers.tobytes() + documents.tobytes()
        with (self.folder / f"{self.name}.idx").open("wb") as file:
            file.write(index)
            sync_file(file)
        size = self.counts["tokens"] * self.dtype.itemsize
        files = {
            f"{self.name}.bin": {"size": size, "sha256": self.hash.hexdigest()},
            f"{self.name}.idx": {"size": len(index), "sha256": hashlib.sha256(index).hexdigest()},
        }
        record = {**self.counts, "next": self.position, "files": files}
        append(self.progress, record)
        self.done.append(record)
        self.begin()


def sync_file(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def append(progress: BinaryIO, record: Mapping[str, Any]) -> None:
    progress.write(json.dumps(record).encode() + b"\n")
    sync_file(progress)


def hashes(folder: Path, names: Sequence[str], doing: str) -> dict[str, str]:
    """SHA-256 of files in a folder. Ctrl-C ends it at once, because a ThreadPool does not wait for its threads."""
    paths = [folder / name for name in names]
    read: list[int] = []  # bytes of each piece
    megabytes = sum(path.stat().st_size for path in paths) // 10**6
    with ThreadPool(available_cores()) as threads, Waiting(doing, megabytes, "MB", lambda: sum(read) // 10**6):
        return dict(zip(names, threads.map(partial(sha256_of, read=read.append), paths, chunksize=1), strict=True))


def described(worker: Worker, known: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the content of the shards. Files that `known` describes, unchanged since, are not hashed again."""
    described = []
    for number, (name, column) in enumerate(worker.job.sources):
        source = worker.opened[number]
        root: Any = getattr(source, "root", None)
        names = getattr(source, "files", ())
        before: dict[str, Any] = next((s["files"] for s in known.get("sources", ()) if s["name"] == name), {})
        files = {}
        for file in names if root else ():
            size, modified = Stamp.of(root / file)
            now = {"size": size, "modified": modified, "sample": sample_of(root / file)}
            same = before.get(file, {})
            files[file] = {**now, "sha256": same.get("sha256") if now.items() <= same.items() else None}
        new = [] if is_remote(root) else [file for file in files if files[file]["sha256"] is None]
        for file, digest in hashes(root, new, f"{name}: hashing its files").items():
            files[file]["sha256"] = digest
        described.append({"name": name, "column": column, "fingerprint": source.fingerprint, "files": files})
    tokenizer = worker.tokenizer
    return {
        "tokenizer": tokenizer.fingerprint,
        "tokenizer_ids": tokenizer.ids_fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id if tokenizer.add_eos else None,
        "sources": described,
        **({"train_on": worker.job.train_on, "chat": chat.identity} if (chat := worker.job.chat(tokenizer)) else {}),
    }


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How what shards were made from differs from what they would be made from now; "" if it does not."""
    if any(before[key] != now[key] for key in ("tokenizer", "vocab_size", "bos_id", "eos_id")):
        return "with another tokenizer, or with other tokens at the ends of documents"
    if before.get("chat") != now.get("chat"):
        return "with another --train-on, or with another chat template"

    def content(source: Mapping[str, Any] | None) -> object:
        return source and [
            source["column"],
            source["fingerprint"],
            {name: (file["size"], file["sha256"]) for name, file in source["files"].items()},
        ]

    for old, new in zip_longest(before["sources"], now["sources"]):
        if content(old) != content(new):
            return f"from other sources: {(new or old)['name']} was {'changed' if old and new else 'added or removed'}"
    return ""


def damaged_files(folder: Path, files: Mapping[str, Any]) -> list[str]:
    """The names of files that are missing, or have another size or hash."""
    # `os.path` takes a name that no file can have, too.
    sizes = {name: os.path.getsize(folder / name) if os.path.isfile(folder / name) else -1 for name in files}
    whole = [name for name in files if sizes[name] == files[name]["size"]]
    hash_of = hashes(folder, whole, f"{folder}: verifying")
    return [name for name in files if hash_of.get(name) != files[name]["sha256"]]


def read_own_metadata(folder: Path) -> dict[str, Any]:
    def refuse(_: str) -> DataError:
        return DataError(f"{folder / METADATA} is damaged; remove {folder}, and run the command again.")

    with parsing(refuse):
        about: dict[str, Any] = json.loads(regular_file(folder / METADATA).read_bytes())
        _ = (
            counts(about),
            difference(about, about),
            [(natural(file["size"]), file["sha256"]) for file in about["files"].values()],
        )
    return about


def verify(folder: Path, about: Mapping[str, Any]) -> None:
    """Reads a complete folder, and says that it is intact, or raises a DataError."""
    if names := damaged_files(folder, about["files"]):
        raise DataError(
            f"{folder} is damaged: {first_names(names)} {'differs' if len(names) == 1 else 'differ'} from what was "
            "written; copy the folder again, or remove it and run the command again."
        )
    print(f"{folder} is there already and intact: {counts(about)}")


def counts(about: Mapping[str, Any]) -> str:
    shards = counted(len(about["files"]) // 2, "shard")
    documents = f"{counted(about['documents'], 'document')} ({about['empty']:,} of them empty or unusable)"
    per_token = f", {about['text_bytes'] / about['tokens']:.2f} bytes per token" if about["text_bytes"] else ""
    return f"{documents}, {counted(about['tokens'], 'token')} in {shards}{per_token}"


@contextlib.contextmanager
def locked(folder: Path, out: Path) -> Iterator[BinaryIO]:
    """The file of progress of an unfinished folder, which this process alone may write."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PROGRESS
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino
        except BlockingIOError:
            alone = False
        if not alone:  # another command holds it, or has just finished
            raise DataError(f"another command is writing {out}; wait until it has ended, or name another folder.")
        yield file


def finished_shards(folder: Path, progress: BinaryIO) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a folder was begun from, {} if nothing was finished; and the shards that are intact. Forgets all others."""
    progress.seek(0)
    lines = [line for line in progress if line.endswith(b"\n")]

    def refuse(_: str) -> DataError:
        return DataError(f"{folder / PROGRESS} is damaged; remove {folder}, and run the command again.")

    with parsing(refuse):
        begun, *done = map(json.loads, lines or [b"{}"])
        _ = begun and difference(begun, begun)
        bad = damaged_files(folder, {name: file for record in done for name, file in record["files"].items()})
    if bad:
        print(f"{folder}: making {first_names(bad)} and all later shards again, for it has changed", flush=True)
        done = done[: next(number for number, record in enumerate(done) if set(bad) & set(record["files"]))]
    progress.truncate(sum(map(len, lines[: 1 + len(done)])))
    return begun, done


def tasks(opened: Mapping[int, AnySource], first: int, position: Any, batch: Callable[[], int]) -> Iterator[Portion]:
    """All documents from `position` in the `first` source on, in storage order, `batch()` at a time."""
    for number in range(first, len(opened)):
        source, position = opened[number], position if number == first else None
        if hasattr(source, "__getitem__"):
            begin, size = position or 0, len(source)  # type: ignore[arg-type]
            while begin < size:
                end = min(begin + batch(), size)
                yield Portion(number, range(begin, end), range(begin + 1, end + 1))
                begin = end
            continue
        documents, positions, length = [], [], 0
        for drawn in takewhile(lambda drawn: drawn.epoch == 0, source.documents(0, 1, None, position)):
            documents.append(drawn.document)
            positions.append(drawn.position)
            length += len(drawn.document.text)
            if length >= 4 * BATCH_TOKENS or len(documents) >= BATCH_DOCUMENTS:
                yield Portion(number, documents, positions)
                documents, positions, length = [], [], 0
        if documents:
            yield Portion(number, documents, positions)


def run_job(job: TokenizeJob, out: Path, workers: int) -> None:
    if not (out / METADATA).exists() and (out.is_symlink() or os.path.ismount(out)):  # no rename can replace these
        raise DataError(f"{out} is a link or a mount point; name a folder in it, such as {out / 'tokens'}.")
    partial = out.with_name(f"{out.name}.partial")
    for folder, mark in ((out, METADATA), (partial, PROGRESS)):
        if folder.exists() and not (folder / mark).exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DataError(f"{folder} holds something else than token shards; name another folder.")
    tokenizer = load_tokenizer(*job.tokenizer)
    worker = Worker(job, tokenizer, {number: job.open(number, tokenizer) for number in range(len(job.sources))})
    for (name, _), source in zip(job.sources, worker.opened.values(), strict=True):
        job.versions.append(version(source))
        place = Path(name).expanduser()
        if place.is_dir() and out.resolve().is_relative_to(place.resolve()):
            raise DataError(f"{out} lies in the source {name}; name a folder outside of it.")
    if (out / METADATA).exists():
        about = read_own_metadata(out)
        if reason := difference(about, described(worker, about)):
            raise DataError(f"{out} was made {reason}; name another folder, or remove it.")
        verify(out, about)
        (out / PROGRESS).unlink(missing_ok=True)  # killed after the rename
        return
    try:
        with locked(partial, out) as progress:
            begun, done = finished_shards(partial, progress)
            now = described(worker, begun)
            if begun and (reason := difference(begun, now)):
                raise DataError(f"{partial} was begun {reason}; restore that, or remove it to begin again.")
            if not begun:
                append(progress, now)
            shards = Shards(partial, progress, done, dtype_of(tokenizer, job.train_on))
            write_shards(shards, worker, workers)
            totals = {count: shards.total(count) for count in COUNTS}
            files = {name: file for record in shards.done for name, file in record["files"].items()}
            about = {"format": 1, **now, **totals, "files": files}
            with (partial / METADATA).open("wb") as file:
                file.write(json.dumps(about, indent=1).encode())
                sync_file(file)
            partial.rename(out)
            (out / PROGRESS).unlink()
            print(f"saved {out}: {counts(about)}")
    except OSError as error:
        raise DataError(
            f"{error.filename or partial}: {error.strerror}; when that is repaired, run the same command again: "
            "finished shards are kept."
        ) from error


def write_shards(shards: Shards, worker: Worker, workers: int) -> None:
    """Tokenizes and writes what is missing."""
    lengths = [len(source) if isinstance(source, Sized) else 0 for source in worker.opened.values()]
    total = sum(lengths) if all(lengths) else None
    before = shards.total("documents")
    if before:
        print(f"{shards.folder}: going on after {counted(before, 'document')}", flush=True)

    def batch() -> int:
        documents, tokens = shards.total("documents"), max(1, shards.total("tokens"))
        return max(1, min(BATCH_DOCUMENTS, BATCH_TOKENS * documents // tokens)) if documents else FIRST_BATCH

    with TokenizeProgress("tokenizing", total and total - before, "documents") as waiting:
        try:
            source, position = shards.done[-1]["next"] if shards.done else (0, None)
            for task, result in results(tasks(worker.opened, source, position, batch), worker, workers):
                shards.add(task, result)
                waiting.done += len(result.lengths)
                waiting.tokens += len(result.tokens)
            if not shards.total("tokens"):
                raise DataError(f"{first_names([name for name, _ in worker.job.sources])}: there is no text.")
            if shards.counts["documents"]:
                shards.finish()
        finally:
            if shards.file is not None:
                with contextlib.suppress(OSError):
                    shards.file.close()


def main() -> None:
    parser = command_parser("tokenize", __doc__)
    usual = Training()
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="path, pattern, Hub id or data set")
    parser.add_argument("-o", "--output", type=local_path, required=True, metavar="FOLDER", help="folder to create")
    parser.add_argument("--tokenizer", type=expand_any, help="default: the shipped one", metavar="FILE")
    parser.add_argument("--workers", type=int, default=available_cores(), help="processes; default: cores", metavar="N")
    parser.add_argument("--text-column", default=usual.text_column, help="of records", metavar="NAME")
    parser.add_argument("--train-on", choices=["assistant", "completion", "all"], help="as training.train_on")
    parser.add_argument("--chat-template", help="as training.chat_template", metavar="NAME")
    parser.add_argument("--add-bos", action=argparse.BooleanOptionalAction, help="as training.add_bos")
    parser.add_argument("--add-eos", action=argparse.BooleanOptionalAction, default=True, help="as training.add_eos")
    parser.add_argument(
        "--global-batch-size",
        type=int,
        default=usual.local_batch_size,
        help="of the run; with --seq-len it decides how text files are cut",
        metavar="B",
    )
    parser.add_argument("--seq-len", type=int, default=usual.seq_len, help="of the run", metavar="N")
    parser.add_argument(
        "--max-document-mb",
        type=float,
        default=usual.max_document_mb,
        help="as training.max_document_mb; default: %(default)s",
        metavar="MB",
    )
    add_custom_import(parser)
    arguments = parser.parse_args()
    logger.handlers = [logging.StreamHandler()]  # the log says which files are left out
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for flag in ("workers", "global_batch_size", "seq_len", "max_document_mb"):
        if not getattr(arguments, flag) > 0:
            raise ConfigError(f"--{flag.replace('_', '-')} must be above 0, not {getattr(arguments, flag)}.")
    out = arguments.output.absolute()
    if not arguments.sources:
        if not (out / METADATA).exists():
            raise ConfigError(f"there is no SOURCE, and {out} is no folder of token shards to verify; name a source.")
        verify(out, read_own_metadata(out))
        return
    if arguments.custom_import:
        import_user_module(arguments.custom_import, "--custom-import")
    entries = (cut_mark(entry, "#") for entry in arguments.sources)
    job = TokenizeJob(
        [(name, column or arguments.text_column) for name, column in entries],
        (arguments.tokenizer, arguments.add_bos, arguments.add_eos),
        arguments.global_batch_size,
        arguments.seq_len,
        arguments.custom_import,
        [],
        arguments.max_document_mb,
        arguments.train_on,
        arguments.chat_template,
    )
    try:
        run_job(job, out, arguments.workers)
    except DataError as error:
        text = str(error)
        for key, flag in FLAG_OF_KEY.items():
            text = text.replace(key, flag)
        raise DataError(text) from error


if __name__ == "__main__":
    run_command(main)
