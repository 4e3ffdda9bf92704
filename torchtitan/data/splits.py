"""Splits of a data set, as names of files and folders tell them, and which are read for what."""

import re
from collections.abc import Iterable
from pathlib import Path

TRAIN, VALIDATION, TEST = "training", "validation", "test"

# Words that `datasets`, too, takes for splits.
SPLITS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev", "heldout", "holdout"), VALIDATION),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), TEST),
}
# The splits for each purpose: the first that exists is read. None: what has no split in its name.
WANTED: dict[str, tuple[str | None, ...]] = {TRAIN: (TRAIN, None), VALIDATION: (VALIDATION, TEST, None)}


def split_of(name: str) -> str | None:
    """The split that the name of a file, or else of a folder around it, tells; None if it tells none, or several."""
    for element in reversed(Path(name).parts):
        if splits := {SPLITS[word] for word in re.findall(r"[a-z]+", element.lower()) if word in SPLITS}:
            return splits.pop() if len(splits) == 1 else None
    return None


def by_split(names: Iterable[str]) -> dict[str | None, list[str]]:
    """The names of each split."""
    of_split: dict[str | None, list[str]] = {}
    for name in names:
        of_split.setdefault(split_of(name), []).append(name)
    return of_split


def split_for(of_split: dict[str | None, list[str]], purpose: str) -> tuple[str, list[str]] | None:
    """For `purpose`, TRAIN or VALIDATION: what to call the split that is read, and its names. None: none is for it."""
    return next(((split or "unmarked", of_split[split]) for split in WANTED[purpose] if split in of_split), None)
