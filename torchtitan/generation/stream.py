"""Prints text while it is generated."""

from collections.abc import Callable
from typing import TextIO

UNFINISHED = "\ufffd"  # a decoder's output for an incomplete character


class TextStream:
    """Prints a prompt and, token by token, its continuation.

    Args:
        decode: token ids to text.
        prompt: printed first.
        out: output stream.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: str, out: TextIO) -> None:
        self._decode = decode
        self._out = out
        self._ids: list[int] = []
        self._shown = 0
        out.write(prompt)
        out.flush()

    def add(self, token: int | None) -> None:
        """Prints all text that can no longer change. None: the row has ended."""
        if token is None:
            return
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.endswith(UNFINISHED):
            self._show(text)

    def end(self) -> None:
        self._show(self._decode(self._ids))
        self._out.write("\n")
        self._out.flush()

    def _show(self, text: str) -> None:
        self._out.write(text[self._shown :])
        self._out.flush()
        self._shown = len(text)
