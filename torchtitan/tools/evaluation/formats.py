"""Reads task files: JSON lines in the formats of HellaSwag, ARC, PIQA and LAMBADA."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.data.tokenizer import require_characters
from torchtitan.errors import DataError
from torchtitan.files import text_of
from torchtitan.tools.evaluation.tasks import Choice, LastWord


class TaskFormat(NamedTuple):
    """A kind of line: the fields that it must have, and how to read it."""

    fields: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Choice | LastWord]


def read_examples(path: Path, key: str) -> list[Choice] | list[LastWord]:
    """The examples of a file. The first line's fields decide the format. Raises a DataError that names `key` if the
    file is missing or empty, or a line cannot be used."""
    examples: list[Any] = []
    name = ""
    for number, line in enumerate(text_of(path, key).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError("not a JSON object")
            require_characters(json.dumps(entry, ensure_ascii=False), f"{key}: {path}, line {number}")
            name = name or _format_of(entry)
            if missing := [field for field in TASK_FORMATS[name].fields if field not in entry]:
                raise ValueError(f"{', '.join(missing)} missing, which {name} requires")
            examples.append(TASK_FORMATS[name].read(entry))
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            raise DataError(f"{key}: {path}, line {number}: {_reason(error)}.") from None
    if not examples:
        raise DataError(f"{key}: {path} is empty.")
    return examples


def _format_of(entry: Mapping[str, Any]) -> str:
    for name, format in TASK_FORMATS.items():
        if entry.keys() >= {*format.fields}:
            return name
    known = "; ".join(f"{name}: {', '.join(format.fields)}" for name, format in TASK_FORMATS.items())
    raise ValueError(f"its fields ({', '.join(entry)}) match no known format ({known})")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg} at column {error.colno})"
    return f"{error.args[0]} missing" if isinstance(error, KeyError) else str(error)


def _choice(context: str, choices: list[str], gold: int) -> Choice:
    if len(choices) < 2 or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("it needs two or more choices, each a non-empty string")
    if not 0 <= gold < len(choices):
        raise ValueError(f"the right choice is number {gold} (from 0), but there are only {len(choices)}")
    return Choice(context, tuple(choices), gold)


def _without_marks(line: str) -> str:
    # After the last closing bracket there is no mark. To look for its end from each opening one would be slow.
    marked, end, rest = line.rpartition("]")
    return re.sub(r"\[.*?\]", "", marked + end) + rest


def _hellaswag(entry: Mapping[str, Any]) -> Choice:
    def clean(text: str) -> str:  # marks of the WikiHow pages
        lines = text.strip().replace(" [title]", ". ").split("\n")
        return "\n".join(map(_without_marks, lines)).replace("  ", " ")

    context = f"{entry['activity_label']}: {entry['ctx_a']} {entry['ctx_b'].capitalize()}"
    return _choice(clean(context), [clean(ending) for ending in entry["endings"]], int(entry["label"]))


def _arc(entry: Mapping[str, Any]) -> Choice:
    """With the fields of the Hub's version, or the nested ones of the original."""
    question, choices = entry["question"], entry.get("choices")
    if isinstance(question, dict):
        question, choices = question["stem"], question["choices"]
    if isinstance(choices, list):
        choices = {name: [choice[name] for choice in choices] for name in ("text", "label")}
    if not isinstance(choices, dict):
        raise ValueError("choices missing")
    if entry["answerKey"] not in choices["label"]:
        raise ValueError(f"answerKey {entry['answerKey']!r} is not one of the labels {', '.join(choices['label'])}")
    return _choice(f"Question: {question}\nAnswer:", choices["text"], choices["label"].index(entry["answerKey"]))


def _piqa(entry: Mapping[str, Any]) -> Choice:
    return _choice(f"Question: {entry['goal']}\nAnswer:", [entry["sol1"], entry["sol2"]], int(entry["label"]))


def _lambada(entry: Mapping[str, Any]) -> LastWord:
    context, _, word = entry["text"].rpartition(" ")
    if not context or not word:
        raise ValueError("text must have at least two words, and no space at the end")
    return LastWord(context, word)


TASK_FORMATS = {
    "HellaSwag": TaskFormat(("activity_label", "ctx_a", "ctx_b", "endings", "label"), _hellaswag),
    "ARC": TaskFormat(("question", "answerKey"), _arc),
    "PIQA": TaskFormat(("goal", "sol1", "sol2", "label"), _piqa),
    "LAMBADA": TaskFormat(("text",), _lambada),
}
