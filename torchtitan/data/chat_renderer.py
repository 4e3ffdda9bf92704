"""Renders a chat template, in a process of its own with bounded memory and time: a template is a program of a stranger.

It imports nothing of ours. Standard input has one JSON object per line, first the template, then conversations, and
each is answered by one line. What a template writes never leaves that line, and no file can be opened any more.
"""

import codecs
import json
import resource
import sys
from collections.abc import Sequence
from datetime import datetime
from itertools import takewhile
from typing import Any

import jinja2.debug  # noqa: F401  (otherwise imported after the first error)
from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

CPU_SECONDS = 4  # for one conversation
MEMORY_BYTES = 1 << 30
MOST_CHARACTERS = 1 << 24  # of one rendered conversation
CHANGED = "\ue000"  # a private character, in place of what the assistant says
Message = dict[str, Any]


class Generation(Extension):
    """`{% generation %}`, with which a template marks what the assistant says, as in transformers."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("note"), [], [], body).set_lineno(line)

    def note(self, caller: Any) -> str:
        text: str = caller()
        self.environment.said.append((self.environment.written, text))  # type: ignore[attr-defined]
        return text


class PlainNamespace(Namespace):
    """A namespace without names of Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=1)` is allowed
        Namespace.__init__(args[0], *args[1:])
        for name, value in kwargs.items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace may not have the name {name!r}")
        super().__setitem__(name, value)


def refuse(message: object) -> None:
    raise TemplateError(str(message))


def as_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled template. Raises a TemplateError if it is none."""

    def __init__(self, source: str) -> None:
        self.environment: Any = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        self.environment.filters["tojson"] = as_json
        self.environment.globals |= {
            "raise_exception": refuse,
            "strftime_now": lambda format: datetime.now().strftime(format),
            "namespace": PlainNamespace,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # not the class, which has more to offer
        }
        del self.environment.globals["lipsum"]  # it would read a file, and make up words
        parsed = self.environment.parse(source)
        self.marks = any(
            isinstance(call.call.node, nodes.ExtensionAttribute) for call in parsed.find_all(nodes.CallBlock)
        )
        self.template = self.environment.from_string(source)

    def render(
        self, messages: Sequence[Message], prompt: bool, tools: Any, variables: dict[str, str]
    ) -> tuple[str, list[tuple[int, str]]]:
        """The text, and where it marks what the assistant says."""
        self.environment.said, self.environment.written, pieces = [], 0, []
        names = {**variables, "messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        for piece in self.template.generate(names):
            pieces.append(piece)
            self.environment.written += len(piece)
            if self.environment.written > MOST_CHARACTERS:
                raise MemoryError(f"it writes more than {MOST_CHARACTERS:,} characters")
        return "".join(pieces), self.environment.said

    def answer(
        self, messages: list[Message], first: int, tools: Any, variables: dict[str, str], prompt: bool = False
    ) -> dict[str, Any]:
        """The rendered conversation (with `prompt`, up to where the assistant answers), and the turns of the assistant
        from message `first` on: [start, end) in its characters. If the template does not mark them, an end is that of
        the content, before what ends the turn."""

        def render(messages: Sequence[Message], prompt: bool = False) -> str:
            return self.render(messages, prompt, tools, variables)[0]

        def begin(number: int) -> int:
            prefix = render(messages[:number], prompt=True) if number else ""
            if not text.startswith(prefix):
                raise ValueError(
                    f"the template writes what comes before message {number + 1} otherwise where it ends there, so "
                    "what the assistant says is ambiguous; mark it with {% generation %}"
                )
            return len(prefix)

        text, said = self.render(messages, prompt, tools, variables)
        if self.marks:
            if any(text[start : start + len(piece)] != piece for start, piece in said):
                raise ValueError("{% generation %} stands within a macro or a {% set %}, so its place is unknown")
            least = begin(first) if first else 0
            return {"text": text, "turns": [(start, start + len(piece)) for start, piece in said if start >= least]}
        turns = []
        for number in range(first, len(messages)):
            if messages[number].get("role") == "assistant":
                start = begin(number)
                other = render([*messages[:number], changed(messages[number]), *messages[number + 1 :]])
                same = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(text), reversed(other), strict=False))
                end = len(text) - sum(1 for _ in same)
                if end < start:
                    raise ValueError(f"the template does not write what message {number + 1} says")
                turns.append((start, end))
        return {"text": text, "turns": turns}


def changed(message: Message) -> Message:
    """A message that differs in what is written last of it: the arguments of a tool call, or else the content."""
    calls = message.get("tool_calls")
    if not calls:
        return {**message, "content": CHANGED}
    last = calls[-1]
    function = last.get("function", last)
    arguments: Any = {CHANGED: CHANGED}
    function = {**function, "arguments": json.dumps(arguments) if isinstance(function["arguments"], str) else arguments}
    return {**message, "tool_calls": [*calls[:-1], {**last, "function": function} if "function" in last else function]}


def reply(template: ChatTemplate | None, request: dict[str, Any]) -> tuple[ChatTemplate | None, dict[str, Any]]:
    """The template from then on, and the answer: a refusal of one conversation, or an error that ends everything."""
    try:
        if template is None:
            template = ChatTemplate(request["template"])
            return template, {"marks": template.marks}
        return template, template.answer(**request)
    except (SecurityError, MemoryError, RecursionError) as error:
        return None, {"error": str(error) or type(error).__name__}
    except Exception as error:
        kind = "refusal" if template else "error"
        return template, {kind: str(error) if isinstance(error, TemplateError | ValueError) else repr(error)}


def main() -> None:
    # What Python would read from files later.
    datetime.now().strftime("%d %b %Y")
    codecs.lookup("unicode-escape")
    for what, limit in (("AS", MEMORY_BYTES), ("NOFILE", 3), ("FSIZE", 0), ("CORE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{what}"), (limit, limit))
    template = None
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        template, answer = reply(template, json.loads(line))
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
        if "error" in answer:
            return


if __name__ == "__main__":
    main()
