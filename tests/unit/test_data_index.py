"""The index of records: right wherever files are cut, made once by all processes together, kept in the cache folder."""

import io
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import TOKENIZER, write_jsonl, write_megatron, write_metadata
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchtitan.config.training import Training
from torchtitan.data import records
from torchtitan.data.datasets import vocabulary_of
from torchtitan.data.hashes import HASHES
from torchtitan.data.paths import open_path
from torchtitan.data.records import JsonLines, Records, json_offsets, record_offsets
from torchtitan.data.sources import DataFiles
from torchtitan.errors import DataError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every index is kept, and files are searched in parts of 100 bytes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(records, "WORTH_KEEPING", 0)
    monkeypatch.setattr(records, "PART_BYTES", 100)
    return tmp_path / "cache" / "torchtitan" / "records"


def records_of(folder: Path, files: list[str], arrays: Sequence[int] = ()) -> Records:
    data = DataFiles(folder, files)
    return Records(data, "records", partial(json_offsets, data, arrays), arrays)


@settings(deadline=None)
@given(
    contents=st.lists(st.text(st.sampled_from("ab\n"), max_size=60), min_size=1, max_size=5),
    array=st.integers(0, 5),
    part_size=st.integers(1, 80),
    chunk=st.integers(1, 20),
    kept=st.booleans(),
)
@example(contents=["aaaaaaaaaaaa"], array=5, part_size=5, chunk=3, kept=True)
def test_offsets_mark_lines_wherever_files_are_cut(
    tmp_path_factory: pytest.TempPathFactory, contents: list[str], array: int, part_size: int, chunk: int, kept: bool
) -> None:
    folder = tmp_path_factory.mktemp("files")
    expected = []
    for number, content in enumerate(contents):
        text = json.dumps([{"text": content}] * 3) if number == array else content
        (folder / str(number)).write_text(text)
        starts = np.cumsum([0, *map(len, text.splitlines(keepends=True))])
        expected.append([1, *(1 + n * (len(text) // 3) for n in (1, 2)), len(text)] if number == array else starts)
    files = [str(number) for number in range(len(contents))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(records, "PART_BYTES", part_size)
        patch.setattr(records, "CHUNK", chunk)
        patch.setattr(records, "WORTH_KEEPING", 0 if kept else 1 << 30)
        for _ in range(2):
            arrays = [array] if array < len(files) else []
            actual = record_offsets(records_of(folder, files, arrays))
            assert [list(map(int, offsets)) for offsets in actual] == [list(map(int, offsets)) for offsets in expected]


def test_another_start_reads_the_index_and_a_changed_file_is_searched_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", range(30))
    assert len(JsonLines(tmp_path, ["a.jsonl"], "text")) == 30
    [kept] = cache.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(records, "line_offsets", None)
        source = JsonLines(tmp_path, ["a.jsonl"], "text")
        assert len(source) == 30 and source[29].text.startswith("Story 29:")
        assert not source.offsets[0].flags.writeable  # mapped, not read into memory
    write_jsonl(path, range(100, 130))  # as many bytes as before, or other ones
    os.utime(path, ns=(1, 1))
    assert JsonLines(tmp_path, ["a.jsonl"], "text")[0].text.startswith("Story 100:")
    assert list(cache.iterdir()) == [kept]


@pytest.mark.parametrize("damage", [b"", b"12345678", b"x" * 80])
def test_a_damaged_index_or_what_a_killed_process_left_is_made_again(
    damage: bytes, cache: Path, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "a.jsonl", range(30))
    JsonLines(tmp_path, ["a.jsonl"], "text")
    [kept] = cache.iterdir()
    identity = records_of(tmp_path, ["a.jsonl"]).identity
    kept.write_bytes(damage)
    working = kept.with_name(f"{kept.name}-{identity}")
    working.mkdir()
    (working / "0.new").write_bytes(b"begun by a process that was killed")
    assert len(JsonLines(tmp_path, ["a.jsonl"], "text")) == 30
    assert list(cache.iterdir()) == [kept]


@pytest.mark.full
def test_processes_search_a_part_each(cache: Path, tmp_path: Path) -> None:
    for number in range(3):
        write_jsonl(tmp_path / f"{number}.jsonl", range(100))
    program = f"""
        import time
        from pathlib import Path
        from torchtitan.data import records
        from torchtitan.data.records import JsonLines
        records.WORTH_KEEPING, records.PART_BYTES = 0, 1000
        searched, search = 0, records.line_offsets
        def line_offsets(file, start, stop):
            global searched
            searched += stop - start
            time.sleep(0.01)
            return search(file, start, stop)
        records.line_offsets = line_offsets
        print(input())
        print(len(JsonLines(Path({str(tmp_path)!r}), ["0.jsonl", "1.jsonl", "2.jsonl"], "text")), searched)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(3)
    ]
    for process in processes:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")  # answered once the imports are done
        process.stdout.readline()
    ended = [list(map(int, process.communicate(timeout=60)[0].split())) for process in processes]
    assert [documents for documents, _ in ended] == [300] * 3
    size = sum((tmp_path / f"{number}.jsonl").stat().st_size for number in range(3))
    assert sum(searched for _, searched in ended) == size
    assert sum(searched > 0 for _, searched in ended) > 1
    assert len(list(cache.iterdir())) == 1


def test_without_a_cache_folder_each_start_searches_and_says_so_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    write_jsonl(tmp_path / "a.jsonl", range(30))
    for _ in range(2):
        assert len(JsonLines(tmp_path, ["a.jsonl"], "text")) == 30
    assert sum("the result cannot be kept" in line for line in log) == 1


def test_a_file_that_changes_while_it_is_searched_is_an_error(cache: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", range(30))
    searched = records_of(tmp_path, ["a.jsonl"])
    write_jsonl(path, range(31))
    with pytest.raises(DataError, match="was changed while the run is reading it"):
        record_offsets(searched)


def replace_unnoticed(path: Path, content: bytes) -> None:
    """By other content of the same size and time."""
    before = path.stat()
    assert before.st_size == len(content) and path.read_bytes() != content
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").replace(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def text_of(path: Path) -> list[str]:
    source: Any = open_path(str(path), "text", vocabulary=vocabulary_of(TOKENIZER, Training()))
    documents = [source[number] for number in range(len(source))]
    return [document.text or str(document.tokens.tolist()) for document in documents]


def parquet(texts: Sequence[str]) -> bytes:
    pq.write_table(pa.table({"text": texts}), sink := io.BytesIO(), compression="none")
    return sink.getvalue()


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("a.jsonl", [b'{"text": "a"}\n{"text": "bcd"}\n', b'{"text": "abc"}\n{"text": "d"}\n']),
        ("a.json", [b'[{"text": "a"}, {"text": "bcd"}]', b'[{"text": "abc"}, {"text": "d"}]']),
        ("a.parquet", [parquet(["one", "two"]), parquet(["uno", "due"])]),
        ("a.bin", [np.array(ids, "<u2").tobytes() for ids in ([5, 2, 6, 7, 2], [5, 6, 2, 7, 2])]),
    ],
)
def test_a_file_replaced_by_one_of_its_size_and_time_is_read_anew(
    name: str, contents: list[bytes], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (path := tmp_path / name).write_bytes(contents[0])
    before = text_of(path)
    replace_unnoticed(path, contents[1])
    after = text_of(path)
    (tmp_path / "other").mkdir()
    (other := tmp_path / "other" / name).write_bytes(contents[1])
    assert before != after == text_of(other)


def test_a_hash_is_not_kept_for_a_file_replaced_by_one_of_its_size_and_time(cache: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "tokens").mkdir()
    path = write_megatron(folder / "a.bin", [[5, 6, 2]] * 9)
    write_metadata(folder)
    for content in (None, path.read_bytes()[:-4] + b"\7\0\2\0"):
        HASHES.forget()  # as in another process
        if content:
            replace_unnoticed(path, content)
        text_of(path)
        if not content:
            assert HASHES.wait()
    with pytest.raises(DataError, match=r"a\.bin does not have the SHA-256"):
        HASHES.wait()
