"""JSON that every parser takes, and what is wrong with JSON from elsewhere."""

import json
import math
from typing import Any

import pydantic


def finite(values: Any) -> Any:
    """The same with None for each number that is not finite, which JSON cannot say."""
    return json.loads(json.dumps(values), parse_constant=lambda _: None)


NONFINITE = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def named(values: Any) -> Any:
    """As JSON has it, with text for each number that JSON cannot say, as pydantic's `ser_json_inf_nan="strings"`."""
    return json.loads(json.dumps(values, default=str), parse_constant=str)


def unnamed(values: Any) -> Any:
    """The inverse of `named`."""
    if isinstance(values, dict):
        return {key: unnamed(value) for key, value in values.items()}
    if isinstance(values, list):
        return [unnamed(value) for value in values]
    return NONFINITE.get(values, values) if isinstance(values, str) else values


def natural(value: object) -> int:
    """The value, if it is an integer of at least 0. Raises a ValueError for all else that JSON may say."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is not a number of bytes or entries")
    return value


def first_fault(error: pydantic.ValidationError) -> str:
    """The first wrong value, by its path, in a few words."""
    fault = error.errors(include_url=False)[0]
    where, why = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")
    if not where:
        return why
    if fault["type"] == "missing":
        return f"{where} is missing"
    value = " ".join(repr(fault["input"]).split())  # in one line
    return f"{where} is {value:.60} ({why[0].lower()}{why[1:]})"
