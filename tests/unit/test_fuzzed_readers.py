"""Damaged and hostile files: each reader of data and configuration gives something, or one sentence."""

import gzip
import json
import os
import random
import struct
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from data_helpers import TOKENIZER, write_jsonl, write_megatron, write_metadata
from tokenizer_files import tekken_file, tiktoken_file, vocabulary_files

from torchtitan.config import ConfigManager
from torchtitan.config.manager import SHIPPED_CONFIGS
from torchtitan.config.training import Training
from torchtitan.data import load_tokenizer, records
from torchtitan.data.datasets import documents_in, vocabulary_of
from torchtitan.data.hashes import HASHES
from torchtitan.data.paths import open_path
from torchtitan.data.tokenizer import SHIPPED as SENTENCEPIECE
from torchtitan.errors import UserError
from torchtitan.tools import tokenize

DOCUMENTS = [[5, number, 6, 2] for number in range(20)]
HUGE, DEEP = "9" * 5000, "[" * 200_000


def read_documents(path: Path) -> None:
    source = open_path(str(path), "text", vocabulary=vocabulary_of(TOKENIZER, Training()))
    assert len(list(islice(documents_in(source), 50))) > 0
    HASHES.wait()


def read_tokens(path: Path) -> None:
    read_documents(path.parent)


def read_configuration(path: Path) -> None:
    ConfigManager().parse_args([f"--job.config_file={path}"])


def read_tokenizer(path: Path) -> None:
    of_folder = path.name.endswith(("config.json", ".txt"))
    tokenizer = load_tokenizer(str(path.parent if of_folder else path))
    tokenizer.decode(tokenizer.encode("Ünïcode and 1,234 words"))


def arrow(folder: Path, kind: str) -> Path:
    import pyarrow as pa

    rows, path = pa.table({"text": [f"text {number}" for number in range(20)]}), folder / "a.arrow"
    with pa.OSFile(str(path), "wb") as file, getattr(pa.ipc, kind)(file, rows.schema) as writer:
        writer.write_table(rows)
    return path


def array(path: Path) -> Path:
    path.write_text(json.dumps([{"text": f"text {number}"} for number in range(20)]))
    return path


def vocabulary(folder: Path) -> Path:
    path = vocabulary_files(folder)
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def configuration(folder: Path) -> Path:
    (path := folder / "a.toml").write_bytes((SHIPPED_CONFIGS / "debug_model.toml").read_bytes())
    return path


def datatrove(folder: Path, name: str) -> Path:
    (folder / "a.ds").write_bytes(np.concatenate(DOCUMENTS).astype("<u2").tobytes())
    (folder / "a.ds.index").write_bytes(np.cumsum([*map(len, DOCUMENTS)]).astype("<u8").tobytes())
    (folder / "a.ds.metadata").write_text("gpt2|2\n80\n80 T")
    return folder / name


def llm_c(folder: Path) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 80
    (path := folder / "a.bin").write_bytes(header.tobytes() + np.concatenate(DOCUMENTS).astype("<u2").tobytes())
    return path


def npy(folder: Path) -> Path:
    np.save(path := folder / "a.npy", np.concatenate(DOCUMENTS).astype("<u2"))
    return path


def dolma(folder: Path) -> Path:
    """With rows that end documents elsewhere than separators do."""
    (folder / "a.npy").write_bytes(np.concatenate(DOCUMENTS).astype("<u2").tobytes())
    rows = "".join(f'{start},{start + 5},"id, {start}",a.jsonl.gz,{start}\r\n' for start in range(0, 80, 5))
    (path := folder / "a.csv.gz").write_bytes(gzip.compress(rows.encode()))
    return path


def read_unpacked(path: Path) -> None:
    """The file has the rows themselves."""
    path.write_bytes(gzip.compress(path.read_bytes(), 1))
    read_tokens(path)


def unpacked(path: Path) -> Path:
    path.write_bytes(gzip.decompress(path.read_bytes()))
    return path


def megatron(folder: Path, name: str = "a.idx") -> Path:
    write_megatron(folder / "a.bin", DOCUMENTS)
    if name == "metadata.json":
        write_metadata(folder)
    return folder / name


def tokenized(folder: Path, name: str) -> Path:
    """With what `torchtitan.tools.tokenize` notes: in a folder that is complete, or not."""
    megatron(folder, "metadata.json")
    about = json.loads((folder / "metadata.json").read_text())
    source = {"name": "a", "column": "text", "fingerprint": "0", "files": {"a": {"size": 1, "sha256": "0"}}}
    counts = dict.fromkeys(tokenize.COUNTS, 5)
    ids = {"tokenizer": "0", "vocab_size": 9, "bos_id": 1, "eos_id": 2, "sources": [source]}
    complete, files = {**about, **counts, **ids}, about["files"]
    lines = [ids, {**counts, "files": files, "next": [0, 1]}]
    (folder / "metadata.json").write_text(json.dumps(complete))
    (folder / ".progress").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / name


def read_progress(path: Path) -> None:
    with path.open("r+b") as file:
        tokenize.finished_shards(path.parent, file)


def byte_level(folder: Path, name: str = "tokenizer.json") -> Path:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["some words to train on"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "add_bos_token": false}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [0]}')
    return folder / name


def sentencepiece(folder: Path) -> Path:
    (path := folder / "tokenizer.model").write_bytes(SENTENCEPIECE.read_bytes())
    return path


def kept_index(folder: Path) -> Path:
    read_documents(write_jsonl(folder / "a.jsonl", range(20)))
    return next((folder.parent / "cache" / "torchtitan" / "records").iterdir())


def kept_hash(folder: Path) -> Path:
    megatron(folder, "metadata.json")
    HASHES.forget()
    read_tokens(folder / "a.bin")
    return next((folder.parent / "cache" / "torchtitan" / "verified").iterdir())


READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "TOML": (configuration, read_configuration),
    "JSONL": (lambda folder: write_jsonl(folder / "a.jsonl", range(20)), read_documents),
    "JSONL, gzip": (lambda folder: write_jsonl(folder / "a.jsonl.gz", range(20)), read_documents),
    "JSON": (lambda folder: array(folder / "a.json"), read_documents),
    "Arrow": (lambda folder: arrow(folder, "new_file"), read_documents),
    "Arrow, a stream": (lambda folder: arrow(folder, "new_stream"), read_documents),
    "npy": (npy, read_tokens),
    "dolma's rows, gzip": (dolma, read_tokens),
    "dolma's rows": (lambda folder: unpacked(dolma(folder)), read_unpacked),
    "Megatron-LM's index": (megatron, read_tokens),
    "metadata.json": (lambda folder: megatron(folder, "metadata.json"), read_tokens),
    "metadata.json, read by tokenize": (
        lambda folder: tokenized(folder, "metadata.json"),
        lambda path: tokenize.read_own_metadata(path.parent),
    ),
    "progress of tokenize": (lambda folder: tokenized(folder, ".progress"), read_progress),
    "datatrove's index": (lambda folder: datatrove(folder, "a.ds.index"), read_tokens),
    "datatrove's metadata": (lambda folder: datatrove(folder, "a.ds.metadata"), read_tokens),
    "llm.c's header": (llm_c, read_tokens),
    "tokenizer.json": (byte_level, read_tokenizer),
    "tokenizer_config.json": (lambda folder: byte_level(folder, "tokenizer_config.json"), read_tokenizer),
    "generation_config.json": (lambda folder: byte_level(folder, "generation_config.json"), read_tokenizer),
    "tekken.json": (lambda folder: tekken_file(folder / "tekken.json"), read_tokenizer),
    "vocab.json": (vocabulary, read_tokenizer),
    "merges.txt": (lambda folder: vocabulary(folder).with_name("merges.txt"), read_tokenizer),
    "a tiktoken file": (lambda folder: tiktoken_file(folder / "tokenizer.model"), read_tokenizer),
    "tokenizer.model": (sentencepiece, read_tokenizer),
    "kept index": (kept_index, lambda path: read_documents(path.parents[3] / "data" / "a.jsonl")),
    "kept hash": (kept_hash, lambda path: read_tokens(path.parents[3] / "data" / "a.bin")),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a cache folder of its own, in which every index is kept; not inside it, where each reader would look through
    what all damaged files before have left there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(records, "WORTH_KEEPING", 0)
    monkeypatch.setattr("torchtitan.data.hashes.LOOK_SECONDS", 0.001)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # thousands of small files, of which none must last
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def outcome(read: Callable[[Path], object], path: Path) -> str:
    """What a user would see: one sentence, or nothing."""
    HASHES.forget()
    try:
        read(path)
        return ""
    except UserError as error:
        assert str(error) and all(len(line) < 10_000 for line in str(error).splitlines())
        return str(error)


WILD = [
    *(b"", b"\0", b"\xff" * 8, b"\xff" * 4, struct.pack("<q", 1 << 40), struct.pack("<i", -1), b"\x80" * 7),
    *(b"NaN", b"Infinity", b"-1", b"1e999", b"null", b"[]", b"{}", b'"', b"(", b"'''", b"\\ud800", b",,"),
    *(b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b"a." * 300, b"\n", b"=", b"|99999999999", b"1_0"),
]


def mutated(content: bytes, seed: int) -> bytes:
    """Some bytes, or numbers in text, replaced by others that parsers may not expect. One number draws them all:
    hypothesis takes longer to draw even that than many readers take to read."""
    draw = random.Random(seed)
    for _ in range(draw.randint(1, 3)):
        start = draw.randint(0, max(min(len(content), 4000) - 1, 0))
        piece = draw.choice(WILD) if draw.random() < 0.5 else draw.randbytes(draw.randint(0, 8))
        content = content[:start] + piece + content[start + draw.choice([0, 1, 1, 2, 4, 8, 30]) :]
    return content if draw.randint(0, 9) else content[: draw.randint(0, len(content))]


def fuzz(reader: str, folder: Path, times: int) -> None:
    write, read = READERS[reader]
    path = write(folder)
    content = path.read_bytes()
    assert outcome(read, path) == ""

    for seed in range(times):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(mutated(content, seed))
        try:
            outcome(read, path)
        except Exception as error:
            raise AssertionError(f"mutated with {seed}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("reader", READERS)
def test_a_few_damaged_files_are_read_or_refused(reader: str, folder: Path) -> None:
    fuzz(reader, folder, 10)


@pytest.mark.full
@pytest.mark.parametrize("reader", READERS)
def test_a_thousand_damaged_files_are_read_or_refused(reader: str, folder: Path) -> None:
    fuzz(reader, folder, 1000)


def npy_header(text: str, version: bytes = b"\1\0") -> bytes:
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text.encode()


@pytest.mark.parametrize(
    ("reader", "content", "message"),
    [
        ("TOML", b"a." * 20_000 + b"b = 1", r"a\.toml: invalid TOML: a key has more than 100 parts"),
        ("TOML", b"[" + b"a . " * 20_000 + b"b]", "a key has more than 100 parts"),
        ("TOML", b"x = {" + b'"a.b".' * 20_000 + b"b = 1}", "a key has more than 100 parts"),
        ("TOML", f"[training]\nsteps = {HUGE}".encode(), r"a\.toml: invalid TOML: Exceeds the limit"),
        ("TOML", b"a = " + DEEP.encode(), "invalid TOML: nested too deeply"),
        (
            "metadata.json",
            b'{"tokenizer_ids": "0", "files": {"a.bin": {"size": Infinity}}}',
            "metadata.json is damaged",
        ),
        (
            "metadata.json",
            DEEP.encode(),
            r"metadata\.json is damaged \(nested too deeply\); restore or remove it",
        ),
        ("metadata.json", f'{{"tokenizer_ids": {HUGE}}}'.encode(), "metadata.json is damaged .Exceeds the limit"),
        ("metadata.json, read by tokenize", DEEP.encode(), "metadata.json is damaged; remove"),
        ("progress of tokenize", DEEP.encode() + b"\n", "progress is damaged; remove"),
        ("npy", npy_header("{'descr': '<u2', 'shape': ('''"), r"a\.npy cannot be read as a token shard \(numpy\): "),
        ("npy", npy_header("(" * 3000), r"a\.npy cannot be read as a token shard \(numpy\): "),
        (
            "npy",
            npy_header("{'descr': '<u2', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",)}"),
            "a token shard",
        ),
        ("npy", npy_header("- " * 3000 + "1"), r"a\.npy cannot be read as a token shard \(numpy\): "),
        ("datatrove's metadata", f"gpt2|{HUGE}".encode(), r"a\.ds cannot be read as a token shard"),
        ("tokenizer.json", b'{"model": ' + DEEP.encode(), "model.tokenizer_path: .*tokenizer.json"),
        ("tokenizer_config.json", DEEP.encode(), r"tokenizer_config\.json is damaged \(nested too deeply\)"),
        ("tokenizer_config.json", f'{{"a": {HUGE}}}'.encode(), "tokenizer_config.json is damaged"),
    ],
)
def test_hostile_files_are_one_sentence_at_once(reader: str, content: bytes, message: str, folder: Path) -> None:
    write, read = READERS[reader]
    path = write(folder)
    path.write_bytes(content)
    start = time.process_time()
    with pytest.raises(UserError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert time.process_time() - start < 20  # one of them took 27 s to parse
