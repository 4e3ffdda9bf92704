"""Tasks: what a model is asked, and the metrics of its answers, as in lm-evaluation-harness."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from torchtitan.errors import DataError
from torchtitan.tools.evaluation.requests import Encoder, Prompt, Request, Score

SHOT_SEPARATOR = "\n\n"
TaskMetrics = dict[str, float]


class Task(Protocol):
    """Examples, each with one or more requests."""

    @property
    def name(self) -> str: ...

    def requests(self, encoder: Encoder) -> Sequence[Sequence[Request | Prompt]]:
        """The requests of each example. Collective."""

    def metrics(self, scores: Sequence[Sequence[Any]]) -> dict[str, TaskMetrics]:
        """From the answers to each example's requests, by the name in metrics and tables. Collective."""

    def details(self, scores: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
        """The result of each example, as JSON."""


@dataclass(frozen=True)
class Choice:
    """A question with several answers."""

    context: str  # before the delimiter and the answer
    choices: tuple[str, ...]
    gold: int  # the index of the right one
    delimiter: str = " "

    @property
    def solved(self) -> str:
        return f"{self.context}{self.delimiter}{self.choices[self.gold]}"


@dataclass(frozen=True)
class LastWord:
    """A text whose last word is to be predicted."""

    context: str
    word: str

    @property
    def solved(self) -> str:
        return f"{self.context} {self.word}"


E = TypeVar("E", Choice, LastWord)


@dataclass(frozen=True)
class Examples(Generic[E]):
    """The examples of a task, and what comes before them."""

    name: str
    examples: Sequence[E]
    num_fewshot: int = 0  # how many solved examples come before each: the first ones that differ from it
    limit: int | None = None  # ask only the first so many; None: all

    @property
    def asked(self) -> Sequence[E]:
        return self.examples[: self.limit]

    def context(self, example: E) -> str:
        """The context of an example, after the solved ones."""
        others = islice((other for other in self.examples if other != example), self.num_fewshot)
        return "".join(f"{other.solved}{SHOT_SEPARATOR}" for other in others) + example.context


class MultipleChoice(Examples[Choice]):
    """The answer whose likelihood is highest: `acc`, by the sum of its tokens' log-likelihoods; `acc_norm`, by that sum
    over the answer's length in characters. `chance` is what guessing gives."""

    def requests(self, encoder: Encoder) -> list[list[Request]]:
        return [
            [encoder.continuation(context, f"{example.delimiter}{choice}") for choice in example.choices]
            for example in self.asked
            for context in [self.context(example)]
        ]

    def metrics(self, scores: Sequence[Sequence[Score]]) -> dict[str, TaskMetrics]:
        right = [
            [answer == example.gold for answer in self._answers(example, of_example)]
            for example, of_example in zip(self.asked, scores, strict=True)
        ]
        acc, acc_norm = (statistics.fmean(column) for column in zip(*right, strict=True))
        chance = statistics.fmean(1 / len(example.choices) for example in self.asked)
        return {self.name: {"acc": acc, "acc_norm": acc_norm, "chance": chance}}

    def details(self, scores: Sequence[Sequence[Score]]) -> list[dict[str, Any]]:
        return [
            {
                "context": example.context,
                "choices": list(example.choices),
                "gold": example.gold,
                "log_likelihoods": [score.log_likelihood for score in of_example],
                **dict(zip(("answer", "answer_norm"), self._answers(example, of_example), strict=True)),
                **({} if all(score.is_finite for score in of_example) else {"answer": None, "answer_norm": None}),
            }
            for example, of_example in zip(self.asked, scores, strict=True)
        ]

    def _answers(self, example: Choice, scores: Sequence[Score]) -> tuple[int, int]:
        likelihoods = np.array([score.log_likelihood for score in scores])
        lengths = np.array([len(choice) for choice in example.choices])
        return int(np.argmax(likelihoods)), int(np.argmax(likelihoods / lengths))


class LastWords(Examples[LastWord]):
    """`acc`: how often every token of the last word is the most likely one; `perplexity` of a word."""

    def requests(self, encoder: Encoder) -> list[list[Request]]:
        return [[encoder.continuation(self.context(example), f" {example.word}")] for example in self.asked]

    def metrics(self, scores: Sequence[Sequence[Score]]) -> dict[str, TaskMetrics]:
        acc = statistics.fmean(score.greedy for (score,) in scores)
        return {
            self.name: {"acc": acc, "perplexity": exp(-statistics.fmean(score.log_likelihood for (score,) in scores))}
        }

    def details(self, scores: Sequence[Sequence[Score]]) -> list[dict[str, Any]]:
        return [
            {"context": example.context, "word": example.word, "log_likelihood": score.log_likelihood,
             "greedy": score.greedy if score.is_finite else None}
            for example, (score,) in zip(self.asked, scores, strict=True)
        ]  # fmt: skip


@dataclass(frozen=True)
class Text:
    """Whole documents, (id, text) each: `bits_per_byte` of UTF-8, which compares models with different tokenizers;
    `perplexity` of a token over all documents; `document_perplexity`, the median of the documents' own."""

    name: str
    documents: Sequence[tuple[str, str]]

    def requests(self, encoder: Encoder) -> list[list[Request]]:
        requests = [encoder.text(text) for _, text in self.documents]
        if not any(requests):
            raise DataError(f"{self.name}: no document has any tokens, so there is nothing to evaluate.")
        return requests

    def metrics(self, scores: Sequence[Sequence[Score]]) -> dict[str, TaskMetrics]:
        each = list(self._scored(scores))
        log_likelihood, tokens = sum(own for _, _, own, _ in each), sum(count for _, _, _, count in each)
        metrics = {
            "bits_per_byte": -log_likelihood / math.log(2) / sum(len(text.encode()) for _, text, _, _ in each),
            "perplexity": exp(-log_likelihood / tokens),
            "document_perplexity": statistics.median(exp(-own / count) for _, _, own, count in each),
        }
        return {self.name: metrics}

    def details(self, scores: Sequence[Sequence[Score]]) -> list[dict[str, Any]]:
        return [
            {
                "document": id,
                "log_likelihood": log_likelihood,
                "tokens": tokens,
                "bytes": len(text.encode()),
                "perplexity": exp(-log_likelihood / tokens),
            }
            for id, text, log_likelihood, tokens in self._scored(scores)
        ]

    def _scored(self, scores: Sequence[Sequence[Score]]) -> Iterator[tuple[str, str, float, int]]:
        """Id, text, log-likelihood and tokens of each document that has tokens."""
        for (id, text), own in zip(self.documents, scores, strict=True):
            if own:
                yield id, text, math.fsum(score.log_likelihood for score in own), sum(score.tokens for score in own)


def exp(value: float) -> float:
    """Infinity where the result is too large, as for a model that has diverged."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
