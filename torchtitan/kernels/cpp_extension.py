"""Compiles a C++ source into a shared library, once, and loads it."""

import contextlib
import ctypes
import hashlib
import hmac
import os
import platform
import secrets
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torchtitan.cache import others_can_write, private_folder
from torchtitan.logging import logger

# No -ffast-math: it would flush denormals to zero in the whole process.
COMPILER_FLAGS = "-std=c++20 -O3 -mprefer-vector-width=512 -fno-math-errno -fno-trapping-math -fopenmp -shared -fPIC"
COMPILERS = ("g++", "clang++", "c++")
COMPILER_PATIENCE = 300  # seconds before a hanging compiler is given up
C_TYPES: dict[type, Any] = {bool: ctypes.c_bool, int: ctypes.c_int64, float: ctypes.c_float}


def isa_flags() -> list[str]:
    """Compiler flags for the instruction set of torch's own kernels, so one cache serves similar CPUs."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    import torch  # not with the module: a simulated GPU must be there before torch is

    capability = torch.backends.cpu.get_cpu_capability()
    return [f"-march=x86-64-{'v4' if 'AVX512' in capability else 'v3' if 'AVX2' in capability else 'v2'}"]


def load_library(source: str | Path, purpose: str, *flags: str) -> ctypes.CDLL | None:
    """Loads `source`, a path from this folder, as a shared library, compiling it with these flags and `COMPILER_FLAGS`,
    unless it is cached. None, with a warning that `purpose` will be slower than it could be, if that fails."""
    source = Path(__file__).parent / source
    try:
        # CXX may have arguments, as in "ccache g++".
        compiler = shlex.split(os.environ.get("CXX", "")) or [next(filter(shutil.which, COMPILERS), COMPILERS[0])]
        command = [*compiler, *COMPILER_FLAGS.split(), str(source), *flags]
        try:
            folder = private_folder("kernels")
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home directory
            logger.warning(f"compiling {purpose} for this run only; no safe cache folder: {error}")
            with tempfile.TemporaryDirectory() as once:
                return ctypes.CDLL(str(_compile(command, Path(once), source.stem, secrets.token_bytes())))
        texts = [file.read_text() for file in (source, *sorted(source.parent.glob("*.h")))]
        made_of = repr((texts, command, version("torch"), platform.machine()))
        name = f"{source.stem}-{hashlib.sha256(made_of.encode()).hexdigest()[:32]}"
        key = _key(folder)
        for entry in os.listdir(folder):  # names, which cannot lead out of the folder
            if entry.startswith(f"{name}-") and entry.endswith(".so"):
                if loaded := _open(folder / entry, name, key):
                    return loaded
                (folder / entry).unlink(missing_ok=True)  # truncated, another's, or from another system
        logger.info(f"compiling {purpose} for this CPU (once) ...")
        return ctypes.CDLL(str(_compile(command, folder, name, key)))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().split("\n")[0]
        logger.warning(
            f"{purpose.capitalize()}: falling back to a slower implementation, as the C++ one cannot be used: {reason}"
        )
        return None


def call(function: Any, *arguments: Any) -> Any:
    """Calls a C++ function with pointers to the data of tensors, other arguments as `C_TYPES` says or as they are, and
    the number of threads at the end."""
    import torch

    def converted(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return ctypes.c_void_p(x.data_ptr())
        return C_TYPES[type(x)](x) if type(x) in C_TYPES else x

    return function(*map(converted, arguments), torch.get_num_threads())


def _key(folder: Path) -> bytes:
    """A secret of this user, made once, by which `_open` knows what was built here: a hash alone could be computed by
    whoever manages to place a file."""
    path = folder / "key"
    for _ in range(2):
        if len(key := _read_own(path)) == 32:
            return key
        path.unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:  # others cannot read this file
            file.write(secrets.token_bytes(32))
            file.flush()
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(file.name, path)
    raise PermissionError(f"{path} cannot be made")


def _read_own(path: Path) -> bytes:
    """The content of a regular file that this user owns, and nobody else can write to. Empty for all else."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            about = os.fstat(file.fileno())
            own = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and not others_can_write(about)
            return file.read() if own else b""
    except OSError:
        return b""


def _signed(name: str, library: bytes, key: bytes) -> str:
    return f"{name}-{hmac.digest(key, name.encode() + library, 'sha256').hex()[:32]}.so"


def _open(path: Path, name: str, key: bytes) -> ctypes.CDLL | None:
    """Loads a library written by `_compile` with this key. None if it is unusable, or anything else."""
    library = _read_own(path)
    if not library or not hmac.compare_digest(path.name.encode(), _signed(name, library, key).encode()):
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _compile(command: Sequence[str], folder: Path, name: str, key: bytes) -> Path:
    """Compiles into a temporary folder and renames, so that concurrent processes never see a partial library."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        built = Path(own) / f"{name}.so"
        command = [*command, "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILER_PATIENCE, errors="replace")
        built.chmod(0o700)
        return built.replace(folder / _signed(name, built.read_bytes(), key))
