"""Files and folders of each kind, and the messages about unusable ones."""

import bz2
import gzip
import itertools
import json
import logging
import lzma
import os
import re
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from data_helpers import TOKENIZER, close, global_batches, loaders_of, sample_ids, story, training_on, write_jsonl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchtitan.config.training import Training, Validation
from torchtitan.data import DATASETS
from torchtitan.data.datasets import documents_of, held_out_documents
from torchtitan.data.packing import permute_index
from torchtitan.data.paths import open_path
from torchtitan.data.sources import TextFiles, python_stdlib
from torchtitan.errors import ConfigError, DataError
from torchtitan.files import any_path
from torchtitan.logging import logger


def texts(path: Path | str, text_column: str = "text") -> list[str]:
    source: Any = open_path(str(path), text_column)
    assert hasattr(source, "__len__")
    return [source[index].text for index in range(len(source))]


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


# Text files


@settings(deadline=None)  # for busy machines
@given(content=st.text(st.sampled_from("ab\n\r é☃😀\u2028"), max_size=400), pieces=st.integers(1, 20))
@example(content="a" * 100, pieces=3)  # the last line begins in the first segment
def test_segments_of_a_file_join_to_the_file(
    tmp_path_factory: pytest.TempPathFactory, content: str, pieces: int
) -> None:
    folder = tmp_path_factory.mktemp("text")
    content *= 20  # segments are 1 KiB or more
    (folder / "one.txt").write_bytes(content.encode())
    cut = TextFiles(folder, ["one.txt"]).cut(pieces)
    documents = [cut[index] for index in range(len(cut))]
    assert "".join(document.text for document in documents) == content
    for document in documents[1:]:
        assert not document.starts
    ends = [document.ends for document in documents if document.text]
    assert ends == [False] * (len(ends) - 1) + [True] * bool(ends)


def test_a_line_longer_than_a_segment_is_cut_at_a_character(tmp_path: Path) -> None:
    content = "x" + "é☃😀" * 50_000
    (tmp_path / "line.txt").write_text(content, encoding="utf-8")
    cut = TextFiles(tmp_path, ["line.txt"]).cut(3)
    assert "".join(cut[index].text for index in range(len(cut))) == content
    assert max(len(cut[index].text.encode()) for index in range(len(cut))) < 3 * (1 << 16)


def test_one_text_file_feeds_every_row(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("".join(f"Line {line} of the book.\n" for line in range(5000)))
    batches = global_batches(loaders_of(training_on(tmp_path / "book.txt"), 16, 2), 3)
    assert len({tuple(row.tolist()) for batch in batches for row in batch}) == 48


def test_a_folder_is_read_with_its_subfolders_and_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "inside" / "c.txt").write_text("third")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden.jsonl").write_text("{}")
    (tmp_path / "_SUCCESS").write_text("")
    assert texts(tmp_path) == ["first", "second", "third"]


def test_links_to_folders_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    for name in ("data", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "a.txt").write_text("first")
    (tmp_path / "elsewhere" / "b.txt").write_text("second")
    (tmp_path / "data" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "data")
    assert texts(tmp_path / "data") == ["first", "second"]


def test_python_stdlib_is_source_code_without_tests() -> None:
    source = python_stdlib()
    ids = [source[index].id for index in range(len(source))]
    assert {"json/decoder.py", "os.py"} <= set(ids)
    assert not any("/test/" in id or "site-packages" in id for id in ids)
    assert sum(source.sizes) > 5_000_000


# JSONL


def test_jsonl_files_are_read_by_line_whatever_the_line_ends(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"line {n}\nand \u2028 more"}, ensure_ascii=False) for n in range(3)]
    (tmp_path / "a.jsonl").write_bytes("\r\n".join(lines[:2]).encode())
    (tmp_path / "b.json").write_bytes((lines[2] + "\n").encode())
    assert texts(tmp_path) == [f"line {n}\nand \u2028 more" for n in range(3)]


def test_a_bad_line_is_skipped_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "some_bad.jsonl", range(30))
    lines = path.read_bytes().splitlines()
    bad = [b"{not json", b'{"other": 1}', b'{"text": 5}', b"[1]", b'{"text": "\xff\xfe"}', b'{"text": null}']
    path.write_bytes(b"\n".join(lines[:20] + bad + lines[20:]))
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.WARNING, "torchtitan"):
        rows = sample_ids(loaders_of(training_on(path, shuffle=False), 1, 1), 130)
    assert rows[0][:31] == [f"some_bad.jsonl:{line}" for line in [*range(1, 21), *range(27, 37), 1]]
    assert "skipped some_bad.jsonl:21 (not JSON" in caplog.text
    assert "skipped some_bad.jsonl:22 (no text in column 'text')" in caplog.text
    assert caplog.text.count("skipped some_bad.jsonl:") == 5 < len(bad)


def test_half_a_surrogate_pair_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a \\ud83d b"}\n{"text": "\\ud83d\\ude00"}\n')
    assert texts(tmp_path / "a.jsonl") == ["a \ufffd b", "😀"]


def test_the_text_column_can_have_another_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "here", "text": "not here"}\n')
    assert texts(path, "content") == ["here"]


@pytest.mark.usefixtures("datasets_cache")
def test_parquet(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "parquet"
    folder.mkdir()
    for shard in range(2):
        numbers = range(shard * 10, shard * 10 + 10)
        pq.write_table(pa.table({"n": list(numbers), "text": [story(n) for n in numbers]}), folder / f"{shard}.parquet")
    assert texts(folder) == [story(number) for number in range(20)]
    ids = sample_ids(loaders_of(training_on(folder), 2, 1), 100)
    assert {id for row in ids for id in row} == {f"parquet[{index}]" for index in range(20)}
    with pytest.raises(DataError, match=r"no text column 'body'; its columns are n \(int64\), text \(string\)"):
        open_path(str(folder), "body")
    with pytest.raises(DataError, match="no text column 'n'"):
        open_path(str(folder), "n")
    null = tmp_path / "null [1]*.parquet"  # no pattern
    pq.write_table(pa.table({"text": ["a", None]}), null)
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.WARNING, "torchtitan"):
        assert texts(null) == ["a", ""]
    assert f"skipped {null.name}[1]" in caplog.text


@pytest.mark.usefixtures("datasets_cache")
def test_every_form_of_text_in_parquet_and_arrow(tmp_path: Path) -> None:
    values = ["one", "naïve ☃", None]
    columns = {
        "a": pa.array(values),
        "b": pa.array(values).dictionary_encode(),
        "c": pa.array(values, pa.large_string()),
        "d": pa.array([value and value.encode() for value in values]),
        "e": pa.nulls(3),
        "f": pa.array([], pa.string()),
        "g": pa.array([], pa.null()),
    }
    if hasattr(pa, "string_view"):
        columns["h"] = pa.array(values, pa.string_view())
    for name, column in columns.items():
        table = pa.table({"text": column, "n": list(range(len(column)))})
        (tmp_path / name).mkdir()
        pq.write_table(table, tmp_path / name / "x.parquet")
        with pa.ipc.new_stream(str(tmp_path / name / "stream.arrow"), table.schema) as stream:
            stream.write_table(table)
        with pa.ipc.new_file(str(tmp_path / name / "feather.arrow"), table.schema) as feather:
            feather.write_table(table, max_chunksize=2)
    expected = [*values[:2], ""]
    for name in set(columns) - {"e", "f", "g"}:
        for file in ("x.parquet", "stream.arrow", "feather.arrow"):
            assert texts(tmp_path / name / file) == expected, (name, file)
    for suffix in ("parquet", "arrow"):
        copies = len(list(tmp_path.glob(f"?/*.{suffix}"))) // len(columns)
        everything = dict.fromkeys(columns, expected * copies) | {"e": [""] * 3 * copies, "f": [], "g": []}
        assert texts(f"{tmp_path}/?/*.{suffix}") == [text for name in columns for text in everything[name]]
        with pytest.raises(DataError, match="has no rows"):
            open_path(str(tmp_path / "f" / f"*.{suffix}"), "text")
        with pytest.raises(DataError, match="has no text in column 'text', only nulls"):
            open_path(str(tmp_path / "e" / f"*.{suffix}"), "text")


@pytest.mark.usefixtures("datasets_cache")
def test_what_save_to_disk_has_written(tmp_path: Path, log: list[str]) -> None:
    import datasets

    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"text": [story(n) for n in range(20)], "n": list(range(20))})
    data.save_to_disk(tmp_path / "data", num_shards=3)
    assert texts(tmp_path / "data") == [story(n) for n in range(20)]
    data.select([3, 1]).save_to_disk(tmp_path / "selected")
    assert texts(tmp_path / "selected") == [story(3), story(1)]
    splits = datasets.DatasetDict({"train": data.select(range(15)), "test": data.select(range(15, 20))})
    splits.save_to_disk(tmp_path / "parts")
    assert texts(tmp_path / "parts") == [story(n) for n in range(15)]
    assert "left out: test/data-00000-of-00001.arrow" in log[-1]
    with pytest.raises(DataError, match=r"no text column 'body'; its columns are text \(string\), n \(int64\)"):
        open_path(str(tmp_path / "data"), "body")
    source = open_path(str(tmp_path / "data"), "text")
    os.truncate(tmp_path / "data" / "data-00000-of-00003.arrow", 100)
    with pytest.raises(DataError, match="was changed while the run is reading it"):
        source[0]  # type: ignore[index]


# Compression and byte order marks

COMPRESSORS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("suffix", ["", *COMPRESSORS])
def test_lines_are_skipped_alike_whatever_compresses_them(suffix: str, tmp_path: Path, log: list[str]) -> None:
    mark = b"\xef\xbb\xbf"
    lines = [mark + b'{"text": "first"}', b"", b'{"text": "\xff"}', mark + '{"text": "zwölf\u2028"}'.encode(), b"{"]
    content, compress = b"\n".join([*lines, b""]), COMPRESSORS.get(suffix, bytes)
    file = tmp_path / f"a.jsonl{suffix}"
    file.write_bytes(compress(content[:20]) + compress(content[20:]))  # as two joined files
    read = [document.text for document in documents_of(str(tmp_path), "text") if document.text]
    assert read == ["first", "zwölf\u2028"]
    skipped = [line.partition(" (")[0].rpartition(":")[2] for line in log if "skipped a.jsonl" in line]
    assert skipped == ["3", "5"]
    if suffix:
        file.write_bytes(compress(content)[:-5])
        with pytest.raises(DataError, match=rf"a\.jsonl{suffix} cannot be read after line \d+ \(EOFError"):
            list(documents_of(str(tmp_path), "text"))


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    (tmp_path / "array.json").write_bytes(mark + b'[{"text": "first"},\n {"text": "second"}]')
    assert texts(tmp_path / "array.json") == ["first", "second"]
    (tmp_path / "a.txt").write_bytes(mark + b"some text\n" * 1000)
    pieces = TextFiles(tmp_path, ["a.txt"]).cut(5)
    assert "".join(piece.text for piece in pieces) == "some text\n" * 1000  # type: ignore[attr-defined]


# Splits


@pytest.mark.parametrize(
    ("files", "trained", "validated"),
    [
        ("train-0.jsonl train-1.jsonl validation-0.jsonl test-0.jsonl", r"train-\d", "validation-0"),
        ("train.jsonl valid.jsonl extra.jsonl", "train", "valid"),
        ("train/0.jsonl dev/0.jsonl test/0.jsonl", "train/0", "dev/0"),
        ("en/c4-train.00000-of-00002.json en/c4-validation.00000-of-00001.json", ".*train.*", ".*validation.*"),
        ("wiki.train.tokens wiki.valid.tokens wiki.test.tokens", "wiki.train", "wiki.valid"),
        ("T-train.txt T-eval.txt notes.txt", "T-train", "T-eval"),
        ("a.jsonl b.jsonl test.jsonl", "[ab]", "test"),
        ("val-0.jsonl val-1.jsonl", ".*", ".*"),
        ("latest.jsonl contest.jsonl", ".*", ".*"),
        ("train.py model.py tests/test_model.py", ".*", ".*"),  # code
    ],
)
def test_of_a_folder_of_splits_the_one_that_is_wanted_is_read(
    files: str, trained: str, validated: str, tmp_path: Path, log: list[str]
) -> None:
    def matching(pattern: str) -> list[str]:
        return sorted(name for name in files.split() if re.fullmatch(pattern, name.rpartition(".")[0]))

    for name in files.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) if "json" in name else name)
    assert texts(tmp_path) == matching(trained)
    aside = sorted(set(files.split()) - set(matching(trained)))
    assert [f"left out: {', '.join(aside)};" in line for line in log] == [True] * bool(aside)
    [(_, documents)] = held_out_documents(Validation(dataset_path=str(tmp_path)), Training())
    assert [document.text for document in documents] == matching(validated)
    # A file or a pattern is read whatever its name is.
    assert texts(f"{tmp_path}/**/*.*") == sorted(files.split())
    assert texts(tmp_path / files.split()[-1]) == [files.split()[-1]]


def test_what_spark_and_others_leave_beside_data_is_not_read(tmp_path: Path) -> None:
    data, others = ["day=1/part-0.jsonl", "part-1.jsonl"], ["_temporary/0/t/part-0.jsonl", "_delta_log/0.json"]
    others += ["_SUCCESS", "_started_1", "day=1/_committed_1", ".part-1.jsonl.crc"]
    for name in (*data, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    assert texts(tmp_path) == data
    store = any_path("memory://spark-output")
    for name in (*data, *others):
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_text(json.dumps({"text": name}))
    assert texts("memory://spark-output") == data


def test_a_pattern_names_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/1.jsonl", "a/2.jsonl", "b/3.jsonl", "c[1].jsonl", "d[1]/4.jsonl", "d1/5.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    assert texts(f"{tmp_path}/[ab]") == ["a/1.jsonl", "a/2.jsonl", "b/3.jsonl"]
    assert texts(f"{tmp_path}/a/?.jsonl") == ["a/1.jsonl", "a/2.jsonl"]
    assert texts(tmp_path / "c[1].jsonl") == ["c[1].jsonl"]
    assert texts(f"{tmp_path}/d[1]/*") == ["d[1]/4.jsonl"]  # the folder, which exists
    monkeypatch.chdir(tmp_path)
    assert texts("*/3*") == ["b/3.jsonl"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert texts("~/b/*.jsonl") == ["b/3.jsonl"]
    with pytest.raises(DataError, match=r"^training\.dataset_path: no file matches e\*\.jsonl"):
        loaders_of(training_on("e*.jsonl"), 1, 1)


# Unusable data


@pytest.mark.parametrize(
    "name", ["shard.tar", "table.csv", "picture.png", "weights.pt", "utf16.txt", "no_suffix", "nul.md"]
)
def test_what_is_not_text_is_refused_by_name(name: str, tmp_path: Path) -> None:
    content = {
        "table.csv": b"text,n\nhello,1\n",
        "picture.png": b"\x89PNG\r\n\x1a\n",
        "utf16.txt": "text".encode("utf-16-le"),
        "nul.md": b"text and a zero \0",
    }.get(name, bytes(range(256)) * 100)
    if name == "shard.tar":
        (tmp_path / "a.txt").write_text("text")
        with tarfile.open(tmp_path / name, "w") as archive:
            archive.add(tmp_path / "a.txt", "a.txt")
    else:
        (tmp_path / name).write_bytes(content)
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(
            DataError, match=rf"^training\.dataset_path: {tmp_path / name} is not UTF-8 text: .*rewrite"
        ):
            loaders_of(training_on(path), 1, 1)


def test_what_is_not_a_file_is_refused_by_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", range(3))
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", tmp_path, f"{tmp_path}/*.jsonl"):
        with pytest.raises(DataError, match=r"pipe\.jsonl cannot be read \(it is a named pipe, not a file\)"):
            open_path(str(path), "text")
    with pytest.raises(DataError, match=r"/dev/zero cannot be read \(it is a device, not a file\)"):
        open_path("/dev/zero", "text")
    for path in ("nowhere://bucket/a.jsonl", "https://localhost/a.jsonl"):
        for training in (training_on(path), training_on(None, dataset_mixture=[f"{path}:1"])):
            with pytest.raises(DataError, match=rf"^training\.dataset_(path|mixture): '{path}' cannot be read: "):
                loaders_of(training, 1, 1)


def test_a_file_without_records_does_not_make_its_folder_unreadable(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", range(3))
    (tmp_path / "b.jsonl").write_text("\n")
    (tmp_path / "c.json").write_text("[]")
    (tmp_path / "d.jsonl").write_text("\n" * 50 + json.dumps({"text": "late"}))
    assert [text for text in texts(tmp_path) if text] == [story(0), story(1), story(2), "late"]


def test_a_truncated_array_takes_no_time(tmp_path: Path) -> None:
    text = 'He said "yes". ' * 20_000
    content = json.dumps([{"text": "a"}, {"text": text}])
    (tmp_path / "a.json").write_text(content[: len(content) // 2])
    assert texts(tmp_path / "a.json")[0] == "a"


def test_bad_paths(tmp_path: Path) -> None:
    empty_file, empty_folder, latin1 = tmp_path / "empty.txt", tmp_path / "empty", tmp_path / "latin1.txt"
    empty_file.touch()
    empty_folder.mkdir()
    latin1.write_bytes("naïve\n".encode("latin1") * 200)
    path: Any
    for path, message in [
        (tmp_path / "missing", "there is no file or folder"),
        ("missing/file.jsonl", "there is no file or folder missing/file.jsonl"),
        (empty_file, "is empty"),
        (empty_folder, "is empty"),
    ]:
        with pytest.raises(DataError, match=rf"^training\.dataset_path: .*{message}"):
            loaders_of(training_on(path), 1, 1)
    with pytest.raises(DataError, match=r"latin1\.txt is not UTF-8 text: byte 2 cannot be decoded"):
        loaders_of(training_on(latin1, shuffle=False), 1, 1)
    latin1.write_bytes(b"a" * 20_000 + b"\xe9" * 10)
    with pytest.raises(DataError, match=r"latin1\.txt is not UTF-8 text: byte 20000 cannot be decoded"):
        loaders_of(training_on(latin1, shuffle=False), 1, 1)[0].next()


def test_of_a_folder_the_kind_that_the_data_are_is_read(tmp_path: Path, log: list[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", range(2))
    (tmp_path / "README.md").write_text("about " * 1000)
    (tmp_path / "notes.txt").write_text("beside\n")
    assert texts(tmp_path) == [story(0), story(1)]
    assert log == [f"INFO {tmp_path}: reading 1 JSONL file; skipped: README.md, notes.txt"]
    books = tmp_path / "books"
    books.mkdir()
    (books / "a.txt").write_text("long " * 100)
    (books / "b.md").write_text("short")
    assert texts(books) == ["long " * 100]


def test_a_folder_with_records_of_several_kinds(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", range(20))
    write_jsonl(tmp_path / "b.jsonl.gz", range(20))
    with pytest.raises(DataError, match=r"several kinds \(1 JSONL, 1 compressed JSONL\)"):
        open_path(str(tmp_path), "text")


def test_an_array_of_records(tmp_path: Path) -> None:
    records = [{"text": f'with ] and }} and "quotes" {n}', "more": [{"a": [n]}]} for n in range(3)]
    (tmp_path / "a.json").write_text(json.dumps(records, indent=1))
    (tmp_path / "b.json").write_text(json.dumps(records))
    assert texts(tmp_path / "a.json") == texts(tmp_path / "b.json") == [record["text"] for record in records]
    (tmp_path / "c.json").write_text('[{"body": 1}]')
    with pytest.raises(DataError, match=r"no text column 'text'; its columns are body"):
        open_path(str(tmp_path / "c.json"), "text")


@pytest.mark.usefixtures("datasets_cache")
def test_a_column_within_a_column(tmp_path: Path) -> None:
    records = [{"a": {"b": "inner"}}, {"a.b": "by its name"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert texts(tmp_path / "a.jsonl", "a.b") == ["inner", "by its name"]
    pq.write_table(pa.table({"a": [{"b": "inner", "c": 1}]}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet", "a.b") == ["inner"]
    with pytest.raises(DataError, match=r"no text column 'a\.c'"):
        open_path(str(tmp_path / "a.parquet"), "a.c")


@pytest.mark.usefixtures("datasets_cache")
def test_records_that_no_parser_bears_are_skipped(tmp_path: Path, log: list[str]) -> None:
    nested = "[" * 100_000 + "]" * 100_000
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": ' + nested + "}\n")
    assert texts(tmp_path / "a.jsonl") == ["good", ""]
    strings = pa.array([b"good", b"\xff\xfe"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": strings}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["good", ""]
    assert any("a.jsonl:2 (not JSON: nested too deeply)" in line for line in log)
    assert any("a.parquet[1] (not UTF-8" in line for line in log)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_file_that_is_changed_while_it_is_read(name: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / name, range(200))
    size = path.stat().st_size
    loader = loaders_of(training_on(path), 2, 1)[0]
    loader.next()
    os.truncate(path, 100)
    with pytest.raises(DataError, match=rf"{name} was changed .* \(it had {size:,} bytes, now 100\); restore it"):
        for _ in range(500):
            loader.next()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"body": "x", "id": 1}\n', "no text column 'text'; its columns are body, id: set training.text_column"),
        ('["x", "y"]\n', "not JSONL, one JSON object per line"),
        ("plain text\n", "not JSONL"),
        ("\n\n", "it has no lines"),
    ],
)
def test_a_jsonl_file_without_text(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        open_path(str(path), "text")


def test_what_is_no_parquet_file(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(DataError, match="not a Parquet file"):
        open_path(str(tmp_path / "a.parquet"), "text")


def test_a_file_that_vanishes_is_an_error_of_the_next_batch(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"Line {line} of the book.\n" for line in range(5000)))
    loader = loaders_of(training_on(path), 2, 1)[0]
    loader.next()
    path.unlink()
    with pytest.raises(DataError, match=r"book\.txt cannot be read \(No such file"):
        for _ in range(5000):
            loader.next()


def test_unknown_data_set_names_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"unknown data set 'pythonstdlib' \(did you mean python_stdlib\?\).*c4"):
        loaders_of(Training(dataset="pythonstdlib", seq_len=8, local_batch_size=1), 1, 1)


def test_a_path_is_read_whatever_built_in_data_set_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.json", range(5))
    rows = sample_ids(loaders_of(training_on(path, dataset="c4", shuffle=False), 1, 1), 10)
    assert rows[0][0] == "data.json:1"


def test_a_data_set_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("mine " * 200)
    DATASETS.register("mine_for_a_test", lambda path, text_column: TextFiles(tmp_path, ["a.txt"]))
    batch = global_batches(loaders_of(training_on(None, dataset="mine_for_a_test", shuffle=False), 1, 1), 1)[0]
    assert "mine mine" in TOKENIZER.decode(batch[0].tolist())


# Order


@settings(deadline=None)  # for busy machines
@given(length=st.integers(1, 2000), key=st.integers(0, 2**64 - 1))
def test_permuted_takes_each_index_to_another(length: int, key: int) -> None:
    assert sorted(permute_index(index, length, key) for index in range(length)) == list(range(length))


def test_permuted_mixes_well() -> None:
    order = [permute_index(index, 10_000, key=7) for index in range(10_000)]
    neighbours = sum(abs(a - b) < 100 for a, b in itertools.pairwise(order))
    assert neighbours < 2 * 10_000 * 200 / 10_000  # about 200 of 10,000 by chance
    assert permute_index(10**11, 10**12, key=7) < 10**12


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
@pytest.mark.parametrize("column", ["input_ids", "tokens", "ids"])
def test_token_ids_in_json(name: str, column: str, tmp_path: Path) -> None:
    """As in Parquet: the columns input_ids and tokens are found, others are named."""
    ids = [[5 + number, 7, 9, TOKENIZER.eos_id] for number in range(30)]
    records = [{"id": str(number), column: tokens} for number, tokens in enumerate(ids)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    content = json.dumps(records) if name == "a.json" else lines
    (tmp_path / name).write_bytes(gzip.compress(content.encode()) if name.endswith("gz") else content.encode())
    chosen = {} if column in ("input_ids", "tokens") else {"text_column": column}
    training = training_on(tmp_path / name, seq_len=4 * 30 - 1, shuffle=False, **chosen)
    [loader] = loaders_of(training, 1, 1)
    [row] = global_batches([loader], 1)[0].tolist()
    close([loader])
    assert row == [token for tokens in ids for token in tokens]
    with pytest.raises(DataError, match="holds token ids, but text is wanted here"):
        list(documents_of(str(tmp_path / name), column))


@pytest.mark.parametrize("value", [[-1, 3], [2**40], [1.5], ["a"], [True], []])
def test_numbers_that_are_no_token_ids(value: list[object], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text((json.dumps({"input_ids": value}) + "\n") * 30)
    with pytest.raises(DataError, match=r"cannot be read \(.*token ids"):
        loaders_of(training_on(tmp_path / "a.jsonl"), 1, 1)
