"""Compiled code is cached where no other user can write, and code that cannot be loaded is recompiled."""

import ctypes
import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from torchtitan import cache
from torchtitan.kernels.cpp_extension import load_library


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(cache.INDUCTOR, "")  # so that it is restored afterwards
    monkeypatch.delenv(cache.INDUCTOR)
    return tmp_path


@pytest.fixture
def source(home: Path) -> Path:
    file = home / "seven.cpp"
    file.write_text('extern "C" int seven() { return 7; }\n')
    return file


def works(library: ctypes.CDLL | None) -> bool:
    return library is not None and library.seven() == 7


def another_library(home: Path) -> bytes:
    """One that an attacker has built for the same function: it creates a file when it is loaded."""
    code = '#include <cstdio>\n__attribute__((constructor)) static void run() { fclose(fopen("%s", "w")); }\n'
    (home / "evil.cpp").write_text(code % (home / "it_ran") + 'extern "C" int seven() { return 7; }\n')
    subprocess.run(["g++", "-shared", "-fPIC", "-o", home / "evil.lib", home / "evil.cpp"], check=True)
    return (home / "evil.lib").read_bytes()


def libraries(home: Path) -> list[Path]:
    return list((home / "cache").rglob("*.so"))


def test_it_is_compiled_once_into_a_private_folder(source: Path, home: Path, log: list[str]) -> None:
    assert works(load_library(source, "a test")) and works(load_library(source, "a test"))
    assert log == ["INFO compiling a test for this CPU (once) ..."]
    (library,) = libraries(home)
    assert library.parent.stat().st_mode & 0o777 == 0o700
    library.parent.chmod(0o755)
    assert works(load_library(source, "a test"))
    assert library.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "fault",
    ["cut short", "of another system", "another user's", "a group may write to it", "a link", "with the right hash"],
)
def test_what_cannot_be_used_is_compiled_again(fault: str, source: Path, home: Path, log: list[str]) -> None:
    load_library(source, "a test")
    (library,) = libraries(home)
    text = library.read_bytes()
    del log[:]
    library.unlink()  # this process has mapped it
    if fault == "cut short":
        library.write_bytes(text[:1000])
    elif fault == "another user's":
        if os.geteuid():
            pytest.skip("root alone can give a file to another user")
        library.write_bytes(text)
        os.chown(library, 12345, -1)
    elif fault == "a group may write to it":
        library.write_bytes(text)
        os.chown(library, -1, os.geteuid() + 1) if not os.geteuid() else None
        library.chmod(0o775)
    elif fault == "a link":
        (home / "elsewhere.so").write_bytes(text)
        library.symlink_to(home / "elsewhere.so")
    else:
        forged = b"no library" if fault == "of another system" else another_library(home)
        digest = hashlib.sha256(forged).hexdigest()[:32]
        library = library.with_name(f"{library.stem.rpartition('-')[0]}-{digest}.so")
        library.write_bytes(forged)
        library.chmod(0o700)
    assert works(load_library(source, "a test"))
    assert log == ["INFO compiling a test for this CPU (once) ..."]
    (again,) = libraries(home)
    assert again.read_bytes() == text and again.stat().st_uid == os.geteuid()
    assert not (home / "it_ran").exists()


@pytest.mark.parametrize("fault", ["of another user", "known", "cut short", "a link"])
def test_a_secret_that_others_may_know_is_replaced(fault: str, source: Path, home: Path, log: list[str]) -> None:
    load_library(source, "a test")
    (key,) = (home / "cache").rglob("key")
    assert key.stat().st_mode & 0o777 == 0o600
    before = key.read_bytes()
    if fault == "of another user":
        if os.geteuid():
            pytest.skip("root alone can give a file to another user")
        os.chown(key, 12345, -1)
    elif fault == "known":
        key.chmod(0o666)
    elif fault == "cut short":
        key.write_bytes(b"")
    else:
        key.unlink()
        (home / "theirs").write_bytes(before)
        key.symlink_to(home / "theirs")
    assert works(load_library(source, "a test")) and log == ["INFO compiling a test for this CPU (once) ..."] * 2
    assert key.read_bytes() != before and key.lstat().st_mode & 0o777 == 0o600
    assert len(libraries(home)) == 1


@pytest.mark.parametrize("fault", ["a link", "another user's", "anyone may write above", "unwritable"])
def test_a_folder_that_is_not_safe_gets_nothing_and_the_run_goes_on(
    fault: str, source: Path, home: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / "cache" / "torchtitan" / "kernels"
    folder.mkdir(parents=True)
    if fault == "a link":
        folder.rmdir()
        (home / "elsewhere").mkdir()
        folder.symlink_to(home / "elsewhere")
    elif fault == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    elif fault == "anyone may write above":
        (home / "cache").chmod(0o777)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    assert works(load_library(source, "a test"))
    assert len(log) == 1 and "compiling a test for this run only; no safe cache folder: " in log[0]
    assert not libraries(home) and not list(home.glob("elsewhere/*"))


def test_a_compiler_may_have_arguments(source: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = home / "wrapper"
    wrapper.write_text('#!/bin/sh\n[ "$1" = g++ ] && exec "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"{wrapper} g++")
    assert works(load_library(source, "a test"))


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("no-such-compiler", "No such file"), ("false", "returned non-zero"), ("true", "No such file"), ("'g++", "quot")],
)
def test_a_compiler_that_does_not_work_is_one_sentence(
    compiler: str, reason: str, source: Path, home: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert load_library(source, "a test") is None
    assert (
        "A test: falling back to a slower implementation, as the C++ one cannot be used: " in log[-1]
        and reason in log[-1]
    )
    assert not libraries(home)


def test_inductors_code_is_kept_there_too(home: Path, log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    keep = cache.keep_compiled_code_private
    keep()
    assert os.environ[cache.INDUCTOR] == str(home / "cache" / "torchtitan" / "inductor-2")
    shared = home / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv(cache.INDUCTOR, str(shared))
    keep()
    assert Path(os.environ[cache.INDUCTOR]).stat().st_mode & 0o777 == 0o700
    assert len(log) == 1 and f"other users can write to {shared}" in log[0]
    os.rmdir(os.environ[cache.INDUCTOR])
