"""Compares configurations: differences from the defaults and between runs, and runs that are seeds of one."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan.config import JobConfig, to_toml
from torchtitan.config.manager import leaves, tomllib

ShownValues = dict[str, Any]
"""section.key -> value as in TOML; None is "none"."""

# The location and name of a run do not affect what it trains.
LABELS = {"job.dump_folder", "job.description", "job.config_file"}
SEED_KEY = "training.seed"


def flat(table: Mapping[str, Any]) -> ShownValues:
    """Flattens a TOML table of sections, and its [[stage]]: `stage.NAME.section.key`."""
    stages = table.get("stage")
    return {
        f"{section}.{key}": value
        for section, keys in table.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
    } | {
        f"stage.{stage.get('name', number)}.{key}": value
        for number, stage in enumerate(stages if isinstance(stages, list) else (), 1)
        if isinstance(stage, dict)
        for key, value in leaves(stage).items()
        if key != "name"
    }


def default_values() -> ShownValues:
    return flat(tomllib.loads(to_toml(JobConfig())))


def display(value: Any) -> str:
    """A value for display: as in TOML, but strings without quotation marks."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, list):
        return ", ".join(map(display, value)) or "[]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {display(item)}" for key, item in value.items() if item != "none") + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def differing(configs: Sequence[ShownValues | None], ignored: set[str] = LABELS) -> list[str]:
    """Keys whose values differ between configurations. None is an unknown configuration."""
    known = [config for config in configs if config is not None]
    keys = dict.fromkeys(key for config in known for key in config)
    return [key for key in keys if key not in ignored and any(config.get(key) != known[0].get(key) for config in known)]


def seed_groups(configs: Sequence[ShownValues | None]) -> list[list[int]]:
    """Indices of runs, grouped. Runs of one group differ only in their seed, and no two have the same seed."""
    groups: list[list[int]] = []
    for index, config in enumerate(configs):
        for group in groups:
            seeds = [(configs[member] or {}).get(SEED_KEY) for member in group]
            alike = config and configs[group[0]] and not differing([config, configs[group[0]]], LABELS | {SEED_KEY})
            if config and alike and None not in seeds and config.get(SEED_KEY) not in [None, *seeds]:
                group.append(index)
                break
        else:
            groups.append([index])
    return groups
