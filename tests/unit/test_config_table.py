"""docs/config_keys.md is the current output of scripts/config_table.py."""

import runpy
from pathlib import Path

from torchtitan.config import JobConfig
from torchtitan.config.fields import fields_by_key, keys_of_entry

ROOT = Path(__file__).parents[2]


def test_table_is_up_to_date_and_complete() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "config_table.py"))["render"]()
    assert (ROOT / "docs" / "config_keys.md").read_text(encoding="utf-8") == page, (
        "a key has changed: run scripts/config_table.py"
    )
    page, _, former = page.partition("## Names of other versions")
    assert "| `training.batch_size` | is now training.local_batch_size |" in former
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    keys = fields_by_key(JobConfig)
    entries = [keys_of_entry(key.entry) for key in keys.values() if key.entry]
    assert len(rows) == len(keys) + sum(map(len, entries))
    assert "| `steps` | `10000` | an integer above 0 | Number of optimizer steps. |" in rows
