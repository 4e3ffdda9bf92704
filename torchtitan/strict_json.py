"""JSON that every parser takes, and what is wrong with JSON from elsewhere."""

import json
from typing import Any

import pydantic


def finite(values: Any) -> Any:
    """The same with None for each number that is not finite, which JSON cannot say."""
    return json.loads(json.dumps(values), parse_constant=lambda _: None)


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
