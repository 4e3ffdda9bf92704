"""What a path that a user writes leads to, and that nothing waits for what is not a file."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from object_store import S3Server

from torchtitan.data.paths import open_path
from torchtitan.data.transient import is_transient
from torchtitan.errors import DataError
from torchtitan.files import PathError, any_path, expand, local_path, regular_file, store_errors

ROOT = Path(__file__).parents[2]
PATH_ARGUMENTS = re.compile(
    r'"(-o|--(out|output|json|folder|dump-folder|checkpoint|.*-file|.*-path)|run|runs|checkpoint|checkpoints|out)"'
)


def test_a_path_is_expanded_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    for path, expanded in (("~", "/home/ada"), ("~/a", "/home/ada/a"), ("./~b", "./~b"), ("a:b#c", "a:b#c")):
        assert expand(path) == expanded
        assert local_path(path) == Path(expanded)
    remote = ("s3://bucket/x", "gs://b", "hf://datasets/a/b", "file:///x", "S3:/b", "abfs+ssl://b")
    for path in (*remote, "~nobody-of-this-name/x", "a\0b"):
        with pytest.raises(PathError, match=r"no path on this machine|no such home folder|zero byte"):
            expand(path)


def test_only_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    assert regular_file(tmp_path / "link").read_bytes() == b""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))
        for name, file_type in (("pipe", "named pipe"), ("zero", "device"), ("socket", "socket")):
            with pytest.raises(OSError, match=f"it is a {file_type}, not a file"):
                regular_file(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        regular_file(tmp_path / "missing")


def test_no_command_takes_a_path_as_it_is_written() -> None:
    for file in (*ROOT.glob("scripts/*.py"), *ROOT.glob("torchtitan/**/*.py")):
        for argument in re.findall(r"add_argument\(\s*(.*?)\s*\)\n", file.read_text(), re.DOTALL):
            if PATH_ARGUMENTS.match(argument) or "type=Path" in argument:
                assert re.search("type=(local_path|any_path|expand)", argument), f"{file}: {argument}"


@pytest.mark.parametrize(
    ("command", "path"),
    [
        (["-m", "torchtitan.tools.evaluate", "run", "--dump-folder", "s3://bucket/run"], "s3://bucket/run"),
        (["-m", "torchtitan.tools.report", "run", "--output", "gs://bucket/report.html"], "gs://bucket/report.html"),
        (["-m", "torchtitan.tools.convert", "to-hf", "run", "~nobody-of-this-name/out"], "~nobody-of-this-name/out"),
    ],
)
def test_a_command_refuses_what_is_no_path_here(command: list[str], path: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert re.search(rf"error: argument \S+: '{path}'.*(path on this machine|no such home folder)", done.stderr)


def test_an_object_store_has_the_methods_of_a_path(s3: S3Server) -> None:
    folder = any_path("s3://bucket/run")
    (folder / "a.txt").write_bytes(b"text")
    assert [path.name for path in folder.iterdir()] == ["a.txt"]
    assert (folder / "a.txt").stat().st_size == 4
    s3.fault = lambda method, path: 403
    with pytest.raises(PermissionError):
        (folder / "a.txt").read_bytes()


def test_a_uri_that_nothing_here_can_read_is_refused() -> None:
    for uri in ("nowhere://bucket/run", "https://localhost/a", "ftp://127.0.0.1:9/a"):
        with pytest.raises(PathError, match=f"'{uri}' cannot be read"):
            any_path(uri)
    for uri, fault in (("s3://", "'s3://' cannot be used"), ("hf://name", "hf://name cannot be read")):
        with pytest.raises(DataError, match=fault):
            open_path(uri, "text")


def test_the_extra_that_reads_a_uri_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(PathError, match=r"run `pip install 'torchtitan-toml\[gcs\]'`"):
        any_path("GS://bucket/run")


def test_file_uris_are_paths(tmp_path: Path) -> None:
    for start in ("file://", "file:", "FILE://", "local://"):
        assert any_path(f"{start}{tmp_path}") == tmp_path


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ({}, FileNotFoundError, "no such file or folder in the object store"),
        ({"bucket": "nowhere"}, FileNotFoundError, "no such bucket"),
        ({"status": 403}, PermissionError, "check the credentials .* and that the clock"),
        ({"code": "InvalidAccessKeyId"}, PermissionError, "correct AWS_ACCESS_KEY_ID"),
        ({"code": "SignatureDoesNotMatch"}, PermissionError, "correct AWS_SECRET_ACCESS_KEY"),
        ({"code": "RequestTimeTooSkewed"}, PermissionError, "the clock of this machine is off"),
        ({"status": 503}, OSError, "Service Unavailable"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, PermissionError, "there are no credentials"),
        ({"AWS_PROFILE": "nobody"}, PermissionError, "there are no credentials"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, ConnectionRefusedError, "does not answer: check the network"),
        ({"AWS_ENDPOINT_URL": "nonsense"}, OSError, "Invalid endpoint"),
    ],
)
def test_what_goes_wrong_in_an_object_store_is_said_with_the_remedy(
    fault: dict[str, Any], error: type[OSError], message: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in fault.items():
        if name.isupper():
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    s3.fault = lambda method, path: fault.get("status", 0)
    s3.code = fault.get("code", "")
    place: Any = any_path(f"s3://{fault.get('bucket', 'bucket')}/a.txt")
    with pytest.raises(error, match=message) as raised, store_errors(place):
        place.fs.find(place.path)
        place.read_bytes()
    assert raised.value.strerror and raised.value.filename == str(place) and raised.value.__cause__
    passing = is_transient(raised.value)
    assert passing == (fault.get("status") == 503 or "http://127.0.0.1:9" in fault.values())


def test_errors_on_this_machine_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised, store_errors(tmp_path):
        (tmp_path / "missing").read_bytes()
    assert raised.value.filename == str(tmp_path / "missing")
    for error in (TypeError("ours"), DataError("ours")):
        with pytest.raises(type(error), match="ours"), store_errors("s3://bucket/a"):
            raise error
