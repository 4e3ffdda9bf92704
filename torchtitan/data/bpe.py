"""Tokenizers in files of byte-pair encoding: a tokenizer.json of Hugging Face, and those that `byte_level` reads."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torchtitan.data import byte_level
from torchtitan.data.tokenizer import (
    CONFIG,
    PROBE,
    SPECIAL_TOKENS,
    Limits,
    Tokenizer,
    damaged,
    json_beside,
    main_folder,
)
from torchtitan.errors import DataError, reason_of
from torchtitan.files import regular_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

T = TypeVar("T")

MOST_IDS_PER_TOKEN = 16  # gaps are common, but an embedding has a row for each id

IS_JSON_OF_LIBRARY = re.compile(rb'"model"\s*:\s*\{')  # a tokenizer.json
# tiktoken crashes on runs of a million blanks. Llama's own code splits runs at this length too.
TIKTOKEN_LONGEST_RUN = 25_000


def attempt(file: Path, format: str, act: Callable[[], T]) -> T:
    """Raises a DataError if `act` fails: libraries limit how long a regular expression may search, and panic. What
    Rust prints of a panic, with a stack, is left out."""
    panic, own = False, -1
    with contextlib.suppress(OSError, AttributeError):  # a closed stderr; another system than Linux
        own = os.dup(2)
        printed = os.memfd_create("printed")
        os.dup2(printed, 2)
    try:
        return act()
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"
        if panic or (isinstance(error, Exception) and not isinstance(error, DataError)):
            raise damaged(file, format, reason_of(error)) from None
        raise
    finally:
        with contextlib.suppress(OSError, NameError):
            os.dup2(own, 2)
            os.close(own)
            with open(printed, "rb") as held:
                held.seek(0)
                os.write(2, b"" if panic else held.read())


def try_runs(encode: Callable[[str], object]) -> None:
    """Encodes runs of one letter, on which a regular expression may never end."""
    for letter in ("a", "Z", "0", " ", "\n", "-", "é", "語"):
        encode(letter * 100 + "\x01")


def fast_tokenizer(file: Path, content: bytes) -> "FastTokenizer":
    """The tokenizer in a tokenizer.json, a tekken.json, or a vocab.json with a merges.txt beside it. Raises a DataError
    if it is damaged, or its files do not say how it splits text."""
    from tokenizers import Tokenizer

    if byte_level.VOCABULARY_BEGINS.match(content):
        merges = main_folder(file) / byte_level.MERGES
        if not merges.is_file():
            raise DataError(
                f"model.tokenizer_path: {file} is a vocabulary without its {merges.name}; put that beside it."
            )
        beside, added = (
            [json_beside(file, name) for name in (CONFIG, SPECIAL_TOKENS)],
            json_beside(file, byte_level.ADDED),
        )
        vocabulary = attempt(file, "a vocab.json", lambda: byte_level.vocabulary_in(content))
        rules = said(file, lambda: byte_level.vocabulary_rules(content, vocabulary, beside, added))
        text = attempt(merges, "a list of merges", lambda: regular_file(merges).read_bytes().decode())
        return attempt(file, "a vocab.json", lambda: byte_level.of_vocabulary(vocabulary, text, rules))
    if IS_JSON_OF_LIBRARY.search(content) or b'"token_bytes"' not in content:
        return attempt(file, "a tokenizer.json", lambda: Tokenizer.from_buffer(content))
    return attempt(file, "a tekken.json", lambda: byte_level.of_tekken(content))


def said(file: Path, act: Callable[[], T]) -> T:
    """Raises a DataError about `file` from a ValueError that is the rest of a sentence."""
    try:
        return act()
    except ValueError as error:
        raise DataError(f"model.tokenizer_path: {file} {error}.") from None


def load_tokenizers(file: Path, content: bytes, fingerprint: str, limits: Limits) -> Tokenizer:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads only cost time for one text
    check = partial(attempt, file, "a tokenizer.json")
    tokenizer = fast_tokenizer(file, content)
    if not IS_JSON_OF_LIBRARY.search(content):  # Other files have a part in it.
        fingerprint = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:16]
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise damaged(file, "a tokenizer.json", "its vocabulary is empty")
    if max(ids) >= MOST_IDS_PER_TOKEN * len(ids):
        raise damaged(file, "a tokenizer.json", f"its {len(ids):,} tokens have ids up to {max(ids):,}")
    # The file may enable these for chats and classifiers; here every token of a text counts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # True means: encode text that spells a special token as ordinary text
    check(partial(try_runs, tokenizer.encode))
    template = tokenizer.encode("a")  # includes what the file itself adds to a text
    added = template.special_tokens_mask
    own = {"bos_token": template.ids[0]} if added[:1] == [1] else {}
    own |= {"eos_token": template.ids[-1]} if added[-1:] == [1] and len(added) > 1 else {}
    return Tokenizer(
        kind="tokenizers",
        vocab_size=max(ids) + 1,
        **limits(tokenizer.token_to_id, max(ids) + 1, own, common=True),
        fingerprint=fingerprint,
        encode=lambda text: check(lambda: tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        piece=lambda id: tokenizer.id_to_token(id) or "",
    )


def tiktoken_parts(file: Path, content: bytes) -> tuple[dict[bytes, int], byte_level.Rules]:
    """The pieces of a tiktoken file and their ids, and how text is split. Raises a DataError if it is damaged, or is
    not Llama 3's and nothing beside it says how it splits text."""
    pieces = attempt(file, "a tiktoken file", lambda: byte_level.tiktoken_pieces(content))
    return pieces, said(file, lambda: byte_level.tiktoken_rules(content, len(pieces), json_beside(file, CONFIG)))


def load_tiktoken(file: Path, content: bytes, fingerprint: str, limits: Limits) -> Tokenizer:
    import tiktoken

    check = partial(attempt, file, "a tiktoken file")
    pieces, (split, special, _) = tiktoken_parts(file, content)
    if max(special.values()) >= MOST_IDS_PER_TOKEN * len(pieces):
        raise damaged(
            file, "a tiktoken file", f"{CONFIG} beside its {len(pieces):,} pieces adds {max(special.values()):,}"
        )
    if split != byte_level.LLAMA3_SPLIT:  # The file beside has a part in it.
        fingerprint = hashlib.sha256(json.dumps([fingerprint, split, special]).encode()).hexdigest()[:16]
    options: dict[str, Any] = {"pat_str": split, "mergeable_ranks": pieces, "special_tokens": dict(special)}
    encoding = check(lambda: tiktoken.Encoding(fingerprint, **options))
    ordinary = encoding.encode_ordinary
    check(partial(try_runs, ordinary))
    if lost := next((text for text in PROBE if encoding.decode(ordinary(text)) != text), None):
        raise damaged(file, "a tiktoken file", f"the pat_str in {CONFIG} beside it loses a part of {lost!r:.60}")
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    return Tokenizer(
        kind="tiktoken",
        vocab_size=encoding.n_vocab,
        **limits(
            special.get,
            encoding.n_vocab,
            {key: special[name] for key, name in names.items() if name in special},
            common=True,
        ),
        fingerprint=fingerprint,
        encode=lambda text: check(lambda: [id for piece in cut_long_runs(text) for id in ordinary(piece)]),
        decode=encoding.decode,
        piece=lambda id: encoding.decode([id]),
    )


def cut_long_runs(text: str) -> Iterator[str]:
    """Splits `text` so that no run of blanks, or of non-blanks, is too long for tiktoken."""
    start = 0
    if len(text) > TIKTOKEN_LONGEST_RUN:
        for run in re.finditer(r"\s+|\S+", text):
            for cut in range(run.start() + TIKTOKEN_LONGEST_RUN, run.end(), TIKTOKEN_LONGEST_RUN):
                yield text[start:cut]
                start = cut
    yield text[start:]
