"""scripts/make_conversations.py and the run of docs/answers.md on what it makes."""

import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM
from runs import lines_of, python, reports
from workers import PATIENCE

from torchtitan.data import load_tokenizer
from torchtitan.data.conversations import Chat
from torchtitan.data.sources import UNCOUNTED

ROOT = Path(__file__).parents[2]
SOURCE = '''
LIMIT = 3
class Lost:
    pass
class LostError(Exception):
    """It was there, and is not any more."""
    def again(self, *places, hint=None):
        """Short."""
class _Hidden:
    pass
def find(what, where=None):
    """Find what is lost in a place.

    Not before.
    """
'''


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "make_conversations.py"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    done = python("scripts/make_conversations.py", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_what_is_asked_of_a_module(script: dict[str, Any]) -> None:
    topics = {thing.name: thing.topics for thing in script["things_in"](SOURCE, "m")}
    find, again = "def find(what, where=None)", "def again(self, *places, hint=None)"
    assert topics == {
        "m.LIMIT": {"kind": ("LIMIT", "constant")},
        "m.Lost": {"kind": ("Lost", "class")},
        "m.LostError": {
            "kind": ("LostError", "exception"),
            "purpose": ("m.LostError", "It was there, and is not any more."),
        },
        "m.LostError.again": {"parameters": (again, "three"), "any_number": (again, "yes")},
        "m.find": {
            "kind": ("find", "function"),
            "parameters": (find, "two"),
            "any_number": (find, "no"),
            "purpose": ("m.find", "Find what is lost in a place."),
        },
    }


@pytest.mark.full
def test_records_are_conversations_and_what_is_held_out_is_in_none(made: Path, script: dict[str, Any]) -> None:
    forms = {
        topic: [re.escape(form).replace(r"\{\}", "(.*)") for form in script["FORMS"][topic]]
        for topic in script["FORMS"]
    }
    seen, unseen = lines_of(made / "train.jsonl"), lines_of(made / "held_out.jsonl")
    names: list[set[str]] = [set(), set()]
    for part, records in zip(names, (seen, unseen), strict=True):
        for record in records:
            messages = record["messages"]
            assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
            for question in messages[::2]:
                matches = [re.fullmatch(form, question["content"]) for kinds in forms.values() for form in kinds[:-1]]
                [match] = filter(None, matches)
                subject = match[1].removeprefix("def ").partition("(")[0]
                part.add(subject.rpartition(".")[2])
    assert len(seen) > 5000 and len(unseen) > 1000 and not names[0] & names[1]
    for topic, kinds in forms.items():
        examples = lines_of(made / f"{topic}.jsonl")
        assert len(examples) >= 60
        for example in examples:
            asked = re.fullmatch(kinds[-1], example["question"])
            assert asked and asked[1].removeprefix("def ").partition("(")[0].rpartition(".")[2] in names[1]


@pytest.mark.full
def test_the_same_python_makes_the_same_files(made: Path, script: dict[str, Any], tmp_path: Path) -> None:
    assert script["main"]([str(tmp_path)]) == 0
    files = {path.relative_to(made): path.read_bytes() for path in made.rglob("*") if path.is_file()}
    assert files == {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.full
def test_answers_count_and_questions_are_those_of_the_evaluation(made: Path) -> None:
    tokenizer = load_tokenizer(str(made / "tokenizer"))
    chat = Chat(tokenizer, "assistant", None, "refuse", 512)
    for record in lines_of(made / "train.jsonl")[:50]:
        messages = record["messages"]
        tokens = chat.tokens(record, "messages").tolist()
        said = [id for id in tokens if id < UNCOUNTED]
        assert tokenizer.decode(said) == "".join(f" {message['content']}</s>" for message in messages[1::2])
        asked = f"Question: {messages[0]['content']}\nAnswer:"  # as `torchtitan.tools.evaluation.formats` writes it
        assert chat.prompt(messages[:1]) == [tokenizer.bos_id, *tokenizer.encode(asked)]


@pytest.mark.full
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    flags = (
        "--training.steps=3",
        "--stage.text.until=1",
        "--stage.longer.until=2",
        "--evaluation.limit=2",
        "--metrics.log_freq=1",
    )
    shorter = ("--stage.conversations.evaluation.limit=2", "--stage.conversations.validation.steps=1")
    script = [str(ROOT / "scripts" / "answers.sh"), str(tmp_path), *flags, *shorter]
    done = subprocess.run(script, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "answers"
    assert [line["stage"] for line in reports(run)] == [1, 2, 3]
    lines = lines_of(run / "metrics.jsonl")
    assert {"kind/acc", "purpose/acc", "validation_loss"} <= {key for line in lines for key in line}
    assert (run / "report.html").exists()
    assert "chat_template" in {path.stem for path in (run / "tokenizer_copy").iterdir()}
    assert {"model.safetensors", "chat_template.jinja"} <= {path.name for path in (tmp_path / "answers_hf").iterdir()}
    assert (tmp_path / "answers.png").exists() == (CHROMIUM is not None)
