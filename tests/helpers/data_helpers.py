"""Small corpora on disk, and loaders of all ranks of a run in one process."""

import gzip
import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchtitan.config.training import Training
from torchtitan.data import Loader, Tokenizer, build_loader, load_tokenizer, shards
from torchtitan.data.paths import METADATA
from torchtitan.files import sha256_of

TOKENIZER = load_tokenizer(None)
Documents = Sequence[Sequence[int]]  # of token ids


def story(number: int, words: int = 20) -> str:
    """A document whose tokens distinguish it from all others."""
    return f"Story {number}: " + " ".join(f"w{number}x{word}" for word in range(words))


def write_jsonl(path: Path, numbers: Iterable[int], words: int = 20) -> Path:
    lines = [json.dumps({"text": story(number, words), "url": f"u{number}"}) + "\n" for number in numbers]
    content = "".join(lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def flat(documents: Documents, dtype: str = "<u2") -> bytes:
    return np.array([token for document in documents for token in document], dtype).tobytes()


def write_megatron(path: Path, documents: Documents, code: int = 8, sequences: int = 1) -> Path:
    """Each document in several sequences, as Megatron-LM writes sentences; an empty one has none."""
    dtype = np.dtype(shards.MEGATRON_DTYPES[code])
    cut = [[piece for piece in np.array_split(document, sequences) if len(piece)] for document in documents]
    lengths = [len(piece) for document in cut for piece in document]
    pointers = (np.cumsum([0, *lengths]) * dtype.itemsize)[:-1]
    indices = np.cumsum([0, *map(len, cut)])
    path.write_bytes(flat(documents, dtype.str))
    path.with_suffix(".idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(indices))
        + np.array(lengths, "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + indices.astype("<i8").tobytes()
    )
    return path


def write_metadata(folder: Path) -> None:
    """As `torchtitan.tools.tokenize` does beside the shards of a folder, with the hashes of all files."""
    files = {path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)} for path in folder.iterdir()}
    about = {"tokenizer_ids": TOKENIZER.ids_fingerprint, "files": files}
    (folder / METADATA).write_text(json.dumps(about))


def training_on(path: Path | str | None, **changes: Any) -> Training:
    settings: dict[str, Any] = {"seq_len": 32, "local_batch_size": 1, "record_sample_ids": True}
    return Training(dataset_path=None if path is None else str(path), **{**settings, **changes})


def loaders_of(
    training: Training, rows: int, dp_size: int, *, tokenizer: Tokenizer = TOKENIZER, hold_out: bool = False
) -> list[Loader]:
    return [
        build_loader(training, tokenizer, dp_rank=rank, dp_size=dp_size, global_batch_size=rows, hold_out=hold_out)
        for rank in range(dp_size)
    ]


def global_batches(loaders: Sequence[Loader], steps: int) -> list[torch.Tensor]:
    """`steps` tensors (global batch, seq_len + 1): the rows of all ranks in order, labels as the last column."""
    return [
        torch.cat([torch.cat([b.tokens, b.labels[:, -1:]], dim=1) for loader in loaders for b in loader.next()])
        for _ in range(steps)
    ]


def sample_ids(loaders: Sequence[Loader], steps: int) -> list[list[str]]:
    """For each row, the ids of its documents in order, without repetition."""
    rows: list[list[str]] = []
    for _step in range(steps):
        of_step = [ids for loader in loaders for batch in loader.next() for ids in batch.sample_ids or []]
        rows = rows or [[] for _ in of_step]
        for row, ids in zip(rows, of_step, strict=True):
            row += ids[1:] if row and row[-1] == ids[0] else ids
    return rows


def as_lists(position: Any, shuffled: bool) -> Any:
    """The position of a row in a source, or in its documents, as earlier versions wrote it."""
    match position:
        case {"used": _}:
            packed = position["packed"] or {}
            return [as_lists(position["documents"], shuffled), position["tokens"], position["used"], *packed.values()]
        case {"turn": _}:
            return [position["epoch"], position["place"], *(() if shuffled else [position["turn"]])]
        case {"shards": shards}:
            states = (shard["state"] and [*shard["state"].values()] for shard in shards)
            pairs = zip(shards, states, strict=True)
            return {**position, "shards": [[shard["place"], shard["read"], state] for shard, state in pairs]}
    return position


def close(loaders: Iterable[Loader]) -> None:
    for loader in loaders:
        loader.close()
