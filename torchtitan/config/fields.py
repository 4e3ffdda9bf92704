"""The vocabulary of the section dataclasses: `Annotated[type, Doc(one line of help)]`, with ranges by name."""

from typing import Annotated

from annotated_types import Ge, Gt, Le
from typing_extensions import Doc

__all__ = [
    "Annotated",
    "Doc",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Share",
    "TimesMore",
]

PositiveInt = Annotated[int, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
TimesMore = Annotated[float, Gt(1)]
