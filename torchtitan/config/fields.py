"""Types for the section dataclasses: `Annotated[type, Doc(one line of help)]`, and named ranges."""

import functools
import re
from pathlib import Path
from typing import Annotated as Annotated
from typing import Any

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen, Predicate
from pydantic import AfterValidator, AllowInfNan, FiniteFloat, StringConstraints
from typing_extensions import Doc as Doc

from torchtitan.files import expand, expand_any, expand_data


class Expected(str):
    """What a value must be, for messages and help, where the type and its limits do not say it well."""


def step_ranges(entries: list[str]) -> list[range]:
    """Ranges of steps, from texts such as `1200-1250` and `1300`; raises ValueError if one makes no sense."""
    words = (entry.partition("-") for entry in entries)
    ends = [(int(first), int(last if dash else first)) for first, dash, last in words]
    if any(not 0 < first <= last for first, last in ends):
        raise ValueError("a step below 1, or a range that ends before it begins")
    return [range(first, last + 1) for first, last in ends]


def tokens_in(text: str) -> int:
    """A number of tokens, from a text such as `400B` or `1.5T`; raises ValueError for another text, or 0."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([KMBT])", text, re.IGNORECASE)
    if match is None or not (tokens := round(float(match[1]) * 1000.0 ** ("KMBT".index(match[2].upper()) + 1))):
        raise ValueError("not a number of tokens")
    return tokens


@functools.cache
def batch_schedule(text: str) -> tuple[tuple[int, int | str], ...]:
    """Sizes of batches and where they begin, as a step (0: with the run) or a number of tokens, from a text such as
    `64@0, 128@2B`; raises ValueError for another text."""
    entries = [entry.strip().partition("@") for entry in text.split(",")]
    schedule = tuple((int(size), int(at) if at.isdigit() else at) for size, _, at in entries)
    if schedule[0][1] != 0 or any(size < 1 for size, _ in schedule):
        raise ValueError("it begins with a size above 0 from step 0 on")
    for unit in (int, str):
        begins = [tokens_in(at) if isinstance(at, str) else at for _, at in schedule if isinstance(at, unit)]
        if begins != sorted({*begins}):
            raise ValueError("sizes must begin one after the other")
    return schedule


PositiveInt = Annotated[int, Gt(0)]
TokenCount = Annotated[
    str, Predicate(lambda text: tokens_in(text) > 0), Expected("a number of tokens with K, M, B or T, such as 10B")
]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveOrAll = Annotated[int, Ge(-1), Predicate(bool), Expected("-1 or an integer above 0")]
BatchSize = Annotated[
    PositiveOrAll | Annotated[str, Predicate(lambda text: bool(batch_schedule(text)))],
    Expected('-1, an integer above 0, or sizes and where they begin, such as "64@0, 128@2B"'),
]
TokenOrNothing = Annotated[int, Ge(-1), Expected("-1 or the id of a token")]
StepOrNewest = Annotated[int, Ge(-1), Expected("-1 or a step")]
PositiveFloat = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
LearningRate = Annotated[float, Gt(0), Le(100)]  # roughly how far AdamW moves a weight per step
Decay = Annotated[float, Ge(0), Le(100)]
RopeTheta = Annotated[float, Gt(1), AllowInfNan(False)]
RopeScalingTable = Annotated[dict[str, Any], Expected('a table such as {type = "yarn", factor = 8, original = 4096}')]
PositiveFraction = Annotated[float, Gt(0), Le(1)]
Seed = Annotated[int, Ge(0), Lt(2**63)]  # a signed 64-bit integer, as torch and TOML need
Gigabytes = Annotated[float, Ge(0), Le(10**6)]
Entries = Annotated[int, Ge(0), Le(10**7)]
Seconds = Annotated[int, Gt(0), Le(365 * 24 * 3600)]
SecondsOrNone = Annotated[int, Ge(0), Le(365 * 24 * 3600)]
NotEmpty = Annotated[str, MinLen(1)]  # an unset shell variable would mean the working directory
ExpertLoad = Annotated[float, Ge(1)]
TimesMore = Annotated[float, Gt(1)]
StageName = Annotated[
    str, StringConstraints(pattern=r"^[\w-]+$"), Expected("a name of letters, digits, hyphens and underscores")
]
StageEnd = Annotated[
    Annotated[int, Gt(0)] | Annotated[float, Gt(0), Le(1)] | TokenCount,
    Expected('a step, a fraction of training.steps, or a number of tokens such as "400B"'),
]
Steps = Annotated[
    list[str],
    Predicate(lambda entries: step_ranges(entries) is not None),
    Expected("a list of steps above 0 and ranges of them, such as 1200-1250"),
]
Coefficients = Annotated[list[FiniteFloat], MinLen(3), MaxLen(3), Expected("a list of 3 finite numbers")]
EveryLayers = Annotated[
    str, StringConstraints(pattern="^(op|0*[1-9][0-9]*)$"), Expected("'op' or a number of layers above 0")
]
PathOrEmpty = Annotated[str, AfterValidator(expand), Expected("a path on this machine")]
LocalPath = Annotated[PathOrEmpty, MinLen(1)]
NOT_ABOVE = Predicate(lambda path: ".." not in Path(path).parts)
DumpFolder = Annotated[
    LocalPath, Expected("a path on this machine (checkpoint.folder takes a URI, to keep checkpoints elsewhere)")
]
InnerFolder = Annotated[LocalPath, NOT_ABOVE, Expected("a path on this machine, in job.dump_folder or absolute")]
AnyPath = Annotated[str, AfterValidator(expand_any), MinLen(1), Expected("a path, or a URI such as s3://bucket/name")]
AnyFolder = Annotated[
    AnyPath,
    NOT_ABOVE,
    Predicate(lambda path: not path.lower().startswith(("hf:", "http:", "https:"))),  # where no run can write
    Expected("a path in job.dump_folder, an absolute one, or a URI such as s3://bucket/run"),
]
DataPath = Annotated[NotEmpty, AfterValidator(expand_data)]  # a user's own data set may give the path another meaning
WorldSize = Annotated[int, Gt(0), Le(1 << 16)]  # planning for more would take many minutes
