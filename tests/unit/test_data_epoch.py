"""In an epoch each token of each document is predicted once, from the token before it, and what is not is counted: for
every packing, kind of source, format and number of ranks."""

import dataclasses
import gzip
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from data_helpers import TOKENIZER, close, loaders_of, training_on
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_shards import WRITERS

from torchtitan.config.training import Validation
from torchtitan.data import best_fit, build_validation_loader, loader
from torchtitan.data.packing import tokens_of
from torchtitan.data.sources import Drawn
from torchtitan.protocols import IGNORE_INDEX

# One token for each character, and each character is in the data once, so that a token tells its document and place.
FIRST = 0x4E00
CHARACTERS = dataclasses.replace(
    TOKENIZER,
    vocab_size=32_000,
    encode=lambda text: [ord(letter) - FIRST + 3 if FIRST <= ord(letter) < FIRST + 31_000 else 0 for letter in text],
)
BOS, EOS = TOKENIZER.bos_id, TOKENIZER.eos_id
Texts = Sequence[str]
Draws = dict[tuple[int, int], list[Drawn]]  # by row and source


def jsonl(texts: Texts) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write_halves(folder: Path, texts: Texts, suffix: str, pack: Callable[[Texts], bytes]) -> None:
    for number, half in enumerate((texts[: len(texts) // 2], texts[len(texts) // 2 :])):
        (folder / f"{number}{suffix}").write_bytes(pack(half))


def write_table(folder: Path, texts: Texts) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": list(texts)}), folder / "a.parquet", row_group_size=7)


def write_shard(format: str) -> Callable[[Path, Texts], None]:
    name, write = WRITERS[format]

    def write_documents(folder: Path, texts: Texts) -> None:
        write(folder / name, [[BOS, *CHARACTERS.encode(text), EOS] for text in texts])

    return write_documents


SOURCES: dict[str, Callable[[Path, Texts], None]] = {
    "JSONL": lambda folder, texts: write_halves(folder, texts, ".jsonl", jsonl),
    "JSON array": lambda folder, texts: write_halves(
        folder, texts, ".json", lambda half: json.dumps([{"text": text} for text in half]).encode()
    ),
    "compressed": lambda folder, texts: write_halves(
        folder, texts, ".jsonl.gz", lambda half: gzip.compress(jsonl(half))
    ),
    "Parquet of text": write_table,
    # Lines of 100 characters, in segments of at least 1 KiB that begin with a line.
    "text": lambda folder, texts: write_halves(folder, texts, ".txt", lambda half: "\n".join(half).encode()),
    **{format: write_shard(format) for format in WRITERS},
}


def texts_of(lengths: Sequence[int], first: int = FIRST) -> list[str]:
    ends = [*itertools.accumulate(lengths, initial=first)]
    return ["".join(map(chr, range(*span))) for span in itertools.pairwise(ends)]


def recording(documents: Iterator[Drawn], drawn: list[Drawn]) -> Iterator[Drawn]:
    for draw in documents:
        drawn.append(draw)
        yield draw


def recorded(patch: pytest.MonkeyPatch) -> Draws:
    """What the rows of all loaders draw from here on."""
    draws: Draws = defaultdict(list)
    original = loader.rows_at

    def rows_at(*arguments: Any) -> Any:
        rows = original(*arguments)
        for row in rows:
            for place, stream in enumerate(row.streams):
                stream.documents = recording(stream.documents, draws[row.number, place])
        return rows

    patch.setattr(loader, "rows_at", rows_at)
    return draws


def ids_of(drawn: Sequence[Drawn]) -> list[list[int]]:
    return [tokens_of(draw.document, CHARACTERS).tolist() for draw in drawn]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


LENGTHS = st.lists(st.integers(1, 40), min_size=20, max_size=40)  # enough for each row


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("kind", [*SOURCES, "mixture"])
@settings(deadline=None, max_examples=4)
@given(
    lengths=LENGTHS,
    rows_and_ranks=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 3), (4, 1), (4, 2)]),
    seq_len=st.sampled_from([8, 13]),
    shuffle=st.booleans(),
)
def test_each_token_is_predicted_once_an_epoch(
    kind: str, packing: str, lengths: list[int], rows_and_ranks: tuple[int, int], seq_len: int, shuffle: bool
) -> None:
    rows, ranks = rows_and_ranks
    if kind == "text":
        lengths = [100] * 40
    texts = [texts_of(lengths)]
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_fit, "POOL", 5)
        patch.setattr(best_fit, "POOL_MOST", 7)
        folders = [Path(name) / "first"]
        if kind == "mixture":
            texts.append(texts_of(lengths[::-1], FIRST + 3000))
            folders.append(Path(name) / "second")
        for place, folder in enumerate(folders):
            folder.mkdir()
            SOURCES["compressed" if place else "JSONL" if kind == "mixture" else kind](folder, texts[place])
        draws = recorded(patch)
        data: Any = {"dataset_mixture": [f"{folders[0]}:2", f"{folders[1]}:1"]} if kind == "mixture" else {}
        training = training_on(folders[0], seq_len=seq_len, shuffle=shuffle, packing=packing, **data)
        loaders = loaders_of(training, rows, ranks, tokenizer=CHARACTERS)
        windows: dict[int, list[torch.Tensor]] = {row: [] for row in range(rows)}  # (2, seq_len), tokens and labels
        # Of best fit, by row and source: the row's windows when a pool ended, and the source's state then.
        whole: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
        for step in range(1000):
            for rank, each in enumerate(loaders):
                for number, batch in enumerate(each.next()):
                    windows[rank * rows // ranks + number].append(torch.cat([batch.tokens, batch.labels]))
                for row, position in each.state_dict()["positions"].items():
                    for place, source in enumerate(position["sources"]):
                        if packing == "best_fit" and source["used"] == 0 and source["tokens"] > 0:
                            whole[int(row), place] = len(windows[int(row)]), source
            over = [drawn[-1].epoch > 0 for drawn in draws.values() if drawn]
            enough = packing == "concatenate" or len(whole) == rows * len(folders)
            if step > 20 and len(over) == rows * len(folders) and all(over) and enough:
                break
        close(loaders)

    for place, of_source in enumerate(texts):
        first_epoch = [draw for key, drawn in draws.items() if key[1] == place for draw in drawn if draw.epoch == 0]
        ids = [[BOS, *CHARACTERS.encode(text), EOS] for text in of_source]
        if kind == "text":
            ids = [[BOS, *CHARACTERS.encode("\n".join(half)), EOS] for half in (of_source[:20], of_source[20:])]
        assert Counter(itertools.chain(*ids_of(first_epoch))) == Counter(itertools.chain(*ids))
    for row, given_to_row in windows.items():
        for place in range(len(folders)):
            documents = ids_of(draws[row, place])
            own = {id for text in texts[place] for id in CHARACTERS.encode(text)}
            mine = [window for window in given_to_row if own & set(window.flatten().tolist())]
            if packing == "concatenate":
                flat = [*itertools.chain(*documents)]
                assert torch.cat([tokens for tokens, _ in mine]).tolist() == flat[: len(mine) * seq_len]
                assert torch.cat([labels for _, labels in mine]).tolist() == flat[1 : len(mine) * seq_len + 1]
            else:
                count, position = whole[row, place]
                mine = [window for window in given_to_row[:count] if own & set(window.flatten().tolist())]
                sums = [*itertools.accumulate(map(len, documents), initial=0)]
                documents = documents[: sums.index(position["tokens"])]
                begins = {document[0] for document in documents}
                pairs = Counter(pair for window in mine for pair in zip(*window.tolist(), strict=True))
                predicted = Counter({pair: n for pair, n in pairs.items() if pair[1] not in {IGNORE_INDEX, *begins}})
                assert predicted == Counter(pair for document in documents for pair in itertools.pairwise(document))
                cut = sum(len(document) > seq_len + 1 for document in documents)
                padding = sum(int((labels == IGNORE_INDEX).sum()) for _, labels in mine)
                assert position["packed"] == {"documents": len(documents), "cut": cut, "padding": padding}


@settings(deadline=None, max_examples=20)
@given(
    lengths=LENGTHS,
    ranks=st.integers(1, 4),
    local=st.integers(1, 3),
    kind=st.sampled_from(["JSONL", "compressed", "numpy", "Parquet"]),
)
def test_a_whole_validation_set_is_predicted_once(lengths: list[int], ranks: int, local: int, kind: str) -> None:
    texts = texts_of(lengths)
    with TemporaryDirectory() as name:
        SOURCES[kind](Path(name), texts)
        validation = Validation(enabled=True, dataset_path=name, steps=-1, local_batch_size=local)
        training = training_on(None, seq_len=8)
        of_ranks = [
            list(build_validation_loader(validation, training, CHARACTERS, dp_rank=rank, dp_size=ranks))
            for rank in range(ranks)
        ]
    windows = torch.cat([batch.labels for batches in zip(*of_ranks, strict=True) for batch in batches])
    predicted = windows[windows != IGNORE_INDEX].tolist()
    assert predicted == [id for text in texts for id in (BOS, *CHARACTERS.encode(text), EOS)][1:]
