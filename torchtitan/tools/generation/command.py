"""What `python -m torchtitan.tools.generate` does with its flags."""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from torchtitan.data.tokenizer import require_characters
from torchtitan.device import find_device
from torchtitan.errors import CheckpointError, ConfigError
from torchtitan.files import text_of
from torchtitan.tools.generation.open import choose_dtype, open_model
from torchtitan.tools.generation.sample import Sampling, generate

INCOMPLETE = "\ufffd"  # a decoder's output for an incomplete character


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    try:
        return Sampling(
            arguments.max_new_tokens,
            arguments.temperature,
            arguments.top_k,
            arguments.top_p,
            arguments.seed,
            arguments.num_samples,
        )
    except ValueError as error:
        raise ConfigError(f"{error}.") from None


def continue_prompts(arguments: argparse.Namespace) -> None:
    sampling = sampling_of(arguments)
    if arguments.chat_template or arguments.system:
        raise ConfigError("--chat-template and --system belong to --chat; set that.")
    prompts = [*arguments.prompt, *(_read_prompts(arguments.prompts_file) if arguments.prompts_file else [])]
    if not prompts:
        raise ConfigError("there is no prompt; set --prompt or --prompts-file (an empty prompt starts a new document).")
    for prompt in prompts:
        require_characters(prompt, "--prompt or --prompts-file")
    device = find_device(0).torch_device
    dtype = choose_dtype(arguments.dtype, device)
    opened = open_model(arguments.checkpoint, device, dtype, arguments.tokenizer_path, arguments.ema)
    model, tokenizer = opened.model, opened.tokenizer
    begin = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    warn_of_length(1 + max(map(len, ids)), sampling.max_new_tokens, opened.seq_len)
    samples = sampling.num_samples
    rows = [(prompt, row, sample + 1) for prompt, row in zip(prompts, ids, strict=True) for sample in range(samples)]
    started = time.perf_counter()
    decode = functools.partial(tokenizer.decode_after, ids[0])
    stream = TextStream(decode, prompts[0], sys.stdout) if len(rows) == 1 else None
    new = generate(
        model,
        [[begin, *row] for row in ids],
        sampling,
        tokenizer.stop_ids,
        use_cache=not arguments.no_cache,
        emit=None if stream is None else lambda _, token: stream.add(None if token in tokenizer.stop_ids else token),
    )
    seconds = time.perf_counter() - started
    texts = [
        None if row is None else tokenizer.decode_after(prompt, [id for id in row if id not in tokenizer.stop_ids])
        for (_, prompt, _), row in zip(rows, new, strict=True)
    ]
    if stream is not None:
        stream.end()
    else:
        for (prompt, _, sample), text in zip(rows, texts, strict=True):
            if samples > 1:
                print(f"[sample {sample} of {samples}]")
            print(f"{prompt}{text or ''}\n{'-' * 40}")
    count = sum(len(row) for row in new if row is not None)
    speed = f"{count} tokens in {seconds:.1f} s, {count / seconds:,.0f} tokens/s"
    print(f"[{speed}, {opened.weights}, {str(dtype)[6:]}]", file=sys.stderr)
    if arguments.out:
        lines = [
            json.dumps({"prompt": prompt, "sample": sample, "text": text, "tokens": tokens}) + "\n"
            for (prompt, _, sample), text, tokens in zip(rows, texts, new, strict=True)
        ]
        arguments.out.write_text("".join(lines), encoding="utf-8")
    if None in new:
        raise CheckpointError(
            f"{arguments.checkpoint}: the model's outputs are not finite for {new.count(None)} of {len(new)} texts, "
            "so no text follows (null in --out); its weights may be NaN, or too large for --dtype."
        )


def warn_of_length(prompt: int, new: int, trained: int | None) -> None:
    """Says that the longest prompt, of so many tokens, or what follows it, exceeds the length of training."""
    if trained is None or prompt + new <= trained:
        return
    if prompt > trained:
        what = f"the longest prompt has {prompt:,} tokens"
    else:
        what = f"the longest prompt ({prompt:,} tokens) and --max-new-tokens {new:,} make {prompt + new:,} tokens"
    print(f"{what}, more than the {trained:,} that the model was trained on; the text may be poor.", file=sys.stderr)


class TextStream:
    """Prints a prompt and, token by token, its continuation. `decode`: token ids to text."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: str, out: TextIO) -> None:
        self._decode = decode
        self._out = out
        self._ids: list[int] = []
        self._shown = 0
        self._write(prompt)

    def add(self, token: int | None) -> None:
        """Prints all text that can no longer change. None: the row has ended."""
        if token is None:
            return
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.endswith(INCOMPLETE):
            self._write(text[self._shown :])
            self._shown = len(text)

    def end(self) -> None:
        self._write(self._decode(self._ids)[self._shown :] + "\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _read_prompts(path: Path) -> list[str]:
    r"""Reads one prompt per line; a line that is a JSON string (`"a\nb"`) is decoded."""

    def read(line: str) -> str:
        try:
            value: Any = json.loads(line)
        except (ValueError, RecursionError):
            return line
        return value if isinstance(value, str) else line

    return [read(line) for line in text_of(path, "--prompts-file").split("\n") if line.strip()]
