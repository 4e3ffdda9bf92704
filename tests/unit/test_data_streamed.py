"""Streamed data: the same code path as C4 from the Hub, here with compressed shards on disk."""

import gzip
import json
import logging
import os
import shutil
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import cast

import pytest
import torch
from data_helpers import TOKENIZER, close, global_batches, loaders_of, sample_ids, story, training_on, write_jsonl
from runs import all_equal

from torchtitan.config.training import Training, Validation
from torchtitan.data import Loader, build_validation_loader
from torchtitan.data.paths import open_path
from torchtitan.data.sources import StreamedSource
from torchtitan.data.streamed import ShardedStream
from torchtitan.data.strided import split
from torchtitan.errors import DataError
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
        for loader in loaders if state else []:
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


def test_what_is_held_out_does_not_depend_on_where_the_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held_out(path: str) -> set[str]:
        source = split(open_path(path, "text"), True, "")
        drawn = takewhile(lambda drawn: drawn.epoch == 0, cast(StreamedSource, source).documents(0, 1, None, None))
        return {one.document.id for one in drawn if one.document.text}

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
    with pytest.raises(DataError, match="too few documents for the 300 rows"):
        loaders_of(training_on(c4.dataset_path), 300, 1)[0].next()
    (tmp_path / "plain.json.gz").write_text("not compressed")
    with pytest.raises(DataError, match=r"plain\.json\.gz cannot be read"):
        loaders_of(training_on(tmp_path / "plain.json.gz"), 1, 1)


def test_a_shard_damaged_in_the_middle_is_an_error_of_a_later_batch(tmp_path: Path) -> None:
    for shard in range(2):
        write_jsonl(tmp_path / f"{shard}.json.gz", range(20_000), words=1)
    second = tmp_path / "1.json.gz"
    second.write_bytes(second.read_bytes()[:-5000])
    loader = loaders_of(training_on(tmp_path, shuffle=False, seq_len=2048), 2, 1)[0]
    with pytest.raises(DataError, match="cannot continue reading shard 1"):
        for _ in range(200):
            loader.next()


def test_a_hub_data_set_that_cannot_be_reached() -> None:
    program = (
        "from torchtitan.config.training import Training\n"
        "from torchtitan.data.datasets import training_sources\n"
        "from torchtitan.errors import DataError\n"
        "for training in (Training(dataset='c4'), Training(dataset_path='nobody/nothing-like-this')):\n"
        "    try: training_sources(training, 1, False)\n"
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
