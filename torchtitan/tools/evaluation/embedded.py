"""Tasks made of Python's standard library, without any download.

The same Python makes the same examples. `training.dataset = "python_stdlib"` trains on these files, so the tasks show
whether a model learns, not whether it generalizes.

Context and answer meet between a word and a blank or bracket, where tokenizers do not merge across the border.
"""

import ast
import io
import keyword
import random
import re
import tokenize
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, islice

from torchtitan.data.sources import digest, python_stdlib
from torchtitan.tools.evaluation.tasks import Choice

EXAMPLES = 120
OF_A_FILE = 8  # at most
LONGEST_FILE = 60_000  # characters; tokenizing longer ones takes long
CONTEXT = 240  # characters at most, from the start of a line
ANSWERS = 4
CLOSING = {"(": ")", "[": "]", "{": "}"}
BRACKETS = tuple(CLOSING.values())
Find = Callable[[str, random.Random], Iterator[Choice]]  # takes the text of a file


def identifiers(text: str, draw: random.Random) -> Iterator[Choice]:
    """The next name in the code, and three others from the lines before it."""
    tokens, starts = _tokens(text)
    names = [(starts[token.start[0]] + token.start[1], token.string) for token in tokens if _is_name(token)]
    for at, name in draw.sample(names, len(names)):
        begin = _line_start(text, at)
        before = sorted({other for place, other in names if begin <= place < at})
        if at < 2 or text[at - 1] != " " or text[at - 2].isspace() or name not in before:
            continue
        others = [other for other in before if other != name]
        if len(others) >= ANSWERS - 1:
            yield _choice(text[begin : at - 1], name, draw.sample(others, ANSWERS - 1), draw)


def brackets(text: str, draw: random.Random) -> Iterator[Choice]:
    """The bracket that closes the innermost open one."""
    tokens, starts = _tokens(text)
    opened: list[int] = []
    examples = []
    for token in tokens:
        if token.type != tokenize.OP:
            continue
        at = starts[token.start[0]] + token.start[1]
        if token.string in CLOSING:
            opened.append(at)
        elif token.string in BRACKETS and opened:
            begin = _line_start(text, at)
            if opened.pop() >= begin and (text[at - 1].isalnum() or text[at - 1].isspace()):
                examples.append(Choice(text[begin:at], BRACKETS, BRACKETS.index(token.string), delimiter=""))
    yield from draw.sample(examples, len(examples))


def docstrings(text: str, draw: random.Random) -> Iterator[Choice]:
    """The name of the function with this docstring, and three others from the same module."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    names = sorted({node.name for node in nodes if not node.name.startswith("__")})
    for node in draw.sample(nodes, len(nodes)):
        lines = (ast.get_docstring(node) or "").splitlines()
        others = [name for name in names if name != node.name]
        if lines and 20 <= len(lines[0]) <= CONTEXT and node.name in names and len(others) >= ANSWERS - 1:
            yield _choice(f"# {lines[0]}\ndef", node.name, draw.sample(others, ANSWERS - 1), draw)


def needle(text: str, draw: random.Random, longest: int) -> Iterator[Choice]:
    """The word that follows a name in a comment in the first third of the code, and three others. The code, of at most
    `longest` characters, has none of these words anywhere else, so only that line tells."""
    tokens, starts = _tokens(text)
    names = sorted({token.string for token in tokens if _is_name(token)})
    for begin in draw.sample(starts, len(starts)):
        code = text[begin : text.rfind("\n", begin, begin + longest) + 1]
        unseen = [name for name in names if name not in code]
        if len(code) < 0.8 * longest or len(unseen) <= ANSWERS:
            continue
        at = code.rfind("\n", 0, draw.randrange(len(code) // 3)) + 1
        name, right, *wrong = draw.sample(unseen, 1 + ANSWERS)
        yield _choice(f"{code[:at]}# {name} {right}\n{code[at:]}# {name}", right, wrong, draw)


def make(task: str) -> list[Choice]:
    """The examples of an embedded task, the same ones each time; the right answers are evenly spread over brackets."""
    find, files, draw = EMBEDDED[task], python_stdlib(), random.Random(task)
    missing = dict.fromkeys(BRACKETS, EXAMPLES // len(BRACKETS))
    examples: list[Choice] = []

    def wanted(example: Choice) -> bool:
        answer = example.choices[example.gold]
        missing[answer] = missing.get(answer, EXAMPLES) - 1
        return missing[answer] >= 0

    for index in sorted(range(len(files)), key=lambda index: digest(files.files[files.spans[index].file])):
        if files.sizes[files.spans[index].file] > LONGEST_FILE:
            continue
        text = files[index].text
        useful = "".join(bracket for bracket in BRACKETS if missing[bracket] > 0)
        if find is brackets and not re.search(rf"[a-zA-Z0-9\s][{re.escape(useful)}]", text):
            continue  # tokenizing takes far longer than this search
        examples += islice(filter(wanted, _examples_in(find, text, draw)), min(OF_A_FILE, EXAMPLES - len(examples)))
        if len(examples) == EXAMPLES:
            break
    return examples


def _examples_in(find: Find, text: str, draw: random.Random) -> Iterator[Choice]:
    """The examples in a file; none in one that is not Python, such as a template."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings
            yield from find(text, draw)
    except (SyntaxError, tokenize.TokenError, ValueError):
        return


def _choice(context: str, right: str, wrong: list[str], draw: random.Random) -> Choice:
    choices = [right, *wrong]
    draw.shuffle(choices)
    return Choice(context, tuple(choices), choices.index(right))


def _tokens(text: str) -> tuple[list[tokenize.TokenInfo], list[int]]:
    """The tokens, and where each line starts, by its number from 1."""
    starts = [0, *accumulate(map(len, io.StringIO(text)), initial=0)]
    return list(tokenize.generate_tokens(io.StringIO(text).readline)), starts


def _is_name(token: tokenize.TokenInfo) -> bool:
    return token.type == tokenize.NAME and len(token.string) > 2 and not keyword.iskeyword(token.string)


def _line_start(text: str, at: int) -> int:
    """The first line start from CONTEXT characters before `at` on; that position if there is none."""
    if at <= CONTEXT:
        return 0
    return text.find("\n", at - CONTEXT - 1, at) + 1 or at - CONTEXT


EMBEDDED: dict[str, Find] = {
    "stdlib_identifiers": identifiers,
    "stdlib_brackets": brackets,
    "stdlib_docstrings": docstrings,
    "stdlib_needle_short": partial(needle, longest=200),
    "stdlib_needle_long": partial(needle, longest=1000),
}
