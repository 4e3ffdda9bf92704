"""Streamed data: the same code path as C4 from the Hub, here with compressed shards on disk."""

import bz2
import gzip
import json
import logging
import lzma
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from data_helpers import (
    TOKENIZER,
    as_lists,
    close,
    global_batches,
    loaders_of,
    sample_ids,
    story,
    training_on,
    write_jsonl,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from runs import all_equal

from torchtitan.config.training import Training, Validation
from torchtitan.data import Drawn, Loader, build_validation_loader, streamed
from torchtitan.data.datasets import TRAIN, VALIDATION, documents_in, split_held_out
from torchtitan.data.paths import open_path
from torchtitan.data.sources import LONGEST, StreamedSource
from torchtitan.data.streamed import ShardedStream, open_hub, stream_of_dataset
from torchtitan.errors import CheckpointError, DataError
from torchtitan.logging import logger

SHARDS, DOCUMENTS = 5, 25  # documents per shard


@pytest.fixture
def c4(tmp_path: Path) -> Training:
    folder = tmp_path / "c4"
    folder.mkdir()
    for shard in range(SHARDS):
        write_jsonl(folder / f"c4-train.{shard}.json.gz", range(shard * 100, shard * 100 + DOCUMENTS))
    return training_on(folder, dataset="c4")


@pytest.mark.parametrize("rows", [4, 8])  # fewer and more rows than shards
def test_layouts_and_resumes_do_not_change_the_order(c4: Training, rows: int) -> None:
    expected = global_batches(loaders_of(c4, rows, 1), 40)
    got: list[torch.Tensor] = []
    loaders, state = loaders_of(c4, rows, 1), None
    for dp_size, steps in ((2, 13), (4, 8), (1, 19)):
        close(loaders)
        loaders = loaders_of(c4, rows, dp_size)
        if state:
            for loader in loaders:
                loader.load_state_dict(state)
        got += global_batches(loaders, steps)
        state = json.loads(json.dumps(Loader.merge_states([loader.state_dict() for loader in loaders])))
    assert all_equal(got, expected)


@pytest.mark.parametrize("rows", [2, 5, 7, 10])
def test_rows_share_the_documents_without_a_gap_or_a_repeat(c4: Training, rows: int) -> None:
    stream = open_path(str(c4.dataset_path), "text")
    assert isinstance(stream, ShardedStream)
    of_rows = [
        [drawn.document for drawn in takewhile(lambda drawn: drawn.epoch == 0, stream.documents(row, rows, 0, None))]
        for row in range(rows)
    ]
    assert all(of_rows)
    every = [document for row in of_rows for document in row]
    assert len({document.id for document in every}) == SHARDS * DOCUMENTS
    expected = [story(shard * 100 + number) for shard in range(SHARDS) for number in range(DOCUMENTS)]
    assert sorted(document.text for document in every) == sorted(expected)


def stream_of(sizes: Sequence[int], opened: "list[int] | None" = None) -> ShardedStream:
    """Shards of documents "shard:number", without files."""

    def read(shard: int, number: int, state: Any) -> Iterator[tuple[str, None]]:
        if opened is not None:
            opened.append(shard)
        return ((f"{shard}:{count}", None) for count in range(number + 1, sizes[shard] + 1))

    names = [str(shard) for shard in range(len(sizes))]
    return ShardedStream(names, [size + 10 for size in sizes], read, str, "fake", list(sizes))


def drawn_by(stream: ShardedStream, rows: int, seed: int | None, times: int) -> list[list[Drawn]]:
    """The first documents of each row; the rows draw in turn."""
    drawers = [stream.documents(row, rows, seed, None) for row in range(rows)]
    return [list(of_row) for of_row in zip(*([next(drawer) for drawer in drawers] for _ in range(times)), strict=True)]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    rows=st.integers(1, 70),
    seed=st.sampled_from([None, 0, 1, 2]),
)
@example(sizes=[400, 20], rows=2, seed=0)
@example(sizes=[400, 20], rows=64, seed=0)
@example(sizes=[0, 30, 0, 1], rows=31, seed=5)
def test_each_document_is_read_once_an_epoch(sizes: list[int], rows: int, seed: int | None) -> None:
    rows = min(rows, sum(sizes))
    opened: list[int] = []
    times = -(-3 * sum(sizes) // rows)
    of_rows = drawn_by(stream_of(sizes, opened), rows, seed, times)
    every = sorted(f"{shard}:{count + 1}" for shard, size in enumerate(sizes) for count in range(size))
    for epoch in range(3):
        assert sorted(drawn.document.id for row in of_rows for drawn in row if drawn.epoch == epoch) == every
    in_order = [row[time].epoch for time in range(times) for row in of_rows]
    assert 0 not in in_order[sum(sizes) + rows :]  # rows that draw equally often begin an epoch together
    assert len(opened) <= 4 * len(sizes), "the rows of a process share one reader"
    if seed is not None and sum(sizes) > 20 and len(sizes) > 1:  # one shard is read in order, and rotated by chance
        orders = [[drawn.document.id for row in of_rows for drawn in row if drawn.epoch == epoch] for epoch in (0, 1)]
        assert orders[0] != orders[1] or rows == 1


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) >= 5),
    seed=st.sampled_from([None, 3]),
    served=st.lists(st.integers(0, 4), min_size=1, max_size=150),
    most_waiting=st.sampled_from([0, 200, 1 << 28]),
    data=st.data(),
)
def test_a_row_gets_the_same_whatever_other_rows_a_process_serves_and_wherever_it_resumes(
    sizes: list[int], seed: int | None, served: list[int], most_waiting: int, data: st.DataObject
) -> None:
    expected = drawn_by(stream_of(sizes), 5, seed, len(served))
    stream = stream_of(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed, "MOST_WAITING", most_waiting)
        had, places = dict.fromkeys(range(5), 0), dict[int, Any]().fromkeys(range(5))
        resumed = data.draw(st.sets(st.integers(0, len(served))))
        for time, row in enumerate(served):
            if time == 0 or time in resumed:
                mine = set(served) if time % 2 else {row}  # other rows than before
                drawers = {key: stream.documents(key, 5, seed, places[key]) for key in sorted(mine)}
            if row not in drawers:
                drawers[row] = stream.documents(row, 5, seed, places[row])
            drawn = next(drawers[row])
            assert drawn == expected[row][had[row]]
            had[row] += 1
            places[row] = json.loads(json.dumps(drawn.position))


@pytest.mark.parametrize("rows", [1, 6, 64])
def test_an_epoch_of_tokens_reads_shards_of_unequal_size_once(rows: int, tmp_path: Path) -> None:
    for shard, size in enumerate((400, 20, 0)):
        write_jsonl(tmp_path / f"{shard}.jsonl.gz", range(shard * 1000, shard * 1000 + size))
    numbers = [*range(400), *range(1000, 1020)]
    tokens = sum(len(TOKENIZER.encode(story(number))) + 2 for number in numbers)
    loaders = loaders_of(training_on(tmp_path), rows, 1)
    seen = Counter(id for row in sample_ids(loaders, tokens // (32 * rows)) for id in row)
    close(loaders)
    assert len(seen) >= 420 - rows
    assert sum(count > 1 for count in seen.values()) <= rows
    small = sum(count for id, count in seen.items() if id.startswith("1."))
    assert small / seen.total() == pytest.approx(20 / 420, abs=0.02)


def test_a_stream_of_the_hub_is_dealt_and_resumed_like_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(streamed, "DOCUMENTS_PER_STATE", 7)
    for shard, size in enumerate((40, 5, 23)):
        write_jsonl(tmp_path / f"{shard}.jsonl", range(shard * 100, shard * 100 + size))
    files = [str(tmp_path / f"{shard}.jsonl") for shard in range(3)]
    dataset = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    of_rows = drawn_by(stream_of_dataset(dataset, "hub", "text"), 4, 0, 40)
    texts = [drawn.document.text for row in of_rows for drawn in row if drawn.epoch == 1]
    numbers = [shard * 100 + number for shard, size in enumerate((40, 5, 23)) for number in range(size)]
    assert sorted(texts) == sorted(map(story, numbers))
    for row in range(4):
        place = json.loads(json.dumps(of_rows[row][10 + row].position))
        for form in (place, as_lists(place, shuffled=True)):  # earlier versions wrote lists
            again = stream_of_dataset(dataset, "hub", "text").documents(row, 4, 0, form)
            assert [next(again).document for _ in range(20)] == [
                drawn.document for drawn in of_rows[row][11 + row : 31 + row]
            ]


def test_a_checkpoint_of_version_0_1_which_gave_shards_to_rows_is_refused(c4: Training) -> None:
    stream = cast(ShardedStream, open_path(str(c4.dataset_path), "text"))
    with pytest.raises(CheckpointError, match=r"is from version 0\.1, .*exclude_from_loading=dataloader"):
        stream.documents(0, 3, 0, [0, 0, 4, None])


def test_a_bad_line_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "one.jsonl.gz", range(30))
    lines = gzip.decompress(path.read_bytes()).splitlines()
    path.write_bytes(gzip.compress(b"\n".join([*lines[:10], b"{broken", *lines[10:]])))
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.WARNING, "torchtitan"):
        rows = sample_ids(loaders_of(training_on(path), 1, 1), 80)
    assert len(set(rows[0])) == len(rows[0]) > 12
    assert ".gz:11 (not JSON" in caplog.text


def test_held_out_documents_are_not_trained_on(tmp_path: Path) -> None:
    for shard in range(4):
        write_jsonl(tmp_path / f"{shard}.json.gz", range(shard * 300, shard * 300 + 300), words=5)
    training = training_on(tmp_path, dataset="c4", seq_len=64)
    trained = {id for row in sample_ids(loaders_of(training, 2, 1, hold_out=True), 220) for id in row}
    validation = Validation(enabled=True, local_batch_size=1, steps=3)
    batches = build_validation_loader(validation, training, TOKENIZER, dp_rank=0, dp_size=1)
    validated = {id for batch in batches for ids in batch.sample_ids or [] for id in ids}
    assert len(trained) > 600 and validated and not trained & validated


def test_rows_share_the_held_out_documents_and_the_others_without_a_gap_or_a_repeat() -> None:
    """Of few held-out documents, rows would get none if they were dealt together with the others."""
    whole = stream_of([700, 300, 500])
    drawn = {}
    for held_out, rows in ((True, 7), (False, 6)):
        stream = cast(ShardedStream, split_held_out(whole, held_out, ""))
        of_rows = drawn_by(stream, rows, 0, 1500 * 2 // rows)
        ids = [[draw.document.id for row in of_rows for draw in row if draw.epoch == epoch] for epoch in (0, 1)]
        assert len(ids[0]) == len(set(ids[0])) and {draw.document.id for row in of_rows for draw in row} == set(ids[0])
        assert all(row[0].epoch == 0 for row in of_rows)
        drawn[held_out] = set(ids[0])
    assert 7 <= len(drawn[True]) < 30 and not drawn[True] & drawn[False]
    assert len(drawn[True] | drawn[False]) == 1500


def test_what_is_held_out_does_not_depend_on_where_the_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held_out(path: str) -> set[str]:
        source = split_held_out(open_path(path, "text"), True, "")
        drawn = takewhile(lambda drawn: drawn.epoch == 0, cast(StreamedSource, source).documents(0, 1, None, None))
        return {draw.document.id for draw in drawn if draw.document.text}

    (tmp_path / "a").mkdir()
    for shard in range(2):
        write_jsonl(tmp_path / "a" / f"{shard}.json.gz", range(shard * 400, shard * 400 + 400), words=5)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    first, relative, copied = map(held_out, (str(tmp_path / "a"), "a", "b"))
    assert first and first == relative == copied


def test_other_records_under_the_same_name_are_other_data(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "0.json.gz", range(100))
    source = open_path(str(tmp_path), "text")
    write_jsonl(tmp_path / "0.json.gz", range(300))
    assert open_path(str(tmp_path), "text").fingerprint != source.fingerprint
    with pytest.raises(DataError, match=r"0\.json\.gz was changed while the run is reading it"):
        next(cast(StreamedSource, source).documents(0, 1, None, None))


def test_errors_name_what_is_wrong(tmp_path: Path, c4: Training) -> None:
    with pytest.raises(DataError, match="no text column 'body'; its columns are text, url"):
        loaders_of(training_on(c4.dataset_path, text_column="body"), 1, 1)
    with pytest.raises(DataError, match=r"too few documents \(125\) for the 300 rows"):
        loaders_of(training_on(c4.dataset_path), 300, 1)[0].next()
    (tmp_path / "plain.json.gz").write_text("not compressed")
    with pytest.raises(DataError, match=r"plain\.json\.gz cannot be read"):
        loaders_of(training_on(tmp_path / "plain.json.gz"), 1, 1)


@pytest.mark.full
def test_a_shard_damaged_in_the_middle_is_an_error_of_a_later_batch(tmp_path: Path) -> None:
    for shard in range(2):
        write_jsonl(tmp_path / f"{shard}.json.gz", range(20_000), words=1)
    second = tmp_path / "1.json.gz"
    second.write_bytes(second.read_bytes()[:-5000])
    loader = loaders_of(training_on(tmp_path, shuffle=False, seq_len=2048), 2, 1)[0]
    with pytest.raises(DataError, match=r"1\.json\.gz cannot be read after line 19,\d+ \(EOFError"):
        for _ in range(200):
            loader.next()


def test_of_the_splits_of_the_hub_the_one_that_is_wanted_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    import datasets

    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)  # `datasets` takes an id for a folder, too
    for number, name in enumerate(("train", "validation", "test")):
        (tmp_path / "owner" / "name").mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / f"owner/name/{name}.jsonl", range(number, number + 1))
    for split_name, text in ((TRAIN, story(0)), (VALIDATION, story(1))):
        assert next(open_hub("owner/name", "text", split_name).documents(0, 1, None, None)).document.text == text
    assert "only its split validation is read; left out: train, test" in log[-1]


def test_a_hub_data_set_that_cannot_be_reached() -> None:
    program = (
        "from torchtitan.config.training import Training\n"
        "from torchtitan.data.datasets import DataOfRun, training_sources\n"
        "from torchtitan.errors import CheckpointError, DataError\n"
        "for training in (Training(dataset='c4'), Training(dataset_path='nobody/nothing-like-this')):\n"
        "    try: training_sources(training, DataOfRun(1, 2048, False))\n"
        "    except DataError as error: print(error)\n"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=60).stdout.splitlines()
    assert len(printed) == 2
    assert (
        printed[0].startswith("training.dataset: ") and "allenai/c4/en" in printed[0] and "HF_HUB_OFFLINE" in printed[0]
    )
    assert printed[1].startswith("training.dataset_path: there is no file or folder nobody/nothing-like-this")


def test_shards_are_read_from_their_place_not_from_their_start(c4: Training) -> None:
    """The state that `datasets` provides is enough to resume: earlier documents are not returned again."""
    stream = open_path(str(c4.dataset_path), "text")
    assert isinstance(stream, ShardedStream)
    drawn = stream.documents(0, 1, 0, None)
    before = [next(drawn) for _ in range(30)]
    again = stream.documents(0, 1, 0, json.loads(json.dumps(before[-1].position)))
    assert [next(again).document for _ in range(5)] == [next(drawn).document for _ in range(5)]


def resident() -> int:
    """The largest memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst", ""])
@pytest.mark.parametrize("place", [0, 10])
def test_a_line_beyond_the_bound_is_an_error_that_names_it(
    suffix: str, place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zstandard

    monkeypatch.setattr(LONGEST, "size", LONGEST.size)
    lines = [json.dumps({"text": story(number)}) for number in range(60)]
    lines[place] = json.dumps({"text": "x" * 2_000_000})
    content = "\n".join(lines).encode()
    codecs = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}
    (path := tmp_path / f"a.jsonl{suffix}").write_bytes(codecs.get(suffix, bytes)(content))
    with pytest.raises(DataError, match=r"(line|record) (1|11) has more than 1 MB, which training\.max_document_mb"):
        sample_ids(loaders_of(training_on(path, shuffle=False, max_document_mb=1), 1, 1), 99)
    sample_ids(loaders_of(training_on(path, shuffle=False), 1, 1), 99)


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_a_value_of_a_table_beyond_the_bound_is_an_error(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(LONGEST, "size", LONGEST.size)
    table = pa.table({"text": [story(number) for number in range(9)] + ["x" * 2_000_000]})
    if format == "parquet":
        pq.write_table(table, tmp_path / "a.parquet")
    else:
        with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
            writer.write_table(table)
    training = training_on(tmp_path / f"a.{format}", shuffle=False, max_document_mb=1)
    with pytest.raises(DataError, match=r"a\.(parquet|arrow): a record has more than 1 MB"):
        sample_ids(loaders_of(training, 1, 1), 99)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_small_file_of_gigabytes_takes_little_memory(suffix: str, tmp_path: Path) -> None:
    import zstandard

    path = tmp_path / f"a.jsonl{suffix}"
    if suffix == ".gz":
        with gzip.open(path, "wb", compresslevel=1) as file:
            file.write(b'{"text": "')
            for _ in range(400):
                file.write(b"x" * (1 << 20))
    else:
        with zstandard.open(path, "wb") as file:
            file.write(b'{"text": "')
            for _ in range(1500):
                file.write(b"x" * (1 << 20))
    assert path.stat().st_size < 4 << 20
    open_path(str(write_jsonl(tmp_path / "b.jsonl.gz", range(9))), "text")
    before = resident()
    with pytest.raises(DataError, match=r"line 1 has more than 100 MB"):
        open_path(str(path), "text")
    assert resident() - before < 400 << 20


@pytest.mark.usefixtures("waits_are_said")
def test_blank_lines_are_passed_over_aloud(tmp_path: Path, log: list[str]) -> None:
    (path := tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n" * 200_000, 1))
    with pytest.raises(DataError, match="it has no lines"):
        open_path(str(path), "text")
    assert any("a.jsonl.gz: looking for its first records: " in line for line in log)


def test_a_stream_of_the_hub_goes_on_at_every_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """datasets 5.0.0 began a shard again at the second."""
    import datasets

    monkeypatch.setattr(streamed, "DOCUMENTS_PER_STATE", 7)
    files = [str(write_jsonl(tmp_path / f"{shard}.jsonl", range(shard * 100, shard * 100 + 60))) for shard in range(2)]
    dataset = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    expected = [drawn.document.text for drawn in drawn_by(stream_of_dataset(dataset, "hub", "text"), 1, 0, 100)[0]]
    read: list[str] = []
    place = None
    for _ in range(4):
        drawn = [*islice(stream_of_dataset(dataset, "hub", "text").documents(0, 1, 0, place), 25)]
        place = json.loads(json.dumps(drawn[-1].position))
        read += [each.document.text for each in drawn]
    assert read == expected


def test_xz_with_several_streams_and_padding_is_read_whole(tmp_path: Path) -> None:
    lines = [json.dumps({"text": story(number)}).encode() + b"\n" for number in range(60)]
    first, second = lzma.compress(b"".join(lines[:30])), lzma.compress(b"".join(lines[30:]))
    path = tmp_path / "a.jsonl.xz"
    for padding in (0, 4, 512, 5000):
        path.write_bytes(first + b"\0" * padding + second + b"\0" * padding)
        source = open_path(str(path), "text")
        assert [document.text for document in documents_in(source)] == [story(number) for number in range(60)]
    path.write_bytes(first + second[:-8])
    with pytest.raises(DataError, match=r"a\.jsonl\.xz cannot be read after line \d+ \(EOFError"):
        list(documents_in(open_path(str(path), "text")))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf_16_is_refused_and_loses_nothing(name: str, encoding: str, tmp_path: Path) -> None:
    content = "".join(json.dumps({"text": story(number)}) + "\n" for number in range(9)).encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(DataError, match=r"is not UTF-8, but looks like UTF-16 or UTF-32; rewrite it"):
        open_path(str(tmp_path / name), "text")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_later_file_in_utf_16_loses_nothing_either(suffix: str, tmp_path: Path) -> None:
    for name, encoding in (("a", "utf-8"), ("b", "utf-16-le")):
        lines = "".join(json.dumps({"text": story(number)}) + "\n" for number in range(30)).encode(encoding)
        (tmp_path / f"{name}{suffix}").write_bytes(gzip.compress(lines) if suffix.endswith(".gz") else lines)
    with pytest.raises(DataError, match=rf"b{suffix} is not UTF-8, but looks like UTF-16"):
        list(documents_in(open_path(str(tmp_path), "text")))
