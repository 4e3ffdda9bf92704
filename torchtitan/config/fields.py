"""Types for the section dataclasses: `Annotated[type, Doc(one line of help)]`, and named ranges."""

import os
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator
from typing_extensions import Doc

from torchtitan.files import expand

__all__ = [
    "Annotated",
    "BelowOne",
    "DataPath",
    "Decay",
    "Doc",
    "Entries",
    "ExpertLoad",
    "Fraction",
    "LearningRate",
    "LocalPath",
    "NonNegativeInt",
    "NotEmpty",
    "PathOrEmpty",
    "PositiveFloat",
    "PositiveFraction",
    "PositiveInt",
    "Seconds",
    "Seed",
    "TimesMore",
    "WorldSize",
]

PositiveInt = Annotated[int, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
LearningRate = Annotated[float, Gt(0), Le(100)]  # roughly how far AdamW moves a weight per step
Decay = Annotated[float, Ge(0), Le(100)]
PositiveFraction = Annotated[float, Gt(0), Le(1)]
Seed = Annotated[int, Ge(0), Lt(2**63)]  # a signed 64-bit integer, as torch and TOML need
Entries = Annotated[int, Ge(0), Le(10**7)]
Seconds = Annotated[int, Gt(0), Le(365 * 24 * 3600)]
NotEmpty = Annotated[str, MinLen(1)]  # or an unset shell variable would mean the working directory
ExpertLoad = Annotated[float, Ge(1)]
TimesMore = Annotated[float, Gt(1)]
PathOrEmpty = Annotated[str, AfterValidator(expand)]
LocalPath = Annotated[PathOrEmpty, MinLen(1)]
DataPath = Annotated[NotEmpty, AfterValidator(os.path.expanduser)]  # or what a user's own data set makes of it
WorldSize = Annotated[int, Gt(0), Le(1 << 16)]  # planning for more would take many minutes
