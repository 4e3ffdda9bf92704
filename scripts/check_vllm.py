"""Compares a vLLM server with this program: the ids of prompts, greedy answers, and what ends them.

vllm serve FOLDER --dtype float32
python scripts/check_vllm.py FOLDER [http://127.0.0.1:8000]

FOLDER is an export of a run on conversations. The status is 1 if anything differs.
"""

import argparse
import itertools
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from torchtitan.data.conversations import Chat
from torchtitan.errors import ConfigError, run_command
from torchtitan.files import local_path
from torchtitan.logging import Waiting
from torchtitan.tools.generation.open import OpenedModel, open_model
from torchtitan.tools.generation.sample import Sampling, generate

Result = dict[str, Any]  # empty if the template refuses the conversation
CONVERSATIONS = [
    ["What is 2 + 2?"],
    ["  Größe? 天気は🌦\ufe0f? e\u0301 שלום \t\n"],
    ["Hi", "Hello, what is it?", "Nothing", "Fine.\n", "👩\u200d👧 \u00a0x"],
]
BEFORE: tuple[list[dict[str, str]], ...] = ([], [{"role": "system", "content": "Be brief."}])
MOST = 30  # new tokens


def here(opened: OpenedModel, chat: Chat, messages: list[dict[str, str]]) -> Result:
    try:
        prompt = chat.prompt(messages)
    except ValueError:
        return {}
    stops = opened.tokenizer.stop_ids | chat.ends
    answer = generate(opened.model, [prompt], Sampling(MOST), stops, emit=lambda *_: None)[0] or []
    said = [id for id in answer if id not in stops]
    ended = "stop" if said != answer else "length"
    return {"prompt": prompt, "answer": answer, "text": opened.tokenizer.decode(said), "finish_reason": ended}


def there(url: str, messages: list[dict[str, str]]) -> Result:
    greedy = {"temperature": 0, "repetition_penalty": 1, "max_tokens": MOST, "return_token_ids": True}
    content, about = json.dumps({"messages": messages, **greedy}).encode(), {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(f"{url}/v1/chat/completions", content, about)
        with Waiting(f"an answer of {url}"):
            told = json.load(urllib.request.urlopen(request, timeout=600))
        choice, prompt = told["choices"][0], told["prompt_token_ids"]
        text, ended = choice["message"]["content"], choice["finish_reason"]
        return {"prompt": prompt, "answer": choice["token_ids"], "text": text, "finish_reason": ended}
    except (OSError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, urllib.error.HTTPError) and error.code == 400:
            return {}
        raise ConfigError(f"no vLLM server answers at {url} ({error}); start it, or give its address.") from None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=local_path, metavar="FOLDER")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL")
    arguments = parser.parse_args(argv)
    opened, status = open_model(arguments.folder, torch.device("cpu"), torch.float32), 0
    chat = Chat(opened.tokenizer, "assistant", None, "truncate", None)
    for first, turns in itertools.product(BEFORE, CONVERSATIONS):
        messages = first + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
        ours, theirs = here(opened, chat, messages), there(arguments.url, messages)
        print(f"{turns[-1]!r}: {ours.get('text', 'refused')!r}, {'equal' if ours == theirs else 'DIFFERENT'}")
        for key in [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]:
            print(f"  {key}: {ours.get(key)!r} here, {theirs.get(key)!r} in vLLM")
            status = 1
    return status


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
