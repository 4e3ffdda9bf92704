"""Tokenizers of each kind, the bundled one, the script that trained it, and invalid files."""

import base64
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from torchtitan.data import Tokenizer, load_tokenizer
from torchtitan.errors import DataError

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_tokenizer.py"
TEXTS = ["the cat sat on the mat, and the dog sat on the cat " * 4, "def f(x):\n    return x + 1\n" * 8] * 10
HARD_TEXT = " \u2581a  b\t\tc \r\n\n\n\x00 <s></s><unk><0x0A> <|end_of_text|> é☃😀\u2028\ufeff e\u0301 ﬁ  "


def sentencepiece_file(path: Path, **settings: object) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, model_type="bpe", minloglevel=2, **settings
    )
    path.write_bytes(model.getvalue())
    return path


def tokenizer_json(path: Path, special: list[str]) -> Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = tokenizers.decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    # as in files made for chat use: BOS before each text, and at most eight tokens
    first = [(special[0], tokenizer.token_to_id(special[0]))]
    template = tokenizers.processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=first)
    tokenizer.post_processor = template  # type: ignore[assignment]
    tokenizer.enable_truncation(8)
    tokenizer.save(str(path))
    return path


def tiktoken_file(path: Path) -> Path:
    pieces = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"at"]
    lines = [base64.b64encode(piece) + b" " + str(rank).encode() for rank, piece in enumerate(pieces)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@given(st.text())
@example(HARD_TEXT)
@example("\u2581")
@example("\u2581" * 3 + "a" + "\u2581")
def test_the_shipped_tokenizer_is_lossless(text: str) -> None:
    tokenizer = load_tokenizer(None)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_shipped_tokenizer() -> None:
    tokenizer = load_tokenizer(None)
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == ("sentencepiece", 4096, 1, 2)
    # it was trained on source code, where a piece stands for several characters
    code = Path(json.__file__).read_text(encoding="utf-8")
    ids = tokenizer.encode(code)
    assert len(ids) < len(code) / 2.8
    assert set(ids) <= set(range(4096))
    assert not {1, 2} & set(tokenizer.encode("<s></s>"))


def test_the_script_trains_a_lossless_tokenizer_and_the_same_one_again(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, text in enumerate(TEXTS):
        (corpus / f"{number}.txt").write_text(text + "é" * 5000)  # a line longer than the trainer accepts
    models = []
    for name in ("one.model", "two.model"):
        arguments = [f"--dataset={corpus}", "--vocab_size=330", f"--output={tmp_path / 'made' / name}"]
        subprocess.run([sys.executable, SCRIPT, *arguments], check=True, timeout=60)
        models.append((tmp_path / "made" / name).read_bytes())
    assert models[0] == models[1]
    tokenizer = load_tokenizer(str(tmp_path / "made" / "one.model"))
    assert tokenizer.vocab_size == 330
    assert tokenizer.decode(tokenizer.encode(HARD_TEXT)) == HARD_TEXT


def test_the_script_says_what_is_wrong_in_a_line(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, f"--dataset={tmp_path / 'missing'}", f"--output={tmp_path / 'a.model'}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith("Error: dataset: there is no file or folder")
    assert len(ended.stderr.splitlines()) == 1


def test_sentencepiece_with_a_space_before_each_text(tmp_path: Path) -> None:
    """As Llama 2's: its ids equal the library's own, with or without U+2581."""
    path = sentencepiece_file(tmp_path / "tokenizer.model", vocab_size=330, byte_fallback=True)
    tokenizer = load_tokenizer(str(tmp_path))  # a folder that contains one
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    for text in ("the cat sat", " the  cat", "a\u2581b", "é☃"):
        assert tokenizer.encode(text) == library.encode(text)
    ids = tokenizer.encode("the cat sat")
    assert tokenizer.decode(ids) == "the cat sat"
    for cut in range(len(ids) + 1):
        assert tokenizer.decode(ids[:cut]) + tokenizer.decode_after(ids[:cut], ids[cut:]) == "the cat sat"
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == ("sentencepiece", 330, 1, 2)


def test_tokenizer_json(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_json(tmp_path / "any.name", ["<|begin_of_text|>", "<|end_of_text|>"])))
    assert tokenizer.kind == "tokenizers" and 258 < tokenizer.vocab_size <= 400
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    for text in (HARD_TEXT, TEXTS[0]):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not {0, 1} & set(ids)  # neither a prepended BOS, nor an EOS where the text spells it
    assert len(tokenizer.encode(TEXTS[0])) > 8


def test_tokenizer_json_with_names_of_its_own_for_bos_and_eos(tmp_path: Path) -> None:
    tokenizer_json(tmp_path / "tokenizer.json", ["[BEGIN]", "[END]"])
    with pytest.raises(DataError, match="has no end-of-document token"):
        load_tokenizer(str(tmp_path))
    config = {"bos_token": "[BEGIN]", "eos_token": {"content": "[END]"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


def test_tiktoken(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiktoken_file(tmp_path / "tokenizer.model")))
    assert (tokenizer.kind, tokenizer.vocab_size) == ("tiktoken", 260 + 256)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (260, 261)
    assert tokenizer.encode("the the") == [257, 258]
    assert tokenizer.decode([260, 257, 261]) == "<|begin_of_text|>the<|end_of_text|>"
    assert tokenizer.decode(tokenizer.encode(HARD_TEXT)) == HARD_TEXT
    assert max(tokenizer.encode("<|end_of_text|>")) < 260


def test_tiktoken_bears_long_runs(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiktoken_file(tmp_path / "tokenizer.model")))
    text = " " * 1_500_000 + "x" * 60_000 + "\n" * 30_000 + "end"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_what_is_in_the_file_decides_and_its_fingerprint_follows(tmp_path: Path) -> None:
    """Llama 2 and Llama 3 both name their file tokenizer.model."""
    path = tmp_path / "tokenizer.model"
    seen: list[Tokenizer] = []
    for write in (
        lambda p: sentencepiece_file(p, vocab_size=60),
        tiktoken_file,
        lambda p: tokenizer_json(p, ["<s>", "</s>"]),
    ):
        write(path)
        seen.append(load_tokenizer(str(path)))
    assert [tokenizer.kind for tokenizer in seen] == ["sentencepiece", "tiktoken", "tokenizers"]
    assert len({tokenizer.fingerprint for tokenizer in seen}) == 3


def write(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "tokenizer.model").write_bytes(content) and None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "holds no tokenizer.model or tokenizer.json"),
        (write(b""), "is not a sentencepiece model, a Hugging Face tokenizer.json or a tiktoken-style"),
        (write(b"\x0a\x0e\x0a\x05<unk>" + b"\xff" * 50), "is not a sentencepiece model"),
        (write(b"A text about tokenizers.\n"), "is not a sentencepiece model"),
        (write(b'{"version": "1.0"}'), "looks like a tokenizer.json but is damaged"),
        (write(b'{"model'), "looks like a tokenizer.json but is damaged"),
        (write(b"IQ== 0\nIg== 1\n"), r"looks like a tiktoken file but is damaged \(2 pieces"),
        (write(b"IQ== 0\nnot a line\n"), r"looks like a tiktoken file but is damaged \(line 2"),
        (write(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "git lfs pull"),
        (lambda f: sentencepiece_file(f / "a.model", vocab_size=60, eos_id=-1) and None, "no end-of-document token"),
        (lambda f: [(f / name).touch() for name in ("a.model", "b.model")], r"several models \(a.model, b.model\)"),
    ],
)
def test_what_is_no_tokenizer(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path)
    with pytest.raises(DataError, match=rf"^model\.tokenizer_path: .*{message}"):
        load_tokenizer(str(tmp_path))


def test_ids_far_beyond_the_number_of_tokens(tmp_path: Path) -> None:
    file = tokenizer_json(tmp_path / "tokenizer.json", ["</s>"])
    content = json.loads(file.read_text())
    content["model"]["vocab"][next(iter(content["model"]["vocab"]))] = 99_999_999
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"damaged \(its [\d,]+ tokens have ids up to 99,999,999\)"):
        load_tokenizer(str(file))


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^model\.tokenizer_path: there is no file or folder .*missing"):
        load_tokenizer(str(tmp_path / "missing"))
