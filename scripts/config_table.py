#!/usr/bin/env python3
"""Write docs/config_keys.md, the table of all keys, from the dataclasses of torchtitan/config.

python scripts/config_table.py
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from torchtitan.config import JobConfig
from torchtitan.config.keys import Key, fields_by_key, keys_of_entry, section_class

TABLE = Path(__file__).parent.parent / "docs" / "config_keys.md"
HEAD = """\
# All keys

Made by `scripts/config_table.py` from the dataclasses in `torchtitan/config`; `train.py --help` prints the same.
[configuration.md](configuration.md) tells how files and flags are written and what is worth knowing about some keys.
"""


def render(config_class: type[JobConfig] = JobConfig) -> str:
    """The whole page: a table for each section, in the order of the dataclass."""
    keys = fields_by_key(config_class)
    parts = [HEAD]
    for section in dataclasses.fields(config_class):
        doc = (section_class(config_class, section.name).__doc__ or "").strip().splitlines()[0]
        mine = {key: spec for key, spec in keys.items() if key.split(".", 1)[0] == section.name}
        parts += [f"\n## [{section.name}]\n\n{doc}\n\n", table(mine)]
        for key, spec in mine.items():
            if spec.entry:
                doc = " ".join(spec.entry.__doc__.split("\n\n")[0].split())
                parts += [f"\n### [[{key}]]\n\n{doc}\n\n", table(keys_of_entry(spec.entry))]
    return "".join(parts)


def table(keys: dict[str, Key]) -> str:
    return "| key | default | type | meaning |\n|---|---|---|---|\n" + "".join(map(row, keys, keys.values()))


def row(key: str, spec: Key) -> str:
    cells = (f"`{key.rpartition('.')[2]}`", f"`{spec.shown_default}`", spec.expected, spec.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    TABLE.write_text(render(), encoding="utf-8")
    print(f"wrote {TABLE}")
