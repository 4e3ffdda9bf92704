"""An assignment as configuration: converters, recipes and filter lists."""

from collections.abc import Sequence
from typing import Any

from torchtitan.config.manager import tables_to_toml
from torchtitan.precision_search.candidates import Candidate
from torchtitan.precision_search.search import Assignment

Tables = dict[str, dict[str, Any]]


def tables_of(candidates: Sequence[Candidate], assignment: Assignment) -> Tables:
    """The keys to set, by section. Each converter's `filter_fqns` names every layer that it would convert and that is
    not its own, so their order does not matter."""
    used = sorted({index for index in assignment.values() if index is not None})
    tables: Tables = {"model": {"converters": [candidates[index].converter.name for index in used]}}
    for index in used:
        candidate = candidates[index]
        # What the user's own filter excludes stays in it.
        own = [] if "filter_fqns" in candidate.keys else list(candidate.converter.filter_fqns)
        others = [fqn for fqn, one in candidate.decisions.items() if one.converted and assignment.get(fqn) != index]
        entries = own + shortened(others, list(candidate.decisions))
        tables[candidate.converter.name] = {**candidate.keys, "filter_fqns": entries}
    return tables


def shortened(fqns: Sequence[str], all_fqns: Sequence[str]) -> list[str]:
    """The same layers with fewer entries: layers that are excluded in all blocks share one, `layers.*.attention.wq`."""
    entries: dict[str, None] = {}
    for fqn in fqns:
        pattern = _any_block(fqn)
        everywhere = all(other in fqns for other in all_fqns if _any_block(other) == pattern)
        entries[pattern if everywhere else fqn] = None
    return list(entries)


def _any_block(fqn: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in fqn.split("."))


def to_toml(tables: Tables) -> str:
    return tables_to_toml(tables)


def to_flags(tables: Tables) -> list[str]:
    """The same as command-line flags."""
    flags = []
    for section, keys in tables.items():
        for key, value in keys.items():
            if value is True:
                flags.append(f"--{section}.{key}")
            else:
                flags.append(f"--{section}.{key}={','.join(value) if isinstance(value, list) else value}")
    return flags
