"""Weighted mixtures: fractions of tokens, and the same guarantees as for one dataset."""

import json
from collections import Counter
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from data_helpers import TOKENIZER, close, global_batches, loaders_of, sample_ids, story, training_on, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import all_equal

from torchtitan.config.training import Training
from torchtitan.data import Loader
from torchtitan.data.datasets import parse_entry
from torchtitan.data.packing import Corpus, Row, SourceStream, Weighted
from torchtitan.data.sources import StreamedSource
from torchtitan.errors import CheckpointError, ConfigError, DataError


def mixture(tmp_path: Path, *weights: float, suffix: str = "") -> Training:
    entries = []
    for number, weight in enumerate(weights):
        # documents of very different lengths: weights are fractions of tokens, not of documents
        words = 10 * (number + 1)
        path = write_jsonl(tmp_path / f"{number}.jsonl{suffix}", range(100 * number, 100 * number + 90), words)
        entries.append(f"{path}:{weight}")
    return training_on(None, dataset_mixture=entries)


@pytest.mark.parametrize("rows", [1, 4, 12])
def test_each_source_gets_its_share_of_the_tokens_from_the_first_step(rows: int, tmp_path: Path) -> None:
    entries = []
    for number, weight in enumerate((0.6, 0.3, 0.1)):
        words = (1, 20, 400)[number]  # the source with the lowest weight has the longest documents
        path = write_jsonl(tmp_path / f"{number}.jsonl", range(100 * number, 100 * number + 90), words)
        entries.append(f"{path}:{weight}")
    loader = loaders_of(training_on(None, dataset_mixture=entries), rows, 1)[0]
    seen = Counter[str]()
    for step in range(1, 101):
        for batch in loader.next():
            # a window has one source, so all its documents are from the same file
            seen.update(ids[0].split(".")[0] for ids in batch.sample_ids or [])
        if step * rows >= 48 and step in (4, 12, 48, 100):
            shares = [seen[str(number)] / seen.total() for number in range(3)]
            assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.02 if step == 100 else 0.04)
    close([loader])


@settings(deadline=None)
@given(weights=st.lists(st.floats(0.05, 1), min_size=2, max_size=4), rows=st.integers(1, 64))
def test_shares_are_right_to_a_few_windows_at_any_time(weights: list[float], rows: int) -> None:
    """Over the windows of all rows: multiples of the golden ratio spread evenly."""
    sources = [Weighted(cast(StreamedSource, None), "", weight) for weight in weights]
    corpus = Corpus(sources, TOKENIZER, rows, 32, None, stream=cast(type[SourceStream], lambda *_: None))
    every = [Row(corpus, number) for number in range(rows)]
    counts = Counter[int]()
    for _ in range(-(-1000 // rows)):
        for row in every:
            counts[row.source] += 1
            row.windows += 1
        for place, weight in enumerate(weights):
            assert abs(counts[place] - counts.total() * weight / sum(weights)) < 5


def test_sources_of_equal_length_are_read_in_different_orders(tmp_path: Path) -> None:
    loader = loaders_of(mixture(tmp_path, 1, 1), 1, 1)[0]
    ids = [id.split(":") for id in sample_ids([loader], 200)[0]]
    first, second = (
        list(dict.fromkeys(line for file, line in ids if file == f"{number}.jsonl"))[:20] for number in (0, 1)
    )
    assert len(second) == 20 and first != second
    close([loader])


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_layouts_and_resumes_do_not_change_the_order(suffix: str, tmp_path: Path) -> None:
    training = mixture(tmp_path, 2, 1, suffix=suffix)
    expected = global_batches(loaders_of(training, 4, 1), 60)
    two = loaders_of(training, 4, 2)
    got = global_batches(two, 25)
    state = json.loads(json.dumps(Loader.merge_states([loader.state_dict() for loader in two])))
    close(two)
    four = loaders_of(training, 4, 4)
    for loader in four:
        loader.load_state_dict(state)
    got += global_batches(four, 35)
    assert all_equal(got, expected)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_epochs_of_every_kind_of_source(packing: str, tmp_path: Path) -> None:
    """Files, a stream, and token shards: how often every row has read its documents of each, of the batch that was
    given, not of those read ahead; for any number of ranks, also after a resume, and one by a checkpoint of before."""
    count, rows = 24, 4
    write_jsonl(tmp_path / "file.jsonl", range(count))
    write_jsonl(tmp_path / "stream.jsonl.gz", range(100, 100 + count), 30)
    tokens = [token for number in range(count) for token in (*TOKENIZER.encode(story(200 + number)), TOKENIZER.eos_id)]
    (tmp_path / "shard.bin").write_bytes(np.array(tokens, "<u2").tobytes())
    names = ["file.jsonl", "stream.jsonl.gz", "shard.bin"]
    entries = [f"{tmp_path / name}@{name[:4]}:{weight}" for name, weight in zip(names, (3, 2, 1), strict=True)]
    training = training_on(None, dataset_mixture=entries, token_dtype="uint16", packing=packing, seq_len=64)

    def all_epochs(loaders: list[Loader]) -> list[int]:
        return [min(of) for of in zip(*(loader.epochs.values() for loader in loaders), strict=True)]

    alone = loaders_of(training, rows, 1)
    assert alone[0].epochs == {"file": 0, "stre": 0, "shar": 0}
    expected, states = [], []
    seen: dict[tuple[int, str], list[str]] = {}  # the documents of a row and source, in order
    for _ in range(200):
        batches = alone[0].next()
        expected.append(all_epochs(alone))
        states.append(json.loads(json.dumps(Loader.merge_states([alone[0].state_dict()]))))
        for row, ids in enumerate(ids for batch in batches for ids in batch.sample_ids or []):
            documents = seen.setdefault((row, ids[0].split(":")[0]), [])
            documents += [id for id in ids if id and id not in documents[-1:]]
        if packing == "concatenate":  # else documents are drawn long before
            for name, epoch in zip(names, expected[-1], strict=True):
                drawn = [len(seen.get((row, name), ())) for row in range(rows)]
                # A document that gives only the last label is drawn, but not named.
                assert epoch in {
                    min(max(number - 1, 0) * rows // count for number in drawn),
                    min(drawn) * rows // count,
                }
    assert min(expected[-1]) >= 1 and expected[-1][0] >= 3
    assert expected == sorted(expected, key=sum)  # they never fall
    two, four = loaders_of(training, rows, 2), loaders_of(training, rows, 4)
    for loader in four:
        loader.load_state_dict(states[89])
    assert all_epochs(four) == expected[89]
    for loaders, steps in ((two, expected[:60]), (four, expected[90:])):
        for step in steps:
            global_batches(loaders, 1)
            assert all_epochs(loaders) == step
    for position in states[120]["positions"].values():
        del position["epochs"]
    four[0].load_state_dict(states[120])
    assert all(epoch in (0, position["epoch"]) for epoch in four[0].epochs.values())
    close([*alone, *two, *four])


def test_registered_names_can_be_mixed_with_paths(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "stories.jsonl", range(40))
    training = training_on(None, dataset_mixture=["python_stdlib:0.5", f"{path}:0.5"], seq_len=512)
    loaders = loaders_of(training, 2, 1)
    ids = {id for row in sample_ids(loaders, 60) for id in row}
    assert any(id.startswith("stories.jsonl:") for id in ids) and any(".py" in id for id in ids)
    assert loaders[0].description.startswith(f"python_stdlib 50%, {path} 50%")


def test_another_weight_is_other_data(tmp_path: Path) -> None:
    state = loaders_of(mixture(tmp_path, 1, 1), 2, 1)[0].state_dict()
    with pytest.raises(CheckpointError, match=r"training\.dataset"):
        loaders_of(mixture(tmp_path, 1, 2), 2, 1)[0].load_state_dict(state)


@pytest.mark.parametrize(
    "entry", ["python_stdlib", "python_stdlib:", ":1", "python_stdlib:0", "a:-1", "a:nan", "a:inf"]
)
def test_an_entry_that_makes_no_sense(entry: str) -> None:
    with pytest.raises(DataError, match=r"^training\.dataset_mixture: .*is not `name or path:weight`"):
        loaders_of(training_on(None, dataset_mixture=["python_stdlib:1", entry]), 1, 1)


@pytest.mark.parametrize(
    ("entry", "fields"),
    [
        ("a.jsonl:0.5", ("a.jsonl", "", "")),
        ("a.jsonl@web:0.5", ("a.jsonl", "", "web")),
        ("a.jsonl#page.text@web:0.5", ("a.jsonl", "page.text", "web")),
        ("user@host/a#1.jsonl:0.5", ("user@host/a#1.jsonl", "", "")),  # exists
        ("user@host/*.jsonl:0.5", ("user@host/*.jsonl", "", "")),
        ("user@host/*.jsonl#body@web:0.5", ("user@host/*.jsonl", "body", "web")),
        ("user#1/*.jsonl:0.5", ("user#1/*.jsonl", "", "")),
        ("user@host/a#*:0.5", ("user@host/a#*", "", "")),
        ("user@nowhere/a.jsonl:0.5", ("user@nowhere/a.jsonl", "", "")),  # no file, rather than those of user
        ("./other@host:0.5", ("./other@host", "", "")),
        ("/nowhere/jo@corp.example:0.5", ("/nowhere/jo@corp.example", "", "")),
        ("./user@web:0.5", ("./user", "", "web")),
        ("s3://bucket/jo@corp/:0.5", ("s3://bucket/jo@corp/", "", "")),
    ],
)
def test_sources_can_be_named(
    entry: str, fields: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("user", "user@host", "user#1"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a#1.jsonl").touch()
    assert parse_entry(entry) == (*fields, 0.5)


def test_an_entry_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^training\.dataset_mixture: there is no file or folder"):
        loaders_of(training_on(None, dataset_mixture=[f"{tmp_path}/missing.jsonl:1"]), 1, 1)


def test_a_source_too_small_is_named(tmp_path: Path) -> None:
    big = write_jsonl(tmp_path / "big.jsonl", range(90))
    small = write_jsonl(tmp_path / "small.jsonl", range(2), words=1)
    loader = loaders_of(training_on(None, dataset_mixture=[f"{big}:1", f"{small}:1"]), 2, 1)[0]
    with pytest.raises(DataError, match=r"small\.jsonl is too small"):
        for _ in range(50):
            loader.next()


def test_one_unknown_word_is_a_path_that_is_not_there() -> None:
    with pytest.raises((DataError, ConfigError), match="there is no file or folder pythonstdlib"):
        loaders_of(training_on(None, dataset_mixture=["pythonstdlib:1"]), 1, 1)


def test_a_column_of_its_own_for_a_source(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": {"text": story(n)}}) + "\n" for n in range(50)))
    write_jsonl(tmp_path / "b#c.jsonl", range(100, 150))  # a "#" in the name
    entries = [f"{tmp_path}/a.jsonl#body.text:1", f"{tmp_path}/b#c.jsonl:1"]
    rows = sample_ids(loaders_of(training_on(None, dataset_mixture=entries), 1, 1), 20)
    assert {id.split(":")[0] for id in rows[0]} == {"a.jsonl", "b#c.jsonl"}
