"""Prints how large this project is, as a table: a column for each git revision, and one for the files as they are.

python scripts/figures_of_the_house.py [REVISION ...]     (Python 3.11 or later)
"""

import argparse
import ast
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import tomllib

REFERENCE = {"api.md", "config_keys.md", "modules.md"}  # pages that are looked up, not read


def figures(root: Path) -> dict[str, object]:
    paths = [root / "train.py", *root.glob("torchtitan/**/*.py")]
    _, *package = files = {path.relative_to(root).as_posix(): path.read_text() for path in paths}
    code = "".join(files[path] for path in package)
    entry, statements = (
        files.get("torchtitan/train.py", files["train.py"]),
        re.compile(r"^[ \t]*[^\s#]", re.MULTILINE),
    )  # neither blank nor a comment
    # The functions of docs/tour.md, each of which calls the next, and the step itself.
    tour = re.findall(r"^\| \d \| `([^`]+):(?:\w+\.)?(\w+)`", (root / "docs/tour.md").read_text(), re.MULTILINE)
    way = {path for path, _ in tour} | {path for path, text in files.items() if "\ndef optimizer_step(" in text}
    nodes = [node for path in way for node in ast.walk(ast.parse(files[path])) if isinstance(node, ast.FunctionDef)]
    steps = [node for node in nodes if node.name in {"optimizer_step", *(name for _, name in tour)}]
    pages = [root / "README.md", *root.glob("docs/*.md")]
    words = sorted((len(page.read_text().split()), page.name) for page in pages if page.name not in REFERENCE)
    required = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    return {
        "torchtitan/: files": len(package),
        "torchtitan/: lines": len(code.splitlines()),
        "torchtitan/: lines without blank and comment lines": len(statements.findall(code)),
        "torchtitan/converters/: files": sum(path.startswith("torchtitan/converters/") for path in package),
        "isinstance(..., LinearConverter)": len(re.findall(r"isinstance\([^()]*LinearConverter", code)),
        "train.py: lines without blank and comment lines": len(statements.findall(entry)),
        "train.py to the optimizer step: files": len(way),
        "train.py to the optimizer step: lines of functions": sum(
            (node.end_lineno or 0) - node.lineno + 1 for node in steps
        ),
        "README.md and docs/ without reference: words": sum(count for count, _ in words),
        "... of the longest page": f"{words[-1][0]} ({words[-1][1]})",
        "hard dependencies without zstandard and fsspec": sum(not re.match("zstandard|fsspec", r) for r in required),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs="*", metavar="REVISION")
    columns = {}
    for revision in parser.parse_args().revisions:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["git", "archive", "--output", f"{folder}/files.tar", revision], check=True)
            shutil.unpack_archive(f"{folder}/files.tar", folder)
            columns[revision] = figures(Path(folder))
    columns["now"] = figures(Path(__file__).parents[1])
    print(f"| | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for name in columns["now"]:
        print(f"| {name} | {' | '.join(str(column[name]) for column in columns.values())} |")
