"""Files of tokenizers in the forms that other programs write."""

import base64
import json
from pathlib import Path

import tokenizers

from torchtitan.data.byte_level import LLAMA3_SPLIT, llama3_special_tokens

TEXTS = ["the cat sat on the mat, and the dog sat on the cat " * 4, "def f(x):\n    return x + 1\n" * 8] * 10


def tokenizer_json(path: Path, special: list[str]) -> Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    # as in files made for chat use: BOS before each text, and at most eight tokens
    first = [(special[0], tokenizer.token_to_id(special[0]))]
    template = tokenizers.processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=first)
    tokenizer.post_processor = template
    tokenizer.enable_truncation(8)
    tokenizer.save(str(path))
    return path


# What a tiktoken file other than Llama 3's needs beside it.
LIKE_LLAMA3 = {
    "pat_str": LLAMA3_SPLIT,
    "added_tokens_decoder": {str(id): {"content": name} for name, id in llama3_special_tokens(260).items()},
}


def tiktoken_file(path: Path) -> Path:
    pieces = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"at"]
    lines = [base64.b64encode(piece) + b" " + str(rank).encode() for rank, piece in enumerate(pieces)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    main = path.parent.parent if path.parent.name == "original" else path.parent
    (main / "tokenizer_config.json").write_text(json.dumps(LIKE_LLAMA3))
    return path


def tekken_file(path: Path, **config: object) -> Path:
    pieces = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"at", b" r", b"et"]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate([*pieces, b"beyond", b"the vocabulary"])
    ]
    sizes = {"default_vocab_size": 20 + len(pieces), "default_num_special_tokens": 20, "version": "v3"}
    special = [{"rank": id, "token_str": name} for id, name in enumerate(("<unk>", "<s>", "</s>", "[INST]"))]
    tekken = {"config": {"pattern": LLAMA3_SPLIT, **sizes, **config}, "vocab": vocab, "special_tokens": special}
    path.write_text(json.dumps(tekken))
    return path


def vocabulary_files(folder: Path) -> Path:
    """A vocab.json and a merges.txt, whose special token has the last id."""
    library = tokenizers.Tokenizer.from_file(str(tokenizer_json(folder / "tokenizer.json", ["</s>"])))
    (folder / "tokenizer.json").unlink()
    library.model.save(str(folder))
    vocabulary = json.loads((folder / "vocab.json").read_text())
    vocabulary = {"<|endoftext|>" if name == "</s>" else name: id for name, id in vocabulary.items()}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    return folder / "vocab.json"
