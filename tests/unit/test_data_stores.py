"""Data in object stores: the same documents in the same order as on disks, read by blocks that are kept."""

import gzip
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import (
    TOKENIZER,
    close,
    global_batches,
    loaders_of,
    story,
    training_on,
    write_jsonl,
    write_megatron,
    write_metadata,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from object_store import S3Server

from torchtitan.config.training import Training, Validation
from torchtitan.data import blocks, records
from torchtitan.data.blocks import StoreFile
from torchtitan.data.datasets import parse_entry, validation_sources, vocabulary_of
from torchtitan.data.hashes import HASHES
from torchtitan.data.paths import open_path
from torchtitan.data.sources import KEPT, LISTED, Stamp, say_once
from torchtitan.data.transient import is_transient
from torchtitan.errors import DataError
from torchtitan.files import any_path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterable[Path]:
    """Nothing is kept from other tests; blocks have 1,000 bytes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(blocks, "BLOCK", 1000)
    monkeypatch.setattr(records, "WORTH_KEEPING", 0)
    monkeypatch.setattr(KEPT, "most", 10**9)
    forget()
    yield tmp_path / "cache" / "torchtitan" / "blocks"
    forget()


def forget() -> None:
    """As if another process came."""
    blocks.block.cache_clear()
    say_once.cache_clear()
    LISTED.clear()


def upload(folder: Path, uri: str) -> str:
    for file in folder.rglob("*"):
        if file.is_file():
            place = any_path(f"{uri}/{file.relative_to(folder).as_posix()}")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_bytes())
    return uri


def write_kind(file_format: str, folder: Path) -> None:
    """Two files of some kilobytes, of each kind that is read."""
    folder.mkdir(parents=True)
    for number, texts in enumerate(([story(n) for n in range(40)], [story(n) for n in range(40, 60)])):
        table = pa.table({"id": range(len(texts)), "text": texts})
        place = folder / str(number)
        match file_format:
            case "jsonl":
                write_jsonl(place.with_suffix(".jsonl"), range(40 * number, 60))
            case "array":
                place.with_suffix(".json").write_text(json.dumps([{"text": text} for text in texts]))
            case "gz":
                lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
                place.with_suffix(".jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
            case "txt":
                place.with_suffix(".txt").write_text("\n".join(texts))
            case "parquet":
                pq.write_table(table, place.with_suffix(".parquet"), row_group_size=7)
            case "arrow":
                new = pa.ipc.new_stream if number else pa.ipc.new_file
                with new(str(place.with_suffix(".arrow")), table.schema) as writer:
                    writer.write_table(table, max_chunksize=7)


def rows_of(path: Path | str, steps: int, state: dict[str, Any] | None = None) -> tuple[list[Any], dict[str, Any]]:
    """The batches of 2 ranks from `state` on, and the state after them, but for what only disks are asked for."""
    loaders = loaders_of(training_on(path, seq_len=64), 4, 2)
    for loader in loaders:
        if state:
            loader.load_state_dict(state)
    batches = [batch.tolist() for batch in global_batches(loaders, steps)]
    after = loaders[0].merge_states([loader.state_dict() for loader in loaders])
    close(loaders)
    return batches, {key: value for key, value in after.items() if key != "content"}


@pytest.mark.full
@pytest.mark.parametrize("file_format", ["jsonl", "array", "gz", "txt", "parquet", "arrow"])
def test_a_run_goes_on_with_the_copy_in_a_bucket(file_format: str, s3: S3Server, tmp_path: Path) -> None:
    write_kind(file_format, local := tmp_path / "data")
    uri = upload(local, "s3://bucket/data")
    begun, state = rows_of(local, 4)
    rest, end = rows_of(local, 4, state)
    assert rows_of(uri, 4) == (begun, state)
    assert rows_of(uri, 4, state) == (rest, end)


@pytest.mark.parametrize("scheme", ["s3://bucket", "memory://bucket"])
def test_a_uri_names_a_file_a_folder_or_a_pattern(scheme: str, s3: S3Server, tmp_path: Path) -> None:
    folder = tmp_path / "d [1]"
    for name in ("train/b.jsonl", "train/a.jsonl", ".hidden/c.jsonl", "_SUCCESS", "README.md", "validation/v.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / name, range(30))
    uri = upload(folder, f"{scheme}/d [1]")
    for end in ("", "/", "/train", "/train/a.jsonl", "/.hidden/c.jsonl"):
        local, remote = open_path(f"{folder}{end}", "text"), open_path(f"{uri}{end}", "text")
        assert local.fingerprint == remote.fingerprint, end
        assert [local[n] for n in (0, 29)] == [remote[n] for n in (0, 29)]  # type: ignore[index]
    for pattern, files in {"*/*.jsonl": 3, "tr*": 2, "**/[ab].jsonl": 2, "train/?.jsonl": 2}.items():
        upload(folder, f"{scheme}/plain")
        shutil.copytree(folder, tmp_path / "plain", dirs_exist_ok=True)
        local, remote = open_path(f"{tmp_path}/plain/{pattern}", "text"), open_path(f"{scheme}/plain/{pattern}", "text")
        assert local.fingerprint == remote.fingerprint, pattern
        assert len(getattr(local, "files")) == files  # noqa: B009
    for missing in ("/missing", "/missing.jsonl", "/train/*.txt"):
        with pytest.raises(DataError, match=r"cannot be read \(there is no such file or folder in the object store\)"):
            open_path(f"{uri}{missing}", "text")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(0, 5000), ranges=st.lists(st.tuples(st.integers(0, 5500), st.integers(0, 5500)), max_size=5))
def test_any_part_of_a_file_is_what_is_there(size: int, ranges: list[tuple[int, int]]) -> None:
    place = any_path("memory://bucket/part.bin")
    place.write_bytes(content := os.urandom(size))
    file = StoreFile(place, Stamp.now(place))
    opened = file.stamp.open(place)
    assert len(file) == size
    for start, stop in ranges:
        assert bytes(file[start:stop]) == content[start:stop]
        opened.seek(start)
        assert opened.read(max(stop - start, 0)) == content[start : max(stop, start)]
    opened.seek(0)
    assert opened.read() == content


def gets(s3: S3Server) -> int:
    return sum(method == "GET" for method, _ in s3.requests)


def test_blocks_are_read_once_by_the_processes_of_a_machine(s3: S3Server, cache: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", range(30))
    uri = upload_file(tmp_path / "a.jsonl", "s3://bucket/a.jsonl")
    size = (tmp_path / "a.jsonl").stat().st_size
    source = open_path(uri, "text")
    expected = [source[number].text for number in range(30)]  # type: ignore[index]
    assert gets(s3) <= -(-size // 1000) + 2  # and two listings
    assert sorted(file.stat().st_size for file in cache.iterdir())[-1] == 1000
    s3.requests.clear()
    assert [source[number].text for number in range(30)] == expected  # type: ignore[index]
    assert not s3.requests  # not one for each document, either
    program = f"""
        from torchtitan.data import blocks
        from torchtitan.data.paths import open_path
        blocks.BLOCK = 1000
        source = open_path({uri!r}, "text")
        print([source[number].text for number in range(30)])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{expected}\n"
    assert gets(s3) <= 2


def upload_file(file: Path, uri: str) -> str:
    any_path(uri).write_bytes(file.read_bytes())
    return uri


def test_blocks_beyond_the_bound_are_removed_the_oldest_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KEPT, "most", 10_000)
    place = any_path("memory://bucket/large.bin")
    place.write_bytes(content := os.urandom(30_000))
    file = StoreFile(place, Stamp.now(place))
    for number in range(30):
        assert bytes(file[number * 1000 : number * 1000 + 5]) == content[number * 1000 : number * 1000 + 5]
        blocks.block.cache_clear()
        assert bytes(file[:5]) == content[:5]  # always used, so never the oldest
        blocks.block.cache_clear()
        for kept in cache.iterdir():  # clocks of file systems are coarse
            if not kept.name.endswith("-0"):
                os.utime(kept, ns=(number, number + int(kept.name.rpartition("-")[2])))
    names = {int(kept.name.rpartition("-")[2]) for kept in cache.iterdir()}
    assert 0 in names and 29 in names and 4 <= len(names) <= 11
    (cache / next(kept.name for kept in cache.iterdir())).write_bytes(b"cut off")
    assert bytes(file[:]) == content


@pytest.mark.parametrize("folder", ["/dev/null/cache", None])
def test_without_a_cache_blocks_are_in_memory(
    folder: str | None, cache: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    if folder:
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
    else:
        monkeypatch.setattr(KEPT, "most", 0)
    place = any_path("memory://bucket/a.bin")
    place.write_bytes(content := os.urandom(3000))
    file = StoreFile(place, Stamp.now(place))
    assert bytes(file[:]) == content == bytes(file[:])
    assert sum("kept in memory only" in line for line in log) == bool(folder)
    assert not cache.exists() or not [*cache.iterdir()]


def test_a_file_that_changes_while_it_is_read_is_an_error(s3: S3Server, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", range(30))
    uri = upload_file(tmp_path / "a.jsonl", "s3://bucket/a.jsonl")
    source = open_path(uri, "text")
    content = (tmp_path / "a.jsonl").read_bytes()
    any_path(uri).write_bytes(content.replace(b"Story", b"STORY"))
    shutil.rmtree(tmp_path / "cache")
    blocks.block.cache_clear()
    with pytest.raises(DataError, match=r"a\.jsonl was changed while the run is reading it"):
        source[20]  # type: ignore[index]
    assert open_path(uri, "text")[20].text.startswith("STORY")  # type: ignore[index]


def test_a_failure_that_may_pass_is_told_from_others(s3: S3Server, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    write_jsonl(tmp_path / "a.jsonl", range(60))
    source: Any = open_path(upload_file(tmp_path / "a.jsonl", "s3://bucket/a.jsonl"), "text")
    shutil.rmtree(tmp_path / "cache")
    blocks.block.cache_clear()
    for status, passing in ((503, True), (403, False)):
        s3.fault = lambda method, path, status=status: status  # type: ignore[misc]
        with pytest.raises(DataError, match=r"s3://bucket/a.jsonl cannot be read \(\w+") as raised:
            source[40]
        assert isinstance(raised.value.__cause__, OSError)
        assert is_transient(raised.value) == passing
    s3.fault = lambda method, path: 0
    assert source[40].text.startswith("Story 40")


def test_a_large_table_is_refused_and_one_without_a_cache_is_not(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kind("parquet", tmp_path / "data")
    uri = upload(tmp_path / "data", "s3://bucket/data")
    monkeypatch.setattr(KEPT, "most", 3000)
    LISTED.clear()
    with pytest.raises(DataError, match=r"training\.cache_gb allows 0\.0; raise it, or rewrite"):
        open_path(uri, "text")
    monkeypatch.setattr(KEPT, "most", 10**9)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    assert len(open_path(uri, "text")) == 60  # type: ignore[arg-type]
    any_path(f"{uri}/0.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"0\.parquet is not a Parquet file, or is damaged"):
        open_path(uri, "text")


@pytest.mark.usefixtures("waits_are_said")
def test_a_store_that_does_not_answer_is_waited_for_aloud_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    s3fs = pytest.importorskip("s3fs")
    monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name, value in (("ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}"), ("MAX_ATTEMPTS", "2")):
            monkeypatch.setenv(f"AWS_{name}", value)
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            monkeypatch.setenv(f"AWS_{name}", "test")
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(DataError, match="the object store does not answer: check the network"):
            open_path("s3://bucket/a.jsonl", "text")
        s3fs.S3FileSystem.clear_instance_cache()
    assert any("s3://bucket/a.jsonl: waiting for the object store" in line for line in log)


@pytest.mark.full
def test_threads_and_spawned_processes_read_what_was_opened_here(s3: S3Server, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", range(60))
    source: Any = open_path(upload_file(tmp_path / "a.jsonl", "s3://bucket/a.jsonl"), "text")
    shutil.rmtree(tmp_path / "cache")
    blocks.block.cache_clear()
    with ThreadPoolExecutor(8) as threads:
        read = list(threads.map(source.__getitem__, range(60)))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        assert list(processes.map(source.__getitem__, range(60))) == read


@pytest.mark.parametrize(
    ("entry", "parsed"),
    [
        ("s3://bucket/a b/c:0.5", ("s3://bucket/a b/c", "", "", 0.5)),
        ("s3://bucket/c#body@web:2", ("s3://bucket/c", "body", "web", 2)),
        ("s3://key@bucket/c:1", ("s3://key@bucket/c", "", "", 1)),
        ("hf://datasets/o/n@main/c.jsonl:1", ("hf://datasets/o/n@main/c.jsonl", "", "", 1)),
        ("hf://datasets/o/n@main:1", ("hf://datasets/o/n@main", "", "", 1)),
        ("hf://datasets/o/n@main/c#body@web:1", ("hf://datasets/o/n@main/c", "body", "web", 1)),
    ],
)
def test_the_uri_of_an_entry_stays_whole(entry: str, parsed: tuple[str, str, str, float]) -> None:
    assert parse_entry(entry) == parsed


def test_validation_in_a_bucket_is_read_with_the_bound_of_training(tmp_path: Path) -> None:
    place = any_path("memory://bucket/v.jsonl")
    place.write_bytes(write_jsonl(tmp_path / "v.jsonl", range(9)).read_bytes())
    validation = Validation(dataset_path="memory://bucket/v.jsonl")
    [weighted] = validation_sources(validation, Training(cache_gb=0.5), 2)
    assert weighted.name == "memory://bucket/v.jsonl" and KEPT.most == 500_000_000


def test_folders_that_a_console_has_made(s3: S3Server) -> None:
    boto3 = pytest.importorskip("boto3")
    put = partial(boto3.client("s3").put_object, Bucket="bucket")
    for key, content in (("made/", b""), ("made/sub/", b""), ("made/sub/a.jsonl", b'{"text": "words"}\n')):
        put(Key=key, Body=content)
    for uri in ("s3://bucket/made", "s3://bucket/made/"):
        source: Any = open_path(uri, "text")
        assert source.files == ["sub/a.jsonl"] and source[0].text == "words"
    put(Key="odd//a.jsonl", Body=b"{}")
    with pytest.raises(DataError, match="has an empty part"):
        open_path("s3://bucket/odd", "text")


def test_a_damaged_shard_in_a_store_is_found_once_it_was_read(s3: S3Server, tmp_path: Path) -> None:
    (folder := tmp_path / "tokens").mkdir()
    for name in ("a.bin", "b.bin"):
        write_megatron(folder / name, [[5, number, 2] for number in range(60)])
    write_metadata(folder)
    content = bytearray((folder / "b.bin").read_bytes())
    content[-1] ^= 1
    (folder / "b.bin").write_bytes(content)
    HASHES.forget()
    source: Any = open_path(
        upload(folder, "s3://bucket/tokens"), "text", vocabulary=vocabulary_of(TOKENIZER, Training())
    )
    assert HASHES.wait() and HASHES.verified == 0
    assert source[0].tokens.tolist() == [5, 0, 2]
    assert HASHES.wait() and HASHES.verified == 2
    assert source[60].tokens.tolist() == [5, 0, 2]
    with pytest.raises(DataError, match=r"s3://bucket/tokens/b\.bin does not have the SHA-256"):
        HASHES.wait()
