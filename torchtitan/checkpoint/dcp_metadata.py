"""Reads the `.metadata` of torch.distributed.checkpoint without unpickling it.

The file is a pickle, and a pickle is a program: even one that can name only harmless classes can set their attributes
(BUILD). So nothing here unpickles. `parse` knows the few opcodes that torch's metadata consist of. It looks a name in
the file up in a literal table; the only objects that it makes are torch's dataclasses of metadata, by their own
constructors and from values whose types have been checked. It refuses everything else.
"""

import gc
import struct
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from pickletools import opcodes
from struct import unpack_from
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan.checkpoint.manifest import METADATA, FileRecord, read_file
from torchtitan.compat.distributed import MemoryFormatEncoding, StorageInfo
from torchtitan.errors import CheckpointError, printable

PROTOCOLS = (4, 5)  # Python's defaults since 3.8 and since 3.14; they write metadata alike
MOST_DIMS = 64
MOST_CELLS = 2**26  # that the edges of chunks divide a tensor into; 1,000 ranks in each of two dimensions have 2**20
MOST_MARKS = 16  # containers that are open at once; torch needs 6
MOST_STACKED = 4096  # values of an open container; pickle fills a dictionary with 1,000 pairs at a time
LONGEST_INT = 8  # bytes

_NONE = type(None)
_MEMORY_FORMATS = {
    MemoryFormatEncoding.TORCH_CONTIGUOUS_FORMAT: torch.contiguous_format,
    MemoryFormatEncoding.TORCH_CHANNELS_LAST: torch.channels_last,
    MemoryFormatEncoding.TORCH_PRESERVE_FORMAT: torch.preserve_format,
}
# Class -> field -> the types that it may have. Other fields must be None, as what torch may add one day and not use.
_FIELDS: Final[dict[type, dict[str, tuple[type, ...]]]] = {
    Metadata: {"state_dict_metadata": (dict,), "storage_data": (dict,)},
    MetadataIndex: {"fqn": (str,), "offset": (torch.Size, _NONE), "index": (int, _NONE)},
    TensorStorageMetadata: {"properties": (TensorProperties,), "size": (torch.Size,), "chunks": (list,)},
    ChunkStorageMetadata: {"offsets": (torch.Size,), "sizes": (torch.Size,)},
    StorageInfo: {"relative_path": (str,), "offset": (int,), "length": (int,)},
    StorageMeta: {},
    BytesStorageMetadata: {},
}
# How nested dictionaries were flattened, and where the file was written: loading needs none of it, so it is dropped.
_DROPPED = {
    Metadata: {"planner_data", "storage_meta", "version"},
    StorageMeta: {"checkpoint_id", "save_id", "load_id", "modules"},
}
_OPTIONAL = {MetadataIndex: {"offset", "index"}}  # torch leaves them out if they are None
_PROPERTIES = (torch.dtype, torch.layout, bool, MemoryFormatEncoding, bool)  # a tuple instead of fields


class _Class(NamedTuple):
    """Stands on the stack for a class that the file names. An instance is made by `_build`."""

    cls: type


class _Function(NamedTuple):
    """Stands on the stack for a function that the file names; `call` is ours, and gets the arguments."""

    call: Callable[[tuple[Any, ...]], Any]


def _size(arguments: tuple[Any, ...]) -> torch.Size:
    sizes = arguments[0] if len(arguments) == 1 else None
    if type(sizes) is not tuple or len(sizes) > MOST_DIMS or not _INTS.issuperset(map(type, sizes)):
        raise ValueError("it has a size that is none")
    if sizes and min(sizes) < 0:
        raise ValueError("it has a negative size")
    return torch.Size(sizes)


def _row(table: dict[Any, Any], at: int = 0) -> _Function:
    return _Function(lambda arguments: table[arguments[at]])


_OF_METADATA = "torch.distributed.checkpoint.metadata"
_PATH = _Function(lambda parts: None)
# All that a file may name, by module and name.
_NAMES: Final[dict[tuple[str, str], Any]] = {
    **{(_OF_METADATA, cls.__name__): _Class(cls) for cls in (*_FIELDS, TensorProperties) if cls is not StorageInfo},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Class(StorageInfo),
    (_OF_METADATA, "_MEM_FORMAT_ENCODING"): _row({encoding.value: encoding for encoding in _MEMORY_FORMATS}),
    # Python 3.11.0 to 3.11.3 write a member of an enum as getattr(enum, name).
    ("builtins", "getattr"): _row({encoding.name: encoding for encoding in _MEMORY_FORMATS}, at=1),
    **{("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
    ("torch", "Size"): _Function(_size),
    ("torch.serialization", "_get_layout"): _row(
        {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}
    ),
    ("pathlib", "PosixPath"): _PATH,  # where the folder was written
    ("pathlib._local", "PosixPath"): _PATH,
}
_OPCODES = {ord(opcode.code): f"the opcode {opcode.name}" for opcode in opcodes}  # for messages
_INTS = {int}
_KEYS = {str, MetadataIndex}
_IN_LISTS = {str, ChunkStorageMetadata}
_IN_TUPLES = {str, int, bool, _NONE, torch.dtype, torch.layout, MemoryFormatEncoding, _Function}


def _build(made: Any, state: Any, known: set[tuple[Any, ...]]) -> None:
    """Fills a new instance with what the file says about it, by its class's own constructor. `known` collects what has
    been checked: a class with its fields and their types."""
    cls = type(made)
    if cls is TensorProperties:
        if type(state) is not tuple or tuple(map(type, state)) != _PROPERTIES:
            raise ValueError("it has a TensorProperties whose fields have other types")
        dtype, layout, requires_grad, encoding, pin_memory = state
        TensorProperties.__init__(made, dtype, layout, requires_grad, _MEMORY_FORMATS[encoding], pin_memory)
        return
    fields = _FIELDS.get(cls)
    if fields is None or type(state) is not dict or vars(made):
        raise ValueError(f"it changes a {cls.__name__}, which tensor metadata do not need")
    what = (cls, *state, *map(type, state.values()))
    if what not in known:
        for name, value in state.items():
            if type(value) not in fields.get(name, (_NONE,)) and name not in _DROPPED.get(cls, ()):
                raise ValueError(f"it has a {cls.__name__} whose {name!s:.40} is a {type(value).__name__}")
        if missing := sorted(fields.keys() - state - _OPTIONAL.get(cls, set())):
            raise ValueError(f"it has a {cls.__name__} without {missing[0]}")
        known.add(what)
    cls.__init__(made, **{name: state[name] for name in fields if name in state})


def parse(data: bytes) -> Metadata:
    """The metadata in the pickle `data`, without `planner_data` and `storage_meta`. Raises a ValueError, with the
    reason, if it contains anything but tensor metadata as torch writes them, or is damaged."""
    collects = gc.isenabled()
    gc.disable()  # it would look through all that is read so far, again and again, and take half of the time
    try:
        metadata, end = _parse(data)
    except (IndexError, struct.error):
        raise ValueError("it is cut off or damaged") from None
    except (KeyError, TypeError, AttributeError):  # what is in no table, or cannot be looked up
        raise ValueError("it contains something that tensor metadata do not") from None
    finally:
        if collects:
            gc.enable()
    if type(metadata) is not Metadata or end != len(data):
        raise ValueError("it is not one torch.distributed.checkpoint.metadata.Metadata")
    return metadata


def _parse(data: bytes) -> tuple[Any, int]:
    """The object that the pickle ends with, and the number of bytes until there. In the order of how often torch's
    metadata have an opcode: they have about 70 for each tensor."""
    if data[0] != 0x80 or data[1] not in PROTOCOLS:
        raise ValueError("it is no pickle of protocol 4 or 5")
    at, end = 2, len(data)
    stack: list[Any] = []
    marked: list[list[Any]] = []  # the stacks below each open mark
    memo: list[Any] = []
    known: set[tuple[Any, ...]] = set()
    empty = 0  # instances whose fields are still to come
    while True:
        op = data[at]
        at += 1
        if len(stack) > MOST_STACKED:
            raise ValueError("it has more values in one place than tensor metadata have")
        if op == 0x94:  # MEMOIZE
            memo.append(stack[-1])
        elif op == 0x6A:  # LONG_BINGET
            stack.append(memo[unpack_from("<I", data, at)[0]])
            at += 4
        elif op == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif op == 0x29:  # EMPTY_TUPLE
            stack.append(())
        elif op == 0x81:  # NEWOBJ
            arguments, made = stack.pop(), stack.pop()
            if type(made) is not _Class or arguments != ():
                raise ValueError("it creates something that tensor metadata do not contain")
            stack.append(object.__new__(made.cls))
            empty += made.cls is not BytesStorageMetadata
        elif op == 0x8C or op == 0x58:  # SHORT_BINUNICODE, BINUNICODE
            length, at = (data[at], at + 1) if op == 0x8C else (unpack_from("<I", data, at)[0], at + 4)
            if at + length > end:
                raise IndexError
            stack.append(str(data[at : at + length], "utf-8", "backslashreplace"))
            at += length
        elif op == 0x28:  # MARK
            if len(marked) == MOST_MARKS:
                raise ValueError("it is nested more deeply than tensor metadata are")
            marked.append(stack)
            stack = []
        elif op == 0x62:  # BUILD
            state = stack.pop()
            _build(stack[-1], state, known)
            empty -= 1
        elif op == 0x7D:  # EMPTY_DICT
            stack.append({})
        elif op == 0x75 or op == 0x73:  # SETITEMS, SETITEM
            if op == 0x75:
                items, stack = stack, marked.pop()
            else:
                items, stack = stack[-2:], stack[:-2]
            filled = stack[-1]
            keys = items[::2]
            if type(filled) is not dict or len(items) % 2 or not set(map(type, keys)) <= _KEYS:
                raise ValueError("it has a dictionary that tensor metadata do not contain")
            filled.update(zip(keys, items[1::2], strict=True))
        elif op == 0x85 or op == 0x86 or op == 0x87 or op == 0x74:  # TUPLE1, TUPLE2, TUPLE3, TUPLE
            if op == 0x74:
                items, stack = stack, marked.pop()
            else:
                count = op - 0x84
                items = stack[-count:]
                del stack[-count:]
            for item in items:  # at most a tuple of numbers: hashing one that is nested deeply would crash Python
                if type(item) not in _IN_TUPLES and not (type(item) is tuple and _INTS.issuperset(map(type, item))):
                    raise ValueError("it has a tuple that tensor metadata do not contain")
            stack.append(tuple(items))
        elif op == 0x4B:  # BININT1
            stack.append(data[at])
            at += 1
        elif op == 0x4D:  # BININT2
            stack.append(unpack_from("<H", data, at)[0])
            at += 2
        elif op == 0x52:  # REDUCE
            arguments, function = stack.pop(), stack.pop()
            if type(function) is not _Function or type(arguments) is not tuple:
                raise ValueError("it calls something that tensor metadata do not need")
            stack.append(function.call(arguments))
        elif op == 0x4A:  # BININT
            stack.append(unpack_from("<i", data, at)[0])
            at += 4
        elif op == 0x4E:  # NONE
            stack.append(None)
        elif op == 0x88 or op == 0x89:  # NEWTRUE, NEWFALSE
            stack.append(op == 0x88)
        elif op == 0x5D:  # EMPTY_LIST
            stack.append([])
        elif op == 0x61 or op == 0x65:  # APPEND, APPENDS
            if op == 0x65:
                items, stack = stack, marked.pop()
            else:
                items = [stack.pop()]
            filled = stack[-1]
            if type(filled) is not list or not set(map(type, items)) <= _IN_LISTS:
                raise ValueError("it has a list that tensor metadata do not contain")
            filled.extend(items)
        elif op == 0x8A:  # LONG1
            length = data[at]
            if length > LONGEST_INT or at + 1 + length > end:
                raise ValueError("it has a number that is too large")
            stack.append(int.from_bytes(data[at + 1 : at + 1 + length], "little", signed=True))
            at += 1 + length
        elif op == 0x93:  # STACK_GLOBAL
            name, module = stack.pop(), stack.pop()
            if type(module) is not str or type(name) is not str or (module, name) not in _NAMES:
                raise ValueError(f"it refers to {module!s:.80}.{name!s:.80}, which tensor metadata do not need")
            stack.append(_NAMES[module, name])
        elif op == 0x95:  # FRAME
            if unpack_from("<Q", data, at)[0] > end - at - 8:
                raise IndexError
            at += 8
        elif op == 0x2E:  # STOP
            if len(stack) != 1 or marked or empty:
                raise ValueError("it is damaged")
            return stack[0], at
        else:
            raise ValueError(f"it has {_OPCODES.get(op, f'the byte {op}')}, which tensor metadata do not need")


def read_metadata(checkpoint: Path, files: Mapping[str, FileRecord], of_others: bool = False) -> Metadata:
    """The names, shapes and locations of a checkpoint's tensors, which must be in its `files`, and no larger. Executes
    nothing that is in it. If another program wrote it (`of_others`), it may have entries that are not tensors, and be a
    link. Raises a CheckpointError, with only the reason, if it is invalid or points elsewhere."""
    try:
        metadata = parse(read_file(checkpoint / METADATA, of_others))
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        stored = 0
        for name, tensor in tensors.items():
            if of_others and type(tensor) is BytesStorageMetadata:
                continue
            if type(name) is not str or type(tensor) is not TensorStorageMetadata:
                raise TypeError(f"{name} is not a tensor")
            chunks = {MetadataIndex(name, chunk.offsets) for chunk in tensor.chunks if prod(chunk.sizes) > 0}
            if not _is_complete(tensor) or not places.keys() >= chunks:
                raise ValueError(f"{name} is incomplete")
            stored += prod(tensor.size) * tensor.properties.dtype.itemsize
        for index, place in places.items():
            if type(index) is not MetadataIndex or type(place) is not StorageInfo:
                raise TypeError("its list of places is damaged")
            if place.relative_path not in files:
                raise ValueError(f"it points to {place.relative_path!r:.200}, which is not a file of the checkpoint")
            if not 0 <= place.offset <= place.offset + place.length <= files[place.relative_path].size:
                raise ValueError(f"{place.relative_path} is shorter than the tensors in it: it was cut off")
        if stored > (held := sum(record.size for record in files.values())):
            raise ValueError(f"its tensors have {stored:,} bytes, but its files {held:,}")
        return metadata
    except OSError as error:
        raise CheckpointError(f"{METADATA} cannot be read ({error.strerror})") from None
    except Exception as error:  # names in it may be anything, so that a sentence about them may have many lines
        raise CheckpointError(f"{METADATA} is refused: {' '.join(printable(str(error)).split()):.300}") from None


def _is_complete(tensor: TensorStorageMetadata) -> bool:
    """Whether the chunks cover the tensor: anything missing would silently keep its initial value."""
    chunks = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in tensor.chunks if prod(chunk.sizes) > 0}
    fit = all(
        len(offsets) == len(sizes) == len(tensor.size)
        and all(offset + size <= full for offset, size, full in zip(offsets, sizes, tensor.size, strict=True))
        for offsets, sizes in chunks.items()
    )
    covered = sum(prod(sizes) for sizes in chunks.values()) == prod(tensor.size)
    return fit and covered and not _overlap(chunks)


def _overlap(chunks: Mapping[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Whether two of the chunks, sizes by offsets, have an element in common. Their edges divide the tensor into cells,
    each of which is taken once; so many cells that no layout of ranks has them count as an overlap."""
    places: list[dict[int, int]] = []  # for each dimension, an edge's place among all edges
    for dim in range(len(next(iter(chunks), ()))):
        edges = {offsets[dim] for offsets in chunks} | {o[dim] + sizes[dim] for o, sizes in chunks.items()}
        places.append({edge: place for place, edge in enumerate(sorted(edges))})
    divided = [dim for dim, edges in enumerate(places) if len(edges) > 2]
    shape = [len(places[dim]) - 1 for dim in divided]
    if prod(shape) > MOST_CELLS:
        return True
    taken = np.zeros(shape, bool)
    for offsets, sizes in chunks.items():
        cells = tuple(slice(places[d][offsets[d]], places[d][offsets[d] + sizes[d]]) for d in divided)
        if taken[cells].any():
            return True
        taken[cells] = True
    return False
