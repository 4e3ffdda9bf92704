"""`python -m benchmarks NAME [arguments]` runs a benchmark; without a name it lists them."""

import ast
import runpy
import sys
from pathlib import Path

from torchtitan.errors import EXIT_STATUS, nearest

FINISHED = ("busy", "precision_schedule", "precision_search", "weight_bound")


def benchmarks() -> dict[str, str]:
    """The available benchmarks by name, with the first sentence of each script's docstring."""
    summaries = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        runs = any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body)
        if runs and path.stem != "__main__":
            paragraph = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
            summaries[path.stem] = paragraph.split(". ")[0].rstrip(".")
    return summaries


def main(arguments: list[str]) -> int:
    known = benchmarks()
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, known))
        print(__doc__ or "", *(f"{name:{width}}  {sentence}" for name, sentence in known.items()), sep="\n")
        return 0
    name = arguments[0]
    if name not in known:
        remedy = ": it is finished, and docs/ has its result" if name in FINISHED else nearest(name, list(known))
        print(f"Error: unknown benchmark {name!r}{remedy}.", file=sys.stderr)
        return EXIT_STATUS
    sys.argv = arguments
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
