#!/usr/bin/env python3
"""Makes conversations of the names, signatures and docstrings of Python's standard library, and a tokenizer for them.

python scripts/make_conversations.py outputs/questions     (see docs/answers.md)

The same Python makes the same files. A fifth of the names, and one form of each question, are in no conversation of
train.jsonl. held_out.jsonl has conversations about these names, and a file for each topic asks about them in that form,
as multiple choice.
"""

import argparse
import ast
import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from torchtitan.data.sources import digest, python_stdlib
from torchtitan.errors import run_command
from torchtitan.files import local_path
from torchtitan.tools.interchange.tokenizer_files import tokenizer_files

# Forms of the questions by topic. The last form is held out.
FORMS = {
    "kind": ("What is `{}`?", "Is `{}` a function, a class, an exception or a constant?", "What kind is `{}`?",
             "Which kind of object does `{}` name?"),
    "parameters": ("How many parameters does `{}` have?", "Count the parameters of `{}`.",
                   "What is the number of parameters in `{}`?"),
    "any_number": ("Does `{}` take any number of positional arguments?", "Is `{}` variadic?",
                   "May a call of `{}` have as many positional arguments as you like?"),
    "purpose": ("What does `{}` do?", "Describe `{}`.", "What is `{}` for?"),
}  # fmt: skip
ANSWERS = {
    "kind": ("function", "class", "exception", "constant"),
    "parameters": ("none", "one", "two", "three", "four"),
    "any_number": ("no", "yes"),
}
EXAMPLES = 120  # of each topic, at most
CHOICES = 4  # docstrings to choose from
HELD_OUT = 5  # one name in so many
LONGEST = 100  # characters of a signature or a docstring's first line

# Writes a conversation as evaluation writes questions, so that a model that has seen none can be asked the same.
TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- 'Question: ' + message['content'] + '\\n' }}
    {%- elif message['role'] == 'assistant' %}
        {{- 'Answer:' }}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{{ '\\n' }}
    {%- else %}
        {{- raise_exception('this template knows no role ' + message['role']) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Answer:' }}{% endif %}
"""


class Thing(NamedTuple):
    """A name that a module defines, and for each topic that applies what the question names, and the answer."""

    name: str
    topics: dict[str, tuple[str, str]]

    @property
    def held_out(self) -> bool:
        """Decided by the bare name, so the same name in another module is held out as well."""
        return int(digest(self.name.rpartition(".")[2]), 16) % HELD_OUT == 0


def things_in(text: str, module: str) -> Iterator[Thing]:
    """The public functions, methods, classes, exceptions and constants of a module's source."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in the source
        tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
            if not (name := node.targets[0].id).startswith("_"):
                yield Thing(f"{module}.{name}", {"kind": (name, "constant")})
        elif isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield from _defined(node, f"{module}.{node.name}")
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    yield from _defined(method, f"{module}.{node.name}.{method.name}", is_method=True)


def _defined(node: ast.ClassDef | ast.FunctionDef, name: str, is_method: bool = False) -> Iterator[Thing]:
    topics = {}
    if isinstance(node, ast.ClassDef):
        fails = node.name.endswith(("Error", "Exception", "Warning"))
        topics["kind"] = node.name, "exception" if fails else "class"
    else:
        if not is_method:
            topics["kind"] = node.name, "function"
        given, signature = node.args, f"def {node.name}({ast.unparse(node.args)})"
        count = len([*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))])
        if len(signature) <= LONGEST:
            topics["any_number"] = signature, ANSWERS["any_number"][given.vararg is not None]
            if count < len(ANSWERS["parameters"]):
                topics["parameters"] = signature, ANSWERS["parameters"][count]
    line = (ast.get_docstring(node) or "").partition("\n")[0]
    if LONGEST / 5 <= len(line) <= LONGEST and line.endswith("."):
        topics["purpose"] = name, line
    if topics:
        yield Thing(name, topics)


def conversation(thing: Thing, draw: random.Random) -> dict[str, Any]:
    """All questions about a thing, in any order, each in a form that is not held out."""
    messages = []
    for topic in draw.sample(sorted(thing.topics), len(thing.topics)):
        asked, answer = thing.topics[topic]
        messages += [
            {"role": "user", "content": draw.choice(FORMS[topic][:-1]).format(asked)},
            {"role": "assistant", "content": answer},
        ]
    return {"messages": messages}


def examples(topic: str, things: Iterable[Thing], draw: random.Random) -> Iterator[dict[str, Any]]:
    """Multiple choice in the format of ARC. No question is asked twice, and each of a topic's answers is as
    frequent, so that one who always gives the same is right by chance."""
    asked = dict(thing.topics[topic] for thing in things if topic in thing.topics)
    answers = ANSWERS.get(topic, ())
    lines, found = sorted({*asked.values()}), Counter(asked.values())
    missing = {answer: min(EXAMPLES // len(answers), *(found[other] for other in answers)) for answer in answers}
    for subject in draw.sample(sorted(asked), len(asked)):
        answer = asked[subject]
        missing[answer] = missing.get(answer, 1) - 1
        if missing[answer] < 0:
            continue
        others = draw.sample([line for line in lines if line != answer], CHOICES - 1) if not answers else ()
        choices = answers or draw.sample([answer, *others], CHOICES)
        labels = [str(number) for number in range(len(choices))]
        yield {
            "question": FORMS[topic][-1].format(subject),
            "choices": {"text": [*choices], "label": labels},
            "answerKey": labels[choices.index(answer)],
        }


def write(file: Path, records: Iterable[dict[str, Any]]) -> None:
    lines = [json.dumps(record) for record in records]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{file}: {len(lines):,} records")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=local_path, help="folder to write")
    folder: Path = parser.parse_args(argv).folder
    files, draw = python_stdlib(), random.Random(0)
    names = [files.files[span.file].removesuffix(".py").removesuffix("/__init__") for span in files.spans]
    sources = ((files[index].text, name.replace("/", ".")) for index, name in enumerate(names))
    things = [thing for text, module in sources for thing in things_in(text, module)]
    draw.shuffle(things)
    seen, unseen = ([thing for thing in things if thing.held_out is held] for held in (False, True))
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer_files(None).items():
        if name != "tokenizer.model":  # tokenizer.json has the same ids, and special tokens that text can spell
            (folder / "tokenizer" / name).write_bytes(content)
    (folder / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    write(folder / "train.jsonl", (conversation(thing, draw) for thing in seen))
    write(folder / "held_out.jsonl", (conversation(thing, draw) for thing in unseen))
    for topic in FORMS:
        write(folder / f"{topic}.jsonl", list(examples(topic, unseen, draw))[:EXAMPLES])
    return 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
