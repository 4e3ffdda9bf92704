#!/usr/bin/env python3
"""Trains a lossless byte-fallback sentencepiece tokenizer on any text that the data layer can read.

python scripts/train_tokenizer.py --output=my.model                          # on python_stdlib: the shipped model
python scripts/train_tokenizer.py --dataset=corpus/ --vocab_size=32000 --output=my.model
"""

import argparse
import io
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from torchtitan.data.datasets import DATASETS, documents_of
from torchtitan.errors import ConfigError, run_command
from torchtitan.files import local_path
from torchtitan.logging import Waiting

SENTENCE_BYTES = 4096  # the trainer takes text in sentences; ours are groups of whole lines up to this length


def sentences(texts: Iterable[str]) -> Iterator[str]:
    """Groups of lines. A line longer than the limit stands alone, truncated."""
    for text in texts:
        lines: list[str] = []
        length = 0
        for line in text.splitlines(keepends=True):
            size = len(line.encode())
            if size > SENTENCE_BYTES:
                line = line.encode()[:SENTENCE_BYTES].decode(errors="ignore")
            if lines and length + size > SENTENCE_BYTES:
                yield "".join(lines)
                lines, length = [], 0
            lines.append(line)
            length += size
        if lines:
            yield "".join(lines)


def train(texts: Iterable[str], vocab_size: int) -> bytes:
    """The content of the model file. The same texts give the same bytes."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=sentences(texts),
        model_writer=model,
        vocab_size=vocab_size,
        model_type="bpe",
        # Lossless: no normalization, all whitespace preserved, and bytes for what no piece covers.
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        byte_fallback=True,
        character_coverage=0.9999,
        required_chars="\n\t",
        split_digits=True,
        max_sentence_length=2 * SENTENCE_BYTES,
        num_threads=1,  # for the same model on every machine
        minloglevel=2,
    )
    return model.getvalue()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dataset", default="python_stdlib", help=f"{', '.join(DATASETS.names())}, a file, a folder or a Hub id"
    )
    parser.add_argument("--text_column", default="text", help="text column of JSONL or Parquet files")
    parser.add_argument("--documents", type=int, help="use only this many documents")
    parser.add_argument("--vocab_size", type=int, default=4096, help="number of pieces, including special ones")
    parser.add_argument("--output", type=local_path, required=True, help="file to write")
    arguments = parser.parse_args(argv)
    if arguments.documents is not None and arguments.documents < 1:
        parser.error(f"--documents must be above 0, not {arguments.documents}")
    try:
        documents = islice(documents_of(arguments.dataset, arguments.text_column), arguments.documents)
        with Waiting("training the tokenizer"):
            model = train((document.text for document in documents), arguments.vocab_size)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_bytes(model)
    except RuntimeError as error:  # the trainer's
        raise ConfigError(str(error)) from None
    print(f"{arguments.output}: {arguments.vocab_size} pieces, {len(model):,} bytes.")
    return 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
