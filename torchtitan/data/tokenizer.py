"""Tokenizers: sentencepiece, Hugging Face `tokenizer.json`, and byte-level BPE in other files, by their content."""

import codecs
import errno
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torchtitan.data.sources import LISTED, Stamp, file_system_of
from torchtitan.errors import DataError, parsing
from torchtitan.files import PathError, any_path, is_remote, regular_file, store_errors
from torchtitan.registry import load

SHIPPED = Path(__file__).parent / "assets" / "python_stdlib_4k.model"
KINDS = "a sentencepiece model, a Hugging Face tokenizer.json or a tiktoken-style tokenizer.model"
REMEDY = "set another model.tokenizer_path, or none for the shipped tokenizer"

# Where downloaded model folders store their tokenizer; the first that exists is used.
FILES_IN_FOLDER = ("tokenizer.model", "original/tokenizer.model", "tokenizer.json")
OTHER_FILES = ("tekken.json", "vocab.json")  # used if there is neither one of these nor a *.model

# For a tokenizer.json whose folder declares no BOS or EOS.
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>")
EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>")

# Files of transformers beside a tokenizer that declare BOS and EOS.
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
GENERATION = "generation_config.json"
BESIDE = (CONFIG, SPECIAL_TOKENS, GENERATION, "chat_template.jinja", "merges.txt", "added_tokens.json")

# Text whose ids tell tokenizers apart, but not two files of the same one.
PROBE = (
    "The quick brown fox jumps over the lazy dog, doesn't it? Yes: 1234567890 times in 2,048 days (99.5%).",
    "import os\n\n\ndef main(path: str) -> int:\n    return len(os.listdir(path)) + 0xFF\n\nif __name__ == '__main__':",
    "Nevertheless, the committee's unprecedented recommendations were internationally acknowledged yesterday.",
    '#include <stdio.h>\nint main(void) { printf("%d items", 42); return 0; } // https://example.org/?q=a&b=c_d-e',
    "Größere Städte, où l'été naïf s'achève; mañana será otro. Привет, как дела? 東京の天気は晴れです。 한국어 문장",
    '{"name": "value", "list": [1, 2.5, null, true]} <p class=\'x\'>Text</p> $E = mc^2$ @user #tag',
)

TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?")


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back.

    Attributes:
        encode: text to ids, without BOS and EOS. Text that spells a special token is encoded as ordinary text.
    """

    kind: str  # "sentencepiece", "tokenizers" or "tiktoken"
    vocab_size: int  # largest id + 1
    bos_id: int | None  # at the beginning of a document, if documents begin with one
    eos_id: int  # at the end of a document
    add_eos: bool  # whether documents end with it in training
    stop_ids: frozenset[int]  # they end generated text: `eos_id`, and those in a generation_config.json
    fingerprint: str  # changes with the content of the tokenizer file
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    piece: Callable[[int], str]  # the vocabulary entry of an id
    file: Path = SHIPPED

    def encode_rest(self, text: str) -> list[int]:
        """The ids of text after other text, without the blank that some tokenizers (Llama 2's) put before a text."""
        line_end = self.encode("\n")
        ids = self.encode("\n" + text) if self.prepends_blank else []
        return ids[len(line_end) :] if ids and ids[: len(line_end)] == line_end else self.encode(text)

    @cached_property
    def prepends_blank(self) -> bool:
        return self.encode("\na")[len(self.encode("\n")) :] != self.encode("a")

    def decode_after(self, context: list[int], ids: list[int]) -> str:
        """The text of ids after `context`. Without it, sentencepiece's decoder takes a blank off their beginning."""
        return self.decode([*context, *ids])[len(self.decode(context)) :]

    @cached_property
    def ids_fingerprint(self) -> str:
        """Changes with the ids of texts, and with their number: the same for two files of one tokenizer."""
        ids = [self.vocab_size, *(self.encode(text) for text in PROBE)]
        return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]

    @property
    def boundaries(self) -> str:
        """What documents begin and end with, for people."""
        ids = {"BOS": self.bos_id, "EOS": self.eos_id if self.add_eos else None}
        return ", ".join(f"no {n}" if id is None else f"{n} {self.piece(id)!r} ({id})" for n, id in ids.items())


def load_tokenizer(path: str | None, add_bos: bool | None = None, add_eos: bool = True) -> Tokenizer:
    """Loads the tokenizer in a file or folder; None loads the bundled one. Flags are as in the [training] section.

    Raises:
        DataError: the file is missing, damaged, of another kind, or has no end-of-document token, or no wanted BOS.
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
    limits = partial(boundaries, file, add_bos, add_eos)
    content = content.removeprefix(codecs.BOM_UTF8)
    read = load_sentencepiece
    if content.lstrip()[:1] == b"{":
        read = load("torchtitan.data.bpe:load_tokenizers")
    elif TIKTOKEN_LINE.fullmatch(content[:4096].split(b"\n", 1)[0]):
        read = load("torchtitan.data.bpe:load_tiktoken")
    return read(file, content, fingerprint, limits)


def require_characters(text: str, where: str) -> None:
    """Raises a DataError if a text holds half of a surrogate pair, which no tokenizer takes and no screen shows."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise DataError(f"{where}: {text!a:.60} holds half of a surrogate pair, which is not a character; remove it.")


def find_file(name: str | Path) -> Path:
    try:
        path = any_path(str(name))
        path = fetched_tokenizer(path) if is_remote(path) else path
    except PathError as error:
        raise DataError(f"model.tokenizer_path: {error}") from None
    except OSError as error:
        raise DataError(f"model.tokenizer_path: cannot read {error.filename} ({error.strerror}); {REMEDY}.") from error
    if not path.exists():
        raise DataError(f"model.tokenizer_path: there is no file or folder {path}; {REMEDY}.")
    if not path.is_dir():
        return path
    usual, others = ([path / n for n in names if (path / n).exists()] for names in (FILES_IN_FOLDER, OTHER_FILES))
    models = usual[:1] or sorted(path.glob("*.model")) or others[:1]
    if len(models) > 1:
        names = ", ".join(model.name for model in models)
        raise DataError(f"model.tokenizer_path: the folder {path} holds several models ({names}); name one of them.")
    if models:
        return models[0]
    raise DataError(f"model.tokenizer_path: the folder {path} holds no tokenizer.model or tokenizer.json; {REMEDY}.")


def fetched_tokenizer(place: Path) -> Path:
    """A copy of a tokenizer file or folder in an object store, with what lies beside it; in the cache folder."""
    store, path = file_system_of(place)
    with store_errors(place):
        named = store.info(path)["type"] == "file"
        main = main_folder(place) if named else place
        base = file_system_of(main)[1]
        inside = store.ls(base, detail=True)
        inside += [
            info for each in inside if each["name"] == f"{base}/original" for info in store.ls(each["name"], True)
        ]
        stamps = {info["name"][len(base) + 1 :]: Stamp.of_info(info) for info in inside if info["type"] == "file"}
        itself = path[len(base) + 1 :] if named else ""
        known = (*FILES_IN_FOLDER, *OTHER_FILES)
        wanted = [itself] if named else [name for name in stamps if name in known or name.endswith(".model")]
        if not wanted:
            raise FileNotFoundError(errno.ENOENT, "it holds no tokenizer.model or tokenizer.json", str(place))
        names = [name for name in sorted({*wanted, *BESIDE}) if name in stamps]
        LISTED.update({str(main / name): stamps[name] for name in names})
    copy: Path = load("torchtitan.data.blocks:copied")(main, names) / itself
    return copy


def damaged(file: Path, format: str, reason: object) -> DataError:
    return DataError(f"model.tokenizer_path: {file} looks like {format} but is damaged ({reason}); {REMEDY}.")


Limits = Callable[..., dict[str, Any]]  # `boundaries` of a file, as the keys want them


def boundaries(
    file: Path,
    add_bos: bool | None,
    add_eos: bool,
    token_to_id: Callable[[str], int | None],
    vocab_size: int,
    own: Mapping[str, int | None],
    common: bool = False,
) -> dict[str, Any]:
    """What documents begin and end with, as fields of a `Tokenizer`: as the keys say, or else as the files beside the
    tokenizer declare, or else the tokenizer file itself, or else by common names.

    Args:
        own: "bos_token" and "eos_token" as far as the tokenizer file declares them.
        common: whether common names decide if nothing is declared.

    Raises:
        DataError: a declared token does not exist, or there is no EOS, or no BOS that `add_bos` wants.
    """
    config, generation = json_beside(file, CONFIG), json_beside(file, GENERATION)
    listed = generation.get("eos_token_id")
    stops = [id for id in (listed if isinstance(listed, list) else [listed]) if type(id) is int]
    generated = {"bos_token": generation["bos_token_id"]} if "bos_token_id" in generation else {}
    declared = {
        CONFIG: config,
        SPECIAL_TOKENS: json_beside(file, SPECIAL_TOKENS),
        file.name: own,
        GENERATION: {**generated, **({"eos_token": stops[0]} if stops else {})},
    }

    def find(key: str, names: tuple[str, ...]) -> int | None:
        for where, tokens in declared.items():
            if key not in tokens:
                continue
            token = tokens[key].get("content") if isinstance(tokens[key], dict) else tokens[key]
            if token in (None, ""):
                return None
            if isinstance(token, str):
                require_characters(token, f"the {key} of the {where} with {file}")
            id = token_to_id(token) if isinstance(token, str) else token
            if type(id) is int and 0 <= id < vocab_size:
                return id
            raise DataError(
                f"model.tokenizer_path: the {where} with {file} declares the {key} {token!r:.60}, which "
                f"{file.name} does not have; correct it, or name another tokenizer file."
            )
        return next((id for id in map(token_to_id, names) if id is not None), None)

    eos = find("eos_token", EOS_NAMES if common else ())
    if eos is None:
        raise DataError(
            f"model.tokenizer_path: {file} has no end-of-document token (such as {' or '.join(EOS_NAMES)}); "
            "documents would have no boundary. Add one, or use another tokenizer."
        )
    bos = None if add_bos is False else find("bos_token", BOS_NAMES if common else ())
    if add_bos and bos is None:
        raise DataError(f"training.add_bos: {file} has no BOS token; use another tokenizer, or unset the key.")
    if add_bos is None:
        added = config.get("add_bos_token")
        if not isinstance(added, bool | None):
            raise damaged(file, "a tokenizer", f"{CONFIG}: add_bos_token is {added!r:.60}, not true or false")
        # One token that ends documents, and is also named for BOS, stands once between them.
        if added is False or (bos == eos and added is not True and not (common and "bos_token" in own)):
            bos = None
    if bos is None and not add_eos:
        raise DataError(
            "training.add_eos = false: documents would have no boundary, because they do not begin with a BOS; "
            "unset it, or set training.add_bos = true."
        )
    return {"bos_id": bos, "eos_id": eos, "add_eos": add_eos, "stop_ids": frozenset({eos, *stops}), "file": file}


def main_folder(file: Path) -> Path:
    """The folder with the other files of a tokenizer's model."""
    return file.parent.parent if file.parent.name == "original" else file.parent


def json_beside(file: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file beside a tokenizer; {} if there is none. Raises a DataError if it is damaged."""
    path = main_folder(file) / name
    if file == SHIPPED or not path.exists():
        return {}
    with parsing(lambda why: DataError(f"model.tokenizer_path: {path} is damaged ({why}); correct or remove it.")):
        try:
            content: dict[str, Any] = json.loads(regular_file(path).read_bytes())
        except OSError as error:
            raise ValueError(str(error)) from None
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
    return content


def load_sentencepiece(file: Path, content: bytes, fingerprint: str, limits: Limits) -> Tokenizer:
    from sentencepiece import SentencePieceProcessor

    with parsing(lambda _: DataError(f"model.tokenizer_path: {file} is not {KINDS}, or is damaged; {REMEDY}.")):
        if not content:
            raise ValueError("empty file")
        processor = SentencePieceProcessor(model_proto=content)
        processor.id_to_piece([*range(processor.vocab_size())])  # raises an error for one that is no text
    own = {"bos_token": processor.bos_id(), "eos_token": processor.eos_id()}
    space = "\u2581"

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for number, piece in enumerate(text.split(space)):
            ids += space_bytes if number else []
            ids += processor.encode(piece)
        return ids

    # sentencepiece represents the space as U+2581, so U+2581 in the text would decode to a space. Encoding it as bytes
    # preserves it. Not for models that prepend a space to each text (Llama 2): splitting the text would add spaces.
    space_bytes = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in space.encode()]
    lossless = all(map(processor.is_byte, space_bytes)) and processor.encode("a", out_type=str) == ["a"]
    return Tokenizer(
        kind="sentencepiece",
        vocab_size=processor.vocab_size(),
        **limits(
            lambda name: id if processor.id_to_piece(id := processor.piece_to_id(name)) == name else None,
            processor.vocab_size(),
            {key: id if id >= 0 else None for key, id in own.items()},
        ),
        fingerprint=fingerprint,
        encode=encode if lossless else processor.encode,
        decode=processor.decode,
        piece=processor.id_to_piece,
    )
