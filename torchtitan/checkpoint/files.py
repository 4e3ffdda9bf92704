"""Files of torch.distributed.checkpoint: written with hashes, and read without executing anything in them."""

from collections import ChainMap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from torchtitan.checkpoint.manifest import (
    MOST_THREADS,
    FileRecord,
    HashingFile,
    balanced,
    threads_of_rank,
)
from torchtitan.errors import CheckpointError
from torchtitan.files import is_remote, open_bytes

Files = dict[str, FileRecord]

WORTH_A_FILE = 256 << 20  # bytes; a rank writes smaller checkpoints into one file

INTERCHANGEABLE = {torch.float32, torch.bfloat16, torch.float16}  # a weight saved in one loads into another


class HashingFileSystem(FileSystem):
    """torch's file system, here or in an object store, plus a record of every file written. The folder appears when it
    is complete (`store.py`), so no file needs another name first."""

    def __init__(self) -> None:
        self.written: Files = {}

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix.removesuffix(".tmp")

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode == "rb":
            with open_bytes(path) if is_remote(path) else path.open(mode) as read:
                yield read
            return
        with HashingFile(path) as file:
            yield file
        self.written[path.name] = file.record()

    def mkdir(self, path: Any) -> None:
        if not is_remote(path):
            super().mkdir(path)

    def exists(self, path: object) -> bool:
        return False  # `begin` has made room

    def rename(self, path: object, new_path: object) -> None:
        pass


def _divided(plan: Any, count: int) -> list[Any]:
    """A rank's plan as up to `count` plans of about equal size, each of which becomes a file: one thread hashes about a
    gigabyte per second. A small plan stays one."""
    tensors = [item.tensor_data for item in plan.items]
    sizes = [prod(of.chunk.sizes) * of.properties.dtype.itemsize if of else 0 for of in tensors]
    count = min(count, sum(sizes) // WORTH_A_FILE)
    if count < 2:
        return [plan]
    prefix = plan.storage_data.prefix
    names = [prefix, *(f"{prefix}{number}_" for number in range(1, count))]
    return [
        replace(plan, items=[plan.items[at] for at in places], storage_data=replace(plan.storage_data, prefix=name))
        for name, places in zip(names, balanced(sizes, count), strict=True)
    ]


class CheckpointWriter(dcp.FileSystemWriter):
    """torch's writer, plus file hashes, and errors that name their cause. Rank 0 calls `begin` before any file is
    written, and `finished` with all ranks' files once all are on disk; if it raises, the save fails on every rank."""

    def __init__(self, path: Path, finished: Callable[[Files], None], begin: Callable[[], None] = lambda: None) -> None:
        # The threads of `write_data` have no current GPU, so they copy each tensor before they read it: torch's copies
        # ahead would be waited for on the streams of GPU 0.
        super().__init__("", sync_files=not is_remote(path), per_thread_copy_ahead=0)
        self.finished, self.begin = finished, begin
        self.fs: HashingFileSystem = HashingFileSystem()
        self.path = path
        self.threads = MOST_THREADS if is_remote(path) else threads_of_rank()  # a store answers slowly

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.begin()
        return super().prepare_global_plan(plans)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # torch's contains the path on this machine

    def write_data(  # type: ignore[override]  # `finish` takes the results apart
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[tuple[list[WriteResult], Files]]:
        plans = _divided(plan, self.threads)
        try:
            with ThreadPoolExecutor(len(plans)) as threads:
                written = list(threads.map(lambda plan: self._write_file(plan, planner), plans))
        except RuntimeError as error:  # torch.save hides a full disk's OSError behind an error of its own
            cause = error.__context__
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise (cause or error) from None
        future: torch.futures.Future[tuple[list[WriteResult], Files]] = torch.futures.Future()
        future.set_result((list(chain.from_iterable(written)), self.fs.written))
        return future

    def _write_file(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # besides SHA-256 it would take as long as everything else
        try:
            return super().write_data(plan, planner).value()
        finally:
            torch.serialization.set_crc32_options(before)

    def finish(self, metadata: Metadata, results: list[tuple[list[WriteResult], Files]]) -> None:  # type: ignore[override]
        super().finish(metadata, [of_rank for of_rank, _ in results])
        self.finished(dict(ChainMap(self.fs.written, *(written for _, written in results))))


class CheckpointReader(dcp.FileSystemReader):
    """torch's reader, for metadata that are already read (`dcp_metadata`). It loads tensors weights-only."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__("")
        self.fs, self.path, self.metadata = HashingFileSystem(), path, metadata

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self.metadata


class TensorsOnlyPlanner(dcp.DefaultLoadPlanner):
    """torch's planner would unpickle any entry that is not a tensor; this one refuses it."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor")


def cause_of(error: BaseException) -> BaseException:
    """The first rank's error in a CheckpointException; all others are their own."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


def first_line(error: BaseException) -> str:
    """The cause in one line. A CheckpointException holds one error per rank."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {first_line(cause)}"
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def differences(metadata: Metadata, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Which of `tensors` are missing from a checkpoint or differ in shape or dtype; a few words each."""
    faults = []
    for name, tensor in tensors.items():
        # `dcp_metadata` refuses everything but tensors.
        saved: TensorStorageMetadata | None = metadata.state_dict_metadata.get(name)  # type: ignore[assignment]
        if saved is None:
            faults.append(f"{name} is not in the checkpoint")
            continue
        shape, dtype = tuple(saved.size), saved.properties.dtype
        if shape != tuple(tensor.shape):
            faults.append(f"{name} has shape {shape} in the checkpoint and {tuple(tensor.shape)} in this run")
        elif dtype != tensor.dtype and not {dtype, tensor.dtype} <= INTERCHANGEABLE:
            faults.append(f"{name} is {dtype} in the checkpoint and {tensor.dtype} in this run")
    return faults
