"""The command torchtitan-train: outside the package, to run even if `import torchtitan` gives another project."""

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def main() -> None:
    """Becomes `python -m torchtitan.launch -m torchtitan.train`, with run_train.sh's variables and defaults."""
    found = PathFinder.find_spec("torchtitan", [os.getcwd(), *sys.path])  # as the process that this one becomes
    if found and not (found.origin and "torchtitan-toml" in Path(found.origin).read_text()):
        place = Path(found.origin).parent if found.origin else next(iter(found.submodule_search_locations or ()))
        print(
            f"Error: `import torchtitan` would give {place}, which is another project, or incomplete: start in another "
            "folder, or run `pip uninstall torchtitan torchtitan-toml` and install torchtitan-toml again.",
            file=sys.stderr,
        )
        sys.exit(2)
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    if not os.environ.get("PYTORCH_CUDA_ALLOC_CONF"):
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    file = os.environ.get("CONFIG_FILE") or "debug_model"
    program = ["-m", "torchtitan.launch", "-m", "torchtitan.train", f"--job.config_file={file}"]
    os.execv(sys.executable, [sys.executable, *program, *sys.argv[1:]])


if __name__ == "__main__":
    main()
