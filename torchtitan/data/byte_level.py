"""Byte-level BPE in other files than a tokenizer.json (tiktoken, tekken.json, vocab.json with merges.txt): which ids
they have is half said by the file, and half by how text is split before, which must be known or stand beside it."""

import base64
import binascii
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Llama 3's regular expression for splitting text, and the names of its 256 special tokens (Llama 3 model card).
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
LLAMA3_NAMED = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
LLAMA3_SPECIAL_TOKENS = 256
# SHA-256 of the files themselves: tokenizer.model of Llama 3 to 3.3, and GPT-2's vocab.json.
LLAMA3_FILE = "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
GPT2_FILE = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"

VOCABULARY_BEGINS = re.compile(rb'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*\d')  # names and their ids
NEVER = 1 << 62  # merged, among ranks
MERGES, ADDED = "merges.txt", "added_tokens.json"
# A tekken.json that does not list its special tokens has these. The others have no part in pretraining.
TEKKEN_NAMED = {0: "<unk>", 1: "<s>", 2: "</s>"}


class Rules(NamedTuple):
    """What a file of pieces does not say itself."""

    split: str  # a regular expression, which matches each part of a text that is encoded on its own
    special: Mapping[str, int]  # special tokens and their ids
    nfc: bool = False  # whether letters and their marks are composed before


CLASSES = {"GPT2Tokenizer": Rules(GPT2_SPLIT, {}), "Qwen2Tokenizer": Rules(QWEN2_SPLIT, {}, nfc=True)}
"""Classes of `transformers` that read a vocab.json."""


def tiktoken_pieces(content: bytes) -> dict[bytes, int]:
    """The pieces of a tiktoken file and their ids. An id is also a merge rank: lower ranks are merged first. Raises a
    ValueError with the reason if it is damaged."""
    pieces: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            if line.strip():
                piece, rank = line.split()
                pieces[base64.b64decode(piece, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"line {number}") from None
    if sorted(pieces.values()) != list(range(len(pieces))) or any(bytes([byte]) not in pieces for byte in range(256)):
        raise ValueError(f"{len(pieces)} pieces, some of them missing or duplicate")
    return pieces


def tiktoken_rules(content: bytes, pieces: int, config: Mapping[str, Any]) -> Rules:
    """Of a tiktoken file with so many pieces: Llama 3's, or what the tokenizer_config.json beside it says. Raises a
    ValueError with a sentence if it says nothing."""
    if hashlib.sha256(content).hexdigest() == LLAMA3_FILE:
        return Rules(LLAMA3_SPLIT, llama3_special_tokens(pieces))
    split, special = config.get("pat_str"), added_tokens(config)
    if not isinstance(split, str) or not special:
        raise ValueError(
            "is a tiktoken file other than Llama 3's, and such a file does not say how text is split, nor its special "
            'tokens; put a tokenizer_config.json beside it, with the regular expression as "pat_str" and the special '
            'tokens as "added_tokens_decoder" ({"ID": {"content": "NAME"}, ...}), or use a tokenizer.json'
        )
    if min(special.values()) < pieces or len({*special.values()}) < len(special):
        raise ValueError(
            f"has the ids 0 to {pieces - 1}, and the tokenizer_config.json beside it gives special tokens some of "
            "these, or one id twice; correct its added_tokens_decoder"
        )
    return Rules(split, special)


def llama3_special_tokens(first: int) -> dict[str, int]:
    """Llama 3's special tokens and their ids, starting at `first`."""
    reserved = (f"reserved_special_token_{number}" for number in range(LLAMA3_SPECIAL_TOKENS))
    names = [LLAMA3_NAMED.get(place) or next(reserved) for place in range(LLAMA3_SPECIAL_TOKENS)]
    return {f"<|{name}|>": first + place for place, name in enumerate(names)}


def added_tokens(config: Mapping[str, Any]) -> dict[str, int]:
    """The tokens that a tokenizer_config.json adds to a vocabulary, and their ids."""
    listed = config.get("added_tokens_decoder")
    entries = listed.items() if isinstance(listed, dict) else ()
    return {
        entry["content"]: int(id)
        for id, entry in entries
        if id.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str)
    }


def vocabulary_rules(
    content: bytes, vocabulary: Mapping[str, int], beside: Iterable[Mapping[str, Any]], added: Mapping[str, Any]
) -> Rules:
    """Of a vocab.json: GPT-2's, or of the class that files beside it name. `beside` are tokenizer_config.json and
    special_tokens_map.json, `added` an added_tokens.json. Raises a ValueError with a sentence if they name none."""
    config: dict[str, Any] = {}
    names: list[Any] = []
    for entries in beside:
        config = {**entries, **config}
        named = [entries.get(f"{key}_token") for key in ("bos", "eos", "unk", "pad")]
        names += [name.get("content") if isinstance(name, dict) else name for name in named]
    known = hashlib.sha256(content).hexdigest() == GPT2_FILE
    name = "GPT2Tokenizer" if known else str(config.get("tokenizer_class")).removesuffix("Fast")
    if name not in CLASSES:
        raise ValueError(
            "is a vocabulary, which does not say how text is split; put a tokenizer_config.json beside it that names "
            f"its tokenizer_class ({' or '.join(CLASSES)}), or use a tokenizer.json"
        )
    special = {name: id for name, id in added.items() if type(id) is int} | added_tokens(config)
    names = [name for name in [*names, "<|endoftext|>"] if isinstance(name, str)]
    special |= {name: vocabulary[name] for name in names if name in vocabulary}
    return CLASSES[name]._replace(special=special)


def vocabulary_in(content: bytes) -> dict[str, int]:
    """The pieces in a vocab.json and their ids. Raises a ValueError if it holds something else."""
    vocabulary = json.loads(content)
    if any(type(id) is not int or id < 0 for id in vocabulary.values()):
        raise ValueError("not every piece has an id")
    return dict(vocabulary)


def of_vocabulary(vocabulary: dict[str, int], merges: str, rules: Rules) -> "FastTokenizer":
    """Of a vocab.json and a merges.txt, one pair a line, the first merge first."""
    pairs = [line.split() for line in merges.split("\n") if line.strip() and not line.startswith("#version")]
    return _byte_level(vocabulary, [(left, right) for left, right in pairs], rules, whole_words=False)


def of_tekken(content: bytes) -> "FastTokenizer":
    """Of Mistral's tekken.json: special tokens first, then as many pieces as its vocabulary is said to have."""
    tekken = json.loads(content)
    config = tekken["config"]
    first, size = config["default_num_special_tokens"], config["default_vocab_size"]
    entries = tekken["vocab"][: size - first]
    if [entry["rank"] for entry in entries] != list(range(size - first)):
        raise ValueError(f"its first {size - first} pieces are not ranked in order")
    pieces = {base64.b64decode(entry["token_bytes"]): first + entry["rank"] for entry in entries}
    listed = tekken.get("special_tokens") or ()
    named = {entry["rank"]: entry["token_str"] for entry in listed} or TEKKEN_NAMED
    special = {named.get(id, f"<SPECIAL_{id}>"): id for id in range(first)}
    return of_pieces(pieces, Rules(config["pattern"], special))


def of_pieces(pieces: Mapping[bytes, int], rules: Rules) -> "FastTokenizer":
    """Of pieces and their ids, of which lower ones are merged first, as in tiktoken."""
    letters = byte_letters()
    vocabulary = {"".join(letters[byte] for byte in piece): id for piece, id in pieces.items()}
    spelled = dict(zip(pieces, vocabulary, strict=True))
    ranked = sorted((piece for piece in pieces if len(piece) > 1), key=pieces.__getitem__)
    halves = (_halves(piece, pieces) for piece in ranked)
    # Llama 3 has pieces that no merge produces: complete words.
    merges = [(spelled[left], spelled[right]) for left, right in halves if {left, right} <= pieces.keys()]
    return _byte_level(vocabulary, merges, rules, whole_words=True)


def byte_letters() -> list[str]:
    """The letter that stands for each byte: a printable one for itself, others for letters from 256 on, in order."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    in_order = sorted(range(256), key=lambda byte: (chr(byte) not in letters, byte))
    return [letter for _, letter in sorted(zip(in_order, letters, strict=True))]


def _byte_level(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], rules: Rules, whole_words: bool
) -> "FastTokenizer":
    """`whole_words`: a word that is a piece needs no merges."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    inside = {name: id for name, id in rules.special.items() if name not in vocabulary}
    following = [*inside.values()] == [*range(len(vocabulary), len(vocabulary) + len(inside))]
    vocabulary = vocabulary if following else {**vocabulary, **inside}  # The library numbers others by itself.
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words))
    if rules.nfc:
        fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rules.split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in rules.special])
    return fast


def _halves(piece: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """The two pieces whose merge produced `piece`."""
    symbols = [bytes([byte]) for byte in piece]
    while len(symbols) > 2:
        pairs = [ranks.get(left + right, NEVER) for left, right in itertools.pairwise(symbols)]
        at = pairs.index(min(pairs))
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return symbols[0], symbols[1]
