"""docs/modules.md is the current output of scripts/module_index.py."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_index_is_up_to_date_and_complete() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "module_index.py"))["render"]()
    assert (ROOT / "docs" / "modules.md").read_text(encoding="utf-8") == page, (
        "a module has moved or changed its first sentence: run scripts/module_index.py"
    )
    assert " | . |" not in page, "a module has no docstring"
    assert "| `forward.py` | Forward passes without" in page
