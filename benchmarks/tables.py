"""Markdown tables and JSON files."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is left-aligned, the others right-aligned."""
    lines = [list(columns), ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def median_of(values: Sequence[float | None], form: str) -> str:
    """The median of the known values, formatted; "" if none is known."""
    known = [value for value in values if value is not None]
    return form.format(statistics.median(known)) if known else ""


def spread(values: Sequence[float], form: str) -> str:
    return f"{form.format(min(values))} to {form.format(max(values))}"


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
