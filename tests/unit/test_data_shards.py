"""Token shards: everybody's formats give the tokens that went in, in the order of the text that they were made of."""

import dataclasses
import gzip
import itertools
import json
import os
import resource
import struct
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_helpers import (
    TOKENIZER,
    Documents,
    close,
    flat,
    global_batches,
    loaders_of,
    sample_ids,
    story,
    training_on,
    write_jsonl,
    write_megatron,
    write_metadata,
)
from runs import TINY, into, losses, train

from torchtitan.config.training import Evaluation, Training, Validation
from torchtitan.data import Document, Loader, Source, build_validation_loader, records, shards
from torchtitan.data.datasets import documents_of, vocabulary_of
from torchtitan.data.hashes import HASHES
from torchtitan.data.packing import tokens_of
from torchtitan.data.paths import open_path
from torchtitan.errors import CheckpointError, DataError
from torchtitan.tools.evaluation.find_tasks import find_tasks

ROWS = 8
DOCUMENTS = [tokens_of(Document(story(number), ""), TOKENIZER).tolist() for number in range(60)]
BOS, EOS = TOKENIZER.bos_id, TOKENIZER.eos_id
VOCABULARY = vocabulary_of(TOKENIZER, Training())


def write_datatrove(path: Path, documents: Documents, item: int = 2, metadata: bool = True) -> Path:
    path.write_bytes(flat(documents, f"<u{item}"))
    path.with_name(f"{path.name}.index").write_bytes(np.cumsum([*map(len, documents)]).astype("<u8").tobytes())
    if metadata:
        size = sum(map(len, documents))
        path.with_name(f"{path.name}.metadata").write_text(f"gpt|2|{item}\n{size}\n{size} T")
    return path


def write_llm_c(path: Path, documents: Documents, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, sum(map(len, documents))
    path.write_bytes(header.tobytes() + flat(documents, dtype))
    return path


def write_numpy(path: Path, documents: Documents, dtype: str = "<u2") -> Path:
    np.save(path, np.frombuffer(flat(documents, dtype), dtype))
    return path


def write_raw(path: Path, documents: Documents, dtype: str = "<u2") -> Path:
    path.write_bytes(flat(documents, dtype))
    return path


def write_table(path: Path, documents: Documents, column: str = "input_ids") -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({column: pa.array(documents, pa.list_(pa.int32())), "n": list(range(len(documents)))})
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return path


WRITERS: dict[str, tuple[str, Callable[[Path, Documents], Path]]] = {
    "Megatron-LM": ("a.bin", write_megatron),
    "Megatron-LM, int32, sentences": ("a.bin", lambda path, docs: write_megatron(path, docs, 4, 3)),
    "Megatron-LM, int64": ("a.bin", lambda path, docs: write_megatron(path, docs, 5)),
    "datatrove": ("a.ds", write_datatrove),
    "datatrove, uint32": ("a.ds", lambda path, docs: write_datatrove(path, docs, 4)),
    "datatrove, no metadata": ("a.ds", lambda path, docs: write_datatrove(path, docs, 4, metadata=False)),
    "llm.c": ("a.bin", write_llm_c),
    "llm.c, Llama 3": ("a.bin", lambda path, docs: write_llm_c(path, docs, 20240801, 7, "<u4")),
    "numpy": ("a.npy", write_numpy),
    "numpy, big-endian": ("a.npy", lambda path, docs: write_numpy(path, docs, ">i4")),
    "nanoGPT": ("a.bin", write_raw),
    "nanoGPT, uint32": ("a.bin", lambda path, docs: write_raw(path, docs, "<u4")),
    "OLMo": ("a.npy", write_raw),
    "OLMo, uint32": ("a.npy", lambda path, docs: write_raw(path, docs, "<u4")),
    "Parquet": ("a.parquet", write_table),
    "Arrow": ("a.arrow", lambda path, docs: write_table(path, docs, "tokens")),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def opened(path: Path, **keys: Any) -> Any:
    source = open_path(str(path), "text", vocabulary=vocabulary_of(TOKENIZER, Training(**keys)))
    assert hasattr(source, "__getitem__")
    return source


def tokens_in(source: Source) -> list[list[int]]:
    documents = [source[number].tokens for number in range(len(source))]
    return [document.tolist() for document in documents if document is not None]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("format", WRITERS)
def test_shards_give_the_batches_of_their_text_for_every_layout_and_across_resumes(format: str, folder: Path) -> None:
    text = loaders_of(training_on(write_jsonl(folder.parent / "a.jsonl", range(60))), ROWS, 1)
    expected = global_batches(text, 16)
    name, write = WRITERS[format]
    write(folder / name, DOCUMENTS)
    assert tokens_in(opened(folder)) == DOCUMENTS
    loaders, done = loaders_of(training_on(folder), ROWS, 1), 0
    state: dict[str, Any] = {}
    for ranks, steps in ((1, 4), (2, 3), (4, 9)):
        close(loaders)
        loaders = loaders_of(training_on(folder), ROWS, ranks)
        for loader in loaders if state else []:
            loader.load_state_dict(state)
        assert equal(global_batches(loaders, steps), expected[done : done + steps])
        state = json.loads(json.dumps(Loader.merge_states([loader.state_dict() for loader in loaders])))
        done += steps
    close([*loaders, *text])


def test_masks_held_out_documents_and_sample_ids_are_as_for_text(folder: Path) -> None:
    numbers = range(300)
    text = write_jsonl(folder.parent / "a.jsonl", numbers)
    write_megatron(folder / "a.bin", [tokens_of(Document(story(n), ""), TOKENIZER).tolist() for n in numbers])
    both = []
    for path in (text, folder):
        training = training_on(path, document_mask=True)
        loaders = loaders_of(training, 4, 1, hold_out=True)
        masks: list[Any] = [loaders[0].next()[0].document_ids for _ in range(3)]
        ids = sample_ids(loaders, 40)
        close(loaders)
        for steps in (3, -1):
            validation = Validation(enabled=True, local_batch_size=2, steps=steps)
            masks += [b.labels for b in build_validation_loader(validation, training, TOKENIZER, dp_rank=0, dp_size=1)]
        both.append((masks, [[id.rpartition(":")[2] for id in row] for row in ids]))
    assert all(map(torch.equal, both[0][0], both[1][0])) and both[0][1] == both[1][1]


def test_empty_documents_keep_their_number(folder: Path) -> None:
    documents = [DOCUMENTS[0], [], DOCUMENTS[1], [], []]
    write_megatron(folder / "a.bin", documents)
    assert tokens_in(opened(folder)) == documents
    (folder / "a.bin").unlink(), (folder / "a.idx").unlink()
    write_datatrove(folder / "a.ds", documents)
    assert tokens_in(opened(folder)) == documents


@pytest.mark.parametrize(
    ("name", "write", "tokens", "keys", "expected"),
    [
        ("a.bin", write_raw, [7, 8, EOS, 9, EOS, 5], {}, [[7, 8, EOS], [9, EOS], [5]]),
        ("a.bin", write_raw, [EOS, 7, 8, EOS, EOS, 5], {}, [[EOS, 7, 8], [EOS], [EOS, 5]]),
        ("a.bin", write_raw, [BOS, 7, 8, BOS, 9], {}, [[BOS, 7, 8], [BOS, 9]]),
        ("a.bin", write_llm_c, [7, 8, EOS, 9], {}, [[7, 8], [EOS, 9]]),  # goes on from the shard before
        ("a.bin", write_llm_c, [7, 8, EOS, 9, EOS], {}, [[7, 8, EOS], [9, EOS]]),
        ("a.npy", write_numpy, [7, 99, 9, 9], {"token_separator": 99}, [[7, 99], [9, 9]]),
        ("a.bin", write_raw, [0, 0, 7, EOS, 0, 0], {"token_dtype": "uint16"}, [[0, 0, 7, EOS], [0, 0]]),
    ],
)
def test_separators_stay_with_their_documents(
    name: str, write: Any, tokens: list[int], keys: dict[str, Any], expected: Documents, folder: Path, monkeypatch: Any
) -> None:
    write(folder / name, [tokens])
    assert tokens_in(opened(folder, **keys)) == expected
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
    monkeypatch.setattr(records, "WORTH_KEEPING", 0)
    monkeypatch.setattr(records, "PART_BYTES", 4)
    monkeypatch.setattr(shards, "CHUNK", 2)
    assert tokens_in(opened(folder, **keys)) == expected
    monkeypatch.setattr(shards, "separated_offsets", pytest.fail)
    assert tokens_in(opened(folder, **keys)) == expected  # from the kept index


def test_shards_that_nothing_separates_are_even_documents(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As nanoGPT's examples are: one text, without a token at its end."""
    monkeypatch.setattr(shards, "PIECE_TOKENS", 3)
    write_raw(folder / "a.bin", [[7, 8, 9, EOS, 5, 6, 7]])
    write_raw(folder / "b.bin", [[8, 9, 9]])
    assert tokens_in(opened(folder, token_separator=-1)) == [[7, 8, 9], [EOS, 5, 6], [7], [8, 9, 9]]


def test_another_separator_is_other_data(folder: Path) -> None:
    write_raw(folder / "a.bin", [[7, 8, EOS, 9] * 40])
    state = Loader.merge_states([loaders_of(training_on(folder), 4, 1)[0].state_dict()])
    [other] = loaders_of(training_on(folder, token_separator=9), 4, 1)
    with pytest.raises(CheckpointError, match=r"training\.dataset"):
        other.load_state_dict(state)


def test_splits_and_files_in_folders_are_read_like_text(folder: Path) -> None:
    (folder / "deep").mkdir()
    for name, documents in {
        "train.bin": DOCUMENTS[:3],
        "val.bin": DOCUMENTS[3:5],
        "deep/train.bin": DOCUMENTS[5:],
    }.items():
        write_raw(folder / name, documents)
    source = opened(folder)
    assert tokens_in(source) == [*DOCUMENTS[5:], *DOCUMENTS[:3]]
    assert source[len(source) - 1].id == "train.bin:3"
    assert tokens_in(opened(folder / "*.bin")) == [*DOCUMENTS[:3], *DOCUMENTS[3:5]]
    elsewhere = folder.rename(folder.with_name("elsewhere"))
    assert opened(elsewhere).fingerprint == source.fingerprint


def test_a_token_beyond_the_vocabulary_names_file_document_and_id(folder: Path) -> None:
    documents = [*DOCUMENTS[:20], [BOS, 5, TOKENIZER.vocab_size + 3, 5, EOS], *DOCUMENTS[20:]]
    for write in (write_megatron, lambda path, docs: write_table(path.with_suffix(".parquet"), docs)):
        path = write(folder / "a.bin", documents)
        [loader] = loaders_of(training_on(path, shuffle=False), 1, 1)
        with pytest.raises(
            DataError, match=rf"a\..*2[01]\]? holds token {TOKENIZER.vocab_size + 3}, .*model\.tokenizer_path"
        ) as e:
            global_batches([loader], 200)
        assert path.name in str(e.value)
    write_megatron(folder / "a.bin", [[-4, *document] for document in DOCUMENTS], 4)
    with pytest.raises(DataError, match="holds token -4,"):
        global_batches(loaders_of(training_on(folder / "a.bin", shuffle=False), 1, 1), 1)


def changed(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def cut_off(path: Path, size: int) -> None:
    os.truncate(path, path.stat().st_size - size)


BAD: dict[str, tuple[str, Callable[[Path], Any], dict[str, Any], str]] = {
    "truncated bin": ("Megatron-LM", lambda d: cut_off(d / "a.bin", 2), {}, "a.idx lists tokens beyond its end"),
    "bin cut to nothing": ("Megatron-LM", lambda d: os.truncate(d / "a.bin", 0), {}, "lists tokens beyond its end"),
    "truncated idx": ("Megatron-LM", lambda d: cut_off(d / "a.idx", 8), {}, "a.idx is too small for the 60 sequences"),
    "cut in the header": ("Megatron-LM", lambda d: os.truncate(d / "a.idx", 20), {}, "a.idx is not an index"),
    "no index": ("Megatron-LM", lambda d: (d / "a.idx").write_bytes(b"text" * 99), {}, "a.idx is not an index"),
    "empty idx": ("Megatron-LM", lambda d: os.truncate(d / "a.idx", 0), {}, "a.idx is not an index"),
    "version": ("Megatron-LM", lambda d: changed(d / "a.idx", 9, b"\2"), {}, "has version 2 and dtype 8"),
    "dtype": ("Megatron-LM", lambda d: changed(d / "a.idx", 17, b"\x63"), {}, "version 1 and dtype 99"),
    "float": ("Megatron-LM", lambda d: changed(d / "a.idx", 17, b"\7"), {}, "it holds float32|beyond its end"),
    "int8": ("Megatron-LM", lambda d: write_megatron(d / "a.bin", [[5]], 2), {}, "holds int8, too small"),
    "documents": ("Megatron-LM", lambda d: changed(d / "a.idx", 34 + 20 * 60, b"\x20"), {}, r"\[0, 32\], not all 60"),
    "counts": ("Megatron-LM", lambda d: changed(d / "a.idx", 18, b"\xff" * 16), {}, "is too small for the 18,446,"),
    "no bin": ("Megatron-LM", lambda d: (d / "a.bin").unlink(), {}, "holds a.idx without a.bin"),
    "no idx": (
        "Megatron-LM, int32, sentences",
        lambda d: ((d / "a.idx").unlink(), write_raw(d / "a.bin", [[7, 8, 9] * 9], "<i4")),
        {},
        "no token 2 separates documents; set training.token_separator .*idx",
    ),
    "truncated ds": ("datatrove", lambda d: cut_off(d / "a.ds", 2), {}, "a.ds.index ends at token"),
    "truncated index": ("datatrove", lambda d: cut_off(d / "a.ds.index", 9), {}, "a.ds.index ends at token"),
    "no ds": ("datatrove", lambda d: (d / "a.ds").unlink(), {}, "holds a.ds.index without a.ds"),
    "other metadata": ("datatrove", lambda d: (d / "a.ds.metadata").write_text("gpt2|8"), {}, "index ends at token"),
    "count": ("llm.c", lambda d: changed(d / "a.bin", 8, b"\1"), {}, "its header announces"),
    "other version": ("llm.c", lambda d: changed(d / "a.bin", 4, b"\3"), {}, "its header has version 3, not 1"),
    "short header": ("llm.c", lambda d: os.truncate(d / "a.bin", 6), {}, "version 0|announces"),
    "none separated": ("llm.c", lambda d: write_llm_c(d / "a.bin", [[7, 8, 9]]), {}, "no token 2 separates documents"),
    "npy": ("numpy", lambda d: cut_off(d / "a.npy", 2), {}, "its header announces"),
    "npy header": ("numpy", lambda d: os.truncate(d / "a.npy", 20), {}, "a.npy cannot be read as a token shard"),
    "npy floats": ("numpy", lambda d: np.save(d / "a.npy", np.ones(9)), {}, "it holds float64, which are no token ids"),
    "npy objects": ("numpy", lambda d: np.save(d / "a.npy", np.array([{}])), {}, "holds object|announces"),
    "npy order": ("numpy", lambda d: np.save(d / "a.npy", np.ones((2, 3), "i4", "F")), {}, "Fortran"),
    "odd": ("nanoGPT", lambda d: cut_off(d / "a.bin", 1), {}, "a.bin is no token shard of a known format"),
    "odd, dtype": ("nanoGPT", lambda d: cut_off(d / "a.bin", 1), {"token_dtype": "uint16"}, "no whole number"),
    "weights": ("nanoGPT", lambda d: (d / "a.bin").write_bytes(b"PK\3\4" * 999), {}, "training.token_dtype"),
    "zeros": ("nanoGPT", lambda d: os.truncate(d / "b.bin", 1 << 20), {}, "b.bin is no token shard"),
    "separator": ("nanoGPT", lambda d: None, {"token_separator": 4096}, r"training.token_separator = 4096 is no token"),
    "formats": ("nanoGPT", lambda d: write_megatron(d / "b.bin", DOCUMENTS), {}, r"\(raw: a.bin, Megatron-LM: b.bin\)"),
    "kinds": ("nanoGPT", lambda d: write_jsonl(d / "b.jsonl", range(60)), {}, "files of several kinds"),
    "empty": ("nanoGPT", lambda d: os.truncate(d / "a.bin", 0), {}, "has no documents"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_shards_are_one_sentence(case: str, folder: Path) -> None:
    format, damage, keys, message = BAD[case]
    name, write = WRITERS[format]
    write(folder / name, DOCUMENTS)
    (folder / "b.bin").touch()
    damage(folder)
    with pytest.raises(DataError, match=message) as caught:
        opened(folder, **keys)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("offset", "content"),
    [
        (34 + 8, struct.pack("<i", -5)),  # the length of the third document
        (34 + 8, struct.pack("<i", 1 << 30)),
        (34 + 60 * 4 + 16, struct.pack("<q", -8)),  # its pointer
        (34 + 60 * 4 + 16, struct.pack("<q", 1 << 62)),
        (34 + 60 * 12 + 16, struct.pack("<q", 1 << 62)),  # its first sequence
        (34 + 60 * 12 + 16, struct.pack("<q", -1)),
    ],
)
def test_a_hostile_index_is_refused_or_if_it_is_large_an_error_of_its_document(
    offset: int, content: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_megatron(folder / "a.bin", DOCUMENTS)
    changed(path.with_suffix(".idx"), offset, content)
    with pytest.raises(DataError, match=rf"{path}: .*a\.idx .*copy or make it again\.$"):
        opened(folder)
    monkeypatch.setattr(shards, "CHECKED_AT_ONCE", 0)
    monkeypatch.setattr(HASHES, "add", lambda checks: None)
    source = opened(folder)
    with pytest.raises(DataError, match=rf"{path}, document 3: .*copy or make it again\.$"):
        source[2]
    assert source[5].tokens.tolist() == DOCUMENTS[5]


@pytest.mark.parametrize(
    ("offset", "content", "message"),
    [
        (34 + 8, struct.pack("<i", 7), r"sequence 4 has [\d,]+ tokens from byte [\d,]+ on, but the one before ends at"),
        (34 + 8, struct.pack("<i", 1000), r"sequence 4 has"),  # overlaps
        (34 + 60 * 4 + 16, struct.pack("<q", 3), r"sequence 3 has [\d,]+ tokens from byte 3 on"),  # within a token
        (34 + 60 * 12 + 16, struct.pack("<q", 9), r"the documents in a\.idx are not in order"),
    ],
)
@pytest.mark.parametrize("large", [False, True])
def test_an_index_that_contradicts_itself_does_not_train(
    offset: int, content: bytes, message: str, large: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these documents can be read alone."""
    path = write_megatron(folder / "a.bin", DOCUMENTS)
    changed(path.with_suffix(".idx"), offset, content)
    HASHES.forget()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
    monkeypatch.setattr(shards, "CHECKED_AT_ONCE", 0 if large else 1 << 20)
    with pytest.raises(DataError, match=message):
        source = opened(folder)
        source[40]
        HASHES.wait()


def test_a_small_dtype_is_refused_unless_the_key_says_so(folder: Path) -> None:
    large = dataclasses.replace(TOKENIZER, vocab_size=128_256)
    write_megatron(folder / "a.bin", DOCUMENTS)
    with pytest.raises(DataError, match=r"holds uint16, too small for the 128,256 tokens .*training.token_dtype"):
        loaders_of(training_on(folder), ROWS, 1, tokenizer=large)
    loaders_of(training_on(folder, token_dtype="uint16"), ROWS, 1, tokenizer=large)
    write_raw(folder / "b.bin", DOCUMENTS)
    with pytest.raises(DataError, match=r"b.bin is no token shard .*training.token_dtype"):
        loaders_of(training_on(folder / "b.bin"), ROWS, 1, tokenizer=large)


def test_notes_beside_shards_are_compared_with_the_run(folder: Path) -> None:
    write_megatron(folder / "a.bin", DOCUMENTS)
    sizes = {name: {"size": (folder / name).stat().st_size, "sha256": ""} for name in ("a.bin", "a.idx")}
    noted = {"tokenizer": TOKENIZER.fingerprint, "tokenizer_ids": TOKENIZER.ids_fingerprint, "files": sizes}
    notes = folder / "metadata.json"
    notes.write_text(json.dumps(noted))
    assert len(opened(folder)) == len(opened(folder / "a.bin")) == 60
    for change, message in (
        ({"tokenizer_ids": "other"}, r"another tokenizer .*set model\.tokenizer_path"),
        ({"files": {**sizes, "a.idx": {"size": 7}}}, "a.idx has .* bytes, but metadata.json beside it says 7 bytes"),
        ({"files": {**sizes, "b.bin": {"size": 7}}}, "b.bin is missing, but"),
        ({"files": 5}, "metadata.json is damaged"),
    ):
        notes.write_text(json.dumps({**noted, **change}))
        with pytest.raises(DataError, match=message):
            opened(folder)
    notes.write_text('{"made by": "others"}')
    assert len(opened(folder)) == 60


def test_a_flipped_bit_ends_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
    monkeypatch.setattr(shards, "SHARD_LOOK_SECONDS", 0.0)
    write_megatron(folder / "a.bin", DOCUMENTS)
    write_metadata(folder)

    def read() -> None:
        source = opened(folder)
        [thread.join() for thread in threading.enumerate() if thread.name == "hashes"]
        source[3]

    read()
    content = bytearray((folder / "a.bin").read_bytes())
    content[100] ^= 1
    (folder / "a.bin").write_bytes(content)
    for _ in range(2):  # the second time the cache folder knows
        with pytest.raises(DataError, match=r"a\.bin does not have the SHA-256 that metadata\.json beside it says"):
            read()


def test_what_would_be_read_wrongly_in_silence(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    flat = [token for document in DOCUMENTS for token in document]
    for dtype in ("<i8", "<u8", "<i4"):
        np.array(flat, dtype).tofile(folder / "a.bin")
        assert [token for document in tokens_in(opened(folder)) for token in document] == flat
    with pytest.raises(DataError, match="every second token is 0"):
        opened(folder, token_dtype="uint16")
    for number in range(2):  # BOS begins files, EOS ends documents
        np.array([BOS, *flat, EOS], "<u2").tofile(folder / f"{number}.bin")
    (folder / "a.bin").unlink()
    assert len(opened(folder)) > 2
    for path in folder.iterdir():
        path.unlink()
    write_megatron(folder / "a.bin", DOCUMENTS)
    with (folder / "a.bin").open("ab") as file:
        file.write(b"1234")
    with pytest.raises(DataError, match="it is of a shorter file"):
        opened(folder)
    write_megatron(folder / "a.bin", DOCUMENTS)
    (folder / ".progress").touch()
    with pytest.raises(DataError, match="is not complete"):
        opened(folder)
    (folder / ".progress").unlink()
    noted: dict[str, Any] = {"tokenizer_ids": TOKENIZER.ids_fingerprint, "files": {}, "bos_id": None, "eos_id": None}
    (folder / "metadata.json").write_text(json.dumps(noted))
    with pytest.raises(DataError, match=r"does not list a\.bin beside it"):
        opened(folder)
    noted["files"] = {name: {"size": (folder / name).stat().st_size} for name in ("a.bin", "a.idx")}
    (folder / "metadata.json").write_text(json.dumps(noted))
    opened(folder)
    assert "its documents have no BOS and no EOS, and this run's text would have BOS and EOS" in caplog.text


def test_shards_are_no_text(folder: Path) -> None:
    path = str(write_megatron(folder / "a.bin", DOCUMENTS))
    for use in (
        lambda: list(documents_of(path, "text")),
        lambda: find_tasks(Evaluation(tasks=[f"text:{path}"]), None, None, str),
        lambda: find_tasks(Evaluation(tasks=["held_out"]), Validation(dataset_path=path), Training(), str),
    ):
        with pytest.raises(DataError, match=r"holds tokens, but evaluation\.tasks"):
            use()


def test_shards_that_change_end_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_LOOK_SECONDS", 0)
    path = write_megatron(folder / "a.bin", DOCUMENTS)
    source = opened(folder)
    cut_off(path, 200)
    with pytest.raises(DataError, match="was changed while the run is reading it"):
        source[3]


def test_more_shards_than_open_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "content_of", lru_cache(8)(shards.content_of.__wrapped__))
    for number in range(60):
        write_megatron(folder / f"{number:02}.bin", DOCUMENTS[number : number + 1])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, limits[1]))
    try:
        assert tokens_in(opened(folder)) == DOCUMENTS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_200_gb_are_opened_without_reading_them(folder: Path) -> None:
    gigabytes = 10**9
    for name, sequences, length in (("a", 10**9, 100), ("b", 40, 10**9)):
        lengths, pointers, last = 34 + 4 * (sequences - 1), 34 + 12 * sequences - 8, 34 + 20 * sequences
        with (folder / f"{name}.bin").open("wb") as tokens, (folder / f"{name}.idx").open("wb") as idx:
            tokens.truncate(100 * gigabytes)
            idx.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, sequences, sequences + 1))
            for place, packed in (
                (lengths, struct.pack("<i", length)),
                (pointers, struct.pack("<q", 100 * gigabytes - 2 * length)),
                (last - 8, struct.pack("<2q", sequences - 1, sequences)),
            ):
                idx.seek(place)
                idx.write(packed)
    program = """
        import sys
        from torchtitan.data.datasets import DataOfRun, training_sources
        from torchtitan.data.tokenizer import load_tokenizer
        from torchtitan.config.training import Training
        import numpy as np
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096
        tokenizer, before = load_tokenizer(None), resident()
        [source], _ = training_sources(Training(dataset_path=sys.argv[1]), DataOfRun(8, 2048, False), tokenizer)
        documents = source.source.source
        print(len(documents), documents[len(documents) - 1].tokens.shape, documents[10**9 - 1].id, resident() - before)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(folder)], capture_output=True, text=True, timeout=60
    )
    *printed, grown = ended.stdout.split(" ")
    assert " ".join(printed) == "1000000040 (1000000000,) a.bin:1000000000", ended.stderr
    assert int(grown) < 200 * 10**6


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_tables_of_tokens(name: str, folder: Path) -> None:
    with pytest.raises(DataError, match=r"no text column 'text'; its columns are input_ids .*list"):
        open_path(str(write_table(folder / name, DOCUMENTS)), "text")
    write_table(folder / name, DOCUMENTS, "ids")
    with pytest.raises(DataError, match=r"no text column 'text'; its columns are ids"):
        opened(folder)
    loaders_of(training_on(folder, text_column="ids"), ROWS, 1)[0].next()
    write_table(folder / name, [DOCUMENTS[0], None, [5, None]])  # type: ignore[list-item]
    source = opened(folder)
    assert tokens_in(source) == DOCUMENTS[:1] and len(source) == 3 and source.skipped.count == 2


@pytest.mark.full
def test_shards_of_others_writers_give_what_went_in(folder: Path) -> None:
    import datasets
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for dtype in (np.uint16, np.int32):
        builder = IndexedDatasetBuilder(str(folder / f"m{dtype.__name__}.bin"), dtype=dtype)
        for document in DOCUMENTS:
            builder.add_document(torch.tensor(document), [len(document) - 3, 3])
        builder.finalize(str(folder / f"m{dtype.__name__}.idx"))
        assert tokens_in(opened(folder / f"m{dtype.__name__}.bin")) == DOCUMENTS
    for item in (2, 4):
        file = TokenizedFile(str(folder), f"{item}.ds", save_final_metadata=True, token_size=item)
        for document in DOCUMENTS:
            file.write(document, None)
        file.close()
        assert tokens_in(opened(folder / f"{item}.ds")) == DOCUMENTS
    ids = np.memmap(folder / "train.bin", np.uint16, "w+", shape=(sum(map(len, DOCUMENTS)),))  # as in prepare.py
    ids[:] = np.concatenate(DOCUMENTS)
    ids.flush()
    assert tokens_in(opened(folder / "train.bin")) == DOCUMENTS
    datasets.Dataset.from_dict({"input_ids": DOCUMENTS}).save_to_disk(folder / "saved")
    assert tokens_in(opened(folder / "saved")) == DOCUMENTS


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_runs_on_shards_have_the_losses_of_runs_on_their_text(processes: int, folder: Path) -> None:
    keys = ("--training.global_batch_size=8", "--training.local_batch_size=1", "--checkpoint.enable_checkpoint")
    text = write_jsonl(folder.parent / "a.jsonl", range(60))
    (folder / "nanogpt").mkdir()
    paths = {
        "text": text,
        "megatron": write_megatron(folder / "a.bin", DOCUMENTS),
        "nanogpt": write_raw(folder / "nanogpt" / "a.bin", DOCUMENTS),
        "arrow": write_table(folder / "a.arrow", DOCUMENTS),
    }
    of_each = []
    for name, path in paths.items():
        flags = (*TINY, *keys, f"--training.dataset_path={path}", into(folder / "out" / name))
        train(*flags, "--training.steps=3", processes=processes)
        train(*flags, "--training.steps=6", processes=1 if processes > 1 else 2)  # from a checkpoint
        of_each.append(losses(folder / "out" / name))
    assert list(of_each[0]) == [1, 2, 3, 4, 5, 6]
    assert all(of_shards == of_each[0] for of_shards in of_each[1:])


@pytest.mark.parametrize(
    ("shard", "program"), [("shard.00000.mds.zstd", "MosaicML Streaming"), ("chunk-0-0.bin", "LitData")]
)
def test_shards_of_programs_that_are_not_read_are_named(shard: str, program: str, tmp_path: Path) -> None:
    (tmp_path / shard).write_bytes(bytes(range(256)) * 40)
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    with pytest.raises(DataError, match=f"holds shards of {program}"):
        loaders_of(training_on(tmp_path), 1, 1)


def rows_of(documents: Documents) -> bytes:
    """What `dolma tokens` writes beside a shard."""
    ends = [0, *itertools.accumulate(map(len, documents))]
    rows = "".join(f'{first},{last},"id, {first}",a.jsonl.gz,{first}\r\n' for first, last in itertools.pairwise(ends))
    return gzip.compress(rows.encode())


def write_dolma(path: Path, documents: Documents, rows: bytes | None = None) -> Path:
    path.with_suffix(".csv.gz").write_bytes(rows_of(documents) if rows is None else rows)
    return write_raw(path, documents)


@pytest.mark.parametrize("kept", [False, True])
def test_documents_are_where_dolma_s_rows_say(kept: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where separators say something else; a shard without rows is divided by these."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
    monkeypatch.setattr(records, "WORTH_KEEPING", 0 if kept else 1 << 40)
    documents = [[5, EOS, 7, number + 9] for number in range(60)]
    write_dolma(folder / "part-0-00000.npy", documents)
    write_raw(folder / "part-0-00001.npy", DOCUMENTS)
    write_numpy(folder / "part-0-00002.npy", documents)
    (folder / "part-0-00002.csv.gz").write_bytes(rows_of(documents))
    for _ in range(2):
        source = opened(folder / "part-0-0000[01].npy")
        assert tokens_in(source) == [*documents, *DOCUMENTS]
        assert tokens_in(opened(folder / "part-0-00002.npy")) == documents
    assert tokens_in(opened(folder / "part-0-00000.npy", token_separator=-1)) == documents
    halves = [part for document in documents for part in (document[:2], document[2:])]
    write_dolma(folder / "part-0-00000.npy", halves)  # of the same size, and separated otherwise
    changed = opened(folder / "part-0-0000[01].npy")
    assert tokens_in(changed) == [*halves, *DOCUMENTS] and changed.fingerprint != source.fingerprint
    [loader] = loaders_of(training_on(folder / "part-0-00000.npy", document_mask=True, shuffle=False), 1, 1)
    [batch] = loader.next()
    loader.close()
    assert batch.document_ids is not None
    assert batch.document_ids[0, :8].diff().ne(0).tolist() == [False, True, False, True, False, True, False]


def test_dolma_s_rows_that_say_what_separators_say_change_no_run(folder: Path) -> None:
    """A run that began without them goes on."""
    path = write_raw(folder / "a.npy", DOCUMENTS)
    before = opened(path).fingerprint
    assert opened(write_dolma(path, DOCUMENTS)).fingerprint == before
    assert opened(write_dolma(path, [[*DOCUMENTS[0], *DOCUMENTS[1]], *DOCUMENTS[2:]])).fingerprint != before
    shifted = [DOCUMENTS[0][:-1], [DOCUMENTS[0][-1], *DOCUMENTS[1]], *DOCUMENTS[2:]]  # as many
    assert opened(write_dolma(path, shifted)).fingerprint != before


ROWS_OF_DOLMA = gzip.decompress(rows_of(DOCUMENTS)).decode().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS_OF_DOLMA[:-1], r"a\.csv\.gz: its 59 rows end at token [\d,]+ of [\d,]+; make it again, or remove it"),
        ([], "its 0 rows end at token 0 of"),
        (ROWS_OF_DOLMA[1:], "row 1 says that a document is from token .*, but the one before ends at 0 of"),
        (ROWS_OF_DOLMA[:3] + ROWS_OF_DOLMA[4:], "row 4 says .* but the one before ends at"),
        (ROWS_OF_DOLMA[:3] + ROWS_OF_DOLMA[2:], "row 4 says .* but the one before ends at"),
        ([ROWS_OF_DOLMA[1], ROWS_OF_DOLMA[0]], "row 1 says"),
        (["0,0,a,b,0\n", *ROWS_OF_DOLMA], "row 1 says that a document is from token 0 to 0,"),
        (["0,99999999,a,b,0\n"], "row 1 says that a document is from token 0 to 99,999,999,"),
        (["start,end,id,src,loc\n", *ROWS_OF_DOLMA], "row 1 does not begin with the places of a document's first and"),
        (["0\n"], "row 1 does not begin with the places"),
        (["0,-5\n"], "row 1 does not begin with the places"),
        (["\n", *ROWS_OF_DOLMA], "row 1 does not begin with the places"),
        ([f"0,{'9' * 5000}\n"], r"a\.csv\.gz: Exceeds the limit"),
        (['0,5,"' + "x" * (1 << 22)], r"a\.csv\.gz: Error: field larger than field limit"),
    ],
)
def test_rows_of_dolma_that_are_wrong_are_one_sentence(rows: list[str], message: str, folder: Path) -> None:
    path = write_dolma(folder / "a.npy", DOCUMENTS, gzip.compress("".join(rows).encode()))
    with pytest.raises(DataError, match=message) as caught:
        opened(path)
    assert str(caught.value).endswith("; make it again, or remove it, so that separators divide a.npy into documents.")


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (b"0,5,a,b,0\n", "it is no gzip file"),
        (rows_of(DOCUMENTS)[:-30], "EOFError: Compressed file ended before"),
        (rows_of(DOCUMENTS)[:-8] + b"\0" * 8, "it is no gzip file"),
        (rows_of(DOCUMENTS)[:40] + b"\xff" * 40 + rows_of(DOCUMENTS)[80:], "rror"),
        (b"", "its 0 rows end at token 0 of"),
    ],
)
def test_rows_of_dolma_that_cannot_be_unpacked_are_one_sentence(
    packed: bytes, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
    for large in (0, 1 << 40):
        monkeypatch.setattr(records, "WORTH_KEEPING", large)
        with pytest.raises(DataError, match=rf"a\.csv\.gz: .*{message}.*; make it again, or remove it"):
            opened(write_dolma(folder / "a.npy", DOCUMENTS, packed))


def test_a_bomb_of_a_row_takes_no_memory(folder: Path) -> None:
    bomb = gzip.compress(b"0" * (1 << 26))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"field larger than|does not begin"):
        opened(write_dolma(folder / "a.npy", DOCUMENTS, bomb))
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


def test_dolma_s_rows_that_change_end_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_LOOK_SECONDS", 0)
    source = opened(write_dolma(folder / "a.npy", DOCUMENTS))
    (folder / "a.csv.gz").write_bytes(rows_of(DOCUMENTS[:5]))
    with pytest.raises(DataError, match=r"a\.csv\.gz was changed while the run is reading it"):
        source[0]


@pytest.mark.parametrize("first", ["gpt2", "folder|name", "gpt2|2"])
def test_notes_of_older_datatrove_do_not_say_the_bytes_of_a_token(first: str, tmp_path: Path) -> None:
    documents = [[5, 6, 7, number + 9, TOKENIZER.eos_id] for number in range(60)]
    np.array(documents, np.uint16).tofile(tmp_path / "a.ds")
    np.arange(5, 301, 5, dtype=np.uint64).tofile(tmp_path / "a.ds.index")
    (tmp_path / "a.ds.metadata").write_text(f"{first}\n300\n300 T")
    [loader] = loaders_of(training_on(tmp_path, shuffle=False), 1, 1)
    [batch] = loader.next()
    loader.close()
    assert batch.tokens[0].tolist() == [*itertools.chain(*documents)][:32]
