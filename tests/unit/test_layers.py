"""The code matches docs/architecture.md: layers of imports, no cycles, private names of torch in one place."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from torchtitan.registry import load

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "train.py", *sorted((ROOT / "torchtitan").rglob("*.py"))]
TOOLS = ROOT / "torchtitan" / "tools"
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
PRIVATE_OPERATORS = (
    "_scaled_mm",
    "_int_mm",
    "_scaled_grouped_mm",
    "_foreach_",
    "_fused_sdp_choice",
)  # private names in `torch` without a public equivalent


@cache
def layers() -> dict[str, int]:
    """Path (a folder ends with "/") -> number of its layer, from the first table of docs/architecture.md."""
    by_path = {}
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        if row := re.match(r"\| (\d+) \| ([^|]+) \|", line):
            for path in re.findall(r"`([\w./]+)`", row[2]):
                assert (ROOT / path).exists(), f"docs/architecture.md names {path}, which is not there"
                by_path[path] = int(row[1])
    return by_path


def layer_of(path: Path) -> int:
    name = path.relative_to(ROOT).as_posix()
    fitting = [known for known in layers() if name == known or (known.endswith("/") and name.startswith(known))]
    assert fitting, f"docs/architecture.md has no place for {name}"
    return layers()[max(fitting, key=len)]


def file_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


@cache
def imports_of(path: Path) -> list[tuple[str, tuple[str, ...], int]]:
    """(module, names, line) of all imports, including those inside functions and for type checkers only."""
    imports: list[tuple[str, tuple[str, ...], int]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}:{node.lineno}: a relative import"
            imports.append((node.module, tuple(alias.name for alias in node.names), node.lineno))
        elif isinstance(node, ast.Import):
            imports += [(alias.name, (), node.lineno) for alias in node.names]
    return imports


@cache
def rows_of(path: Path) -> dict[str, int]:
    """The rows that `torchtitan.registry.load` imports from when they are needed, and the line of each."""
    texts = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    rows = {str(node.value): node.lineno for node in texts}
    return {row: line for row, line in rows.items() if re.fullmatch(r"torchtitan(\.\w+)+:\w+", row)}


@cache
def own_imports_of(path: Path) -> dict[Path, int]:
    """The files of this project that a file imports, and the line of each import."""
    lines: dict[Path, int] = {}
    for module, names, line in imports_of(path):
        if module.split(".")[0] in ("torchtitan", "benchmarks"):
            submodules = [file for name in names if (file := file_of(f"{module}.{name}"))]
            package = file_of(module)
            for file in submodules or ([package] if package else []):
                lines.setdefault(file, line)
    return lines


def test_no_file_imports_from_a_layer_above_it() -> None:
    """Rows, too, except those that name a tool: the core knows tools by rows alone."""
    upward = [
        f"{path.relative_to(ROOT)}:{line} (layer {layer_of(path)}) imports {target.relative_to(ROOT)} "
        f"(layer {layer_of(target)})"
        for path in FILES
        for target, line in [
            *own_imports_of(path).items(),
            *(found for found in declared_by(path) if TOOLS not in found[0].parents),
        ]
        if layer_of(target) > layer_of(path)
    ]
    assert not upward, "\n".join(upward)


def declared_by(path: Path) -> list[tuple[Path, int]]:
    files = [(file_of(row.split(":")[0]), line) for row, line in rows_of(path).items()]
    return [(file, line) for file, line in files if file]


def test_every_row_names_something_that_exists() -> None:
    for path in FILES:
        for row, line in rows_of(path).items():
            try:
                load(row)
            except (ImportError, AttributeError) as error:
                pytest.fail(f"{path.relative_to(ROOT)}:{line}: {row}: {error}")


def test_no_imports_go_in_a_circle() -> None:
    done: set[Path] = set()

    def visit(path: Path, way: list[Path]) -> None:
        assert path not in way, " -> ".join(str(step.relative_to(ROOT)) for step in [*way[way.index(path) :], path])
        if path not in done:
            for target in own_imports_of(path):
                visit(target, [*way, path])
            done.add(path)

    for path in [*FILES, *BENCHMARKS]:
        visit(path, [])


def is_private(module: str, names: tuple[str, ...]) -> bool:
    root = module.split(".")[0]
    private = any(name.startswith("_") for name in (*module.split("."), *names))
    return root == "torchao" or (root == "torch" and private)


def private_attributes(path: Path) -> list[str]:
    """`torch._dynamo` and similar, except operators."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: torch.{node.attr}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        and node.attr.startswith("_")
        and not node.attr.startswith(("__", *PRIVATE_OPERATORS))
    ]


def test_private_names_of_torch_and_torchao_are_in_compat_alone() -> None:
    elsewhere = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in FILES
        if path.parent.name != "compat"
        for module, names, line in imports_of(path)
        if is_private(module, names)
    ]
    elsewhere += [attribute for path in FILES if path.parent.name != "compat" for attribute in private_attributes(path)]
    assert not elsewhere, "\n".join(elsewhere)


def test_each_module_of_compat_says_what_every_private_name_is_for() -> None:
    for path in sorted((ROOT / "torchtitan" / "compat").glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        for module, names, _ in imports_of(path):
            for name in names if is_private(module, names) else ():
                assert name in docstring, f"{path.name} does not say what {name} of {module} is for"


@pytest.mark.parametrize("folder", ["config", "tools/report"])
def test_parts_without_torch(folder: str) -> None:
    """`--help` is instant, and a report can be made without torch installed."""
    seen: set[Path] = set()

    def visit(path: Path, way: list[str]) -> None:
        if path in seen:
            return
        seen.add(path)
        way = [*way, str(path.relative_to(ROOT))]
        for module, _, _ in imports_of(path):
            assert module.split(".")[0] not in ("torch", "torchao"), " -> ".join([*way, module])
        for target in own_imports_of(path):
            visit(target, way)

    for path in (ROOT / "torchtitan" / folder).rglob("*.py"):
        visit(path, [])


def test_layers_below_the_engine_take_sections_and_not_the_whole_configuration() -> None:
    takers = [
        path.relative_to(ROOT)
        for path in FILES
        for module, names, _ in imports_of(path)
        if 0 < layer_of(path) < 5 and module.startswith("torchtitan.config") and "JobConfig" in names
    ]
    assert takers == []
