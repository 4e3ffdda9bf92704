"""Task files in the common formats, with text of Python's standard library: a debug model finds none of it strange."""

import json
from pathlib import Path
from typing import Any

TEXT = "the import return class self value name object string list module file path error key data type code"
WORDS = TEXT.split()


def sentence(start: int, length: int) -> str:
    """Words that repeat with a period of 18; another text for each start."""
    return " ".join(WORDS[(start * 5 + place * 7) % len(WORDS)] for place in range(length))


def hellaswag(number: int) -> dict[str, Any]:
    return {
        "activity_label": f"Writing {WORDS[number % 18]}",
        "ctx_a": f"A person [header] opens the {sentence(number, 9)} [title] then.",
        "ctx_b": f"the {WORDS[(number + 3) % 18]}",
        "endings": [f"[step] {sentence(number + ending, 3 + 2 * ending)} [substeps] é." for ending in range(4)],
        "label": str(number % 4),
    }


def arc(number: int) -> dict[str, Any]:
    texts = [sentence(number + choice, 1 + choice) for choice in range(3 + number % 3)]
    letters = [str(place + 1) if number % 4 == 0 else "ABCDE"[place] for place in range(len(texts))]
    question = f"What is {sentence(number, 6)}?"
    if number % 2:  # as the original files have it
        listed = [{"text": text, "label": letter} for text, letter in zip(texts, letters, strict=True)]
        return {"question": {"stem": question, "choices": listed}, "answerKey": letters[number % len(letters)]}
    choices = {"text": texts, "label": letters}
    return {"question": question, "choices": choices, "answerKey": letters[number % len(letters)]}


def piqa(number: int) -> dict[str, Any]:
    return {
        "goal": f"To {sentence(number, 5)}",
        "sol1": sentence(number + 1, 4),
        "sol2": sentence(number + 2, 6),
        "label": number % 2,
    }


def lambada(number: int) -> dict[str, Any]:
    return {"text": sentence(number, 12)}


KINDS = {"hellaswag": hellaswag, "arc": arc, "piqa": piqa, "lambada": lambada}


def write(folder: Path, kind: str, examples: int) -> Path:
    """Writes `folder`/KIND.jsonl."""
    path = folder / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(KINDS[kind](number)) + "\n" for number in range(examples)), encoding="utf-8")
    return path
