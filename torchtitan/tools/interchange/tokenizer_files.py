"""The tokenizer of a run as files that `transformers` reads, with the same ids."""

import codecs
import itertools
import json
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from torchtitan.data.bpe import IS_JSON_OF_LIBRARY, fast_tokenizer, tiktoken_parts
from torchtitan.data.byte_level import of_pieces
from torchtitan.data.tokenizer import (
    CONFIG,
    SHIPPED,
    SPECIAL_TOKENS,
    Tokenizer,
    find_file,
    json_beside,
    load_tokenizer,
    main_folder,
)
from torchtitan.errors import DataError

SPACE = "\u2581"  # in sentencepiece's vocabularies
# Unassigned, so no tokenizer knows it. Between two characters it keeps them apart: they are not one grapheme.
APART = "\ufff0"
PROTECTED = "\ufff1"
# Beside the tokenizer, and about how it is used in chats rather than about its ids.
CHAT_TEMPLATE = "chat_template.jinja"
KEPT_KEYS = ("chat_template", "model_max_length")
# Beside a tokenizer.json, whose special tokens go along. Other keys may replace how it splits text, or name code.
SPECIAL_KEYS = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "additional_special_tokens",
                "extra_special_tokens", "padding_side", "truncation_side", "clean_up_tokenization_spaces")  # fmt: skip
# Types of pieces in a sentencepiece model.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
UNIGRAM, BPE, CHAR = 1, 2, 4


def tokenizer_files(path: str | None, add_bos: bool | None = None, add_eos: bool = True) -> dict[str, bytes]:
    """Files by name, for arguments of `load_tokenizer`. Raises a DataError if `transformers` cannot give these ids."""
    tokenizer = load_tokenizer(path, add_bos, add_eos)
    file = SHIPPED if path is None else find_file(path)
    content, folder = file.read_bytes().removeprefix(codecs.BOM_UTF8), main_folder(file)
    beside = {**json_beside(file, SPECIAL_TOKENS), **json_beside(file, CONFIG)}
    prefix = [] if tokenizer.bos_id is None else [tokenizer.bos_id]  # documents begin with it, so prompts do, too
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # Others replace what tokenizer.json says.
        "clean_up_tokenization_spaces": False,
        "bos_token": tokenizer.piece(prefix[0]) if prefix else beside.get("bos_token"),
        "eos_token": tokenizer.piece(tokenizer.eos_id),
        "add_bos_token": bool(prefix),
        "add_eos_token": False,
    }
    kept: tuple[str, ...] = KEPT_KEYS
    made: dict[str, bytes] = {}
    if tokenizer.kind == "tokenizers":
        fast = fast_tokenizer(file, content)
        kept += SPECIAL_KEYS
        # Without this key, transformers replaces what the file says by its own default.
        splitting = {} if fast.pre_tokenizer is None else json.loads(fast.pre_tokenizer.__getstate__())
        config |= {key: splitting[key] for key in ("add_prefix_space",) if key in splitting}
    elif tokenizer.kind == "sentencepiece":
        made["tokenizer.model"] = content
        fast = _sentencepiece_as_json(file, content, tokenizer)
    else:
        fast = of_pieces(*tiktoken_parts(file, content))
    config |= {key: beside[key] for key in kept if key in beside}
    changed = bool(fast.truncation or fast.padding)
    fast.no_truncation()
    fast.no_padding()
    if fast.encode("a").ids != [*prefix, *fast.encode("a", add_special_tokens=False).ids]:
        changed, fast = True, _with_prefix(fast, config["bos_token"], prefix)
    _require_same_ids(file, fast, tokenizer, prefix)
    is_one = tokenizer.kind == "tokenizers" and IS_JSON_OF_LIBRARY.search(content)
    made["tokenizer.json"] = content if is_one and not changed else fast.to_str().encode()
    if file != SHIPPED and (folder / CHAT_TEMPLATE).is_file():
        made[CHAT_TEMPLATE] = (folder / CHAT_TEMPLATE).read_bytes()
    return {**made, CONFIG: json.dumps(config, indent=2).encode()}


def _with_prefix(fast: FastTokenizer, bos: str, prefix: list[int]) -> FastTokenizer:
    """The tokenizer, which puts BOS before each text, or nothing if `prefix` is empty."""
    if not prefix:
        return FastTokenizer.from_str(json.dumps({**json.loads(fast.to_str()), "post_processor": None}))
    fast.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, *prefix)]
    )
    return fast


def _require_same_ids(file: Path, fast: FastTokenizer, tokenizer: Tokenizer, prefix: list[int]) -> None:
    """Raises a DataError if the two differ on a text. `prefix` is what `fast` puts before a text."""
    fast.encode_special_tokens = True  # here, too, text that spells a special token is ordinary text
    # One library has both vocabularies of a tokenizer.json, and needs half a minute for all of a large one.
    size = 0 if tokenizer.kind == "tokenizers" else tokenizer.vocab_size
    pieces = (tokenizer.piece(id).replace(SPACE, " ") for id in range(size))
    for text in itertools.chain(_texts(), pieces):
        same = fast.encode(text).ids == [*prefix, *tokenizer.encode(text)]
        if not same and not re.fullmatch("<.*>", text):  # a text that spells a special token is not text there
            raise DataError(
                f"model.tokenizer_path: {file} cannot be exported, because transformers would give the text "
                f"{text!r:.60} other ids; train with a tokenizer.json instead, or switch the export off."
            )
    fast.encode_special_tokens = False


def _texts() -> Iterator[str]:
    yield from ("", " ", "  a", "a  ", " a b  c\td\n\n e\r\n", "x" * 50 + " " * 50 + "=" * 50)
    yield f"a{SPACE}b{SPACE}{SPACE}c"
    yield from ("The cat's 12,345 hats (50%).\n", "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n", "<s> </s>")
    yield from ("Größe ﬁn ½ \uff21\uff22 ™ \uff11 Ⅷ", "東京とソウル、서울", "Привет, мир", "שָׁלוֹם", "شَّمس")
    yield from ("\U0001f469\u200d\U0001f467 \u2122\ufe0f", "é e\u0301")
    yield unicodedata.normalize("NFD", "Tiếng Việt đẹp quá, naïve façade, 한국어")
    category = unicodedata.ucd_3_2_0.category  # newer characters are not in the tables of every library
    letters = (chr(code) for code in range(32, 0xFFF0) if category(chr(code)) not in ("Cs", "Co", "Cn"))
    while block := list(itertools.islice(letters, 64)):
        yield "y".join(block).replace(SPACE, "")


def _sentencepiece_as_json(file: Path, content: bytes, tokenizer: Tokenizer) -> FastTokenizer:
    """A sentencepiece model in the format of the `tokenizers` library: its pieces, algorithm, and treatment of blanks.
    Raises a DataError if that library does not have its algorithm."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except Exception as error:  # protobuf is missing, or too old for this file
        raise DataError(
            f"exporting a sentencepiece model takes protobuf, or a newer one ({error}); run `pip install --upgrade "
            "protobuf`."
        ) from error
    model = sentencepiece_model_pb2.ModelProto.FromString(content)  # type: ignore[attr-defined]  # made at import
    rules, training = model.normalizer_spec, model.trainer_spec
    if training.model_type not in (UNIGRAM, BPE, CHAR):
        raise DataError(
            f"model.tokenizer_path: {file} cannot be exported, because transformers lacks its algorithm (words); "
            "train with another tokenizer, or switch the export off."
        )
    # Where a U+2581 in a text is not a blank, blanks stand for themselves, also in the vocabulary.
    lossless = tokenizer.decode(tokenizer.encode(SPACE)) == SPACE
    space = " " if lossless or not rules.escape_whitespaces else SPACE
    spelled = [piece.piece.replace(SPACE, " ") if lossless else piece.piece for piece in model.pieces]
    special = [id for id, piece in enumerate(model.pieces) if piece.type in (UNKNOWN, CONTROL)]
    user_defined = [spelled[id] for id, piece in enumerate(model.pieces) if piece.type == USER_DEFINED]
    splits = []
    if training.model_type == UNIGRAM:
        vocabulary = [(name, piece.score) for name, piece in zip(spelled, model.pieces, strict=True)]
        fast = FastTokenizer(models.Unigram(vocabulary, training.unk_id, training.byte_fallback))
        # That library would find special tokens and bytes in a text that spells their names.
        names = ["<0x[0-9A-F]{2}>", *(re.escape(spelled[id]) for id in special)]
        splits.append(pre_tokenizers.Split(Regex(f"(?=(?:{'|'.join(names)}))."), "merged_with_previous"))
    else:
        merges = _merges(spelled, model.pieces) if training.model_type == BPE else []
        fast = FastTokenizer(
            models.BPE(
                vocab={piece: id for id, piece in enumerate(spelled)},
                merges=merges,
                unk_token=spelled[training.unk_id],
                fuse_unk=True,
                byte_fallback=training.byte_fallback,
                ignore_merges=bool(user_defined),
            )
        )

    steps: list[Any] = []
    if rules.precompiled_charsmap:
        steps = [*_composing(tokenizer, content), normalizers.Precompiled(rules.precompiled_charsmap)]
        steps.append(normalizers.Replace(APART, ""))
        if lossless:
            steps = [normalizers.Replace(SPACE, PROTECTED), *steps, normalizers.Replace(PROTECTED, SPACE)]
    if rules.remove_extra_whitespaces:
        blanks = (" {2,}", " "), (r"\A | \z", "")
        steps += [normalizers.Replace(Regex(pattern), to) for pattern, to in blanks]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    if space == SPACE:
        steps.append(normalizers.Replace(" ", SPACE))
    fast.normalizer = normalizers.Sequence(steps)
    if user_defined:  # are never split or merged
        pattern = "|".join(map(re.escape, sorted(user_defined, key=len, reverse=True)))
        splits.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    if splits:
        fast.pre_tokenizer = pre_tokenizers.Sequence(splits)
    decoding: list[Any] = [] if lossless else [decoders.Replace(SPACE, " ")]
    decoding += [decoders.ByteFallback()] * training.byte_fallback
    decoding.append(decoders.Fuse())
    if rules.add_dummy_prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    fast.decoder = decoders.Sequence(decoding)
    fast.add_special_tokens([AddedToken(spelled[id], special=True, normalized=False) for id in special])
    return fast


def _merges(spelled: list[str], pieces: Any) -> list[tuple[str, str]]:
    """The merges of a BPE model, best score first. Of several merges that produce the same piece, the one with the
    longest left half is the one that runs of one character take."""
    scores = {name: piece.score for name, piece in zip(spelled, pieces, strict=True) if piece.type == NORMAL}
    ranked = sorted(
        (-score, id, -cut, name)
        for id, (name, score) in enumerate(scores.items())
        for cut in range(1, len(name))
        if name[:cut] in scores and name[cut:] in scores
    )
    return [(name[:-minus], name[-minus:]) for _, _, minus, name in ranked]


def _composing(tokenizer: Tokenizer, content: bytes) -> list[Any]:
    """What must precede a table of sentencepiece's normalizer in the `tokenizers` library, which applies it to
    graphemes: compose a letter and its marks if the table does, and take the rest apart. Marks that compose with no
    letter keep their order, which NFC would change."""
    from sentencepiece import SentencePieceProcessor

    apart = [normalizers.Replace(Regex(r"(?!\A)(?=[\p{M}\u0e33\u0eb3\u200c\u200d\uff9e\uff9f]|(?<=\r)\n)"), APART)]
    if SentencePieceProcessor(model_proto=content).normalize("e\u0301").strip(SPACE) != "\u00e9":
        return apart
    marks: set[str] = set()
    for letter in map(chr, range(0x20000)):  # beyond, no character decomposes into marks
        decomposed, composed = (unicodedata.normalize(form, letter) for form in ("NFD", "NFC"))
        if decomposed != letter and len(composed) == 1:
            marked = decomposed[1:] if composed == letter else letter  # otherwise it is another code of a mark
            marks.update(mark for mark in marked if unicodedata.category(mark)[0] == "M")
    others = Regex(rf"(?!\A)(?=[\p{{M}}&&[^{''.join(sorted(marks))}]])")
    kana = [letter + mark for letter in map(chr, range(0xFF66, 0xFF9E)) for mark in "\uff9e\uff9f\u3099\u309a"]
    voiced = {pair: unicodedata.normalize("NFKC", pair) for pair in kana}  # NFC does not compose them
    halfwidth = [normalizers.Replace(pair, letter) for pair, letter in voiced.items() if len(letter) == 1]
    return [*halfwidth, normalizers.Replace(others, APART), normalizers.NFC(), *apart]
