"""From text to the tokens whose likelihood is asked for, encoded and windowed as lm-evaluation-harness does."""

import heapq
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import DataError


class Request(NamedTuple):
    """Tokens. The last `scored` are predicted from the tokens before them."""

    tokens: "array[int]"
    scored: int


class Prompt(NamedTuple):
    """Tokens to continue greedily, with at most `most` tokens, until one that ends documents or until the new text
    contains one of `stops`."""

    tokens: list[int]
    most: int
    stops: tuple[str, ...] = ()


class Continuation(NamedTuple):
    """The model's answer to a prompt."""

    tokens: list[int]  # the new ones, without one that ends documents
    text: str  # the text of these tokens alone, up to the first of the prompt's `stops`
    is_finite: bool  # whether all logits were


class Score(NamedTuple):
    """The model's answer to a request."""

    log_likelihood: float  # natural logarithm, for the scored tokens together
    greedy: bool  # whether each of them is the most likely one at its place
    tokens: int  # how many were scored

    @property
    def is_finite(self) -> bool:
        """False if the model gave no answer, as with weights that are NaN."""
        return math.isfinite(self.log_likelihood)


@dataclass(frozen=True)
class Encoder:
    """Turns text into requests. Text begins as documents do in training: with BOS, if the tokenizer has one."""

    tokenizer: Tokenizer
    longest: int  # tokens that the model sees at once; earlier ones are dropped

    def continuation(self, context: str, continuation: str) -> Request:
        """Asks for the likelihood of `continuation` after `context`. Blanks between them count as part of the
        continuation, where most tokenizers put them. Raises a DataError if it has no tokens, or more than a window."""
        kept = context.rstrip()
        context, continuation = kept, context[len(kept) :] + continuation
        encode = self.tokenizer.encode
        if context:
            before = self._document(context)
            scored = self._document(context + continuation)[len(before) :]
        else:
            before, scored = [self._begin], encode(continuation)
        tokens = [*before, *(scored or encode(continuation))]  # nothing is left if the two share a token
        if len(tokens) == len(before):
            raise DataError(f"the answer {continuation!r} has no tokens, so it has no likelihood; remove its example.")
        if (scored_tokens := len(tokens) - len(before)) > self.longest:
            raise DataError(
                f"the answer {continuation!r:.60} has {scored_tokens:,} tokens, but the model sees only "
                f"{self.longest:,} at once, so its likelihood would be that of its end; remove its example, or set "
                "training.seq_len (--seq-len of torchtitan.tools.evaluate) to more."
            )
        return Request(array("i", tokens[-self.longest - 1 :]), scored_tokens)

    def text(self, text: str) -> list[Request]:
        """Asks for the likelihood of a whole text. Each token is scored once; windows do not overlap, but the last one
        sees as much before its tokens as fits. A text without tokens, such as blanks, asks for nothing."""
        tokens = [self._begin, *self.tokenizer.encode(text)]
        requests = []
        for start in range(1, len(tokens), self.longest):
            end = min(start + self.longest, len(tokens))
            requests.append(Request(array("i", tokens[max(end - self.longest - 1, 0) : end]), end - start))
        return requests

    def prompt(self, text: str, most: int, stops: tuple[str, ...]) -> Prompt:
        """Asks for up to `most` tokens after `text`, which loses its beginning where they would not fit otherwise."""
        return Prompt((self._document(text) or [self._begin])[-(self.longest - most) :], most, stops)

    def _document(self, text: str) -> list[int]:
        bos = self.tokenizer.bos_id
        return [*([] if bos is None else [bos]), *self.tokenizer.encode(text)]

    @property
    def _begin(self) -> int:
        return self.tokenizer.eos_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id


def pack_requests(requests: Sequence[Request], length: int) -> list[list[int]]:
    """Distributes requests, by number, over rows of `length` positions: the longest first, each to the emptiest row, or
    to a new one if it does not fit there. The result depends on nothing else."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # a heap of (-free positions, row)
    for number in sorted(range(len(requests)), key=lambda number: -len(requests[number].tokens)):
        needed = len(requests[number].tokens) - 1
        if not room or -room[0][0] < needed:
            heapq.heappush(room, (-length, len(rows)))
            rows.append([])
        free, row = room[0]
        rows[row].append(number)
        heapq.heapreplace(room, (free + needed, row))
    return rows
