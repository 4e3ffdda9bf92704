"""scripts/check_vllm.py, with `transformers` behind a server of the same form in place of vLLM."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import CHATML, chat_folder
from runs import python

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers with noise, until it happens to end its turn."""
    from transformers import LlamaConfig, LlamaForCausalLM

    place = chat_folder(tmp_path_factory.mktemp("model"), CHATML)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=320, initializer_range=0.5, **sizes))
    model.generation_config.update(bos_token_id=5, eos_token_id=[4, 3])
    model.save_pretrained(place)
    return place


@pytest.fixture
def server(folder: Path) -> Iterator[HTTPServer]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    library: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    stops = model.generation_config.eos_token_id

    class Handler(BaseHTTPRequestHandler):
        harm = staticmethod(lambda answer: None)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions" and asked["temperature"] == 0 and asked["return_token_ids"]
            messages = asked["messages"]
            ids = library.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
            made = model.generate(ids, do_sample=False, max_new_tokens=asked["max_tokens"])[0, ids.shape[1] :].tolist()
            ended = "stop" if made[-1] in stops else "length"
            text = library.decode([id for id in made if id not in stops])
            choice = {"token_ids": made, "message": {"content": text}, "finish_reason": ended}
            answer = {"prompt_token_ids": ids[0].tolist(), "choices": [choice]}
            type(self).harm(answer)
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def check(folder: Path, server: HTTPServer) -> tuple[int, str]:
    done = python("scripts/check_vllm.py", folder, f"http://127.0.0.1:{server.server_port}")
    return done.returncode, done.stdout + done.stderr


def test_the_same_answers_are_equal(folder: Path, server: HTTPServer) -> None:
    status, output = check(folder, server)
    assert status == 0 and output.count(", equal\n") == 6 and "DIFFERENT" not in output, output


HARMS = {
    "prompt": lambda answer: answer["prompt_token_ids"].insert(0, 5),  # a second BOS, say
    "answer": lambda answer: answer["choices"][0]["token_ids"].append(4),
    "text": lambda answer: answer["choices"][0]["message"].update(content="no"),
    "finish_reason": lambda answer: answer["choices"][0].update(finish_reason="abort"),
}


@pytest.mark.parametrize("key", HARMS)
def test_what_differs_is_named(key: str, folder: Path, server: HTTPServer) -> None:
    server.RequestHandlerClass.harm = staticmethod(HARMS[key])  # type: ignore[attr-defined]
    status, output = check(folder, server)
    assert status == 1 and output.count(", DIFFERENT\n") == 6, output
    assert output.count(f"\n  {key}: ") == 6 == output.count(" in vLLM\n"), output


def test_no_server_is_said_in_a_sentence(folder: Path) -> None:
    done = python("scripts/check_vllm.py", folder, "http://127.0.0.1:9")
    assert done.returncode == 2 and "no vLLM server answers at http://127.0.0.1:9" in done.stderr
