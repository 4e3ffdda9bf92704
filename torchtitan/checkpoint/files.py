"""Files of torch.distributed.checkpoint: written with hashes, and read without executing anything in them."""

import pickle
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, EnumMeta
from io import BytesIO
from itertools import chain
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from torchtitan.checkpoint.manifest import (
    METADATA,
    MOST_THREADS,
    FileRecord,
    HashingFile,
    balanced,
    read_file,
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


class Writer(dcp.FileSystemWriter):
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


class Reader(dcp.FileSystemReader):
    """torch's reader, for metadata that are already read (`read_metadata`). It loads tensors weights-only."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__("")
        self.fs, self.path, self.metadata = HashingFileSystem(), path, metadata

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self.metadata


class TensorsOnlyPlanner(dcp.DefaultLoadPlanner):
    """torch's planner would unpickle any entry that is not a tensor; this one refuses it."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor")


# Everything that tensor metadata consist of. The only functions are constructors of plain data, and the only attributes
# of torch are dtypes.
ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",  # the place of an entry that is not a tensor
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},  # maps a name to one of torch's layouts
    "torch": {"Size"},
}


class MetadataUnpickler(pickle.Unpickler):
    """Knows only the classes of torch's metadata, so a pickle cannot call anything else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if name == "PosixPath" and module in ("pathlib", "pathlib._local"):  # where the folder was written
            return PurePosixPath
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which tensor metadata do not need")


def _member(of: object, name: str) -> Enum:
    """Replaces `getattr`, which Python 3.11.0 to 3.11.3 use to pickle a member of an enum."""
    if not isinstance(of, EnumMeta):
        raise pickle.UnpicklingError("it refers to builtins.getattr, which tensor metadata do not need")
    member: Enum = of[name]
    return member


def read_metadata(checkpoint: Path, files: Mapping[str, FileRecord], of_others: bool = False) -> Metadata:
    """The names, shapes and locations of a checkpoint's tensors, which must be in its `files`, and no larger. Executes
    nothing that is in it. If another program wrote it (`of_others`), it may have entries that are not tensors, and be a
    link. Raises a CheckpointError, with only the reason, if it is invalid or points elsewhere."""
    try:
        metadata: Metadata = MetadataUnpickler(BytesIO(read_file(checkpoint / METADATA, of_others))).load()
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        stored = 0
        for name, tensor in tensors.items():
            if of_others and type(tensor) is BytesStorageMetadata:
                continue
            if type(tensor) is not TensorStorageMetadata:
                raise TypeError(f"{name} is not a tensor")
            if type(name) is not str or not isinstance(tensor.properties.dtype, torch.dtype):
                raise TypeError(f"{name} has no dtype")
            chunks = {MetadataIndex(name, chunk.offsets) for chunk in tensor.chunks if prod(chunk.sizes) > 0}
            if not _is_complete(tensor) or not places.keys() >= chunks:
                raise ValueError(f"{name} is incomplete")
            stored += prod(tensor.size) * tensor.properties.dtype.itemsize
        for index, place in places.items():
            if not (type(index.fqn) is str and isinstance(index.offset, torch.Size | None)):
                raise TypeError("its list of places is damaged")
            if place.relative_path not in files:
                raise ValueError(f"it points to {place.relative_path!r}, which is not a file of the checkpoint")
            if not 0 <= place.offset <= place.offset + place.length <= files[place.relative_path].size:
                raise ValueError(f"{place.relative_path} is shorter than the tensors in it: it was cut off")
        if stored > (held := sum(record.size for record in files.values())):
            raise ValueError(f"its tensors have {stored:,} bytes, but its files {held:,}")
        return metadata
    except OSError as error:
        raise CheckpointError(f"{METADATA} cannot be read ({error.strerror})") from None
    except Exception as error:  # a malicious pickle can fail in any way
        raise CheckpointError(f"{METADATA} is refused: {error}") from None


def _is_complete(tensor: TensorStorageMetadata) -> bool:
    """Whether the chunks cover the tensor: anything missing would silently keep its initial value."""
    chunks = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in tensor.chunks if prod(chunk.sizes) > 0}
    return sum(prod(sizes) for sizes in chunks.values()) == prod(tensor.size) and all(
        0 <= offset <= offset + size <= full
        for offsets, sizes in chunks.items()
        for offset, size, full in zip(offsets, sizes, tensor.size, strict=True)
    )


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
        # `read_metadata` refuses everything but tensors.
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
