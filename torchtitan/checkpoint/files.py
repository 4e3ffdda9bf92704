"""torch.distributed.checkpoint's files: written with hashes, and read without running what is in them."""

import pickle
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from torchtitan.checkpoint.manifest import METADATA, FileRecord, HashingFile, read_file
from torchtitan.errors import CheckpointError

Files = dict[str, FileRecord]

INTERCHANGEABLE = {torch.float32, torch.bfloat16, torch.float16}  # a weight saved in one is loaded in another


class HashingFileSystem(FileSystem):
    """torch's, but for a record of every file that is written."""

    def __init__(self) -> None:
        self.written: Files = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with HashingFile(Path(path)) as file:
            yield file
        self.written[Path(path).name] = file.record()

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


@dataclass(frozen=True)
class WriteResults:
    """What one rank has written: torch's own list, and the files."""

    results: Any
    files: Files


class Writer(dcp.FileSystemWriter):
    """torch's writer, with hashes of the files, and errors that tell the cause.

    Args:
        path: the folder to write.
        finished: called on rank 0 with all ranks' files when all are on disk. What it raises fails the save on every
            rank.
    """

    def __init__(self, path: Path, finished: Callable[[Files], None]) -> None:
        super().__init__(path)
        self.finished = finished
        self.fs = self.hashing = HashingFileSystem()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # torch's has the path on this machine

    def write_data(self, plan: Any, planner: Any) -> Any:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # on top of SHA-256 it would take as long as all the rest
        try:
            results = super().write_data(plan, planner).value()
        except RuntimeError as error:  # torch.save hides the error of a full disk behind one of its own
            cause = error.__context__
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise (cause or error) from None
        finally:
            torch.serialization.set_crc32_options(before)
        future: Any = torch.futures.Future()
        future.set_result(WriteResults(results, self.hashing.written))
        return future

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, [written.results for written in results])
        files = {name: record for written in results for name, record in written.files.items()}
        self.finished({**files, METADATA: self.hashing.written[METADATA]})


class Reader(dcp.FileSystemReader):
    """torch's reader, with metadata that have been read (`read_metadata`). Tensors it reads by weights-only loading."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


class TensorsOnlyPlanner(dcp.DefaultLoadPlanner):
    """torch's planner, which would unpickle whatever an entry that is no tensor holds."""

    def load_bytes(self, read_item: Any, value: BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor")


# All that the metadata of tensors are made of. No function but constructors of plain data is among them, and of torch
# no other attributes than dtypes.
ALLOWED = {
    **dict.fromkeys(
        (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ),
        "torch.distributed.checkpoint.metadata",
    ),
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "_get_layout": "torch.serialization",  # a name to one of torch's layouts
    "Size": "torch",
}


class MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of torch's metadata and nothing else, so that a pickle cannot call anything."""

    def find_class(self, module: str, name: str) -> Any:
        if ALLOWED.get(name) == module or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which metadata of tensors do not need")


def read_metadata(checkpoint: Path, files: Collection[str]) -> Metadata:
    """The names, shapes and places of the tensors of a checkpoint. Runs nothing that is in it.

    Args:
        files: of the checkpoint; the tensors must be in these.

    Raises:
        CheckpointError: it is not such metadata, or points elsewhere. The message is the reason alone.
    """
    try:
        metadata = MetadataUnpickler(BytesIO(read_file(checkpoint / METADATA))).load()
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        for name, tensor in tensors.items():
            if type(tensor) is not TensorStorageMetadata:
                raise TypeError(f"{name} is not a tensor")
            if not isinstance(tensor.properties.dtype, torch.dtype):
                raise TypeError(f"{name} has no dtype")
            if not _is_complete(tensor):
                raise ValueError(f"{name} is there in part only")
        for place in places.values():
            if place.relative_path not in files:
                raise ValueError(f"it points to {place.relative_path!r}, which is not a file of the checkpoint")
        return metadata
    except OSError as error:
        raise CheckpointError(f"{METADATA} cannot be read ({error.strerror})") from None
    except Exception as error:  # a pickle that was made to harm can fail in any way
        raise CheckpointError(f"{METADATA} is refused: {error}") from None


def _is_complete(tensor: TensorStorageMetadata) -> bool:
    """Whether the chunks make up the tensor: what none of them holds would stay as it is, without a word."""
    chunks = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in tensor.chunks if prod(chunk.sizes) > 0}
    return sum(prod(sizes) for sizes in chunks.values()) == prod(tensor.size) and all(
        0 <= offset <= offset + size <= full
        for offsets, sizes in chunks.items()
        for offset, size, full in zip(offsets, sizes, tensor.size, strict=True)
    )


def first_line(error: BaseException) -> str:
    """The cause in a line. A CheckpointException holds one error for each rank."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {first_line(cause)}"
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def differences(metadata: Metadata, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Which of `tensors` a checkpoint does not hold, or holds in another shape or kind; a few words for each."""
    found = []
    for name, tensor in tensors.items():
        saved: Any = metadata.state_dict_metadata.get(name)
        if saved is None:
            found.append(f"{name} is not in it")
        elif tuple(saved.size) != tuple(tensor.shape):
            found.append(f"{name} is {tuple(saved.size)} in it and {tuple(tensor.shape)} here")
        elif saved.properties.dtype != tensor.dtype and not {saved.properties.dtype, tensor.dtype} <= INTERCHANGEABLE:
            found.append(f"{name} is {saved.properties.dtype} in it and {tensor.dtype} here")
    return found
