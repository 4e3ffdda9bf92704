"""A name has one owner, and a comment can be read alone."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "torchtitan").rglob("*.py"))
MID_SENTENCE = {"of", "which", "or", "as", "by", "than", "whose", "with", "from", "to"}


def test_few_functions_and_classes_are_defined_more_than_once() -> None:
    owners: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].append(str(path.relative_to(ROOT)))
    shared = {name: paths for name, paths in owners.items() if len(set(paths)) > 1 and name != "main"}
    assert len(shared) <= 10, "\n".join(f"{name}: {', '.join(paths)}" for name, paths in shared.items())


def test_words_are_spelled_as_in_the_glossary() -> None:
    """Prose has micro-batches and data sets; names and keys have no hyphen or blank."""
    wrong = []
    for path in FILES:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT or token.string.startswith(('"""', 'f"')):
                prose = re.sub(r"`[^`]*`|\{[^}]*\}", "", token.string)
                if " " in prose and re.search(r"(?<![\w./])(microbatch(es)?|datasets?)(?![\w./=])", prose, re.I):
                    wrong.append(f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}")
    assert not wrong, "\n".join(wrong)


def test_few_comments_begin_in_mid_sentence() -> None:
    """A line that goes on with the comment above it is no beginning."""
    fragments, begun = [], 0
    for path in FILES:
        last = -1
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type != tokenize.COMMENT:
                continue
            (row, _), alone = token.start, token.line.lstrip().startswith("#")
            goes_on, last = alone and row == last + 1, row if alone else -1
            words = token.string.lstrip("#: ").split()
            if not goes_on and words:
                begun += 1
                if words[0].lower().rstrip(",") in MID_SENTENCE:
                    fragments.append(f"{path.relative_to(ROOT)}:{row}: {token.string}")
    assert begun > 100
    assert len(fragments) <= 40, "\n".join(fragments)
