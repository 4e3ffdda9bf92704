"""The sequence of global batches: the same for every layout, and resumable."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any

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
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import all_equal

from torchtitan.config.training import Training, Validation
from torchtitan.data import Document, Loader, best_fit, build_loader, build_validation_loader, packing
from torchtitan.data.datasets import DataOfRun, documents_of, places_of_sources, training_sources
from torchtitan.data.packing import StridedSource
from torchtitan.errors import CheckpointError, ConfigError, DataError
from torchtitan.protocols import IGNORE_INDEX

ROWS = 8


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "corpus.jsonl", range(60))


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all_equal(first, second)


def saved(loaders: list[Loader]) -> dict[str, Any]:
    return json.loads(json.dumps(Loader.merge_states([loader.state_dict() for loader in loaders])))


@pytest.mark.parametrize("dp_size", [2, 4, 8])
def test_every_layout_sees_the_same_global_batches(corpus: Path, dp_size: int) -> None:
    single, several = (loaders_of(training_on(corpus), ROWS, size) for size in (1, dp_size))
    # 40 steps are several epochs
    assert equal(global_batches(single, 40), global_batches(several, 40))


def test_microbatches_cut_the_rows_of_a_rank_in_order(corpus: Path) -> None:
    whole = loaders_of(training_on(corpus, local_batch_size=8), ROWS, 1)[0].next()
    microbatches = loaders_of(training_on(corpus, local_batch_size=2), ROWS, 1)[0].next()
    assert [len(batch.tokens) for batch in microbatches] == [2, 2, 2, 2]
    assert torch.equal(whole[0].tokens, torch.cat([batch.tokens for batch in microbatches]))
    assert whole[0].tokens.dtype == whole[0].labels.dtype == torch.int64
    assert torch.equal(whole[0].tokens[:, 1:], whole[0].labels[:, :-1])


@pytest.mark.parametrize("dp_size", [1, 4])
def test_another_number_of_ranks_goes_on_where_two_stopped(corpus: Path, dp_size: int) -> None:
    expected = global_batches(loaders_of(training_on(corpus), ROWS, 1), 30)
    two = loaders_of(training_on(corpus), ROWS, 2)
    assert equal(global_batches(two, 7), expected[:7])
    others = loaders_of(training_on(corpus), ROWS, dp_size)
    for loader in others:
        loader.load_state_dict(saved(two))
    assert equal(global_batches(others, 23), expected[7:])


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("kind", ["records", "text", "compressed", "mixture"])
def test_a_checkpoint_with_lists_for_positions_goes_on_with_the_same_batches(
    kind: str, packing: str, shuffle: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_fit, "POOL", 5)
    for name in ("records", "text", "compressed"):
        (tmp_path / name).mkdir()
    for file in range(3):
        numbers = range(50 * file, 50 * file + 50)
        write_jsonl(tmp_path / "records" / f"{file}.jsonl", numbers)
        write_jsonl(tmp_path / "compressed" / f"{file}.jsonl.gz", numbers)
        (tmp_path / "text" / f"{file}.txt").write_text("\n".join(map(story, numbers)))
    mixture = [f"{tmp_path}/records:2", f"{tmp_path}/compressed:1"] if kind == "mixture" else []
    training = training_on(tmp_path / kind, dataset_mixture=mixture, packing=packing, shuffle=shuffle)
    loaders = loaders_of(training, 4, 2)
    for steps in (8, 400):  # within the first epoch, and in a later one
        global_batches(loaders, steps)
        state = saved(loaders)
        assert (max(row["epoch"] for row in state["positions"].values()) > 0) == (steps == 400)
        for row in state["positions"].values():
            row["sources"] = [as_lists(source, shuffle) for source in row["sources"]]
        resumed = loaders_of(training, 4, 1)
        resumed[0].load_state_dict(state)
        assert equal(global_batches(resumed, 12), global_batches(loaders, 12))
        close(resumed)
    close(loaders)


def test_two_resumes_in_one_run(corpus: Path) -> None:
    expected = global_batches(loaders_of(training_on(corpus), ROWS, 1), 30)
    loaders, done, state = loaders_of(training_on(corpus), ROWS, 1), 0, None
    for dp_size, steps in ((1, 9), (2, 5), (4, 16)):
        close(loaders)
        loaders = loaders_of(training_on(corpus), ROWS, dp_size)
        if state:
            for loader in loaders:
                loader.load_state_dict(state)
        assert equal(global_batches(loaders, steps), expected[done : done + steps])
        state, done = saved(loaders), done + steps


def test_a_loader_that_has_run_already_can_be_set_back(corpus: Path) -> None:
    loaders = loaders_of(training_on(corpus), ROWS, 1)
    start = saved(loaders)
    expected = global_batches(loaders, 5)
    loaders[0].load_state_dict(start)
    assert equal(global_batches(loaders, 5), expected)


def test_the_state_is_of_what_was_handed_out_not_of_what_was_read_ahead(corpus: Path) -> None:
    loaders = loaders_of(training_on(corpus), ROWS, 1)
    global_batches(loaders, 3)
    before = saved(loaders)
    time.sleep(0.2)  # enough time to prefetch
    assert saved(loaders) == before
    following = global_batches(loaders, 1)
    again = loaders_of(training_on(corpus), ROWS, 1)
    again[0].load_state_dict(before)
    assert equal(global_batches(again, 1), following)


def test_an_epoch_reads_every_document_once_and_the_next_in_another_order(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", range(48))
    rows = sample_ids(loaders_of(training_on(corpus), 4, 2), 130)
    every = {f"corpus.jsonl:{line}" for line in range(1, 49)}
    first = [row[:12] for row in rows]
    assert {id for row in first for id in row} == every
    assert [row[12:24] for row in rows] != first
    assert {id for row in rows for id in row[12:24]} == every
    unshuffled = sample_ids(loaders_of(training_on(corpus, shuffle=False), 4, 1), 20)
    assert unshuffled[1][:3] == ["corpus.jsonl:2", "corpus.jsonl:6", "corpus.jsonl:10"]


class Numbers:
    """Documents without files; the text is the index."""

    fingerprint = ""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Document:
        return Document(str(index), str(index))


@settings(deadline=None)
@given(length=st.integers(1, 300), rows=st.integers(1, 70), seed=st.sampled_from([None, 0]))
def test_every_epoch_of_all_rows_has_each_document_once(length: int, rows: int, seed: int | None) -> None:
    length += rows
    epochs: dict[int, list[int]] = {}
    for row in range(rows):
        source = StridedSource(Numbers(length), "")
        drawn = list(itertools.islice(source.documents(row, rows, seed, None), 3 * -(-length // rows)))
        resumed = source.documents(row, rows, seed, json.loads(json.dumps(drawn[len(drawn) // 2].position)))
        for draw, again in zip(drawn[len(drawn) // 2 + 1 :], resumed, strict=False):
            assert draw == again
        for draw in drawn:
            epochs.setdefault(draw.epoch, []).append(int(draw.document.id))
    for epoch in (0, 1, 2) if length % rows == 0 else (0, 1):
        assert sorted(epochs[epoch]) == list(range(length))


@pytest.mark.parametrize("length", [64, 65, 71])
def test_without_shuffling_no_document_waits_for_a_long_one_in_its_row(length: int) -> None:
    """Every eighth document is 100 times as long as the others, and there are eight rows."""
    size = {index: 100 if index % 8 == 0 else 1 for index in range(length)}
    rows = [StridedSource(Numbers(length), "").documents(row, 8, None, None) for row in range(8)]
    busy_until, read = [0] * 8, Counter[int]()
    for now in range(10 * sum(size.values()) // 8):
        for row in range(8):
            if busy_until[row] == now:
                index = int(next(rows[row]).document.id)
                read[index] += 1
                busy_until[row] += size[index]
    assert min(read[index] for index in range(length)) >= 5 and max(read.values()) <= 20


def test_an_unshuffled_epoch_of_a_version_before_ends_as_it_began() -> None:
    source = StridedSource(Numbers(20), "")
    rows = [source.documents(row, 4, None, [3, 8 + row]) for row in range(4)]  # it gave a row the same each epoch
    rest = [[int(next(row).document.id) for _ in range(3)] for row in rows]
    assert rest == [[8 + row, 12 + row, 16 + row] for row in range(4)]
    following = [[next(row) for _ in range(5)] for row in rows]
    assert sorted(int(drawn.document.id) for row in following for drawn in row) == list(range(20))
    assert {drawn.epoch for row in following for drawn in row} == {4}


def test_windows_hold_whole_documents_between_bos_and_eos(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", range(10))
    loaders = loaders_of(training_on(corpus, shuffle=False, document_mask=True), 1, 1)
    batches = [loaders[0].next()[0] for _ in range(12)]
    stream = torch.cat([batch.tokens for batch in batches], dim=1)[0].tolist()
    expected: list[int] = []
    for number in range(10):
        expected += [TOKENIZER.bos_id or 0, *TOKENIZER.encode(story(number)), TOKENIZER.eos_id]
    assert stream == expected[: len(stream)]
    # a new number at each BOS, and only there
    for batch in batches:
        assert batch.document_ids is not None
        starts = batch.tokens[0, 1:].eq(TOKENIZER.bos_id or 0).long()
        assert torch.equal(batch.document_ids[0].diff(), starts)
        assert batch.sample_ids is not None and len(batch.sample_ids[0]) == batch.document_ids.max() + 1


def test_ids_are_left_out_unless_needed(corpus: Path) -> None:
    batch = loaders_of(training_on(corpus, record_sample_ids=False, skip_nonfinite=False), ROWS, 1)[0].next()[0]
    assert batch.document_ids is None and batch.sample_ids is None


def test_batches_for_a_gpu_are_in_pinned_memory(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    training = dataclasses.replace(training_on(corpus), document_mask=True)
    loader = build_loader(
        training, TOKENIZER, dp_rank=0, dp_size=1, global_batch_size=8, hold_out=False, pin_memory=True
    )
    for batch in loader.next():
        assert batch.document_ids is not None
        for tensor in (batch.tokens, batch.labels, batch.document_ids):
            assert any(tensor is pinned_tensor for pinned_tensor in pinned)
    loader.close()


def test_seed_and_epoch_choose_the_order(corpus: Path) -> None:
    first, same, other = (global_batches(loaders_of(training_on(corpus, seed=s), ROWS, 1), 3) for s in (1, 1, 2))
    assert equal(first, same) and not equal(first, other)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seq_len": 16}, "training.seq_len (now 16, in the checkpoint 32)"),
        ({"seed": 5}, "training.seed (now 5, in the checkpoint 0)"),
        ({"shuffle": False}, "training.shuffle"),
    ],
)
def test_a_state_of_other_settings_is_refused(corpus: Path, change: dict[str, Any], named: str) -> None:
    state = saved(loaders_of(training_on(corpus), ROWS, 1))
    other = loaders_of(training_on(corpus, **change), ROWS, 1)[0]
    with pytest.raises(CheckpointError) as caught:
        other.load_state_dict(state)
    assert named in str(caught.value)
    assert "--checkpoint.exclude_from_loading=dataloader" in str(caught.value)


def test_a_state_of_other_data_or_batch_is_refused(corpus: Path) -> None:
    state = saved(loaders_of(training_on(corpus), ROWS, 1))
    with pytest.raises(CheckpointError, match=r"training\.global_batch_size .now 4, in the checkpoint 8"):
        loaders_of(training_on(corpus), 4, 1)[0].load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"validation\.enabled"):
        loaders_of(training_on(corpus), ROWS, 1)[0].load_state_dict({**state, "hold_out": True})
    with pytest.raises(CheckpointError, match=r"model\.tokenizer_path"):
        loaders_of(training_on(corpus), ROWS, 1)[0].load_state_dict(
            {**state, "tokenizer": "another", "tokenizer_ids": "others"}
        )
    loaders_of(training_on(corpus), ROWS, 1)[0].load_state_dict({**state, "tokenizer": "another file of the same"})
    half = loaders_of(training_on(corpus), ROWS, 2)[0].state_dict()
    with pytest.raises(CheckpointError, match="rows are missing"):
        loaders_of(training_on(corpus), ROWS, 1)[0].load_state_dict(half)
    write_jsonl(corpus, range(61))
    with pytest.raises(CheckpointError, match=r"training\.dataset"):
        loaders_of(training_on(corpus), ROWS, 1)[0].load_state_dict(state)


def test_the_same_data_elsewhere_are_the_same_data(corpus: Path, tmp_path: Path) -> None:
    state = saved(loaders_of(training_on(corpus), ROWS, 1))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = corpus.rename(elsewhere / corpus.name)
    loaders_of(training_on(moved), ROWS, 1)[0].load_state_dict(state)


def test_rows_that_cannot_be_divided_are_refused(corpus: Path) -> None:
    with pytest.raises(ConfigError, match="make it a multiple of 6"):
        loaders_of(training_on(corpus, local_batch_size=2), ROWS, 3)


def test_more_rows_than_documents(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "few.jsonl", range(3))
    with pytest.raises(DataError, match="3 documents for the 8 rows"):
        loaders_of(training_on(corpus), ROWS, 1)


def test_less_text_than_one_sequence(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "short.jsonl", range(8), words=1)
    loader = loaders_of(training_on(corpus, seq_len=64), ROWS, 1)[0]
    for _ in range(2):  # the second call neither hangs nor succeeds
        with pytest.raises(DataError, match="fewer than one sequence"):
            loader.next()


def test_documents_without_text_are_no_endless_loop(tmp_path: Path) -> None:
    corpus = tmp_path / "empty.jsonl"
    corpus.write_text('{"text": ""}\n' * 20)
    with pytest.raises(DataError, match="0 tokens"):
        loaders_of(training_on(corpus), ROWS, 1)[0].next()


def test_waiting_is_counted_and_a_closed_loader_says_so(corpus: Path) -> None:
    loader = loaders_of(training_on(corpus), ROWS, 1)[0]
    loader.next()
    waited = loader.wait_seconds
    assert waited > 0
    loader.load_state_dict(loader.state_dict())
    assert loader.wait_seconds >= waited
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        loader.next()


def test_python_stdlib_is_ready_without_datasets_and_the_process_ends_in_mid_stream() -> None:
    program = """
        import sys
        from torchtitan.config.training import Training
        from torchtitan.data import DATASETS, load_tokenizer
        assert "torch" not in sys.modules
        from torchtitan.data import build_loader
        training = Training(seq_len=128, local_batch_size=4)
        loader = build_loader(training, load_tokenizer(None), dp_rank=0, dp_size=1, global_batch_size=8, hold_out=True)
        print([tuple(batch.tokens.shape) for batch in loader.next()], "datasets" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "[(4, 128), (4, 128)] False\n"), ended.stderr


def test_validation_holds_other_documents_than_training(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", range(400))
    training = training_on(corpus)
    trained = {id for row in sample_ids(loaders_of(training, 4, 2, hold_out=True), 450) for id in row}
    validation = Validation(enabled=True, local_batch_size=2, steps=5)
    held_out = build_validation_loader(validation, training, TOKENIZER, dp_rank=0, dp_size=1)
    assert len(list(held_out)) == 5
    validated = {id for batch in held_out for ids in batch.sample_ids or [] for id in ids}
    assert len(trained) == 396 and not trained & validated
    assert validated == {f"corpus.jsonl:{line}" for line in (100, 200, 300, 400)}


@pytest.mark.parametrize("hold_out", [False, True])
def test_each_stage_knows_the_places_of_its_sources(hold_out: bool, tmp_path: Path) -> None:
    stages = [training_on(None), training_on(write_jsonl(tmp_path / "corpus.jsonl", range(400))), training_on(None)]
    run = DataOfRun(4, 32, hold_out, places_of_sources(stages, TOKENIZER, hold_out))
    assert [source.place for stage in stages for source in training_sources(stage, run, TOKENIZER)[0]] == [0, 1, 0]


def test_validation_gives_the_same_batches_each_time_and_each_rank_its_own() -> None:
    validation = Validation(enabled=True, local_batch_size=2, steps=3)
    training = Training(seq_len=64, local_batch_size=2)
    loaders = [build_validation_loader(validation, training, TOKENIZER, dp_rank=r, dp_size=2) for r in range(2)]
    first, second = ([batch.tokens for batch in loader] for loader in loaders)
    assert equal(first, [batch.tokens for batch in loaders[0]])
    assert not equal(first, second)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_whole_validation_set_is_read_once_by_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", range(20))
    validation = Validation(enabled=True, dataset_path=str(corpus), local_batch_size=3, steps=-1)
    loaders = [
        build_validation_loader(validation, training_on(corpus), TOKENIZER, dp_rank=rank, dp_size=ranks)
        for rank in range(ranks)
    ]
    by_rank = [list(loader) for loader in loaders]
    assert len({len(batches_of_rank) for batches_of_rank in by_rank}) == 1  # ranks wait for each other in each batch
    for batches_of_rank, loader in zip(by_rank, loaders, strict=True):
        assert equal([batch.labels for batch in batches_of_rank], [batch.labels for batch in loader])
    rows = [row for batches in zip(*by_rank, strict=True) for batch in batches for row in batch.labels]
    labels = [label for row in rows for label in row.tolist() if label != IGNORE_INDEX]
    text = []
    for document in documents_of(str(corpus), "text"):
        text += [TOKENIZER.bos_id, *TOKENIZER.encode(document.text), TOKENIZER.eos_id]
    assert labels == text[1:]
    assert all(batch.tokens.min() >= 0 for batches_of_rank in by_rank for batch in batches_of_rank)


def test_a_whole_validation_set_divides_windows_into_documents_as_training_does(tmp_path: Path) -> None:
    """A window begins with the last token of the one before, which belongs to the rest of its document."""
    corpus = write_jsonl(tmp_path / "corpus.jsonl", range(20))
    validation = Validation(enabled=True, dataset_path=str(corpus), local_batch_size=1, steps=-1)
    training = training_on(corpus, document_mask=True)
    *batches, _ = build_validation_loader(validation, training, TOKENIZER, dp_rank=0, dp_size=1)  # the last is padded
    for batch in batches:
        assert batch.document_ids is not None
        starts = batch.tokens[0, 1:].eq(TOKENIZER.bos_id or 0).long()
        assert torch.equal(batch.document_ids[0].diff(), starts)


def test_held_out_text_of_files_is_not_trained_on(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number} {line} of a text\n" for line in range(1000)))
    training = training_on(tmp_path, seq_len=512)
    trained = {id for row in sample_ids(loaders_of(training, 2, 1, hold_out=True), 400) for id in row}
    validation = Validation(enabled=True, local_batch_size=2, steps=4)
    batches = list(build_validation_loader(validation, training, TOKENIZER, dp_rank=0, dp_size=1))
    validated = {id for batch in batches for ids in batch.sample_ids or [] for id in ids}
    # ids name the file and the start byte of a segment
    assert len(trained) > 200 and validated and not trained & validated


def test_too_few_documents_to_hold_some_out(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", range(99))
    with pytest.raises(DataError, match=r"99 documents, too few to hold out one in 100.*validation\.dataset_path"):
        loaders_of(training_on(corpus), 4, 1, hold_out=True)


def test_a_validation_set_of_its_own(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", range(20))
    other = write_jsonl(tmp_path / "other.jsonl", range(100, 120))
    validation = Validation(enabled=True, dataset_path=str(other), local_batch_size=2, steps=2)
    batches = build_validation_loader(validation, training_on(corpus), TOKENIZER, dp_rank=0, dp_size=1)
    ids = {id for batch in batches for ids in batch.sample_ids or [] for id in ids}
    assert ids and all(id.startswith("other.jsonl:") for id in ids)
    missing = Validation(enabled=True, dataset_path=str(tmp_path / "missing.jsonl"))
    with pytest.raises(DataError, match=r"^validation\.dataset_path: there is no file or folder"):
        build_validation_loader(missing, training_on(corpus), TOKENIZER, dp_rank=0, dp_size=1)


def test_a_long_document_is_tokenized_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LONGEST_PIECE", 50)
    for text in ("word " * 100, "x" * 333, "short"):
        pieces = list(packing.pieces_of(text))
        assert "".join(pieces) == text and max(map(len, pieces)) <= 50
    assert all(piece.startswith(" word") for piece in list(packing.pieces_of("word " * 100))[1:])


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_no_loss_after_the_end_of_a_document(packing: str, tmp_path: Path) -> None:
    """EOS would else be trained to begin the next document, where there is no BOS."""
    path = write_jsonl(tmp_path / "a.jsonl", range(200), words=5)
    options = {"add_bos": False, "shuffle": False, "packing": packing, "seq_len": 128}
    plain, masked = (loaders_of(training_on(path, **options, eod_mask_loss=on), 2, 1)[0] for on in (False, True))
    ends = 0
    for _ in range(4):
        for without, with_mask in zip(plain.next(), masked.next(), strict=True):
            assert torch.equal(without.tokens, with_mask.tokens)
            after = without.tokens == TOKENIZER.eos_id
            assert torch.equal(with_mask.labels, without.labels.masked_fill(after, IGNORE_INDEX))
            assert (with_mask.labels == TOKENIZER.eos_id).any()  # EOS itself is predicted
            ends += int(after.sum())
    assert ends > 4
    close([plain, masked])


def test_a_file_of_the_same_size_but_other_content_is_other_data(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    text = "".join(f'{{"text": "number {number} of some"}}\n' for number in range(10, 99))
    file.write_text(text)
    about = file.stat()
    state = Loader.merge_states([loaders_of(training_on(file), 4, 1)[0].state_dict()])
    file.write_text(text.replace("some", "many"))
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    [other] = loaders_of(training_on(file), 4, 1)
    with pytest.raises(CheckpointError, match="the content of files of the data"):
        other.load_state_dict(state)
    other.load_state_dict({key: value for key, value in state.items() if key != "content"})  # of an earlier version
