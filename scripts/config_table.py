#!/usr/bin/env python3
"""Generates docs/config_keys.md, the table of all keys, from the dataclasses in torchtitan/config.

python scripts/config_table.py
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from torchtitan.config import JobConfig
from torchtitan.config.keys import Key, fields_by_key, keys_of_entry, section_class
from torchtitan.config.legacy_keys import LEGACY_KEYS, LEGACY_VALUES

TABLE = Path(__file__).parent.parent / "docs" / "config_keys.md"
HEAD = """\
# All keys

Made by `scripts/config_table.py` from the dataclasses in `torchtitan/config`; `train.py --help` prints the same.
[configuration.md](configuration.md) tells how files and flags are written and what is worth knowing about some keys.
"""

FORMER = """
## Names of other versions

Keys and values of torchtitan's files from 2024 to early 2026. They load, in files and as flags, and the run says so in
a line each; a name of today that is given too wins. Values that ask for what is not here are refused, with the reason.

| there | here |
|---|---|
"""


def render(config_class: type[JobConfig] = JobConfig) -> str:
    """The whole page: one table per section, in the order of the dataclass."""
    keys = fields_by_key(config_class)
    parts = [HEAD]
    for section in dataclasses.fields(config_class):
        doc = (section_class(config_class, section.name).__doc__ or "").strip().splitlines()[0]
        mine = {key: spec for key, spec in keys.items() if key.split(".", 1)[0] == section.name}
        parts += [f"\n## [{section.name}]\n\n{doc}\n\n", table(mine)]
        for key, spec in mine.items():
            if spec.entry:
                doc = " ".join((spec.entry.__doc__ or "").split("\n\n")[0].split())
                parts += [f"\n### [[{key}]]\n\n{doc}\n\n", table(keys_of_entry(spec.entry))]
    return "".join([*parts, former_names()])


def former_names() -> str:
    rows = [f"| `{key}` | {former.now} |\n" for key, former in LEGACY_KEYS.items()]
    for key, values in LEGACY_VALUES.items():
        for old, (new, others) in values.items():
            now = [f"`{key} = {new}`"] if new is not None else []
            now += [f"`{other} = {str(value).lower()}`" for other, value in others.items()]
            rows.append(f"| `{key} = {old}` | {', '.join(now) or 'left out'} |\n")
    return FORMER + "".join(rows)


def table(keys: dict[str, Key]) -> str:
    return "| key | default | type | meaning |\n|---|---|---|---|\n" + "".join(map(row, keys, keys.values()))


def row(key: str, spec: Key) -> str:
    cells = (f"`{key.rpartition('.')[2]}`", f"`{spec.shown_default}`", spec.expected, spec.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    TABLE.write_text(render(), encoding="utf-8")
    print(f"wrote {TABLE}")
