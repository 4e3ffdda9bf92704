"""Conversations in a terminal: `python -m torchtitan.tools.generate --chat`."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from torchtitan.data.conversations import Chat
from torchtitan.data.tokenizer import require_characters
from torchtitan.device import find_device
from torchtitan.errors import CheckpointError, ConfigError, DataError
from torchtitan.tools.generation.command import TextStream, sampling_of, warn_of_length
from torchtitan.tools.generation.open import choose_dtype, open_model
from torchtitan.tools.generation.sample import generate


def chat(arguments: argparse.Namespace) -> None:
    """Answers turn by turn, each as it is generated. Raises a UserError if the template refuses the conversation."""
    sampling = sampling_of(arguments)
    if arguments.out or arguments.prompts_file or sampling.num_samples > 1:
        raise ConfigError("--chat holds one conversation; leave out --out, --prompts-file and --num-samples.")
    device = find_device(0).torch_device
    dtype = choose_dtype(arguments.dtype, device)
    opened = open_model(arguments.checkpoint, device, dtype, arguments.tokenizer_path, arguments.ema)
    tokenizer = opened.tokenizer
    chat = Chat(tokenizer, "assistant", arguments.chat_template, "truncate", None)
    stop_ids = tokenizer.stop_ids | chat.ends
    messages: list[dict[str, Any]] = [{"role": "system", "content": arguments.system}] if arguments.system else []
    for question in _questions(arguments.prompt):
        require_characters(question, "--prompt")
        messages.append({"role": "user", "content": question})
        try:
            ids = chat.prompt(messages)
        except ValueError as error:
            raise DataError(f"--chat: {error}.") from None
        warn_of_length(len(ids), 1, opened.seq_len)
        stream = TextStream(tokenizer.decode, "", sys.stdout)
        [answer] = generate(
            opened.model,
            [ids],
            sampling,
            stop_ids,
            use_cache=not arguments.no_cache,
            emit=lambda _, token, stream=stream: stream.add(None if token in stop_ids else token),  # type: ignore[misc]
        )
        stream.end()
        if answer is None:
            raise CheckpointError(f"{arguments.checkpoint}: the model's outputs are not finite, so it cannot answer.")
        said = tokenizer.decode([id for id in answer if id not in stop_ids])
        messages.append({"role": "assistant", "content": said})


def _questions(prompts: list[str]) -> Iterator[str]:
    """The prompts, or else lines that are typed, until the input ends."""
    if prompts:
        yield from prompts
        return
    while True:
        print("> ", end="", flush=True) if sys.stdin.isatty() else None
        if not (line := sys.stdin.readline()):
            return
        if line.strip():
            yield line.rstrip("\n")
