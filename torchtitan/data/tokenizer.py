"""Tokenizers: sentencepiece, Hugging Face `tokenizer.json` and Llama 3's tiktoken files, detected from the content."""

import base64
import binascii
import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torchtitan.errors import DataError
from torchtitan.files import PathError, local_path, regular_file

__all__ = ["Tokenizer", "load_tokenizer"]

SHIPPED = Path(__file__).parent / "assets" / "python_stdlib_4k.model"
KINDS = "a sentencepiece model, a Hugging Face tokenizer.json or a tiktoken-style tokenizer.model"
REMEDY = "set another model.tokenizer_path, or none for the shipped tokenizer"

# Where downloaded model folders store their tokenizer; the first that exists is used.
FILES_IN_FOLDER = ("tokenizer.model", "original/tokenizer.model", "tokenizer.json")

BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>")
EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>")

MOST_IDS_PER_TOKEN = 16  # gaps are common, but an embedding has a row for each id

TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?")
# Llama 3's regular expression for splitting text, and the names of its 256 special tokens (Llama 3 model card).
LLAMA3_SPLIT = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
LLAMA3_NAMED = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
LLAMA3_SPECIAL_TOKENS = 256
# tiktoken crashes on runs of a million blanks. Llama's own code splits runs at this length too.
TIKTOKEN_LONGEST_RUN = 25_000


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back.

    Attributes:
        kind: "sentencepiece", "tokenizers" or "tiktoken".
        vocab_size: largest id + 1.
        bos_id: id at the beginning of a document, if the tokenizer has one.
        eos_id: id at the end of a document.
        fingerprint: changes with the content of the tokenizer file.
        encode: text to ids, without BOS and EOS. Text that spells a special token is encoded as ordinary text.
        decode: ids to text.
        piece: the vocabulary entry of an id.
    """

    kind: str
    vocab_size: int
    bos_id: int | None
    eos_id: int
    fingerprint: str
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    piece: Callable[[int], str]

    def encode_rest(self, text: str) -> list[int]:
        """The ids of text that goes on after other text, without the blank that some tokenizers (Llama 2's) put in
        front of a text."""
        line_end = self.encode("\n")
        ids = self.encode("\n" + text) if self.prepends_blank else []
        return ids[len(line_end) :] if ids and ids[: len(line_end)] == line_end else self.encode(text)

    @cached_property
    def prepends_blank(self) -> bool:
        return self.encode("\na")[len(self.encode("\n")) :] != self.encode("a")

    def decode_after(self, context: list[int], ids: list[int]) -> str:
        """The text of ids that follow `context`. By itself, sentencepiece's decoder takes a blank off their
        beginning."""
        return self.decode([*context, *ids])[len(self.decode(context)) :]


def load_tokenizer(path: str | None) -> Tokenizer:
    """Loads the tokenizer in a file or folder; None loads the bundled one.

    Raises:
        DataError: the file is missing, damaged, of another kind, or has no end-of-document token.
    """
    file = SHIPPED if path is None else find_file(path)
    try:
        content = regular_file(file).read_bytes()
    except OSError as error:
        raise DataError(f"model.tokenizer_path: cannot read {file} ({error.strerror}); {REMEDY}.") from error
    if content.startswith(b"version https://git-lfs"):
        raise DataError(
            f"model.tokenizer_path: {file} is only a Git LFS pointer; download the file with `git lfs pull`."
        )
    fingerprint = hashlib.sha256(content).hexdigest()[:16]
    content = content.removeprefix(codecs.BOM_UTF8)
    if content.lstrip()[:1] == b"{":
        return load_tokenizers(file, content, fingerprint)
    if TIKTOKEN_LINE.fullmatch(content[:4096].split(b"\n", 1)[0]):
        return load_tiktoken(file, content, fingerprint)
    return load_sentencepiece(file, content, fingerprint)


def find_file(name: str | Path) -> Path:
    try:
        path = local_path(str(name))
    except PathError as error:
        raise DataError(f"model.tokenizer_path: {error}") from None
    if not path.exists():
        raise DataError(f"model.tokenizer_path: there is no file or folder {path}; {REMEDY}.")
    if not path.is_dir():
        return path
    named = [path / name for name in FILES_IN_FOLDER if (path / name).exists()]
    others = sorted(path.glob("*.model"))
    if named:
        return named[0]
    if len(others) == 1:
        return others[0]
    if others:
        names = ", ".join(other.name for other in others)
        raise DataError(f"model.tokenizer_path: the folder {path} holds several models ({names}); name one of them.")
    raise DataError(f"model.tokenizer_path: the folder {path} holds no tokenizer.model or tokenizer.json; {REMEDY}.")


def damaged(file: Path, kind: str, reason: object) -> DataError:
    return DataError(f"model.tokenizer_path: {file} looks like {kind} but is damaged ({reason}); {REMEDY}.")


def without_eos(file: Path) -> DataError:
    return DataError(
        f"model.tokenizer_path: {file} has no end-of-document token (such as {' or '.join(EOS_NAMES)}); "
        "documents would have no boundary. Add one, or use another tokenizer."
    )


def load_sentencepiece(file: Path, content: bytes, fingerprint: str) -> Tokenizer:
    from sentencepiece import SentencePieceProcessor

    try:
        if not content:
            raise RuntimeError("empty file")
        processor = SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise DataError(f"model.tokenizer_path: {file} is not {KINDS}, or is damaged; {REMEDY}.") from error
    if processor.eos_id() < 0:
        raise without_eos(file)
    space = "\u2581"

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(text.split(space)):
            ids += space_bytes if number else []
            ids += processor.encode(part)
        return ids

    # sentencepiece represents the space as U+2581, so a U+2581 in the text would decode to a space. Encoding it as
    # bytes preserves it. Not for models that prepend a space to each text (Llama 2): splitting the text would add
    # spaces.
    space_bytes = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in space.encode()]
    lossless = all(map(processor.is_byte, space_bytes)) and processor.encode("a", out_type=str) == ["a"]
    return Tokenizer(
        kind="sentencepiece",
        vocab_size=processor.vocab_size(),
        bos_id=processor.bos_id() if processor.bos_id() >= 0 else None,
        eos_id=processor.eos_id(),
        fingerprint=fingerprint,
        encode=encode if lossless else processor.encode,
        decode=processor.decode,
        piece=processor.id_to_piece,
    )


def load_tokenizers(file: Path, content: bytes, fingerprint: str) -> Tokenizer:
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except ValueError as error:
        raise damaged(file, "a tokenizer.json", error) from error
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if max(ids) >= MOST_IDS_PER_TOKEN * len(ids):
        raise damaged(file, "a tokenizer.json", f"its {len(ids):,} tokens have ids up to {max(ids):,}")
    # The file may enable these for chats and classifiers; here every token of a text counts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # True means: encode text that spells a special token as ordinary text
    bos_name, eos_name = names_beside(file)
    eos_id = first_known(tokenizer.token_to_id, (*EOS_NAMES, eos_name))
    if eos_id is None:
        raise without_eos(file)
    return Tokenizer(
        kind="tokenizers",
        vocab_size=max(ids) + 1,
        bos_id=first_known(tokenizer.token_to_id, (*BOS_NAMES, bos_name)),
        eos_id=eos_id,
        fingerprint=fingerprint,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        piece=lambda id: tokenizer.id_to_token(id) or "",
    )


def first_known(token_to_id: Callable[[str], int | None], names: tuple[str | None, ...]) -> int | None:
    ids = [token_to_id(name) for name in names if name is not None]
    return next((id for id in ids if id is not None), None)


def names_beside(file: Path) -> tuple[str | None, str | None]:
    """Names of BOS and EOS in the tokenizer_config.json next to a Hugging Face tokenizer.json."""
    try:
        config = json.loads(regular_file(file.parent / "tokenizer_config.json").read_bytes())
        tokens = [config.get(key) for key in ("bos_token", "eos_token")]
    except (OSError, ValueError, AttributeError):
        return None, None
    bos, eos = (token.get("content") if isinstance(token, dict) else token for token in tokens)
    return bos, eos


def load_tiktoken(file: Path, content: bytes, fingerprint: str) -> Tokenizer:
    import tiktoken

    pieces = tiktoken_pieces(file, content)
    special = llama3_special_tokens(len(pieces))
    encoding = tiktoken.Encoding(fingerprint, pat_str=LLAMA3_SPLIT, mergeable_ranks=pieces, special_tokens=special)
    return Tokenizer(
        kind="tiktoken",
        vocab_size=encoding.n_vocab,
        bos_id=special["<|begin_of_text|>"],
        eos_id=special["<|end_of_text|>"],
        fingerprint=fingerprint,
        encode=lambda text: [id for part in cut_long_runs(text) for id in encoding.encode_ordinary(part)],
        decode=encoding.decode,
        piece=lambda id: encoding.decode([id]),
    )


def tiktoken_pieces(file: Path, content: bytes) -> dict[bytes, int]:
    """The pieces of a tiktoken file and their ids. An id is also a merge rank: lower ranks are merged first.

    Raises:
        DataError: the file is damaged.
    """
    pieces: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            if line.strip():
                piece, rank = line.split()
                pieces[base64.b64decode(piece, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise damaged(file, "a tiktoken file", f"line {number}") from error
    if sorted(pieces.values()) != list(range(len(pieces))) or any(bytes([byte]) not in pieces for byte in range(256)):
        raise damaged(file, "a tiktoken file", f"{len(pieces)} pieces, some of them missing or duplicate")
    return pieces


def llama3_special_tokens(first: int) -> dict[str, int]:
    """Llama 3's special tokens and their ids, starting at `first`."""
    reserved = (f"reserved_special_token_{number}" for number in range(LLAMA3_SPECIAL_TOKENS))
    names = [LLAMA3_NAMED.get(place) or next(reserved) for place in range(LLAMA3_SPECIAL_TOKENS)]
    return {f"<|{name}|>": first + place for place, name in enumerate(names)}


def cut_long_runs(text: str) -> Iterator[str]:
    """Splits `text` so that no run of blanks, or of non-blanks, is too long for tiktoken."""
    start = 0
    if len(text) > TIKTOKEN_LONGEST_RUN:
        for run in re.finditer(r"\s+|\S+", text):
            for cut in range(run.start() + TIKTOKEN_LONGEST_RUN, run.end(), TIKTOKEN_LONGEST_RUN):
                yield text[start:cut]
                start = cut
    yield text[start:]
