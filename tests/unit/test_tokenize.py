"""Shards that `python -m torchtitan.tools.tokenize` writes: their tokens, and what happens if it is stopped."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import TOKENIZER, close, global_batches, loaders_of, story, training_on, write_jsonl
from runs import all_equal, files_of_at_most

from torchtitan.data.datasets import documents_of
from torchtitan.data.packing import tokens_of
from torchtitan.errors import DataError, UserError
from torchtitan.logging import logger
from torchtitan.tools import tokenize

SHARD = 4000  # bytes, so that small corpora have several
# The command, with small shards. After some of them it waits as long as a file is there, so that it does not end before
# a test stops it.
COMMAND = f"""
import time
from pathlib import Path
from torchtitan.tools import tokenize
from torchtitan.errors import run_command
tokenize.SHARD_BYTES, tokenize.BATCH_TOKENS = {SHARD}, 1000
append, records = tokenize.append, []
def held(progress, record):
    append(progress, record)
    records.append(record)
    while len(records) > 6 and Path(__file__).with_name("held").exists():
        time.sleep(0.01)
tokenize.append = held
if __name__ == "__main__":
    run_command(tokenize.main)
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(tokenize, "SHARD_BYTES", SHARD)
    monkeypatch.setattr(tokenize, "BATCH_TOKENS", 1000)
    for name in ("handlers", "level", "propagate"):  # which the command sets for its process
        monkeypatch.setattr(logger, name, getattr(logger, name))

    def run(*arguments: object, workers: int = 1) -> None:
        monkeypatch.setattr(sys, "argv", ["tokenize", *map(str, arguments), f"--workers={workers}"])
        tokenize.main()

    return run


def corpus(folder: Path) -> Path:
    """Records: most have some 180 tokens, two no text, and one more than two shards."""
    path = write_jsonl(folder / "corpus.jsonl", range(60))
    with path.open("a") as file:
        file.write('not JSON\n{"text": ""}\n')
        file.write(json.dumps({"text": story(60, 1000)}) + "\n")
        file.write(json.dumps({"text": story(61)}) + "\n")
    return path


def documents_in(folder: Path) -> list[list[int]]:
    """Read as Megatron-LM describes its format."""
    documents = []
    for index in sorted(folder.glob("*.idx")):
        content = index.read_bytes()
        assert content[:9] == b"MMIDIDX\0\0"
        assert (content[9:17], content[17]) == ((1).to_bytes(8, "little"), 8)  # version, uint16
        sequences, bounds = np.frombuffer(content, np.uint64, 2, 18).astype(int)
        lengths = np.frombuffer(content, np.int32, sequences, 34)
        pointers = np.frombuffer(content, np.int64, sequences, 34 + 4 * sequences)
        assert np.frombuffer(content, np.int64, offset=34 + 12 * sequences).tolist() == list(range(bounds))
        assert bounds == sequences + 1
        data = index.with_suffix(".bin").read_bytes()
        assert lengths.sum() * 2 == len(data)
        for length, pointer in zip(lengths, pointers, strict=True):
            documents.append(np.frombuffer(data, np.uint16, length, pointer).tolist())
    return documents


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def compressed(folder: Path) -> Path:
    path = folder / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress(corpus(folder).read_bytes()))
    return path


def parquet(folder: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": [story(number) for number in range(40)]}), folder / "corpus.parquet")
    return folder / "corpus.parquet"


@pytest.mark.parametrize("make", [corpus, compressed, parquet])
def test_shards_hold_the_tokens_of_all_documents_in_order(
    make: Callable[[Path], Path], tmp_path: Path, run: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = make(tmp_path), tmp_path / "shards"
    run(source, "-o", out)
    expected = [tokens_of(document, TOKENIZER).tolist() for document in documents_of(str(source), "text")]
    assert documents_in(out) == expected
    about = json.loads((out / "metadata.json").read_text())
    empty, tokens = expected.count([]), sum(map(len, expected))
    assert (about["documents"], about["empty"], about["tokens"]) == (len(expected), empty, tokens)
    assert (about["tokenizer"], about["tokenizer_ids"]) == (TOKENIZER.fingerprint, TOKENIZER.ids_fingerprint)
    assert list(about["sources"][0]["files"]) == [source.name]
    assert sorted(about["files"]) == sorted(set(contents(out)) - {"metadata.json"})
    assert len(about["files"]) > 4
    assert f"{len(expected)} documents ({empty} of them empty or unusable)" in capsys.readouterr().out


def test_several_sources_follow_each_other_and_have_columns_of_their_own(
    tmp_path: Path, run: Callable[..., None]
) -> None:
    (tmp_path / "more.jsonl").write_text('{"page": {"words": "The end."}}\n')
    (tmp_path / "text.txt").write_text("line\n" * 2000)
    sources = [write_jsonl(tmp_path / "a.jsonl", range(3)), f"{tmp_path}/more.jsonl#page.words", tmp_path / "text.txt"]
    run(*sources, "-o", tmp_path / "out", "--no-add-bos", "--global-batch-size=1", "--seq-len=100")
    documents = documents_in(tmp_path / "out")
    assert documents[3] == [*TOKENIZER.encode("The end."), TOKENIZER.eos_id]
    assert len(documents[4:]) == 10000 // 1250  # segments: bytes / (8 rows' worth)
    assert [ids[-1] == TOKENIZER.eos_id for ids in documents[4:]] == [False] * 7 + [True]


@pytest.mark.parametrize("make", [corpus, compressed])
def test_files_do_not_depend_on_the_number_of_workers(
    make: Callable[[Path], Path], tmp_path: Path, run: Callable[..., None]
) -> None:
    source = make(tmp_path)
    for workers in (1, 2):
        run(source, "-o", tmp_path / str(workers), workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_a_full_disk_keeps_the_finished_shards(
    tmp_path: Path, run: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = corpus(tmp_path), tmp_path / "out"
    run(source, "-o", tmp_path / "whole")
    with files_of_at_most(8000), pytest.raises(DataError, match="File too large; when that is repaired"):
        run(source, "-o", out)
    assert not out.exists()
    first = tmp_path / "out.partial" / "shard-000000.bin"
    second = tmp_path / "out.partial" / "shard-000001.bin"
    kept = first.stat().st_mtime_ns
    second.write_bytes(bytes(second.stat().st_size))  # not what was written
    capsys.readouterr()
    run(source, "-o", out)
    assert "making shard-000001.bin and all later shards again" in capsys.readouterr().out
    assert contents(out) == contents(tmp_path / "whole")
    assert (out / "shard-000000.bin").stat().st_mtime_ns == kept


def test_an_unfinished_folder_takes_no_other_tokens(tmp_path: Path, run: Callable[..., None]) -> None:
    source, out = corpus(tmp_path), tmp_path / "out"
    with files_of_at_most(8000), pytest.raises(DataError):
        run(source, "-o", out)
    with pytest.raises(
        DataError, match=r"out.partial was begun with another tokenizer, or with other tokens at the en"
    ):
        run(source, "-o", out, "--no-add-bos")
    with tokenize.locked(tmp_path / "out.partial", out), pytest.raises(DataError, match="another command is writing"):
        run(source, "-o", out)
    source.write_text(source.read_text().replace("Story 0", "Story 1"))
    with pytest.raises(DataError, match=r"was begun from other sources: .*corpus.jsonl was changed"):
        run(source, "-o", out)


def test_a_finished_folder_is_verified_and_not_made_again(
    tmp_path: Path, run: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = corpus(tmp_path), tmp_path / "out"
    run(source, "-o", out)
    before = contents(out)
    capsys.readouterr()
    os.utime(source)  # the content counts
    for arguments in ([source, "-o", out], ["-o", out]):
        run(*arguments)
        assert f"{out} is there already and intact: 64 documents" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"was made from other sources: .*more.jsonl was added or removed"):
        run(source, write_jsonl(tmp_path / "more.jsonl", range(3)), "-o", out)
    assert contents(out) == before
    damaged = out / "shard-000001.bin"
    damaged.write_bytes(b"\7\7" + damaged.read_bytes()[2:])
    with pytest.raises(DataError, match=r"is damaged: shard-000001.bin differs from what was written"):
        run("-o", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["corpus.jsonl", "-o", "."], "holds something else than token shards"),
        (["corpus.jsonl#words", "-o", "out"], "has no text column 'words'.*set --text-column"),
        (["corpus.jsonl", "-o", "out", "--tokenizer=none"], "^--tokenizer: there is no file"),
        (["corpus.jsonl", "-o", "out", "--no-add-bos", "--no-add-eos"], "^--no-add-eos: documents would have"),
        (["empty.jsonl", "-o", "out"], "empty.jsonl: there is no text"),
        (["folder", "-o", "folder/out"], "lies in the source folder"),
        (["-o", "out"], "no folder of token shards to verify"),
        (["corpus.jsonl", "-o", "out", "--seq-len=0"], "--seq-len must be above 0"),
    ],
)
def test_what_cannot_be_tokenized(
    arguments: list[str], message: str, tmp_path: Path, run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    corpus(tmp_path)
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "folder" / "a.jsonl", range(3))
    with pytest.raises(UserError, match=message):
        run(*arguments)
    assert not (tmp_path / "out").exists()


def start(source: Path, out: Path, workers: int) -> "subprocess.Popen[str]":
    script = out.parent / "command.py"
    script.write_text(COMMAND)
    return subprocess.Popen(
        [sys.executable, script, source, "-o", out, f"--workers={workers}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def stopped(process: "subprocess.Popen[str]", out: Path, stop: int, whole_group: bool) -> tuple[int, str]:
    """Stops a command after some shards. Its output ends only when its workers have ended, too."""
    progress = out.with_name(f"{out.name}.partial") / ".progress"
    while process.poll() is None and not (progress.exists() and progress.read_bytes().count(b"\n") > 4):
        time.sleep(0.002)
    (os.killpg if whole_group else os.kill)(process.pid, stop)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


@pytest.mark.full
@pytest.mark.parametrize(
    ("source_of", "stop", "status"),
    [
        (corpus, signal.SIGINT, 130),
        (corpus, signal.SIGKILL, -signal.SIGKILL),
        (compressed, signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_stopped_command_goes_on_after_its_finished_shards(
    source_of: Callable[[Path], Path], stop: int, status: int, tmp_path: Path
) -> None:
    source, out = source_of(tmp_path), tmp_path / "out"
    with source.open("ab") as file:
        more = b"".join(json.dumps({"text": story(number)}).encode() + b"\n" for number in range(1500))
        file.write(gzip.compress(more) if source.suffix == ".gz" else more)
    held = tmp_path / "held"
    held.touch()
    returned, output = stopped(start(source, out, 2), out, stop, whole_group=stop == signal.SIGINT)
    held.unlink()
    assert (returned, "Traceback" in output) == (status, False), output
    assert not out.exists()
    partial = tmp_path / "out.partial"
    lines = (partial / ".progress").read_bytes().splitlines(keepends=True)
    finished = [name for line in lines[1:] if line.endswith(b"\n") for name in json.loads(line)["files"]]
    made = {name: (partial / name).stat().st_mtime_ns for name in finished}
    done = start(source, out, 2).communicate(timeout=240)[0]
    assert "going on after" in done and f"saved {out}" in done
    assert len(made) >= 6 and {name: (out / name).stat().st_mtime_ns for name in made} == made
    assert start(source, tmp_path / "whole", 1).wait(240) == 0
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.full
def test_megatron_reads_the_shards(tmp_path: Path, run: Callable[..., None]) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    run(corpus(tmp_path), "-o", tmp_path / "out")
    shards = [IndexedDataset(str(path.with_suffix(""))) for path in sorted((tmp_path / "out").glob("*.idx"))]
    read = [shard[number].tolist() for shard in shards for number in range(len(shard))]
    documents = documents_of(str(tmp_path / "corpus.jsonl"), "text")
    assert read == [tokens_of(document, TOKENIZER).tolist() for document in documents]
    assert [] in read and len(shards) > 2


@pytest.mark.parametrize("hold_out", [False, True])
@pytest.mark.parametrize("text", [False, True], ids=["records", "text"])
def test_training_on_shards_is_training_on_the_text(
    text: bool, hold_out: bool, tmp_path: Path, run: Callable[..., None]
) -> None:
    pytest.importorskip("torchtitan.data.shards")
    rows, changes = 4, {"seq_len": 64, "document_mask": True}
    if text and hold_out:
        pytest.skip("text files are held out in other pieces")
    source: Any = tmp_path / "text.txt" if text else write_jsonl(tmp_path / "corpus.jsonl", range(200))
    if text:
        source.write_text("\n".join(map(story, range(200))))
    run(source, "-o", tmp_path / "out", f"--global-batch-size={rows}", "--seq-len=64")
    expected = loaders_of(training_on(source, **changes), rows, 1, hold_out=hold_out)
    batches = global_batches(expected, 150)  # some epochs
    for dp_size in (1, 2):
        loaders = loaders_of(training_on(tmp_path / "out", **changes), rows, dp_size, hold_out=hold_out)
        assert all_equal(batches, global_batches(loaders, 150))
        close(loaders)
    close(expected)
