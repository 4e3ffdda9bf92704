"""The tokenizer of a run as files that `transformers` reads."""

import itertools
import json

from torchtitan.data.tokenizer import (
    LLAMA3_SPLIT,
    SHIPPED,
    Tokenizer,
    find_file,
    llama3_special_tokens,
    load_tokenizer,
    tiktoken_pieces,
)

# Files that are usually published next to a tokenizer.
BESIDE = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def tokenizer_files(path: str | None) -> dict[str, bytes]:
    """Files by name.

    Args:
        path: as `model.tokenizer_path`; None is the bundled tokenizer.

    Raises:
        DataError: there is no tokenizer.
    """
    tokenizer = load_tokenizer(path)
    file = SHIPPED if path is None else find_file(path)
    content = file.read_bytes()
    beside = {name: (file.parent / name).read_bytes() for name in BESIDE if (file.parent / name).is_file()}
    match tokenizer.kind:
        case "tokenizers":
            made = {"tokenizer.json": content, "tokenizer_config.json": _config("PreTrainedTokenizerFast", tokenizer)}
        case "sentencepiece":
            made = {"tokenizer.model": content, "tokenizer_config.json": _config("LlamaTokenizer", tokenizer)}
        case _:
            made = {
                "tokenizer.json": _tiktoken_as_json(tiktoken_pieces(file, content)),
                "tokenizer_config.json": _config("PreTrainedTokenizerFast", tokenizer),
            }
    return {**made, **beside}


def _config(kind: str, tokenizer: Tokenizer) -> bytes:
    content = {
        "tokenizer_class": kind,
        "clean_up_tokenization_spaces": False,
        "bos_token": None if tokenizer.bos_id is None else tokenizer.piece(tokenizer.bos_id),
        "eos_token": tokenizer.piece(tokenizer.eos_id),
    }
    if kind == "LlamaTokenizer":
        content |= {
            "add_bos_token": tokenizer.bos_id is not None,  # documents begin with it, so prompts must too
            "add_eos_token": False,
            "add_prefix_space": tokenizer.piece(tokenizer.encode("a")[0]).startswith("\u2581"),
            "legacy": False,
        }
    return json.dumps(content, indent=2).encode()


def _tiktoken_as_json(pieces: dict[bytes, int]) -> bytes:
    """Llama 3's tokenizer in the format of the `tokenizers` library."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as FastTokenizer

    spelled = dict(zip(range(256), _byte_letters(), strict=True))

    def spell(piece: bytes) -> str:
        return "".join(spelled[byte] for byte in piece)

    vocabulary = {spell(piece): rank for piece, rank in pieces.items()}
    ranked = sorted((piece for piece in pieces if len(piece) > 1), key=pieces.__getitem__)
    halves = (_halves(piece, pieces) for piece in ranked)
    # Llama 3 has pieces that no merge produces: complete words (`ignore_merges`).
    merges = [(spell(left), spell(right)) for left, right in halves if {left, right} <= pieces.keys()]
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    special = llama3_special_tokens(len(pieces))
    fast.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    begin = "<|begin_of_text|>"
    fast.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, special[begin])]
    )
    return fast.to_str().encode()


def _halves(piece: bytes, pieces: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two pieces whose merge produced `piece`."""
    parts = [bytes([byte]) for byte in piece]
    while len(parts) > 2:
        ranks = [pieces.get(left + right, len(pieces)) for left, right in itertools.pairwise(parts)]
        at = ranks.index(min(ranks))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _byte_letters() -> list[str]:
    """The letter that represents each byte in byte-level BPE (github.com/openai/gpt-2): printable bytes represent
    themselves, all others are mapped to letters from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
