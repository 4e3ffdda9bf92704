"""Weighted mixtures: shares of tokens, and the same promises as for one data set."""

from pathlib import Path

import pytest
import torch
from data_helpers import close, global_batches, loaders_of, sample_ids, training_on, write_jsonl

from torchtitan.config.training import Training
from torchtitan.data import Loader
from torchtitan.errors import CheckpointError, ConfigError, DataError


def mixture(tmp_path: Path, *weights: float) -> Training:
    entries = []
    for number, weight in enumerate(weights):
        # documents of very different length: shares are of tokens, not of documents
        words = 10 * (number + 1)
        path = write_jsonl(tmp_path / f"{number}.jsonl", range(100 * number, 100 * number + 90), words)
        entries.append(f"{path}:{weight}")
    return training_on(None, dataset_mixture=entries)


def test_each_source_gets_its_share_of_the_tokens(tmp_path: Path) -> None:
    training = mixture(tmp_path, 3, 1.5, 0.5)
    loaders = loaders_of(training, 4, 1)
    global_batches(loaders, 300)
    for position in loaders[0].state_dict()["positions"].values():
        tokens = [tokens for _, tokens in position["sources"]]
        shares = [count / sum(tokens) for count in tokens]
        assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.03)


def test_layouts_and_resumes_do_not_change_the_order(tmp_path: Path) -> None:
    training = mixture(tmp_path, 2, 1)
    expected = global_batches(loaders_of(training, 4, 1), 60)
    two = loaders_of(training, 4, 2)
    got = global_batches(two, 25)
    state = Loader.merge_states([loader.state_dict() for loader in two])
    close(two)
    four = loaders_of(training, 4, 4)
    for loader in four:
        loader.load_state_dict(state)
    got += global_batches(four, 35)
    assert all(map(torch.equal, got, expected))


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
