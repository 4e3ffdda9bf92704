"""Tokenizers of each kind, the bundled one, the script that trained it, and invalid files."""

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import tokenizers
from data_helpers import close, global_batches, loaders_of, training_on
from hypothesis import example, given
from hypothesis import strategies as st
from object_store import S3Server
from tokenizer_files import TEXTS, tekken_file, tiktoken_file, tokenizer_json, vocabulary_files

from torchtitan.checkpoint.tokenizer_copy import copy_tokenizer
from torchtitan.data import Tokenizer, load_tokenizer
from torchtitan.data.byte_level import LLAMA3_SPLIT
from torchtitan.data.sources import KEPT
from torchtitan.data.tokenizer import SHIPPED
from torchtitan.errors import DataError
from torchtitan.files import any_path

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_tokenizer.py"
HARD_TEXT = " \u2581a  b\t\tc \r\n\n\n\x00 <s></s><unk><0x0A> <|end_of_text|> é☃😀\u2028\ufeff e\u0301 ﬁ  "


def sentencepiece_file(path: Path, **settings: Any) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, model_type="bpe", minloglevel=2, **settings
    )
    path.write_bytes(model.getvalue())
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
    command = [sys.executable, str(SCRIPT), f"--dataset={tmp_path / 'missing'}", f"--output={tmp_path / 'a.model'}"]
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


@pytest.mark.parametrize("form", ["sentencepiece", "metaspace", "prepend"])
def test_segments_of_a_text_give_the_ids_of_the_whole(form: str, tmp_path: Path) -> None:
    """No blank in front of each segment, for tokenizers that put one in front of a text: Llama 2's, in each form."""
    text = "".join(f"Line {line} of\n\n    a text\n" for line in range(500))
    if form == "sentencepiece":
        settings = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
        path = sentencepiece_file(tmp_path / "a.model", vocab_size=330, **settings)
    else:
        path = tmp_path / "tokenizer.json"
        fast = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
        if form == "metaspace":
            fast.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(split=False)
        else:
            normalizers = [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
            fast.normalizer = tokenizers.normalizers.Sequence(normalizers)
        special = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        fast.train_from_iterator(TEXTS[0].split(), tokenizers.trainers.BpeTrainer(special_tokens=special))
        fast.save(str(path))
    tokenizer = load_tokenizer(str(path))
    (tmp_path / "a.txt").write_text(text)
    loader = loaders_of(training_on(tmp_path / "a.txt", shuffle=False), 1, 1, tokenizer=tokenizer)[0]
    ids = [id for _ in range(150) for id in loader.next()[0].tokens[0].tolist()]
    loader.close()
    assert ids == [tokenizer.bos_id, *tokenizer.encode(text)][: len(ids)]


def test_tokenizer_json(tmp_path: Path) -> None:
    file = tokenizer_json(tmp_path / "any.name", ["<|begin_of_text|>", "<|end_of_text|>"])
    file.write_text("\ufeff" + file.read_text(), encoding="utf-8")  # a byte order mark
    tokenizer = load_tokenizer(str(file))
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


def test_a_tiktoken_file_says_what_it_is_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any such file would else be split as Llama 3's, and get its special tokens."""
    path = tiktoken_file(tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").unlink()
    refusal = "is a tiktoken file other than Llama 3's, .* put a tokenizer_config.json beside it"
    with pytest.raises(DataError, match=rf"^model\.tokenizer_path: {path} {refusal}"):
        load_tokenizer(str(path))
    with monkeypatch.context() as known:
        known.setattr("torchtitan.data.byte_level.LLAMA3_FILE", hashlib.sha256(path.read_bytes()).hexdigest())
        as_llama3 = load_tokenizer(str(path))
    assert (as_llama3.bos_id, as_llama3.eos_id, as_llama3.vocab_size) == (260, 261, 260 + 256)
    config = {"pat_str": r"the|\s|.", "added_tokens_decoder": {"300": {"content": "<|endoftext|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    own = load_tokenizer(str(path))
    assert (own.bos_id, own.eos_id, own.vocab_size) == (None, 300, 301)
    assert own.encode(" the")[1:] == [257] and as_llama3.encode(" the") == [258]
    assert own.fingerprint != as_llama3.fingerprint
    copy_tokenizer(str(path), tmp_path / "copy")
    assert load_tokenizer(str(tmp_path / "copy")).fingerprint == own.fingerprint
    for wrong, message in (
        ({"pat_str": "("}, "damaged"),
        ({"pat_str": "[a-zA-Z ]+"}, "damaged .* loses a part of"),
        ({"added_tokens_decoder": {"3": {"content": "</s>"}}}, "gives special tokens some of these"),
        ({"added_tokens_decoder": {"99999999": {"content": "</s>"}}}, "damaged .* adds 99,999,999"),
        ({"added_tokens_decoder": [3]}, refusal),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **wrong}))
        with pytest.raises(DataError, match=message):
            load_tokenizer(str(path))


@pytest.mark.parametrize("listed", [True, False])
def test_tekken_json(listed: bool, tmp_path: Path) -> None:
    """Mistral's: special tokens come first, then the pieces, which tiktoken encodes."""
    content = json.loads(tekken_file(tmp_path / "tekken.json").read_text())
    if not listed:
        del content["special_tokens"]  # as in the oldest files
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(tmp_path))
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in content["vocab"][:-2]}
    judge = tiktoken.Encoding("judge", pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens={})
    for text in (HARD_TEXT, *TEXTS[:2], "<s>[INST] the"):
        ids = tokenizer.encode(text)
        assert ids == [20 + rank for rank in judge.encode_ordinary(text)]
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 282)
    assert [tokenizer.piece(id) for id in (2, 3, 19)] == ["</s>", "[INST]" if listed else "<SPECIAL_3>", "<SPECIAL_19>"]


@pytest.mark.parametrize("config", [{"default_vocab_size": 10_000}, {"pattern": "("}, {"default_vocab_size": "many"}])
def test_a_damaged_tekken_json(config: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^model\.tokenizer_path: .*looks like a tekken.json but is damaged"):
        load_tokenizer(str(tekken_file(tmp_path / "tekken.json", **config)))


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2TokenizerFast"])
def test_vocab_json_with_merges(name: str, tmp_path: Path) -> None:
    """The class beside them says how text is split; that class of transformers is the judge."""
    import transformers

    path = vocabulary_files(tmp_path)
    config = {"tokenizer_class": name, "eos_token": "<|endoftext|>", "bos_token": None, "unk_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    judge = getattr(transformers, name).from_pretrained(tmp_path)
    for text in (HARD_TEXT.replace("<|end_of_text|>", ""), *TEXTS[:2], "Don't DON'T 12345  x\n\n\ty"):
        assert tokenizer.encode(text) == judge(text)["input_ids"]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, judge.eos_token_id)
    assert tokenizer.eos_id not in tokenizer.encode("<|endoftext|>")
    copy_tokenizer(str(path), tmp_path / "copy")
    assert load_tokenizer(str(tmp_path / "copy")).fingerprint == tokenizer.fingerprint
    lines = (tmp_path / "merges.txt").read_text().splitlines()
    (tmp_path / "merges.txt").write_text("\n".join(lines[:20]))
    assert load_tokenizer(str(tmp_path)).fingerprint != tokenizer.fingerprint


def test_a_vocab_json_that_does_not_say_how_text_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = vocabulary_files(tmp_path)
    for config in ({}, {"tokenizer_class": "RobertaTokenizer"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(DataError, match=r"is a vocabulary, which does not say .*GPT2Tokenizer or Qwen2Tokenizer"):
            load_tokenizer(str(path))
    monkeypatch.setattr("torchtitan.data.byte_level.GPT2_FILE", hashlib.sha256(path.read_bytes()).hexdigest())
    assert load_tokenizer(str(path)).eos_id == 0
    (tmp_path / "merges.txt").write_text("t h e\n")
    with pytest.raises(DataError, match="damaged"):
        load_tokenizer(str(path))
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(DataError, match=r"is a vocabulary without its merges\.txt"):
        load_tokenizer(str(path))


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
    def write_to(folder: Path) -> None:
        (folder / "tokenizer.model").write_bytes(content)

    return write_to


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"(\p{L}+\s?)+$"}, "behavior": "Isolated",
                            "invert": False}}, "retry-limit-in-match"),
        ({"pre_tokenizer": None, "normalizer": {"type": "Replace", "pattern": {"Regex": "( +)+-"}, "content": ""}},
         "retry-limit-in-match"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": [], "post_processor": None},
         "vocabulary is empty"),
    ],
)  # fmt: skip
def test_a_hostile_tokenizer_json(tmp_path: Path, change: dict[str, object], message: str) -> None:
    file = tokenizer_json(tmp_path / "tokenizer.json", ["</s>"])
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(DataError, match=f"^model.tokenizer_path: .*damaged .*{message}"):
        load_tokenizer(str(file))


def test_ids_far_beyond_the_number_of_tokens(tmp_path: Path) -> None:
    file = tokenizer_json(tmp_path / "tokenizer.json", ["</s>"])
    content = json.loads(file.read_text())
    content["model"]["vocab"][next(iter(content["model"]["vocab"]))] = 99_999_999
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"damaged \(its [\d,]+ tokens have ids up to 99,999,999\)"):
        load_tokenizer(str(file))


@pytest.mark.parametrize("tokenizer_format", ["sentencepiece", "tokenizers", "tiktoken"])
@pytest.mark.parametrize("cache", ["cache", "/dev/null/cache"])
def test_a_tokenizer_in_an_object_store(
    tokenizer_format: str, cache: str, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
    monkeypatch.setattr(KEPT, "unchecked", KEPT.most)  # as at the first look, whatever ran before
    local = tmp_path / "model"
    (local / "original").mkdir(parents=True)
    match tokenizer_format:
        case "sentencepiece":
            file = shutil.copy(SHIPPED, local / "tokenizer.model")
        case "tokenizers":
            file = tokenizer_json(local / "tokenizer.json", ["<s>", "</s>", "<|begin|>", "<|stop|>"])
            declared = {"bos_token": "<|begin|>", "eos_token": "<|stop|>"}
            (local / "tokenizer_config.json").write_text(json.dumps(declared))
        case "tiktoken":
            file = tiktoken_file(local / "original" / "tokenizer.model")
            (local / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 265]}))
    (local / "weights.bin").write_bytes(b"not read")
    for path in local.rglob("*.*"):
        any_path(f"s3://bucket/m/{path.relative_to(local).as_posix()}").write_bytes(path.read_bytes())
    name = Path(file).relative_to(local).as_posix()
    for end in ("", "/", f"/{name}"):
        s3.requests.clear()
        original, remote = load_tokenizer(f"{local}{end}"), load_tokenizer(f"s3://bucket/m{end}")
        for attribute in ("kind", "vocab_size", "bos_id", "eos_id", "stop_ids", "fingerprint"):
            assert getattr(original, attribute) == getattr(remote, attribute)
        assert not any("weights" in path for _, path in s3.requests)
    if tokenizer_format != "sentencepiece":
        any_path(f"s3://bucket/m/{name}").write_bytes(Path(file).read_bytes() + b"\n")
        assert load_tokenizer(f"s3://bucket/m/{name}").fingerprint != remote.fingerprint


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://bucket/missing", "there is no such file or folder in the object store"),
        ("s3://nowhere/tokenizer.json", "there is no such bucket"),
        ("s3://bucket/other", r"it holds no tokenizer\.model or tokenizer\.json"),
        ("nowhere://bucket/other", "cannot be read"),
    ],
)
def test_no_tokenizer_in_an_object_store(uri: str, message: str, s3: S3Server) -> None:
    any_path("s3://bucket/other/a.txt").write_bytes(b"text")
    with pytest.raises(DataError, match=rf"^model\.tokenizer_path: .*{uri}.*{message}"):
        load_tokenizer(uri)


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.model")
    for path in (tmp_path, tmp_path / "tokenizer.model"):
        with pytest.raises(DataError, match=r"cannot read .*/tokenizer\.model \(it is a named pipe, not a file\)"):
            load_tokenizer(str(path))
    with pytest.raises(DataError, match=r"^model\.tokenizer_path: there is no file or folder .*missing"):
        load_tokenizer(str(tmp_path / "missing"))


DECLARED = {"bos_token": "[BEGIN]", "eos_token": {"content": "[END]"}}


@pytest.mark.parametrize(
    ("files", "options", "expected"),
    [
        # Common names decide only where nothing is declared.
        ({}, {}, ("<s>", "</s>")),
        ({"tokenizer_config.json": DECLARED}, {}, ("[BEGIN]", "[END]")),
        ({"special_tokens_map.json": DECLARED}, {}, ("[BEGIN]", "[END]")),
        ({"generation_config.json": {"bos_token_id": 2, "eos_token_id": [3, 1]}}, {}, ("[BEGIN]", "[END]")),
        ({"tokenizer_config.json": DECLARED, "generation_config.json": {"bos_token_id": 0}}, {}, ("[BEGIN]", "[END]")),
        ({"tokenizer_config.json": {"bos_token": None, "eos_token": "</s>"}}, {}, (None, "</s>")),
        ({"tokenizer_config.json": {"bos_token": "", "eos_token": "</s>"}}, {}, (None, "</s>")),
        ({"tokenizer_config.json": {**DECLARED, "add_bos_token": False}}, {}, (None, "[END]")),
        ({"tokenizer_config.json": {"add_bos_token": False}}, {}, (None, "</s>")),
        ({"tokenizer_config.json": {**DECLARED, "bos_token": "[END]"}}, {}, (None, "[END]")),
        (
            {"tokenizer_config.json": {**DECLARED, "bos_token": "[END]", "add_bos_token": True}},
            {},
            ("[END]", "[END]"),
        ),
        # The keys decide before the files.
        ({"tokenizer_config.json": {**DECLARED, "add_bos_token": False}}, {"add_bos": True}, ("[BEGIN]", "[END]")),
        ({"tokenizer_config.json": DECLARED}, {"add_bos": False}, (None, "[END]")),
        ({"tokenizer_config.json": DECLARED}, {"add_eos": False}, ("[BEGIN]", None)),
    ],
)
def test_documents_begin_and_end_as_the_files_declare(
    tmp_path: Path, files: dict[str, object], options: dict[str, bool], expected: tuple[str | None, str | None]
) -> None:
    content = json.loads(tokenizer_json(tmp_path / "tokenizer.json", ["<s>", "</s>", "[BEGIN]", "[END]"]).read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "post_processor": None}))
    for name, declared in files.items():
        (tmp_path / name).write_text(json.dumps(declared))
    tokenizer = load_tokenizer(str(tmp_path), **options)
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n' * 20)
    loaders = loaders_of(training_on(tmp_path / "corpus.jsonl", seq_len=5), 1, 1, tokenizer=tokenizer)
    (row,) = global_batches(loaders, 1)[0].tolist()
    description = loaders[0].description
    close(loaders)
    bos, eos = expected
    document = [token for token in (bos, "a", eos) if token is not None]
    assert [tokenizer.piece(id) for id in row] == (document * 3)[:6]
    assert all(
        f"{token_name} {token!r} (" in description if token else f"no {token_name}" in description
        for token_name, token in zip(("BOS", "EOS"), expected, strict=True)
    )


def test_a_sentencepiece_model_begins_as_its_folder_says(tmp_path: Path) -> None:
    sentencepiece_file(tmp_path / "tokenizer.model", vocab_size=60)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": false}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (None, 2, frozenset({2, 7}))
    sentencepiece_file(tmp_path / "tokenizer.model", vocab_size=60, bos_id=-1)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(str(tmp_path)).bos_id is None


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({"tokenizer_config.json": '{"eos_token": "<other>"}'}, {}, "declares the eos_token '<other>', which"),
        ({"generation_config.json": '{"eos_token_id": 99999999}'}, {}, "declares the eos_token 99999999, which"),
        ({"tokenizer_config.json": '{"eos_token": null}'}, {}, "has no end-of-document token"),
        ({"tokenizer_config.json": '{"add_bos_token": "no"}'}, {}, "add_bos_token is 'no', not true or false"),
        ({"tokenizer_config.json": "[]"}, {}, "tokenizer_config.json is damaged"),
        ({"tokenizer_config.json": '{"bos_token": null}'}, {"add_bos": True}, "^training.add_bos: .* has no BOS token"),
        ({"tokenizer_config.json": '{"bos_token": null}'}, {"add_eos": False}, "^training.add_eos = false: documents"),
    ],
)
def test_declarations_that_cannot_hold(
    tmp_path: Path, files: dict[str, str], options: dict[str, bool], message: str
) -> None:
    tokenizer_json(tmp_path / "tokenizer.json", ["</s>"])
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(str(tmp_path), **options)


def test_what_a_library_prints_of_its_panic_is_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    model = {"type": "BPE", "vocab": {"a": 0, "</s>": 1}, "merges": []}
    content = {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"looks like a tokenizer\.json but is damaged"):
        load_tokenizer(str(tmp_path / "tokenizer.json"), True, True)
    assert capfd.readouterr() == ("", "")
