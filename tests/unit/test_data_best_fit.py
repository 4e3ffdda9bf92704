"""Best-fit packing, and steps whose data are passed over: the same guarantees as for the plain order."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from data_helpers import TOKENIZER, close, global_batches, loaders_of, story, training_on, write_jsonl
from hypothesis import given
from hypothesis import strategies as st
from runs import all_equal

from torchtitan.config import ConfigManager
from torchtitan.data import Batch, Loader, best_fit
from torchtitan.data.best_fit import DocumentPiece, packed
from torchtitan.errors import CheckpointError, ConfigError
from torchtitan.protocols import IGNORE_INDEX

ROWS, SEQ_LEN = 4, 400


@pytest.fixture(autouse=True)
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_fit, "POOL", 5)
    monkeypatch.setattr(best_fit, "POOL_MOST", 7)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Every seventh document is longer than a sequence, some of them than two."""
    lines = [json.dumps({"text": story(n, 90 + n if n % 7 == 0 else n % 19 + 1)}) + "\n" for n in range(160)]
    (tmp_path / "corpus.jsonl").write_text("".join(lines))
    return tmp_path / "corpus.jsonl"


def tokens_of_line(corpus: Path, id: str) -> list[int]:
    text = json.loads(corpus.read_text().splitlines()[int(id.split(":")[1]) - 1])["text"]
    return [TOKENIZER.bos_id or 0, *TOKENIZER.encode(text), TOKENIZER.eos_id]


def parts_of(batch: Batch) -> "list[tuple[str, list[int]]]":
    """Of each row in turn: the id of each document in it, and its tokens there, the last label included."""
    assert batch.document_ids is not None and batch.sample_ids is not None
    pieces = []
    for tokens, labels, numbers, ids in zip(
        batch.tokens, batch.labels, batch.document_ids, batch.sample_ids, strict=True
    ):
        places = [int((numbers == number).sum()) for number in range(len(ids))]
        row = [*tokens[: sum(places)].tolist(), *([int(labels[-1])] if sum(places) == len(tokens) else [])]
        if row[-1] == IGNORE_INDEX or (row[-1] == TOKENIZER.bos_id and len(row) > len(tokens)):
            row.pop()
        starts = [0, *itertools.accumulate(places)]
        ends = [*starts[1:-1], len(row)]
        pieces += [(id, row[a:b]) for id, a, b in zip(ids, starts, ends, strict=False)]
        assert (labels[sum(places) :] == IGNORE_INDEX).all() and "" not in ids
        following = tokens[1 : sum(places)]
        left_out = labels[: len(following)] == IGNORE_INDEX  # a rest's first token, which another window predicts
        assert torch.equal(following.where(~left_out, IGNORE_INDEX), labels[: len(following)])
        assert {int(place) + 1 for place in left_out.nonzero()} <= set(starts)
    return pieces


@given(st.lists(st.integers(1, 10), min_size=1, max_size=60))
def test_best_fit_decreasing(sizes: list[int]) -> None:
    windows = packed([DocumentPiece(range(size), True, True, str(number), 0) for number, size in enumerate(sizes)], 10)
    expected: list[list[int]] = []
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        room = [10 - sum(sizes[other] for other in window) for window in expected]
        fitting = [(left, place) for place, left in enumerate(room) if left >= sizes[number]]
        (expected[min(fitting)[1]] if fitting else expected.append([]) or expected[-1]).append(number)
    assert [[int(piece.sample_id) for piece in window] for window in windows] == [sorted(window) for window in expected]


def test_documents_are_cut_only_if_they_are_longer_than_a_sequence(corpus: Path) -> None:
    training = training_on(corpus, packing="best_fit", seq_len=SEQ_LEN, document_mask=True)
    [loader] = loaders_of(training, ROWS, 1)
    pieces: dict[str, list[list[int]]] = {}
    for _ in range(25):
        for batch in loader.next():
            for id, tokens in parts_of(batch):
                pieces.setdefault(id, []).append(tokens)
    close([loader])
    long = {id for id in pieces if len(tokens_of_line(corpus, id)) > SEQ_LEN + 1}
    assert 10 < len(long) < len(pieces) / 2
    for id, pieces_of_id in pieces.items():
        whole = tokens_of_line(corpus, id)
        cuts = range(0, len(whole) - 1, SEQ_LEN)
        expected = [whole[at : at + SEQ_LEN + 1] for at in cuts]
        assert all(piece in expected or [*piece, TOKENIZER.bos_id] in expected for piece in pieces_of_id), id
    packed_now = loader.packed
    assert packed_now["tokens"] == 25 * ROWS * SEQ_LEN
    assert 0 < packed_now["padding"] < 0.2 * packed_now["tokens"]
    assert 0 < packed_now["cut"] < packed_now["documents"] / 4


@pytest.mark.parametrize("case", ["one source", "mixture", "compressed mixture"])
def test_resuming_at_any_step_on_any_number_of_ranks_changes_nothing(case: str, corpus: Path, tmp_path: Path) -> None:
    suffix = ".jsonl.gz" if case.startswith("compressed") else ".jsonl"
    other = write_jsonl(tmp_path / f"other{suffix}", range(200, 290))
    source: dict[str, Any] = {} if case == "one source" else {"dataset_mixture": [f"{corpus}:2", f"{other}:1"]}
    training = training_on(corpus, packing="best_fit", seq_len=SEQ_LEN, **source)
    whole = loaders_of(training, ROWS, 1)
    expected = global_batches(whole, 10)
    state: dict[str, Any] = {}
    got: list[torch.Tensor] = []
    for step in range(10):
        loaders = loaders_of(training, ROWS, (1, 2, 4)[step % 3])
        for loader in loaders if state else []:
            loader.load_state_dict(state)
        got += global_batches(loaders, 1)
        state = merged(loaders)
        close(loaders)
    assert all_equal(got, expected)
    counts = [loader.packed for loader in loaders]  # of the parts of the ranks
    assert {key: sum(count[key] for count in counts) for key in counts[0]} == whole[0].packed
    close(whole)


def merged(loaders: Sequence[Loader]) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(Loader.merge_states([loader.state_dict() for loader in loaders])))
    return state


def test_long_windows_do_not_come_first(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_fit, "POOL", 30)
    monkeypatch.setattr(best_fit, "POOL_MOST", 34)
    training = training_on(corpus, packing="best_fit", seq_len=SEQ_LEN)
    [loader] = loaders_of(training, 1, 1)
    documents = [len(ids) for _ in range(30) for batch in loader.next() for ids in batch.sample_ids or []]
    close([loader])
    assert documents != sorted(documents)
    assert 0.6 < sum(documents[:15]) / sum(documents[15:]) < 1.7


def test_a_checkpoint_of_another_packing_is_refused(corpus: Path) -> None:
    loaders = loaders_of(training_on(corpus), ROWS, 1)
    global_batches(loaders, 3)
    best = loaders_of(training_on(corpus, packing="best_fit"), ROWS, 1)
    with pytest.raises(CheckpointError, match=r"training\.packing .now best_fit, in the checkpoint concatenate"):
        best[0].load_state_dict(merged(loaders))
    close([*loaders, *best])


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_the_data_of_skipped_steps_are_never_read(packing: str, corpus: Path, log: list[str]) -> None:
    plain = training_on(corpus, packing=packing)
    skipping = training_on(corpus, packing=packing, skip_steps=["5-8", "11"])
    every = global_batches(loaders_of(plain, ROWS, 1), 16)
    expected = every[:4] + every[8:10] + every[11:]
    assert all_equal(global_batches(loaders_of(skipping, ROWS, 2), 11), expected)
    assert any("passing over the data of steps 5 to 8" in line for line in log)
    before = loaders_of(plain, ROWS, 2)
    got = global_batches(before, 3)
    state = merged(before)
    for steps in (2, 3, 3):  # from before the spike; between the ranges; after them
        loaders = loaders_of(skipping, ROWS, 4)
        for loader in loaders:
            loader.load_state_dict(state)
        got += global_batches(loaders, steps)
        state = merged(loaders)
        close(loaders)
    assert all_equal(got, expected)
    assert not any("already" in line for line in log)


def test_skipping_data_that_were_used_already_says_so(corpus: Path, log: list[str]) -> None:
    before = loaders_of(training_on(corpus), ROWS, 1)
    global_batches(before, 6)
    following = global_batches(before, 9)
    state = merged(before)
    loader = loaders_of(training_on(corpus, skip_steps=["5-8", "17"]), ROWS, 1)
    loader[0].load_state_dict(state)
    assert "resume from one before step 5" in log[-1]
    following = global_batches(before, 3)
    assert all_equal(global_batches(loader, 2), [following[0], following[2]])


@pytest.mark.parametrize("steps", ["0", "-5", "12-", "9-5", "five", "1.5", "1-2-3"])
def test_ranges_that_make_no_sense(steps: str) -> None:
    with pytest.raises(ConfigError, match=r"training\.skip_steps must be a list of steps above 0 and ranges of them"):
        ConfigManager().parse_args([f"--training.skip_steps={steps}"])
