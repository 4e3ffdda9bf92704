"""Metadata of checkpoints are pickles; nothing in them is executed, changed or looked up, whatever they say."""

import pickle
import random
import re
import tarfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from enum import Enum
from io import BytesIO
from pathlib import Path, PosixPath, PurePosixPath
from pickletools import opcodes
from struct import pack
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan.checkpoint.dcp_metadata import _is_complete, parse, read_metadata
from torchtitan.checkpoint.manifest import FileRecord
from torchtitan.errors import CheckpointError

ARCHIVE = Path(__file__).parents[1] / "helpers" / "checkpoint_of_torchtitan.tar.xz"
FILES = {"__0_0.distcp": FileRecord(1 << 40, "")}


def metadata(tensors: int = 2, chunks: int = 2) -> Metadata:
    """As torch writes them, with numbers that take one byte to eight."""
    entries: dict[str, Any] = {"train_state.step": BytesStorageMetadata()}
    places = {MetadataIndex("train_state.step"): _StorageInfo("__0_0.distcp", 0, 700)}
    for number in range(tensors):
        name = f"layers.{number}.weight" if number else "long." * 60
        pieces = [ChunkStorageMetadata(torch.Size((at * 300, 0)), torch.Size((300, 70))) for at in range(chunks)]
        about = TensorProperties(dtype=[torch.float32, torch.bfloat16, torch.float8_e4m3fn][number % 3])
        entries[name] = TensorStorageMetadata(about, torch.Size((300 * chunks, 70)), pieces)
        for at, piece in enumerate(pieces):
            index = MetadataIndex(name, piece.offsets, at)
            places[index] = _StorageInfo("__0_0.distcp", number << 34, 90_000 + at)
    where = StorageMeta(PosixPath("/home/x/step-1"), "id", None)
    return Metadata(entries, {"layers.1.weight": ("layers", 1, "weight")}, places, where, "1.0.0")


class OfPython311(pickle._Pickler):
    """3.11.0 to 3.11.3, as in Debian 12."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def of_python_311(value: Any) -> bytes:
    file = BytesIO()
    OfPython311(file).dump(value)
    return file.getvalue()


def of_python_313(value: Any) -> bytes:
    """Its pathlib is a package."""
    pickled = pickle.dumps(value).replace(b"\x8c\x07pathlib", b"\x8c\x0epathlib._local")
    return pickled[:2] + pickled[11:] if pickled[2:3] == b"\x95" else pickled  # the frame has become longer


WAYS: dict[str, Callable[[Any], bytes]] = {
    "C": pickle.dumps,
    "Python": pickle._dumps,  # type: ignore[attr-defined]
    "protocol 5": lambda value: pickle.dumps(value, 5),
    "Python 3.11.3": of_python_311,
    "Python 3.13": of_python_313,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tensors, chunks", [(0, 1), (1, 1), (2, 3), (1100, 1), (1, 1100)])
def test_what_torch_writes_is_read_as_pickle_reads_it(tensors: int, chunks: int, way: str) -> None:
    expected = metadata(tensors, chunks)
    read = parse(WAYS[way](expected))
    assert read.state_dict_metadata == expected.state_dict_metadata
    assert read.storage_data == expected.storage_data
    assert [index.index for index in read.storage_data] == [index.index for index in expected.storage_data]
    assert read.planner_data is None and read.storage_meta is None


def test_the_metadata_of_torchtitan_are_read() -> None:
    with tarfile.open(ARCHIVE) as archive:
        file = archive.extractfile("checkpoint/step-3/.metadata")
        assert file is not None
        pickled = file.read()
    read, expected = parse(pickled), pickle.loads(pickled)
    assert read.state_dict_metadata == expected.state_dict_metadata and read.storage_data == expected.storage_data


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def within(value: bytes) -> bytes:
    """Metadata of torch with the opcodes `value` in the place of `planner_data`. They may not memoize."""
    about = metadata()
    about.planner_data = "PLACEHOLDER"
    before, after = pickle.dumps(about).split(text("PLACEHOLDER"))
    return before[:2] + before[11:] + value + after  # without the frame, whose length is no longer right


OURS = "torch.distributed.checkpoint.metadata"
PATH = named("pathlib", "PosixPath")
CHUNK, INDEX = named(OURS, "ChunkStorageMetadata"), named(OURS, "MetadataIndex")
SIZE, LAYOUT = named("torch", "Size"), named("torch.serialization", "_get_layout")
ENCODING = named(OURS, "_MEM_FORMAT_ENCODING")
STEM = b"}" + text("stem") + text("evil") + b"s"
ORDINARY = pickle.dumps(metadata())
HOSTILE: dict[str, bytes] = {
    "BUILD: slots of a path's class": within(PATH + b"N" + STEM + b"\x86b"),
    "BUILD: dict of a path's class": within(PATH + STEM + b"b"),
    "BUILD: dict and slots of a class": within(CHUNK + b"}" + STEM + b"\x86b"),
    "BUILD: slots of a class": within(named(OURS, "Metadata") + b"N" + STEM + b"\x86b"),
    "BUILD: slots of a function": within(LAYOUT + b"N}" + text("cache") + b"}s\x86b"),
    "BUILD: slots of an enum": within(ENCODING + b"N" + STEM + b"\x86b"),
    "BUILD: slots of getattr": within(named("builtins", "getattr") + b"N" + STEM + b"\x86b"),
    "BUILD: slots of a dtype": within(named("torch", "float32") + b"N" + STEM + b"\x86b"),
    "BUILD: slots of an instance": within(CHUNK + b")\x81N" + STEM + b"\x86b"),
    "BUILD: an attribute that a class lacks": within(CHUNK + b")\x81" + STEM + b"b"),
    "BUILD: __class__ of an instance": within(CHUNK + b")\x81}" + text("__class__") + INDEX + b"sb"),
    "BUILD: a number": within(b"K\x01" + STEM + b"b"),
    "BUILD: twice": within(INDEX + b")\x81" + (b"}" + text("fqn") + text("x") + b"sb") * 2),
    "BUILD: wrong types": within(CHUNK + b")\x81}(" + text("offsets") + b"K\x01" + text("sizes") + b"K\x01ub"),
    "BUILD: properties of wrong types": within(named(OURS, "TensorProperties") + b")\x81(NNNNNtb"),
    "no BUILD": within(CHUNK + b")\x81"),
    "no BUILD of a key": within(b"}" + INDEX + b")\x81Ns"),
    "BUILD: a field is missing": within(CHUNK + b")\x81}" + text("sizes") + SIZE + b"K\x01\x85\x85Rsb"),
    "INST": within(b"(ios\ngetcwd\n"),
    "INST of an allowed class": within(f"(i{OURS}\nStorageMeta\n".encode()),
    "OBJ": within(b"(" + named(OURS, "StorageMeta") + b"o"),
    "NEWOBJ of a function": within(LAYOUT + b")\x81"),
    "NEWOBJ with arguments": within(CHUNK + b"K\x01K\x02\x86\x81"),
    "NEWOBJ_EX": within(CHUNK + b")}\x92"),
    "GLOBAL": within(b"cos\ngetcwd\n"),
    "GLOBAL of an allowed class": within(f"c{OURS}\nMetadata\n".encode()),
    "STACK_GLOBAL of os": within(named("os", "system") + text("true") + b"\x85R"),
    "STACK_GLOBAL of a module's other names": within(named(OURS, "os")),
    "STACK_GLOBAL of a name with dots": within(named(OURS, "Metadata.__init__.__globals__")),
    "STACK_GLOBAL of torch's other names": within(named("torch", "load")),
    "STACK_GLOBAL of numbers": within(b"K\x01K\x02\x93"),
    "STACK_GLOBAL of a list": within(b"]]\x93"),
    "getattr of a class": within(named("builtins", "getattr") + CHUNK + text("__init__") + b"\x86R"),
    "getattr of another member": within(named("builtins", "getattr") + ENCODING + text("__class__") + b"\x86R"),
    "REDUCE of a class": within(CHUNK + b"K\x01K\x02\x86R"),
    "REDUCE of a text": within(text("os.system") + text("true") + b"\x85R"),
    "REDUCE of Size with text": within(SIZE + text("12") + b"\x85R"),
    "REDUCE of Size with a list": within(SIZE + b"]\x85R"),
    "REDUCE of Size with nothing": within(SIZE + b")R"),
    "REDUCE of Size with a negative number": within(SIZE + b"J\xff\xff\xff\xff\x85\x85R"),
    "REDUCE of Size with 65 dimensions": within(SIZE + b"(" + b"K\x01" * 65 + b"t\x85R"),
    "REDUCE of a layout that is none": within(LAYOUT + text("torch.load") + b"\x85R"),
    "REDUCE of an enum with a list": within(ENCODING + b"]\x85R"),
    "persistent id": within(b"P1\n"),
    "binary persistent id": within(b"K\x01Q"),
    "extension registry": within(b"\x82\x01"),
    "extension registry, four bytes": within(b"\x84\x01\0\0\0"),
    "memo: unknown": within(b"h\xff"),
    "memo: huge": within(b"j\xff\xff\xff\xff"),
    "memo: put at a huge place": within(b"Kxr\xff\xff\xff\xff"),
    "memo: put in text": within(b"Kxp99999999999\n"),
    "memo: overwrite a class": within(named("os", "system") + b"q\x02"),
    "POP": within(named("torch", "Size") + b"0N"),
    "DUP": within(b"N2\x86"),
    "BYTEARRAY8 of a petabyte": within(b"\x96" + pack("<Q", 1 << 50)),
    "BINUNICODE8 of a petabyte": within(b"\x8d" + pack("<Q", 1 << 50)),
    "BINUNICODE of four gigabytes": within(b"X\xff\xff\xff\xff"),
    "FRAME of an exabyte": within(b"\x95" + pack("<Q", 1 << 60)),
    "LONG1 of 200 bytes": within(b"\x8a\xc8" + b"\x7f" * 200),
    "LONG4 of a gigabyte": within(b"\x8b" + pack("<i", 1 << 30)),
    "INT of 5,000 digits": within(b"I" + b"9" * 5000 + b"\n"),
    "out-of-band buffer": within(b"\x97"),
    "200,000 marks": within(b"(" * 200_000),
    "200,000 lists": within(b"]" * 200_000 + b"a" * 199_999),
    "a million dictionaries": within(b"}" * 1_000_000),
    "200,000 tuples": within(b")" + b"\x85" * 200_000),
    "a key of 200,000 tuples": within(b"})" + b"\x85" * 200_000 + b"Ns"),
    "a name of 200,000 tuples": within(text("torch") + b")" + b"\x85" * 200_000 + b"\x93"),
    "a number for a key": within(b"}K\x01Ns"),
    "an odd dictionary": within(b"}(" + text("x") + b"u"),
    "SETITEMS of a class": within(CHUNK + text("x") + text("y") + b"s"),
    "APPEND to a class": within(CHUNK + text("x") + b"a"),
    "mark within a tuple": within(b"t"),
    "empty": b"",
    "no opcode": b"\x80\x04\xff.",
    "nothing but STOP": b"\x80\x04.",
    "protocol 2": pickle.dumps(metadata(), 2),
    "protocol 200": b"\x80\xc8" + ORDINARY[2:],
    "no protocol": ORDINARY[2:],
    "another object": pickle.dumps({"a": 1}),
    "the class itself": b"\x80\x04" + named(OURS, "Metadata") + b".",
    "a second pickle": ORDINARY + ORDINARY,
    "zip": b"PK\x03\x04" + ORDINARY,
    "half": ORDINARY[: len(ORDINARY) // 2],
    "without its last byte": ORDINARY[:-1],
}


def allowed_things() -> list[Any]:
    """What could be changed."""
    things = (PosixPath, PurePosixPath, Metadata, ChunkStorageMetadata, MetadataIndex, TensorProperties, StorageMeta)
    about: list[Any] = [dict(vars(thing)) for thing in things]
    return [*about, dict(vars(torch.serialization._get_layout)), Path("/a/b.c").stem, torch.Size]


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_metadata_are_one_sentence(case: str, tmp_path: Path) -> None:
    before = allowed_things()
    (tmp_path / ".metadata").write_bytes(HOSTILE[case])
    with pytest.raises(CheckpointError, match=r"^\.metadata is refused: it [^\n]{10,300}$"):
        read_metadata(tmp_path, FILES, of_others=True)
    assert allowed_things() == before


def test_the_same_without_the_hostile_part_is_read(tmp_path: Path) -> None:
    for harmless in (b"N", text("x"), b"}" + text("x") + b"K\x01\x85s", SIZE + b"K\x01\x85\x85R"):
        (tmp_path / ".metadata").write_bytes(within(harmless))
        assert len(read_metadata(tmp_path, FILES, of_others=True).state_dict_metadata) == 3


def test_the_attack_is_one() -> None:
    """What `pickle` does with BUILD: it sets attributes of a class that it was only allowed to name."""
    taken = pickle.loads(b"\x80\x04" + named(__name__, "Victim") + b"N" + STEM + b"\x86b.")
    assert taken is Victim and Victim.stem == "evil"


class Victim:
    stem = "good"


UNWRITTEN = re.findall(
    r"\w+",
    """INT LONG LONG4 STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 NEXT_BUFFER
    READONLY_BUFFER UNICODE BINUNICODE8 FLOAT BINFLOAT LIST DICT EMPTY_SET ADDITEMS FROZENSET POP DUP POP_MARK GET PUT
    BINPUT LONG_BINPUT EXT1 EXT2 EXT4 GLOBAL INST OBJ NEWOBJ_EX PERSID BINPERSID PROTO""",
)
WRITTEN = re.findall(
    r"\w+",
    """FRAME MEMOIZE BINGET LONG_BINGET SHORT_BINUNICODE BINUNICODE NONE NEWTRUE NEWFALSE BININT1 BININT2 BININT LONG1
    EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE MARK STOP EMPTY_DICT SETITEM SETITEMS EMPTY_LIST APPEND APPENDS STACK_GLOBAL
    NEWOBJ REDUCE BUILD""",
)


@pytest.mark.parametrize("name", UNWRITTEN)
def test_opcodes_that_torch_does_not_write_are_refused(name: str) -> None:
    code = {opcode.name: opcode.code for opcode in opcodes}
    assert {*code} == {*UNWRITTEN, *WRITTEN}
    with pytest.raises(ValueError, match=rf"it has the opcode {name}, which tensor metadata do not need"):
        parse(within(code[name].encode("latin1") + b"\0" * 16))


def mutated(data: bytes, draw: random.Random) -> bytes:
    """With a few bytes replaced, removed, inserted or repeated."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at, length = draw.randrange(len(changed)), draw.choice((1, 1, 2, 8))
        some = draw.choice((draw.randbytes(length), bytes(changed[at : at + length]) * 2, b"", b"b", b"R", b"\x93"))
        changed[at : at + draw.choice((0, length))] = some
    return bytes(changed)


@pytest.mark.parametrize("count", [300, pytest.param(2_000, marks=pytest.mark.full)])
def test_mutated_metadata_are_read_or_refused(count: int, tmp_path: Path) -> None:
    """Nothing else escapes, and what is read consists of the classes that it should."""
    draw, before, read = random.Random(count), allowed_things(), 0
    for _ in range(count):
        (tmp_path / ".metadata").write_bytes(mutated(draw.choice((ORDINARY, within(STEM))), draw))
        try:
            result = read_metadata(tmp_path, FILES, of_others=True)
        except CheckpointError as error:
            assert "\n" not in str(error) and len(str(error)) < 400
            continue
        read += 1
        assert {*map(type, result.state_dict_metadata.values())} <= {TensorStorageMetadata, BytesStorageMetadata}
        assert deepcopy(result) == result
    assert 0 < read < count and allowed_things() == before


@pytest.mark.full
def test_chunks_that_overlap_are_found_whatever_their_number() -> None:
    """In time that grows with their number: a small file must not stop a start for hours."""
    size = 20_000

    def of(chunks: Sequence[tuple[Sequence[int], Sequence[int]]], *size: int) -> TensorStorageMetadata:
        pieces = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
        return TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(size), pieces)

    columns = [((0, place), (1, 1)) for place in range(size)]
    assert _is_complete(of(columns, 1, size))
    assert not _is_complete(of([*columns[:-2], ((0, 5), (1, 2))], 1, size))  # as many elements
    quarters = [((0, 0), (3, 4)), ((3, 0), (5, 4)), ((0, 4), (2, 4)), ((2, 4), (6, 4))]  # rows cut in two ways
    assert _is_complete(of(quarters, 8, 8))
    assert not _is_complete(of([*quarters[:3], ((1, 4), (6, 4))], 8, 8))
    assert _is_complete(of([((), ())], *())) and _is_complete(of([((0, 0, 0), (2, 3, 4))], 2, 3, 4))
    blocks = [((5 * place, 0), (5, 1)) for place in range(size)] + [((place, 1), (1, 1)) for place in range(5 * size)]
    assert _is_complete(of(blocks, 5 * size, 2))
