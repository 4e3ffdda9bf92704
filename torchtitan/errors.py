"""Errors that a user can cause: one sentence with the key and the remedy, exit status 2, no traceback."""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from torchtitan import DISTRIBUTION

EXIT_STATUS = 2
INTERRUPTED = 130  # a shell's exit status for a program stopped by Ctrl-C
PROGRESS = 10.0  # seconds
HIDDEN = "***"  # stands for a password or a token
LONG_WORD = re.compile(r"\S{600,}")  # no name: a damaged or hostile file may have names of any length
SECRET_KEY = re.compile(r"(?:passw(?:or)?d|secret|token|api_?key|credentials?)$", re.IGNORECASE)  # the end of a name
# The user and password of a URI; what its query calls a key, or a signature; tokens of the Hub and of GitHub.
SECRETS = re.compile(
    r"""(://)[^/\s"']+(?=@)|([?&;][\w.%-]*(?:passw(?:or)?d|secret|token|key|credential|sig|signature)=)[^&;\s"']+"""
    r"""|\b((?:hf|gh[opsu])_)[A-Za-z0-9]{16,}""",
    re.IGNORECASE,
)


class UserError(Exception):
    """Something the user can fix. `train.py` prints only the message and exits with status 2."""

    def __str__(self) -> str:
        return LONG_WORD.sub(lambda word: f"{word[0][:200]}...{word[0][-50:]}", printable(super().__str__()))


class ConfigError(UserError):
    """Mistakes in the TOML file, on the command line, or between keys, one sentence each; all are reported at once."""

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(dict.fromkeys(map(printable, problems)))
        super().__init__("\n".join(self.problems))


class DataError(UserError):
    """A data set or tokenizer that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint that cannot be saved, found or loaded."""


class TrainingError(UserError):
    """Training cannot sensibly continue."""


class LostRankError(Exception):
    """Another rank has died or does not reach a collective. `train.py` prints only the message; exit status 1."""


@contextlib.contextmanager
def parsing(refuse: Callable[[str], UserError]) -> Iterator[None]:
    """Context of parsing a user's file. Whatever the parser raises for what it finds there becomes `refuse(reason)`: no
    list of exceptions is complete. A UserError and an OSError pass, because they are about something else."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        raise refuse(reason_of(error)) from None


def reason_of(error: BaseException) -> str:
    """What a parser's exception says about a file, in a few words."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, MemoryError):
        return "what it announces does not fit into memory"
    text = next(iter(str(error).splitlines()), "").partition("; use sys.")[0].rstrip(".")
    plain = isinstance(error, ValueError) or type(error) is Exception
    return text if plain and text else f"{type(error).__name__}: {text}".rstrip(": ")


def require_report_extra(user: str, *modules: str) -> None:
    require_extra(user, "report", *modules)


def require_extra(user: str, extra: str, *modules: str) -> None:
    """Imports modules that only this extra of pyproject.toml installs.

    Args:
        user: the command or key that needs them, with which the error begins.

    Raises:
        UserError: one of them is not installed.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise UserError(
                f"{user} needs {(error.name or module).split('.')[0]}, which is not installed: {install(extra)}."
            ) from None


def install(extra: str) -> str:
    """What installs an extra of pyproject.toml."""
    return f"run `pip install '{DISTRIBUTION}[{extra}]'`, or `pip install -e '.[{extra}]'` in a checkout"


def counted(number: int, noun: str) -> str:
    """'1 line', '2 lines', '1,000 processes'."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def command_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """For `python -m torchtitan.NAME`; its help begins with `about`, line by line."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m torchtitan.tools.{name}", description=about, formatter_class=form)


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Runs the `main` of a script and exits: a UserError or OSError is one sentence and status 2, Ctrl-C is silent."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script may have ignored it for its own imports
    tell_of_imports()
    try:
        status = main()
    except ConfigError as error:
        status = EXIT_STATUS
        print("\n".join(f"Error: {problem}" for problem in error.problems), file=sys.stderr)
    except (UserError, OSError) as error:
        status = EXIT_STATUS
        print(f"Error: {printable(str(error))}", file=sys.stderr)
    except (MemoryError, RuntimeError) as error:  # torch's out-of-memory error is a RuntimeError
        if not isinstance(error, MemoryError) and "allocate" not in str(error):
            raise
        status = EXIT_STATUS
        print(f"Error: there is not enough memory. {next(iter(str(error).splitlines()), '')}", file=sys.stderr)
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.exit(status)


@functools.cache
def tell_of_imports() -> None:
    """Says every PROGRESS seconds what this process is still importing, such as torch from a slow disk."""

    def tell() -> None:
        start = time.monotonic()
        while True:
            time.sleep(PROGRESS)
            specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
            if unfinished := [spec.name for spec in specs if spec and getattr(spec, "_initializing", False)]:
                print(
                    f"importing {unfinished[0]}: {time.monotonic() - start:.0f} s so far", file=sys.stderr, flush=True
                )

    threading.Thread(target=tell, daemon=True, name="imports").start()


def aligned(rows: Iterable[Sequence[str]], left: int) -> str:
    """A table as text, a line for each row; columns but the first `left` are aligned to the right."""
    columns = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.ljust(width) if number < left else cell.rjust(width) for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def printable(text: str) -> str:
    """The text without passwords, with escaped control characters: a name from a file must not control a terminal."""
    text = without_secrets(text)
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def without_secrets(text: str) -> str:
    """The text with `HIDDEN` in place of passwords and tokens in URIs."""
    return SECRETS.sub(lambda found: f"{found[1] or found[2] or found[3]}{HIDDEN}", text)


def public(value: Any) -> Any:
    """A configuration without passwords and tokens, in URIs or by the name of their key. Tuples become lists."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, list | tuple):
        return [public(item) for item in value]
    if isinstance(value, dict):
        return {
            public(key): HIDDEN if item and isinstance(item, str) and SECRET_KEY.search(str(key)) else public(item)
            for key, item in value.items()
        }
    return value


def was_hidden(value: Any) -> bool:
    """Whether a value of a configuration lacks what `public` has removed."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, list | dict):
        return any(map(was_hidden, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and re.search(rf"(?:^|://|=|_){re.escape(HIDDEN)}(?:$|[@&;])", value) is not None


def public_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without passwords and tokens."""
    result: list[str] = []
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        if equals and flag.startswith("--") and SECRET_KEY.search(flag):
            argument = f"{flag}={HIDDEN}"
        elif result and "=" not in result[-1] and result[-1].startswith("--") and SECRET_KEY.search(result[-1]):
            argument = HIDDEN
        result.append(without_secrets(argument))
    return result


def nearest(name: str, known: list[str]) -> str:
    """' (did you mean ...?)' with the closest match in `known`, or '' if nothing is close. In a dotted name the last
    part counts first: often only the section of a key is wrong."""
    from difflib import SequenceMatcher

    def likeness(left: str, right: str) -> float:
        return SequenceMatcher(None, left.lower(), right.lower()).ratio()

    section, _, last = name.rpartition(".")

    def score(key: str) -> tuple[bool, float]:
        key_section, _, key_last = key.rpartition(".")
        return key_last == last, likeness(key_last, last) + likeness(key_section, section)

    best = max(known, key=score, default="")
    close = best and likeness(best.rpartition(".")[2], last) >= 0.6
    return f" (did you mean {best}?)" if close else ""
