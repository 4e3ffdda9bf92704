"""Conversations as documents: their tokens, of which some count, as the chat template of the tokenizer writes them.

A token that does not count has `UNCOUNTED` added to its id, so the mask travels with the tokens through packing and
shards; a window takes it off again.
"""

import functools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchtitan.config.training import Training
from torchtitan.data.bpe import attempt, fast_tokenizer, tiktoken_parts
from torchtitan.data.byte_level import of_pieces
from torchtitan.data.packing import tokens_of
from torchtitan.data.records import column_of, parsed_line
from torchtitan.data.sources import LONGEST, UNCOUNTED, Document, Tokens, digest
from torchtitan.data.tokenizer import CONFIG, SHIPPED, SPECIAL_TOKENS, Tokenizer, json_beside, main_folder
from torchtitan.errors import DataError, require_extra
from torchtitan.files import regular_file, text_of
from torchtitan.logging import logger

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

KEY = "training.chat_template"
FILE = "chat_template.jinja"  # beside a tokenizer
RENDERER = Path(__file__).with_name("chat_renderer.py")
SAFE_JINJA = (3, 1, 6)  # earlier versions let templates out of the sandbox
NAMED = {name: SHIPPED.with_name(f"{name}.jinja") for name in ("chatml", "llama3")}  # templates
LEAST_LOGGED = 5  # long conversations logged one by one


@dataclass
class LongConversations:
    """Counts conversations longer than a window, in this process, and logs them as they get more."""

    count: int = 0

    def add(self, size: int, most: int, what: str) -> None:
        self.count += 1
        if self.count <= LEAST_LOGGED or str(self.count).strip("0") == "1":
            so_far = f"; {self.count} so far" if self.count > LEAST_LOGGED else ""
            logger.warning(f"a conversation has {size:,} tokens, more than the {most:,} of a window: {what}{so_far}")


LONG = LongConversations()


def template_of(tokenizer: Tokenizer, choice: str | None) -> str:
    """The source of the template that `training.chat_template` chooses; None: the one beside the tokenizer."""
    if choice is not None:
        return text_of(NAMED.get(choice, Path(choice)), KEY)
    file, config = main_folder(tokenizer.file) / FILE, json_beside(tokenizer.file, CONFIG)
    if file.is_file():
        return text_of(file, KEY)
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    if isinstance(template, str):
        return template
    raise DataError(
        f"{KEY}: beside {tokenizer.file} there is no chat template ({FILE}, or chat_template in {CONFIG}); add one, or "
        f"set the key to a file or to one of {', '.join(NAMED)}."
    )


class Renderer:
    """A template, compiled in a process of its own: see `chat_renderer`. For any number of threads and forks."""

    def __init__(self, template: str) -> None:
        self.template = template
        self.lock = threading.Lock()
        self.owner = 0  # the process that has started it

    def start(self) -> None:
        self.owner = os.getpid()
        command = [sys.executable, "-c", RENDERER.read_text(encoding="utf-8")]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd="/", stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self.marks = self.exchange({"template": self.template})["marks"]

    def exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        line = b""
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            pass
        answer = json.loads(line) if line.endswith(b"\n") else {"error": "it takes too much time or memory"}
        if "error" in answer:
            self.owner = 0
            raise DataError(f"{KEY}: the chat template cannot be used: {answer['error'].rstrip('.')}; correct it.")
        return dict(answer)

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer of `ChatTemplate.answer`. Raises a DataError if the template is at fault, and a ValueError with
        the reason if it refuses this conversation."""
        with self.lock:
            if self.owner != os.getpid():
                self.start()
            answer = self.exchange(request)
        if "refusal" in answer:
            raise ValueError(f"the chat template refuses it: {answer['refusal'].rstrip('.')}")
        return answer


class Chat:
    """What makes tokens of conversations, with the tokens that count.

    Args:
        train_on, choice, long: as training.train_on, training.chat_template and training.long_conversations.
        window: the most tokens of a conversation; None: all are kept.
    """

    def __init__(self, tokenizer: Tokenizer, train_on: str, choice: str | None, long: str, window: int | None) -> None:
        self.tokenizer, self.train_on, self.choice = tokenizer, train_on, choice
        self.long, self.window = long, window

    @cached_property
    def template(self) -> str:
        return template_of(self.tokenizer, self.choice)

    @cached_property
    def identity(self) -> str:
        """Changes with what decides the tokens of a conversation, and which count."""
        try:
            template = self.template
        except DataError:  # of texts alone
            template = ""
        return digest([self.train_on, self.long, template])

    @cached_property
    def renderer(self) -> Renderer:
        require_extra("training.train_on", "chat", "jinja2")
        if tuple(map(int, re.findall(r"\d+", version("jinja2"))[:3])) < SAFE_JINJA:
            raise DataError("training.train_on needs jinja2 3.1.6 or later, which keeps templates in their sandbox.")
        for token in re.findall(r"<\|\w+\|>", self.template) if self.choice in NAMED else ():
            if self.fast.token_to_id(token) not in self.added:
                raise DataError(
                    f"{KEY} = {self.choice} needs the token {token}, which {self.tokenizer.file} does not have; use "
                    "a tokenizer that has it, or another template."
                )
        if "strftime_now" in self.template:
            logger.warning("the chat template writes today's date: a run that resumes tomorrow reads other tokens")
        return Renderer(self.template)

    @cached_property
    def fast(self) -> "FastTokenizer":
        """The tokenizer, which takes text that spells a special token for the token."""
        file, kind = self.tokenizer.file, self.tokenizer.kind
        if kind == "sentencepiece":
            raise DataError(
                f"training.train_on: {file} is a sentencepiece model, whose special tokens no text can spell; set "
                "model.tokenizer_path to a tokenizer.json with those of the chat template."
            )
        content = regular_file(file).read_bytes()
        fast = fast_tokenizer(file, content) if kind == "tokenizers" else of_pieces(*tiktoken_parts(file, content))
        fast.no_truncation()
        fast.no_padding()
        return fast

    @cached_property
    def added(self) -> dict[int, bool]:
        """The ids of added tokens, and whether they are special."""
        return {id: token.special for id, token in self.fast.get_added_tokens_decoder().items()}

    @cached_property
    def special(self) -> NDArray[np.int64]:
        return np.array([id for id, special in self.added.items() if special], np.int64)

    @cached_property
    def spelled(self) -> re.Pattern[str]:
        """Text that spells a special token."""
        names = [self.tokenizer.piece(int(id)) for id in self.special]
        return re.compile("|".join(re.escape(name) for name in names if name) or r"(?!)")

    @cached_property
    def variables(self) -> dict[str, str]:
        """Special tokens by their names in the files beside the tokenizer, such as eos_token."""
        beside = {**json_beside(self.tokenizer.file, SPECIAL_TOKENS), **json_beside(self.tokenizer.file, CONFIG)}
        contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in beside.items()}
        return {key: value for key, value in contents.items() if key.endswith("_token") and isinstance(value, str)}

    def tokens(self, record: Mapping[str, Any], column: str) -> Tokens:
        """The tokens of a record whose `column` holds the conversation, or the prompt, int32. Raises a ValueError with
        the reason if it is unusable."""
        value, completion = column_of(record, column), record.get("completion")
        if isinstance(value, str) and isinstance(completion, str):
            tokens = self.of_texts(value, completion)
        elif not isinstance(value, list) or not isinstance(completion, list | None):
            raise ValueError(f"column {column!r} holds neither messages nor, with the completion, a text")
        else:
            messages = [message_of(message) for message in [*value, *(completion or ())]]
            last = [number for number, message in enumerate(messages) if message["role"] in ("user", "system")]
            first = len(value) if completion is not None else last[-1] + 1 if last else 0
            tools = record.get("tools")
            tools = parsed_line(tools) if isinstance(tools, str) and tools else tools
            tokens = self.of_messages(messages, first if self.train_on == "completion" else 0, tools or None)
        if self.train_on != "all" and (tokens >= UNCOUNTED).all():
            raise ValueError("no token in it counts, because the assistant says nothing")
        return self.fitted(tokens)

    def of_texts(self, prompt: str, completion: str) -> Tokens:
        """A prompt and its completion, encoded each by itself, as generation encodes the prompt."""
        LONGEST.check(len(prompt) + len(completion), "a prompt with its completion")
        given = tokens_of(Document(prompt, "", ends=False), self.tokenizer)
        rest = tokens_of(Document(completion, "", starts=not prompt), self.tokenizer)
        return np.concatenate([given + (0 if self.train_on == "all" else UNCOUNTED), rest]).astype(np.int32)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids that the assistant's answer follows."""
        answer = self.renderer.ask(
            messages=messages, first=len(messages), tools=None, variables=self.variables, prompt=True
        )
        ids: list[int] = self.fast.encode(answer["text"], add_special_tokens=False).ids
        return ids

    @cached_property
    def ends(self) -> frozenset[int]:
        """Special tokens that end a turn of the assistant."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            tokens = self.of_messages(turns * 2, 0, None)
        except ValueError:  # it refuses these
            return frozenset()
        counted = np.append(tokens < UNCOUNTED, False)
        last = tokens[counted[:-1] & ~counted[1:]].tolist()
        return frozenset({*last} & {*self.special.tolist(), self.tokenizer.eos_id})

    def of_messages(self, messages: Sequence[Mapping[str, Any]], first: int, tools: Any) -> Tokens:
        try:
            written = json.dumps([messages, tools], ensure_ascii=False, default=str)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        LONGEST.check(len(written), "a conversation")  # the Hub's come without another bound
        written.encode()  # raises a ValueError for half of a surrogate pair
        if found := self.spelled.search(written):
            raise ValueError(f"it spells the special token {found[0]}, which only the template may write")
        given = {"tools": tools, "tool_calls": any(message.get("tool_calls") for message in messages)}
        if unknown := next((key for key, there in given.items() if there and key not in self.template), ""):
            raise ValueError(f"it has {unknown}, which the chat template does not write")
        answer = self.renderer.ask(messages=messages, first=first, tools=tools, variables=self.variables)
        text = answer["text"]
        encoding = attempt(self.tokenizer.file, "a tokenizer", lambda: self.fast.encode(text, add_special_tokens=False))
        ids, (starts, ends) = np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        special = np.flatnonzero(np.isin(ids, self.special))
        counted = np.full(len(ids), self.train_on == "all")
        for start, end in answer["turns"] if self.train_on != "all" else ():
            following = special[ends[special] > end][:1]  # what ends the turn
            if not self.renderer.marks:
                end = int(ends[following].max(initial=end))
            elif not (ends[special] == end).any() and len(following) and not text[end : starts[following[0]]].strip():
                self.warn_of_end(self.tokenizer.piece(int(ids[following[0]])))
            counted |= (ends > start) & (starts < end)
        if self.tokenizer.add_eos and text[ends[special].max(initial=0) :].strip():  # nothing ends the last turn
            ids, counted = np.append(ids, self.tokenizer.eos_id), np.append(counted, counted[-1:])
        return np.where(counted, ids, ids + UNCOUNTED).astype(np.int32)

    @functools.lru_cache(1)  # noqa: B019 (there are few)
    def warn_of_end(self, token: str) -> None:
        logger.warning(
            f"the chat template marks what the assistant says without {token}, which ends its turn, so the model is "
            "not taught to stop; move {% endgeneration %} after it"
        )

    def fitted(self, tokens: Tokens) -> Tokens:
        """As training.long_conversations says. Raises a DataError if that is to refuse longer ones."""
        if self.window is None or len(tokens) <= self.window:
            return tokens
        if self.long == "refuse":
            raise DataError(
                f"training.long_conversations = refuse: a conversation has {len(tokens):,} tokens, more than "
                f"training.seq_len and one to predict, {self.window:,}; raise that, or truncate or skip them."
            )
        LONG.add(len(tokens), self.window, "it is truncated" if self.long == "truncate" else "it is left out")
        return tokens[: self.window if self.long == "truncate" else 0]


@functools.lru_cache(8)
def chat_of(tokenizer: Tokenizer, train_on: str, choice: str | None, long: str, window: int | None) -> Chat:
    """A `Chat`, one for all sources of a process."""
    return Chat(tokenizer, train_on, choice, long, window)


def chat_for(tokenizer: Tokenizer, training: Training) -> Chat:
    """As the keys of a run say, whose training.train_on is set."""
    assert training.train_on is not None
    choice, long = training.chat_template, training.long_conversations
    return chat_of(tokenizer, training.train_on, choice, long, training.seq_len + 1)


def message_of(message: object) -> dict[str, Any]:
    """A message as templates get it from transformers: without empty fields, and with the thoughts under each of the
    names that templates know. Raises a ValueError if it is none."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("a message is not an object with a role")
    if not isinstance(message.get("content", ""), str | list | None):
        raise ValueError("the content of a message is neither text nor a list")
    message = {key: value for key, value in message.items() if value is not None}
    if thoughts := [message[key] for key in ("reasoning_content", "thinking", "reasoning") if key in message]:
        message = {"thinking": thoughts[0], **message, "reasoning_content": thoughts[0]}
    return message
