"""What a path that a user writes leads to, and that nothing waits for what is not a file."""

import os
import socket
from pathlib import Path

import pytest

from torchtitan.files import PathError, expand, local_path, regular_file


def test_a_path_is_expanded_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert [expand(path) for path in ("~", "~/a", "./~b", "a:b#c", "/x")] == [
        "/home/ada",
        "/home/ada/a",
        "./~b",
        "a:b#c",
        "/x",
    ]
    assert local_path("~/a") == Path("/home/ada/a")
    for path in (
        "s3://bucket/x",
        "gs://b",
        "hf://datasets/a/b",
        "file:///x",
        "S3:/b",
        "abfs+ssl://b",
        "~nobody-of-this-name/x",
        "a\0b",
    ):
        with pytest.raises(PathError, match="path on this machine|no such home folder|zero byte"):
            expand(path)


def test_only_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    assert regular_file(tmp_path / "link").read_bytes() == b""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))
        for name, what in (("pipe", "named pipe"), ("zero", "device"), ("socket", "socket"), (".", "folder")):
            with pytest.raises(OSError, match=f"it is a {what}, not a file"):
                regular_file(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        regular_file(tmp_path / "missing")
