"""Checkpoints in an object store: what a run saves and loads there, after kills and failures too."""

import itertools
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from object_store import LOST, S3Server
from runs import CHECKPOINTS, TINY, checkpoint_steps, failure, into, losses, python, started, train, train_here

from torchtitan.checkpoint import manifest
from torchtitan.checkpoint.choose import find_checkpoint
from torchtitan.checkpoint.folder import (
    keep_latest,
    make_folder,
    publish,
    saved_steps,
    set_checkpoint_aside,
    step_folder,
)
from torchtitan.checkpoint.store import fetched_folder, store_of
from torchtitan.errors import CheckpointError, ConfigError, DataError
from torchtitan.files import any_path, sha256_of
from torchtitan.launcher import folder_lock
from torchtitan.launcher.object_lock import ObjectLock
from torchtitan.tools.branch import make_branch

URI = "s3://bucket/team/run"
FLAGS = (*TINY, *CHECKPOINTS, "--optimizer.lr=1e-2")
THERE = (*FLAGS, f"--checkpoint.folder={URI}")


def names(uri: str = URI) -> list[str]:
    return sorted(entry.name for entry in any_path(uri).iterdir())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of six steps with checkpoints on a disk."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train_here(*FLAGS, into(folder), "--training.steps=6")
    return losses(folder)


@pytest.mark.full
def test_a_run_goes_on_elsewhere(s3: S3Server, tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """Saved asynchronously by two processes, resumed by one on a machine that has nothing but the URI, exported, and
    used by the commands."""
    train(*THERE, into(tmp_path / "a"), "--training.steps=4", "--checkpoint.async_mode=async", processes=2)
    assert names() == ["step-2", "step-4", "tokenizer_copy"]
    export = ("--checkpoint.last_save_in_hf", "--checkpoint.keep_latest_k=2", "--checkpoint.keep_every=5")
    train_here(*THERE, into(tmp_path / "b"), "--training.steps=6", *export)
    assert names() == ["step-4", "step-5", "step-6", "step-6-hf", "tokenizer_copy"]
    actual = losses(tmp_path / "a") | losses(tmp_path / "b")
    assert list(losses(tmp_path / "b")) == [5, 6]
    assert actual == pytest.approx(undisturbed, abs=1e-5)  # two processes add up in another order

    train_here(*FLAGS, into(tmp_path / "c"), "--training.steps=1", f"--checkpoint.initial_load_path={URI}/step-6-hf")
    train_here(*FLAGS, into(tmp_path / "d"), "--training.steps=1", f"--checkpoint.initial_load_path={URI}/step-6")
    assert losses(tmp_path / "c") == losses(tmp_path / "d") != {1: undisturbed[1]}
    out = "s3://bucket/exported"
    done = python("-m", "torchtitan.tools.convert", "to-hf", URI, out, "--custom-import=tiny", "--dtype=float32")
    assert done.returncode == 0, done.stderr
    assert (
        any_path(f"{out}/model.safetensors").read_bytes() == any_path(f"{URI}/step-6-hf/model.safetensors").read_bytes()
    )
    done = python("-m", "torchtitan.tools.convert", "to-hf", URI, out, "--custom-import=tiny")
    assert (done.returncode, "already exists" in done.stderr) == (2, True)


@pytest.mark.full
def test_a_run_equals_one_on_a_disk(s3: S3Server, tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """Bit for bit; also when it goes back to an earlier checkpoint, whose successors are set aside, not lost."""
    train_here(*THERE, into(tmp_path), "--training.steps=6")
    assert losses(tmp_path) == undisturbed
    assert ("PUT", "/bucket/team/run/.lock") in s3.requests
    train_here(*THERE, into(tmp_path), "--training.steps=4", "--checkpoint.load_step=2", "--optimizer.lr=2e-2")
    assert names() == ["step-2", "step-4", "step-4.abandoned-1", "step-6.abandoned-1", "tokenizer_copy"]
    branch = make_branch(any_path(URI), 2, tmp_path / "branch", ["--experimental.custom_import=tiny"])
    assert 'folder = "checkpoint"' in branch.read_text()
    train_here(f"--job.config_file={branch}", "--experimental.custom_import=tiny")
    assert list(losses(tmp_path / "branch")) == [5, 6]
    assert checkpoint_steps(tmp_path / "branch") == [4, 6]
    content = bytearray(any_path(f"{URI}/step-4/__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    any_path(f"{URI}/step-4/__0_0.distcp").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step-4 is damaged: __0_0.distcp has changed"):
        find_checkpoint(any_path(f"{URI}/step-4"))
    checkpoint = find_checkpoint(any_path(URI))
    assert checkpoint is not None and checkpoint.name == "step-2"


def saved(folder: Path, step: int) -> None:
    checkpoint = step_folder(folder, step)
    store_of(folder).begin(checkpoint, set_checkpoint_aside)
    with manifest.HashingFile(checkpoint / "tensors") as file:
        file.write(b"tensors" * 10)
    metadata = manifest.write_json(checkpoint / ".metadata", {})
    publish(folder, step, {"step": step}, {}, {"tensors": file.record(), ".metadata": metadata})


@pytest.mark.parametrize("uri", [URI, "memory://bucket/run"])
def test_only_a_manifest_makes_a_checkpoint(s3: S3Server, uri: str) -> None:
    folder: Any = any_path(uri)
    for step in (1, 2, 3):
        saved(folder, step)
    left = ("step-4", "step-3.abandoned-1", "step-9-hf")
    for name in (*(f"{name}/{file}" for name in left for file in (".unfinished", "tensors")), "notes/step-5"):
        (folder / name).write_bytes(b"interrupted")
    assert saved_steps(folder) == [1, 2, 3]
    if uri == URI:  # parts of a file that was never completed
        folder.fs.call_s3("create_multipart_upload", Bucket="bucket", Key="team/run/step-4/__1_0.distcp")
        folder.fs.call_s3("create_multipart_upload", Bucket="bucket", Key="team/others")
    make_folder(folder)
    assert sorted(entry.name for entry in folder.iterdir()) == ["notes", "step-1", "step-2", "step-3"]
    if uri == URI:
        assert [upload["Key"] for upload in folder.fs.list_multipart_uploads("bucket")] == ["team/others"]
    posts = itertools.count(1)
    s3.fault = lambda method, path: 403 if method == "POST" and next(posts) == 2 else 0
    keep_latest(folder, 2, newest=3, permanent=set())  # the second request is refused: the manifest went with the first
    assert saved_steps(folder) == [2, 3]
    assert (folder / "step-1").exists() == (uri == URI)


@pytest.mark.full
def test_files_of_others_are_never_removed(s3: S3Server, tmp_path: Path) -> None:
    """Whatever they look like: another program's step-N, a whole bucket, a checkpoint whose manifest was lost."""
    folder: Any = any_path(URI)
    for name in ("step-3/.metadata", "step-3/__0_0.distcp", "step-7-hf/config.json", "a/b.bin"):
        (folder / name).write_bytes(b"theirs")
    before = folder.fs.find(folder.path)
    status, output = failure(*THERE, into(tmp_path / "a"), "--training.steps=1")
    assert status == 2 and "is a checkpoint of torchtitan. To go on from it, add" in output, output
    train_here(*FLAGS, into(tmp_path / "b"), "--training.steps=2")
    for out in (URI, "s3://bucket"):
        done = python("-m", "torchtitan.tools.convert", "to-hf", str(tmp_path / "b"), out, "--custom-import=tiny")
        assert done.returncode == 2 and "other files are there" in done.stderr, done.stderr
    assert [path for path in folder.fs.find(folder.path) if not path.endswith(".lock")] == before


@pytest.mark.parametrize("name", ["../../../../../../../../../../tmp/outside", "/tmp/outside", "a//outside"])
def test_a_bucket_writes_nowhere_but_in_the_copy(s3: S3Server, tmp_path: Path, name: str) -> None:
    folder: Any = any_path("s3://bucket/hf")
    (folder / "config.json").write_bytes(b"{}")
    boto3 = pytest.importorskip("boto3")
    boto3.client("s3").put_object(Bucket="bucket", Key=f"hf/{name}", Body=b"outside")
    with pytest.raises(CheckpointError, match=r"is refused: it would be copied to elsewhere"):
        fetched_folder(folder)
    assert not Path("/tmp/outside").exists()


def test_large_files_go_up_in_parts_and_are_read_by_ranges(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    folder: Any = any_path("s3://bucket/large")
    monkeypatch.setattr(folder.fs, "default_block_size", 5 << 20)  # of a part, the least that S3 takes
    content = os.urandom(1 << 20) * 12
    with manifest.HashingFile(folder / "file") as file:
        file.write(content[:100])
        file.write(content[100:])
    assert sum(method == "PUT" for method, _ in s3.requests) > 1
    assert (folder / "file").stat().st_size == file.record().size == len(content)
    assert sha256_of(folder / "file") == file.record().sha256
    with pytest.raises(KeyError), manifest.HashingFile(folder / "given up") as file:
        file.write(content)
        raise KeyError
    assert not (folder / "given up").exists()
    assert folder.fs.list_multipart_uploads("bucket") == []


@pytest.mark.full
def test_failed_saves_do_not_end_the_run(
    s3: S3Server, tmp_path: Path, undisturbed: dict[int, float], capsys: pytest.CaptureFixture[str]
) -> None:
    """A store that is busy, or lost, for a while is asked again; one that stays so costs a checkpoint, and
    the next start cleans up."""
    busy = 0

    def fault(method: str, path: str) -> int:
        nonlocal busy
        if "step-2/__" in path:
            busy += 1
            return {1: 503, 2: LOST}.get(busy, 0)
        return 403 if "step-4/.metadata" in path else 0

    s3.fault = fault
    train_here(*THERE, into(tmp_path), "--training.steps=5")
    printed = capsys.readouterr().out
    assert "the checkpoint of step 4 could not be saved" in printed
    assert "1 saves failed so far" in printed
    assert names() == ["step-2", "step-5", "tokenizer_copy"]
    # What cannot be read is not damaged: the run does not go back to step 2.
    s3.fault = lambda method, path: 403 if method == "GET" and path.endswith("step-5/__0_0.distcp") else 0
    with pytest.raises(CheckpointError, match=r"step-5/__0_0.distcp cannot be read \(access is refused"):
        train_here(*THERE, into(tmp_path), "--training.steps=6")
    assert not (any_path(URI) / ".lock").exists()  # a run that fails releases it
    s3.fault = lambda method, path: 0
    train_here(*THERE, into(tmp_path), "--training.steps=6")
    assert losses(tmp_path) == undisturbed


@pytest.mark.parametrize(
    ("uri", "instead"),
    [
        ("s3://bucket//run", "; if you mean s3://bucket/run, write that"),
        ("s3://bucket/team//run/", "; if you mean s3://bucket/team/run, write that"),
        ("s3://bucket/./run", "; if you mean s3://bucket/run, write that"),
        ("s3://bucket/run ", "; if you mean s3://bucket/run, write that"),
        ("gs://bucket/ run", "; if you mean gs://bucket/run, write that"),
        ("s3:///run", "; if you mean s3://run, write that"),
        ("s3://", ""),
        ("memory://bucket/../run", ""),
    ],
)
def test_a_uri_that_is_another_name_than_it_seems_is_refused_before_the_start(
    uri: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects were written under one name, and looked for under another."""
    says = re.escape(f"{uri!r} cannot be used: a part of it is empty, . or .., or has blanks around it{instead}.")
    for key in ("checkpoint.folder", "checkpoint.initial_load_path", "model.tokenizer_path", "training.dataset_path"):
        with pytest.raises((ConfigError, DataError), match=rf"{re.escape(key)}: .*{says}"):
            train_here(*FLAGS, f"--{key}={uri}", into(tmp_path), "--training.steps=1")
    assert not (tmp_path / "checkpoint").exists()
    with pytest.raises(DataError, match=says):
        any_path(uri)


def no_bucket(server: S3Server, patch: pytest.MonkeyPatch) -> str:
    return "s3://nowhere/run"


def refused(server: S3Server, patch: pytest.MonkeyPatch) -> str:
    server.fault = lambda method, path: 403
    return URI


def no_credentials(server: S3Server, patch: pytest.MonkeyPatch) -> str:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        patch.delenv(name)
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    return URI


def no_answer(server: S3Server, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    return URI


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (no_bucket, "no such bucket"),
        (refused, "refused"),
        (no_credentials, "no credentials"),
        pytest.param(no_answer, "does not answer", marks=pytest.mark.full),  # after all tries of the library
    ],
)
def test_a_store_that_cannot_be_used(
    s3: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    breaks: Callable[[S3Server, pytest.MonkeyPatch], str],
    says: str,
) -> None:
    uri = breaks(s3, monkeypatch)
    status, output = failure(*FLAGS, f"--checkpoint.folder={uri}", into(tmp_path), "--training.steps=1")
    assert status == 2, output
    last = output.strip().splitlines()[-1]
    assert "checkpoint.folder: " + uri in last and says in last, output
    assert "Traceback" not in output


@pytest.mark.full
def test_two_runs_in_one_folder(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused while the first lives; it follows a dead one, and at once in the same dump folder."""
    monkeypatch.setattr(folder_lock, "TOUCH_INTERVAL", 0.1)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with ObjectLock(any_path(URI), "checkpoint.folder", tmp_path / "a") as first:
        first.take()
        second = ObjectLock(any_path(URI), "checkpoint.folder", tmp_path / "b")
        with pytest.raises(ConfigError, match=r"checkpoint.folder: another run .* is writing to s3://bucket/team/run;"):
            second.take()
        place: Any = any_path(URI) / ".lock"
        left = place.fs.cat_file(place.path)  # in one request: the holder writes it again and again
    assert not (any_path(URI) / ".lock").exists()
    (any_path(URI) / ".lock").write_bytes(left)  # as after a kill
    monkeypatch.setattr(folder_lock, "LOCK_SILENCE", 10**6)
    with ObjectLock(any_path(URI), "checkpoint.folder", tmp_path / "a") as again:
        again.take()
    monkeypatch.setattr(folder_lock, "LOCK_SILENCE", 0.5)
    (any_path(URI) / ".lock").write_bytes(left)
    with ObjectLock(any_path(URI), "checkpoint.folder", tmp_path / "b") as other:
        other.take()
        assert other.sees(other.token)


def kill_at(server: S3Server, number: int, pid: int) -> None:
    """Kills a process when it sends its n-th request that writes."""
    count = 0

    def fault(method: str, path: str) -> int:
        nonlocal count
        if method == "POST" or (method == "PUT" and "/step-" in path):  # POST removes, and opens files in parts
            count += 1
            if count == number:
                os.kill(pid, signal.SIGKILL)
                return 500
        return 0

    server.fault = fault


@pytest.mark.full
def test_kills_in_mid_upload(s3: S3Server, tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """Wherever they are: each start goes on from the newest checkpoint that was complete, and in the end
    the losses equal an undisturbed run's."""
    chance, kills, rounds = random.Random(0), 0, 0
    while kills < 8:
        shutil.rmtree(tmp_path, ignore_errors=True)
        place: Any = any_path(URI)
        if place.exists():
            place.fs.rm(place.path, recursive=True)
        rounds += 1
        while True:
            complete = saved_steps(any_path(URI))
            saves = ("--checkpoint.async_mode=async", "--checkpoint.keep_latest_k=2")
            flags = (*THERE, into(tmp_path), "--training.steps=6", *saves)
            with started(*flags, processes=None) as run:
                kill_at(s3, chance.randint(1, 9), run.process.pid)
                status, output = run.finish()
            s3.fault = lambda method, path: 0
            loaded = [int(step) for step in re.findall(rf"loaded {URI}/step-(\d+)", output)]
            assert loaded == complete[-1:] or (status and not loaded), output  # or killed before that
            now = saved_steps(any_path(URI))
            for step in now:
                assert find_checkpoint(any_path(f"{URI}/step-{step}")) is not None
            assert not complete or now[-1] >= complete[-1]
            if status == 0:
                break
            assert status == 128 + 9, output
            kills += 1
        assert losses(tmp_path) == undisturbed
        assert saved_steps(any_path(URI))[-2:] == [4, 6]  # step 2 is there, too, after a kill before its removal
