"""Token shards: files of token ids, made once, by `tools.tokenize` or other programs; memory-mapped, not copied."""

import csv
import gzip
import hashlib
import io
import json
import math
import resource
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from torchtitan.data.blocks import AHEAD, StoreFile
from torchtitan.data.hashes import HASHES, REMAKE, Check, by_sha256
from torchtitan.data.paths import METADATA, OF_DOLMA
from torchtitan.data.records import CHUNK, Offsets, RecordFiles, Records, record_offsets
from torchtitan.data.sources import Document, Stamp, Tokens, Vocabulary, digest, sample_of, without_marks
from torchtitan.errors import DataError, UserError, parsing, reason_of
from torchtitan.files import is_remote, regular_file
from torchtitan.logging import Waiting, logger
from torchtitan.strict_json import natural

PROGRESS = ".progress"  # `python -m torchtitan.tools.tokenize` writes it when begun, and `METADATA` when complete.

MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, entries of the list of documents
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic -> version and dtype, for GPT-2 and for Llama 3
LLM_C_HEADER = 1024  # bytes: 256 int32
NUMPY_MAGIC = b"\x93NUMPY"

PIECE_TOKENS = 1 << 20  # tokens of a document where nothing separates documents: its first is predicted from nothing
LOOKED_AT = 1 << 16  # bytes of a file, to tell what it is
MAPPED_AT_ONCE = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4, 64)  # files; each takes a descriptor
LONGEST_ROW = 1 << 20  # bytes of a row of dolma's: two places, an id, a path and a number
WORTH_MAPPING = 1 << 20  # bytes; a document that is kept, as for best fit, should not keep its file open
CHECKED_AT_ONCE = 1 << 26  # bytes of indices; of more, training begins while they are checked
SHARD_LOOK_SECONDS = 1.0  # whether a file has changed


class Mapped(NamedTuple):
    """A file, mapped as long as it is in use."""

    path: Path
    stamp: Stamp
    inode: int = 0  # tells apart files of the same path, size and time, so that no other file's mapping is used

    @classmethod
    def of(cls, path: Path) -> "Mapped":
        regular_file(path)
        return cls(path, Stamp.of(path), 0 if is_remote(path) else path.stat().st_ino)

    def integers(self, dtype: DTypeLike, start: int, stop: int) -> Tokens:
        """Bytes `start` to `stop`, as an array of them."""
        if start >= stop:
            return np.empty(0, dtype)
        tokens = np.frombuffer(content_of(self)[start:stop], dtype)
        return tokens.copy() if stop - start < WORTH_MAPPING else tokens

    def numbers(self, format: str, start: int) -> tuple[int, ...]:
        """A few numbers in a format of `struct`, which is faster."""
        return struct.unpack(format, content_of(self)[start : start + struct.calcsize(format)])


@lru_cache(MAPPED_AT_ONCE)
def content_of(file: Mapped) -> Any:
    """The content of a file: slices of it are buffers."""
    if is_remote(file.path):
        return StoreFile(file.path, file.stamp)
    return np.memmap(file.path, np.uint8, "r").view(np.ndarray) if file.path.stat().st_size else b""


class Shard(NamedTuple):
    """A file of tokens."""

    file: Mapped
    dtype: np.dtype[Any]  # a token's type
    header: int = 0  # bytes before the first token
    sidecar: Mapped | None = None  # the index of its documents, or dolma's rows; None: a separator is between them
    documents: int = 0  # their number, by the index
    bounds: Callable[[int], tuple[int, int]] | None = None  # bytes of a document; ValueError if the index is damaged
    check: Check | None = None  # checks the whole index

    @property
    def size(self) -> int:
        """The number of tokens."""
        return (self.file.stamp.size - self.header) // self.dtype.itemsize

    def tokens(self, first: int, last: int) -> Tokens:
        start = self.header + first * self.dtype.itemsize
        return self.file.integers(self.dtype, start, start + (last - first) * self.dtype.itemsize)

    def last(self) -> Tokens:
        return self.tokens(self.size - 1, self.size)


class ShardFormat(NamedTuple):
    """A format of shards."""

    name: str  # for messages
    made: Callable[[Path, bytes], bool]  # whether a file, with its first bytes, is of this format
    # Also takes the first bytes; raises a ValueError with the reason if the shard is damaged.
    open: Callable[[Mapped, bytes, Vocabulary], Shard]
    # Whether a separator begins documents, unless its place in the first file says otherwise; None: an index has them.
    separator_begins: bool | None = None


def beside(path: Path, suffix: str) -> Path:
    return path.parent / (path.name + suffix) if path.suffix == ".ds" else path.with_suffix(suffix)


def open_megatron(file: Mapped, head: bytes, vocabulary: Vocabulary) -> Shard:
    index = Mapped.of(beside(file.path, ".idx"))
    header = bytes(index.integers("u1", 0, MEGATRON_HEADER.size))
    if not header.startswith(MEGATRON_MAGIC) or len(header) < MEGATRON_HEADER.size:
        raise ValueError(f"{index.path.name} is not an index of Megatron-LM")
    _, version, code, sequences, entries = MEGATRON_HEADER.unpack(header)
    if version != 1 or code not in MEGATRON_DTYPES:
        raise ValueError(f"{index.path.name} has version {version} and dtype {code}, not version 1 and dtype 1 to 8")
    if MEGATRON_HEADER.size + 12 * sequences + 8 * entries > index.stamp.size:
        raise ValueError(f"{index.path.name} is too small for the {sequences:,} sequences that it announces")
    dtype = np.dtype(MEGATRON_DTYPES[code])
    pointers = MEGATRON_HEADER.size + 4 * sequences
    documents = pointers + 8 * sequences
    if sequences:
        [length], [pointer] = index.numbers("<i", pointers - 4), index.numbers("<q", documents - 8)
        end = pointer + length * dtype.itemsize
        if end > file.stamp.size:
            raise ValueError(f"{index.path.name} lists tokens beyond its end, {file.stamp.size:,} bytes")
        if end < file.stamp.size:
            raise ValueError(f"{index.path.name} ends at byte {end:,} of {file.stamp.size:,}; it is of a shorter file")
    ends = [*index.numbers("<q", documents), *index.numbers("<q", documents + 8 * entries - 8)] if entries else [0, 0]
    if ends != [0, sequences]:
        raise ValueError(f"the documents in {index.path.name} are sequences {ends}, not all {sequences:,}")
    bounds = partial(megatron_bounds, index, dtype.itemsize, sequences)
    check = Check("Megatron-LM's index", partial(megatron_fault, file, index, dtype.itemsize, sequences, entries))
    return Shard(file, dtype, 0, index, max(entries - 1, 0), bounds, check)


def megatron_fault(file: Mapped, index: Mapped, item: int, sequences: int, entries: int) -> str:
    """What is wrong with an index, all of which is read: sequences follow each other, and documents are divided among
    them in order. A sentence, or ""."""

    def pieces(start: int, dtype: str, count: int) -> Iterator[Tokens]:
        with index.stamp.open(index.path, AHEAD) as opened:
            opened.seek(start)
            for first in range(0, count, CHUNK):
                size = min(CHUNK, count - first) * np.dtype(dtype).itemsize
                yield np.frombuffer(opened.read(size), dtype)

    begin, end = MEGATRON_HEADER.size, 0
    lengths, pointers = pieces(begin, "<i4", sequences), pieces(begin + 4 * sequences, "<i8", sequences)
    for part, (sizes, starts) in enumerate(zip(lengths, pointers, strict=True)):
        ends = end + np.cumsum(sizes, dtype=np.int64) * item
        expected = np.concatenate([[end], ends[:-1]])
        if len(wrong := np.flatnonzero((starts != expected) | (sizes < 0))):
            place = int(wrong[0])
            return (
                f"{file.path}: {index.path.name} says that its sequence {part * CHUNK + place + 1:,} has "
                f"{sizes[place]:,} tokens from byte {starts[place]:,} on, but the one before ends at byte "
                f"{expected[place]:,}; {REMAKE}."
            )
        end = int(ends[-1])
    if end != file.stamp.size:
        return f"{file.path}: {index.path.name} lists {end:,} of its {file.stamp.size:,} bytes; {REMAKE}."
    before = 0
    for documents in pieces(begin + 12 * sequences, "<i8", entries):
        if (np.diff(documents, prepend=before) < 0).any():
            return f"{file.path}: the documents in {index.path.name} are not in order; {REMAKE}."
        before = int(documents[-1])
    return ""


def megatron_bounds(index: Mapped, item: int, sequences: int, document: int) -> tuple[int, int]:
    """A document consists of sequences, which follow each other."""
    lengths = MEGATRON_HEADER.size
    pointers = lengths + 4 * sequences
    first, last = index.numbers("<2q", pointers + 8 * sequences + 8 * document)
    if not 0 <= first <= last <= sequences:
        raise ValueError(f"{index.path.name} lists sequences {first} to {last} of {sequences}")
    if first == last:
        return 0, 0
    [start] = index.numbers("<q", pointers + 8 * first)
    [size] = index.numbers("<i", lengths + 4 * first)
    if last - first > 1:
        sizes = index.integers("<i4", lengths + 4 * first, lengths + 4 * last)
        [pointer], size = index.numbers("<q", pointers + 8 * last - 8), int(sizes.sum(dtype="i8"))
        if sizes.min() < 0 or pointer + int(sizes[-1]) * item != start + size * item:
            raise ValueError(f"its sequences in {index.path.name} do not follow each other")
    return start, start + size * item


def open_datatrove(file: Mapped, head: bytes, vocabulary: Vocabulary) -> Shard:
    index, metadata = Mapped.of(beside(file.path, ".index")), beside(file.path, ".metadata")
    documents = index.stamp.size // 8
    last = index.numbers("<Q", 8 * documents - 8)[0] if documents else 0
    # The name of the tokenizer|bytes of a token; older versions lack the latter.
    noted = metadata.read_text().split("\n", 1)[0].rpartition("|")[1:] if metadata.exists() else ("", "")
    by_size = file.stamp.size // last if last else 2
    item = int(noted[1]) if noted[0] and noted[1].isdecimal() else by_size
    if item not in (2, 4) or last * item != file.stamp.size or index.stamp.size % 8:
        raise ValueError(f"{index.path.name} ends at token {last:,}, but it has {file.stamp.size:,} bytes")

    def bounds(document: int) -> tuple[int, int]:
        start, stop = index.numbers("<2Q", 8 * document - 8) if document else (0, *index.numbers("<Q", 0))
        return start * item, stop * item

    return Shard(file, np.dtype(f"<u{item}"), 0, index, documents, bounds)


def open_llm_c(file: Mapped, head: bytes, vocabulary: Vocabulary) -> Shard:
    magic, its_version, count = struct.unpack_from("<3i", head.ljust(12, b"\0"))
    version, dtype = LLM_C[magic]
    if its_version != version:
        raise ValueError(f"its header has version {its_version}, not {version}")
    return whole(Shard(file, np.dtype(dtype), LLM_C_HEADER), count)


def whole(shard: Shard, count: int) -> Shard:
    """The shard, whose header announces `count` tokens."""
    size = shard.file.stamp.size
    if shard.header + count * shard.dtype.itemsize != size:
        raise ValueError(f"its header announces {count:,} tokens, but it has {size:,} bytes")
    return shard


def open_numpy(file: Mapped, head: bytes, vocabulary: Vocabulary) -> Shard:
    opened = io.BytesIO(head)
    version = np.lib.format.read_magic(opened)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, columns_first, dtype = read_header(opened)
    if columns_first and len(shape) > 1:
        raise ValueError("its array is in Fortran's order")
    return whole(Shard(file, dtype, opened.tell()), math.prod(shape))


def open_raw(file: Mapped, head: bytes, vocabulary: Vocabulary) -> Shard:
    """The ids of a wrong dtype are not of the vocabulary: of two tokens in uint16, the second is the high half."""
    size = file.stamp.size
    if vocabulary.dtype is not None:
        dtype = np.dtype(vocabulary.dtype).newbyteorder("<")
        ids = np.frombuffer(head[: len(head) // (2 * dtype.itemsize) * 2 * dtype.itemsize], dtype)
        if ids.any() and not ids[1::2].any() and len(ids) > 8:
            raise DataError(
                f"{file.path}: as {vocabulary.dtype} every second token is 0, so its tokens are wider than "
                "training.token_dtype says; unset it, and the content tells."
            )
        return Shard(file, dtype)
    for dtype in (np.dtype("<u8"), np.dtype("<u4"), np.dtype("<u2")):
        ids = np.frombuffer(head[: len(head) // dtype.itemsize * dtype.itemsize], dtype)
        if size % dtype.itemsize == 0 and holds(dtype, vocabulary) and ids.any() and ids.max() < vocabulary.size:
            return Shard(file, dtype)
    if size == 0:
        return Shard(file, np.dtype("<u2"))
    raise DataError(
        f"{file.path} is no token shard of a known format, and its first bytes are no ids below {vocabulary.size:,} in "
        "uint64, uint32 or uint16; remove it or name other files by a pattern, or set training.token_dtype, or "
        "model.tokenizer_path to the tokenizer that made it."
    )


SHARD_FORMATS = (
    ShardFormat("Megatron-LM", lambda path, _: path.suffix == ".bin" and beside(path, ".idx").exists(), open_megatron),
    ShardFormat("datatrove", lambda path, _: path.suffix == ".ds" and beside(path, ".index").exists(), open_datatrove),
    ShardFormat("llm.c", lambda _, head: int.from_bytes(head[:4], "little") in LLM_C, open_llm_c, True),
    ShardFormat("numpy", lambda _, head: head.startswith(NUMPY_MAGIC), open_numpy, False),
    ShardFormat("raw", lambda _, head: True, open_raw, False),
)


def holds(dtype: np.dtype[Any], vocabulary: Vocabulary) -> bool:
    """Whether a dtype has an id for every token, or is what the user says."""
    return bool(np.iinfo(dtype).max >= vocabulary.size - 1) or dtype.name == vocabulary.dtype


class TokenFiles(RecordFiles):
    """Documents of token ids in shards of one format, which `path` names in messages. Raises a DataError if they are
    damaged, of several formats, made by another tokenizer, or not separated."""

    def __init__(self, path: str, root: Path, files: Sequence[str], vocabulary: Vocabulary) -> None:
        hashes, conversations = check_metadata(path, root, files, vocabulary)
        self.chat = vocabulary.chat if conversations else None
        self.unmarked = vocabulary.chat is not None and not conversations
        every = Waiting.over(files, f"{path}: opening its token shards", "files")
        opened = [(name, *open_shard(root / name, vocabulary)) for name in every]
        opened = [(name, shard, format) for name, shard, format in opened if shard.sidecar or shard.size]
        if len(formats := {format.name: name for name, _, format in opened}) > 1:
            raise DataError(
                f"{path} holds token shards of several formats ({', '.join(f'{k}: {v}' for k, v in formats.items())}); "
                "name the files of one by a pattern, or put the missing .idx or .index beside its shard."
            )
        self.shards = [shard for _, shard, _ in opened]
        super().__init__(root, [name for name, _, _ in opened], [shard.file.stamp for shard in self.shards])
        self.rule: list[Any] = []  # what divides the tokens into documents, if no index does
        self.offsets: list[Offsets] = []
        counts = [shard.documents for shard in self.shards]
        if opened and (begins := opened[0][2].separator_begins) is not None:
            self.offsets = self.separated(path, begins, vocabulary.separators)
            counts = [len(offsets) - 1 for offsets in self.offsets]
        self.ends = np.cumsum(counts)
        if not sum(counts):
            raise DataError(f"{path} has no documents.")
        self.looked = [0.0] * len(counts)
        checks = {file: by_sha256(file, sha256) for file, sha256 in hashes.items()}
        indices = {s.sidecar: s.check for s in self.shards if s.sidecar and s.check and s.sidecar.path not in checks}
        if sum(index.stamp.size for index in indices) > CHECKED_AT_ONCE:
            checks |= {index.path: check for index, check in indices.items()}
        elif fault := next(filter(None, (check.fault() for check in indices.values())), ""):
            raise DataError(fault)
        self.checked = list(checks)
        HASHES.add(checks)

    def separated(self, path: str, begins: bool, choices: Sequence[int]) -> list[Offsets]:
        """For each shard, its documents' byte offsets, and the end of the last. A document in two files is two."""
        layout = [[shard.dtype.str, shard.header] for shard in self.shards]
        sidecars = {number: shard.sidecar for number, shard in enumerate(self.shards) if shard.sidecar}
        if not choices and not sidecars:
            self.rule = [None, PIECE_TOKENS, layout]
            return [even_offsets(shard) for shard in self.shards]
        first, last = self.shards[0].tokens(0, 1), self.shards[0].last()
        separator = next((id for id in choices if id in first), choices[0] if choices else None)
        begins = separator in first or (begins and separator not in last)
        rule: list[Any] = [separator, begins, layout]
        search = partial(document_offsets, self.shards, separator, begins)
        uncut = sidecars if choices else range(len(self.shards))
        versions = [[number, it.stamp, sample_of(it.path)] for number, it in sidecars.items()]
        offsets = record_offsets(Records(self, "documents", search, uncut, [*rule, *([versions] if versions else [])]))
        # Where a sidecar says what separators say, the data are those of a run that was begun without it.
        others = [number for number in sidecars if not self.as_separated(number, offsets[number], separator, begins)]
        rule += [[number, hashlib.sha256(offsets[number].tobytes()).hexdigest()] for number in others]
        several = bool(sidecars) or any(len(of_file) > 2 for of_file in offsets)
        if not several and len(choices) > 1:  # perhaps it begins files, and another one ends documents
            with suppress(DataError):
                return self.separated(path, begins, [id for id in choices if id != separator])
        self.rule = rule
        if not several and separator not in first and not any(separator in shard.last() for shard in self.shards):
            raise DataError(
                f"{path}: no token {separator} separates documents; set training.token_separator to the id that does, "
                "or to -1 if none does; if the shards are Megatron-LM's or datatrove's, put their .idx or .index "
                "beside them."
            )
        return offsets

    def as_separated(self, number: int, offsets: Offsets, separator: int | None, begins: bool) -> bool:
        """Whether the documents in the first bytes of a shard begin, or end, with the separator."""
        shard = self.shards[number]
        inside = offsets[1:-1][: int(offsets[1:-1].searchsorted(LOOKED_AT))]
        places = (inside - shard.header) // shard.dtype.itemsize - (not begins)
        return bool((shard.tokens(0, int(places.max(initial=-1)) + 1)[places] == separator).all())

    @property
    def fingerprint(self) -> str:
        return digest([self.named_sizes, self.rule, len(self)])

    def __getitem__(self, index: int) -> Document:
        number, document = self.locate(index)
        shard = self.shards[number]
        try:
            for file in filter(None, (shard.file, shard.sidecar)):
                HASHES.note_read(file.path)
            self.check_unchanged(number)
            start, stop = shard.bounds(document) if shard.bounds else self.offsets[number][document : document + 2]
            if not (0 <= start <= stop <= shard.file.stamp.size and (stop - start) % shard.dtype.itemsize == 0):
                raise ValueError(f"its index lists a document at bytes {start:,} to {stop:,}")
            tokens = shard.file.integers(shard.dtype, start, stop)
            tokens = self.chat.fitted(tokens) if self.chat is not None else tokens
            tokens = without_marks(tokens) if self.unmarked else tokens
            return Document("", f"{self.files[number]}:{document + 1}", tokens=tokens)
        except OSError as error:
            raise DataError(f"{shard.file.path} cannot be read ({error.strerror}).") from error
        except UserError:
            raise
        except Exception as error:
            raise DataError(f"{shard.file.path}, document {document + 1}: {reason_of(error)}; {REMAKE}.") from error

    def check_unchanged(self, number: int) -> None:
        if (now := time.monotonic()) - self.looked[number] >= SHARD_LOOK_SECONDS:
            self.looked[number] = now
            if fault := HASHES.fault(*self.checked):
                raise DataError(fault)
            for file in filter(None, (self.shards[number].file, self.shards[number].sidecar)):
                file.stamp.check(file.path)


def open_shard(path: Path, vocabulary: Vocabulary) -> tuple[Shard, ShardFormat]:
    file = Mapped.of(path)
    head = bytes(file.integers("u1", 0, min(LOOKED_AT, file.stamp.size)))
    format = next(format for format in SHARD_FORMATS if format.made(path, head))
    name = format.name
    with parsing(lambda why: DataError(f"{path} cannot be read as a token shard ({name}): {why}; {REMAKE}.")):
        shard = format.open(file, head, vocabulary)
        if shard.dtype.kind not in "iu":
            raise ValueError(f"it holds {shard.dtype.name}, which are no token ids")
        if (file.stamp.size - shard.header) % shard.dtype.itemsize:
            raise ValueError(f"its {file.stamp.size:,} bytes are no whole number of {shard.dtype.name}")
    if not holds(shard.dtype, vocabulary):
        raise DataError(
            f"{path} holds {shard.dtype.name}, too small for the {vocabulary.size:,} tokens of the run's tokenizer; "
            "set model.tokenizer_path to the tokenizer that made it, or, if that is the same, training.token_dtype to "
            f"{shard.dtype.name}."
        )
    if shard.size and path.suffix == ".npy" and (sidecar := beside(path, OF_DOLMA)).exists():
        shard = shard._replace(sidecar=Mapped.of(sidecar))
    return shard, format


def even_offsets(shard: Shard) -> Offsets:
    """(documents + 1,) int64: where documents of `PIECE_TOKENS` tokens begin in a shard's bytes, and its end."""
    end = shard.file.stamp.size
    return np.append(np.arange(shard.header, end, PIECE_TOKENS * shard.dtype.itemsize, dtype=np.int64), end)


def document_offsets(
    shards: Sequence[Shard], separator: int | None, begins: bool, number: int, start: int, stop: int
) -> Offsets:
    """Where documents begin, or end, as their shard's sidecar says, or else separators; a file with a sidecar is not
    divided."""
    if shards[number].sidecar is not None:
        return noted_offsets(shards[number])
    if separator is None:
        return even_offsets(shards[number])
    return separated_offsets(shards, separator, begins, number, start, stop)


def noted_offsets(shard: Shard) -> Offsets:
    """(documents + 1,) int64: where documents begin in a shard's bytes, and its end, by the rows that dolma and
    OLMo-core write: the first token, the token after the last, and perhaps where the document is from."""
    assert shard.sidecar is not None
    path, name, ends = shard.sidecar.path, shard.file.path.name, array("q", [0])

    def refused(why: str) -> DataError:
        return DataError(
            f"{path}: {why}; make it again, or remove it, so that separators divide {name} into documents."
        )

    try:
        with parsing(refused), shard.sidecar.stamp.open(path, AHEAD) as file, gzip.open(file) as unpacked:
            lines = (line.decode("latin-1") for line in iter(partial(unpacked.readline, LONGEST_ROW), b""))
            for count, row in enumerate(csv.reader(lines), 1):
                if len(row) < 2 or not (row[0].isdecimal() and row[1].isdecimal()):
                    raise ValueError(
                        f"row {count:,} does not begin with the places of a document's first and last token"
                    )
                start, end = int(row[0]), int(row[1])
                if start != ends[-1] or not start < end <= shard.size:
                    raise ValueError(
                        f"row {count:,} says that a document is from token {start:,} to {end:,}, but the one before "
                        f"ends at {ends[-1]:,} of {shard.size:,}"
                    )
                ends.append(end)
        if ends[-1] != shard.size:
            raise refused(f"its {len(ends) - 1:,} rows end at token {ends[-1]:,} of {shard.size:,}")
    except gzip.BadGzipFile:
        raise refused("it is no gzip file") from None
    return shard.header + np.array(ends, np.int64) * shard.dtype.itemsize


def separated_offsets(
    shards: Sequence[Shard], separator: int, begins: bool, number: int, start: int, stop: int
) -> Offsets:
    """Where documents begin, for the tokens whose first byte is one of `start` to `stop`; or end, for the last."""
    shard = shards[number]
    shard.file.stamp.check(shard.file.path)
    header, item = shard.header, shard.dtype.itemsize
    token, end = (-(-max(edge - header, 0) // item) for edge in (start, stop))
    offsets = [np.full(1 if start == 0 else 0, header, np.int64)]
    while token < end:
        last = min(end, token + CHUNK // item)
        places = np.flatnonzero(shard.tokens(token, last) == separator)
        places = places[places + token > 0] if begins else places + 1
        offsets.append(header + (places + token) * item)
        token = last
    return np.concatenate(offsets)


def named_ends(ends: tuple[int | None, int | None]) -> str:
    return " and ".join(f"{'no ' if id is None else ''}{name}" for name, id in zip(("BOS", "EOS"), ends, strict=True))


def damaged_metadata(path: Path, reason: str) -> DataError:
    return DataError(f"{path} is damaged ({reason}); restore or remove it.")


def check_metadata(path: str, root: Path, files: Sequence[str], vocabulary: Vocabulary) -> tuple[dict[Path, str], bool]:
    """Compares shards with the notes of torchtitan.tools.tokenize beside them. Returns the SHA-256 of files, as noted,
    and whether they hold conversations."""
    hashes: dict[Path, str] = {}
    conversations = False
    shards = {(root / name).with_suffix("") for name in files}
    for folder in dict.fromkeys((root / name).parent for name in files):
        if not (folder / METADATA).exists():
            if not is_remote(folder) and (folder / PROGRESS).exists():
                raise DataError(
                    f"{folder} is not complete: `python -m torchtitan.tools.tokenize` is writing it, or was stopped; "
                    "run the same command again, and train on the folder that it makes."
                )
            continue
        with parsing(partial(damaged_metadata, folder / METADATA)):
            noted = json.loads(regular_file(folder / METADATA).read_bytes())
            if not isinstance(noted, dict) or "tokenizer_ids" not in noted:
                continue  # the file is something else's
            of_tokenizer = str(noted["tokenizer_ids"])
            listed = {
                folder / name: (natural(file["size"]), str(file.get("sha256") or ""))
                for name, file in noted["files"].items()
            }
        if of_tokenizer != vocabulary.fingerprint:
            raise DataError(
                f"{path}: another tokenizer than the run's made these tokens, as {METADATA} beside them says (its ids "
                f"have the fingerprint {of_tokenizer}, the run's {vocabulary.fingerprint}); set model.tokenizer_path."
            )
        if train_on := noted.get("train_on"):
            conversations, ours = True, vocabulary.chat and vocabulary.chat.train_on
            if train_on != ours:
                raise DataError(
                    f"{path} holds conversations of which other tokens count (--train-on {train_on}); set "
                    f"training.train_on = {train_on}, which is {ours or 'not set'}, or make the shards again."
                )
        ends = (noted.get("bos_id"), noted.get("eos_id"))
        if "bos_id" in noted and ends != vocabulary.ends:
            logger.warning(
                f"{path}: its documents have {named_ends(ends)}, and this run's text would have "
                f"{named_ends(vocabulary.ends)}; they are trained on as they are, so set training.add_bos and "
                "training.add_eos alike for generation"
            )
        if more := [name for name in files if (root / name).parent == folder and (root / name) not in listed]:
            raise DataError(
                f"{path}: {METADATA} does not list {', '.join(more[:5])} beside it, perhaps of an earlier copy; remove "
                "them, or move them to another folder."
            )
        for file, (size, sha256) in listed.items():
            if str(root) == path or file.with_suffix("") in shards:
                now = file.stat().st_size if file.exists() else None
                if now != size:
                    state = "is missing" if now is None else f"has {now:,} bytes"
                    raise DataError(f"{file} {state}, but {METADATA} beside it says {size:,} bytes; {REMAKE}.")
                if sha256:
                    hashes[file] = sha256
    return hashes, conversations
