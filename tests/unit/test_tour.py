"""docs/tour.md: its references exist, and the functions that it quotes contain the quoted lines."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
REFERENCE = re.compile(r"`([\w/]+\.py):([\w.]+)`")
SECTION = re.compile(r"^## (\d)\. `([\w/]+\.py):([\w.]+)`\n(.*?)(?=^## )", re.MULTILINE | re.DOTALL)


def source_of(path: str, name: str) -> str:
    """Source of a function, class or method, by its dotted name in a file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for label in name.split("."):
        types = (ast.FunctionDef, ast.ClassDef)
        node = next(child for child in ast.iter_child_nodes(node) if isinstance(child, types) and child.name == label)
    return ast.get_source_segment(text, node) or ""


def is_quoted_from(quote: str, source: str) -> bool:
    """Whether the source contains the lines in this order, ignoring indentation. After "..." lines may be skipped;
    otherwise each must directly follow the previous one."""
    lines, place, skipping = [line.strip() for line in source.splitlines()], 0, True
    for wanted in (line.strip() for line in quote.splitlines()):
        if wanted == "...":
            skipping = True
            continue
        next_place = next((i for i in range(place, len(lines)) if lines[i] == wanted), None)
        if next_place is None or (next_place > place and not skipping):
            return False
        place, skipping = next_place + 1, False
    return True


@pytest.mark.parametrize("reference", sorted(set(REFERENCE.findall(TOUR))), ids=":".join)
def test_references_exist(reference: tuple[str, str]) -> None:
    assert source_of(*reference)


def test_the_tour_has_six_functions_in_the_order_of_its_table() -> None:
    sections = [(number, f"{path}:{name}") for number, path, name, _ in SECTION.findall(TOUR)]
    assert sections == re.findall(r"^\| (\d) \| `([^`]+)` \|", TOUR, re.MULTILINE)
    assert [number for number, _ in sections] == list("123456")


@pytest.mark.parametrize(("number", "path", "name", "text"), SECTION.findall(TOUR), ids=lambda value: value[:40])
def test_quoted_lines_are_in_the_function(number: str, path: str, name: str, text: str) -> None:
    quotes = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert quotes
    source = source_of(path, name)
    for quote in quotes:
        assert is_quoted_from(quote, source), quote


def test_each_function_calls_the_next() -> None:
    """Otherwise the tour would have a gap. `parallelize` is a field of the model's spec."""
    sections = [(path, name) for _, path, name, _ in SECTION.findall(TOUR)]
    for caller, called in ((0, "build_trainer("), (1, "builder.build("), (2, "parallelize("), (0, "trainer.train(")):
        assert called in source_of(*sections[caller])
    assert "build_engine(" in source_of("torchtitan/run/build_trainer.py", "StageBuilder.build")
    assert "self._train_stage(" in source_of("torchtitan/run/trainer.py", "Trainer.train")
    assert "train_step(self.engine" in source_of("torchtitan/run/trainer.py", "Trainer.train_step")
    assert "self.train_step(" in source_of(*sections[4])


def test_quotes_that_are_not_in_a_function_are_found() -> None:
    source = "def f():\n    a = 1\n    b = 2\n    c = 3\n"
    assert is_quoted_from("a = 1\n...\nc = 3", source)
    for wrong in ("a = 1\nc = 3", "b = 2\n...\na = 1", "d = 4", "a = 1 + 1"):
        assert not is_quoted_from(wrong, source)
