"""Evaluation of a model in one process: requests, tasks, files, the command, and mistakes."""

import json
import math
import re
import shutil
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import torch
from runs import CHECKPOINTS, TINY, failure, into, lines_of, python, train
from safetensors.torch import load_file, save_file
from task_files import KINDS, write, write_lm_eval
from tiny import CappedArgs

from torchtitan.config.training import Evaluation
from torchtitan.data.tokenizer import load_tokenizer
from torchtitan.errors import DataError, UserError
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.tools.evaluation.embedded import CONTEXT, EMBEDDED, EXAMPLES, _tokens, make
from torchtitan.tools.evaluation.evaluator import Evaluator
from torchtitan.tools.evaluation.find_tasks import find_tasks, short_names
from torchtitan.tools.evaluation.formats import read_examples
from torchtitan.tools.evaluation.requests import Encoder, Request, Score, pack_requests
from torchtitan.tools.evaluation.samples import Sampler
from torchtitan.tools.evaluation.scoring import scorer_of_model
from torchtitan.tools.evaluation.tasks import Choice, LastWord, MultipleChoice, Text
from torchtitan.tools.interchange.convert import one_process
from torchtitan.tools.interchange.sources import SUMS

TOKENIZER = load_tokenizer(None)


def encoder(longest: int = 64) -> Encoder:
    return Encoder(TOKENIZER, longest)


def text_of(request: Request) -> tuple[str, str]:
    """Context and scored part."""
    ids = request.tokens.tolist()
    assert ids[0] == TOKENIZER.bos_id
    cut = len(ids) - request.scored
    return TOKENIZER.decode(ids[1:cut]), TOKENIZER.decode(ids[cut:])


def test_a_blank_before_the_answer_belongs_to_it() -> None:
    for context, answer in (
        ("return self.", "name"),
        ("return", " value"),
        ("return ", "value"),
        ("f(x) =\n    ", "y"),
    ):
        before, scored = text_of(encoder().continuation(context, answer))
        assert before + scored == context + answer
        assert not before[-1].isspace()
    assert text_of(encoder().continuation("", "value")) == ("", "value")


def test_a_long_context_loses_its_beginning() -> None:
    request = encoder(8).continuation("one two three four five six seven eight nine", " ten")
    whole = encoder(1000).continuation("one two three four five six seven eight nine", " ten")
    assert request.tokens == whole.tokens[-9:]
    assert request.scored == whole.scored


def test_an_answer_longer_than_the_window_is_refused() -> None:
    """Only its end would be scored, and `acc_norm` would divide that by the length of the whole answer."""
    tokens = encoder(1000).continuation("a", " b c d e f").scored
    assert encoder(tokens).continuation("a", " b c d e f").scored == tokens
    with pytest.raises(
        DataError, match=rf"has {tokens} tokens, but the model sees only {tokens - 1} at once.*--seq-len"
    ):
        encoder(tokens - 1).continuation("a", " b c d e f")


def test_form_feeds_do_not_shift_the_lines_of_a_source_file() -> None:
    """str.splitlines splits there, and Python's tokenizer does not."""
    text = "a = 1\n\x0c\ndef name(argument):\n    return argument\n"
    tokens, starts = _tokens(text)
    token = next(token for token in tokens if token.string == "argument")
    assert text[starts[token.start[0]] + token.start[1] :].startswith("argument):")


def blank_tokenizer(folder: Path) -> str:
    """A sentencepiece model with the trainer's defaults, which drop blanks."""
    file = folder / "blank.model"
    with file.open("wb") as writer:
        texts = iter(["import os and sys"] * 9)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=texts, model_writer=writer, model_type="bpe", vocab_size=24, minloglevel=2
        )
    return str(file)


def test_a_text_is_named_after_its_file_or_folder(tmp_path: Path, group: None) -> None:
    (tmp_path / "stories").mkdir()
    (tmp_path / "stories" / "one.txt").write_text("Once upon a time.")
    tasks = find_tasks(Evaluation(tasks=[f"text:{tmp_path}/stories/{name}" for name in ("one.txt", "*.txt")]))
    assert [task.name for task in tasks] == ["one", "stories"]


def test_text_without_tokens_is_left_out(tmp_path: Path, group: None) -> None:
    tokenizer = load_tokenizer(blank_tokenizer(tmp_path))
    sizes: dict[str, Any] = {"dim": 64, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96}
    scorer = scorer_of_model(Llama(LlamaArgs(**sizes, vocab_size=tokenizer.vocab_size)), 64, 512, "Llama")
    results = []
    for documents in ([("1", "import os")], [("1", "import os"), ("2", "\n\n")]):
        evaluator = Evaluator([Text("text", documents)], tokenizer, scorer)
        scores = evaluator.scores()
        assert scores is not None and len(evaluator.details(scores)) == 1
        results.append(evaluator.metrics(scores)["text"])
    assert results[0] == results[1]
    with pytest.raises(DataError, match="text: no document has any tokens"):
        Evaluator([Text("text", [("2", "\n\n")])], tokenizer, scorer)
    with pytest.raises(DataError, match="the answer '  ' has no tokens"):
        Encoder(tokenizer, 64).continuation("import", "  ")


def test_metrics_are_by_bytes_and_by_characters() -> None:
    """Of answers whose order depends on the length that divides their likelihood."""
    choice = MultipleChoice("choice", [Choice("A", ("b", "cdef"), 1), Choice("A", ("b", "öäüß"), 1)])
    scores = [[Score(-1.0, False, 1), Score(-3.9, False, 2)], [Score(-1.0, False, 1), Score(-4.1, False, 2)]]
    assert choice.metrics(scores) == {"choice": {"acc": 0.0, "acc_norm": 0.5, "chance": 0.5}}
    text = Text("text", [("first", "Grüße"), ("second", "日本")])  # of 7 and 6 bytes in UTF-8
    metrics = text.metrics([[Score(-10.0, False, 3), Score(-2.0, False, 1)], [Score(-8.0, False, 2)]])["text"]
    assert metrics["bits_per_byte"] == pytest.approx(20 / math.log(2) / 13)
    assert metrics["perplexity"] == pytest.approx(math.exp(20 / 6))
    assert metrics["document_perplexity"] == pytest.approx((math.exp(12 / 4) + math.exp(8 / 2)) / 2)


@pytest.mark.parametrize("length", [1, 9, 10, 11, 19, 20, 21, 35])
def test_each_token_of_a_text_is_scored_once(length: int) -> None:
    text = " ".join(["value"] * length)
    tokens = TOKENIZER.encode(text)
    requests = encoder(10).text(text)
    assert [id for request in requests for id in request.tokens[-request.scored :]] == tokens
    assert all(len(request.tokens) == 11 for request in requests) or len(tokens) < 10


def test_packed_rows_hold_each_request_once() -> None:
    requests = [encoder(200).text("x " * (number * 37 % 90 + 1))[0] for number in range(200)]
    rows = pack_requests(requests, 128)
    assert sorted(number for row in rows for number in row) == list(range(200))
    used = [sum(len(requests[number].tokens) - 1 for number in row) for row in rows]
    assert max(used) <= 128
    assert sum(used) > 0.85 * 128 * len(rows)


@pytest.fixture
def group() -> Iterator[None]:
    with one_process(None):
        yield


@pytest.mark.parametrize("args", [LlamaArgs, CappedArgs])
def test_scores_equal_each_request_alone(args: type[LlamaArgs], group: None) -> None:
    torch.manual_seed(0)
    model = Llama(args(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=TOKENIZER.vocab_size))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    texts = [f"{'import os ' * number}def f({number})" for number in range(1, 30)]
    requests = [encoder().continuation(text, f":\n    return {len(text)}") for text in texts]
    ids = requests[3].tokens
    with torch.no_grad():  # a request whose answer is the likeliest one
        best = model(torch.tensor([ids[:-1].tolist()]))[0, -1].argmax()
    requests.append(Request(ids[:-1] + type(ids)("i", [int(best)]), 1))
    scores = scorer_of_model(model, 64, 3 * 64, "Llama").score(requests)
    assert scores is not None
    for request, score in zip(requests, scores, strict=True):
        tokens = torch.tensor([request.tokens.tolist()])
        with torch.no_grad():
            logits = model(tokens[:, :-1])[0, -request.scored :]
        labels = tokens[0, -request.scored :]
        expected = logits.log_softmax(-1).gather(-1, labels[:, None]).sum()
        assert score.log_likelihood == pytest.approx(float(expected), abs=1e-4)
        assert score.greedy == bool((logits.argmax(-1) == labels).all())
        assert score.tokens == request.scored
    assert scores[-1].greedy
    assert math.isfinite(model(tokens[:, :-1], tokens[:, 1:]))  # its own loss is back


@pytest.mark.parametrize(("words", "shape"), [(128, (4, 128)), (320, (1, 320)), (900, (1, 900))])
def test_the_longer_the_rows_the_fewer_at_once(words: int, shape: tuple[int, int], group: None) -> None:
    model = Llama(LlamaArgs(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=TOKENIZER.vocab_size))
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    requests = [Request(array("i", [1] * (words + 1)), 1)] * 8
    scorer_of_model(model, words, 512, "Llama").score(requests)
    assert set(shapes) == {shape}


def test_rows_can_be_divided_among_tensor_parallel_ranks(group: None) -> None:
    scorer = scorer_of_model(torch.nn.Linear(1, 1), 192, 512, "Llama")  # type: ignore[arg-type]
    for ranks in (1, 3, 96):
        mesh: Any = SimpleNamespace(size=lambda ranks=ranks: ranks)
        lengths = [replace(scorer, tensor_mesh=mesh)._row_length(longest, 100) for longest in (1, 64, 65, 130, 192)]
        assert not any(length % ranks for length in lengths) and max(lengths) == 192


@pytest.mark.parametrize("task", EMBEDDED)
def test_embedded_tasks_are_the_same_each_time_and_cannot_be_guessed(task: str) -> None:
    examples = make(task)
    assert examples == make(task)
    assert len(examples) == EXAMPLES
    assert len({(example.context, example.gold) for example in examples}) > 0.9 * EXAMPLES
    assert all(len(set(example.choices)) == len(example.choices) for example in examples)
    if "needle" not in task:
        assert max(map(len, (example.context for example in examples))) <= CONTEXT + 10
    # Neither a place nor, for brackets, an answer is right much more often than others.
    assert max(Counter(example.gold for example in examples).values()) < 1.5 * EXAMPLES / len(examples[0].choices)


@pytest.mark.parametrize(("task", "least", "most"), [("stdlib_needle_short", 0, 128), ("stdlib_needle_long", 128, 512)])
def test_needles_are_as_far_away_as_they_are_said_to_be(task: str, least: int, most: int) -> None:
    for example in make(task):
        question = example.context.rsplit("\n", 1)[1]
        before, after = example.context.split(f"{question} {example.choices[example.gold]}\n")
        code = before + after.removesuffix(question)
        assert not any(word in code for word in (question.removeprefix("# "), *example.choices))
        assert len(TOKENIZER.encode(after)) > least and len(TOKENIZER.encode(example.solved)) <= most


def test_formats(tmp_path: Path) -> None:
    examples = {task: read_examples(write(tmp_path, task, 4), "tasks") for task in KINDS}
    first = examples["hellaswag"][0]
    assert isinstance(first, Choice)
    assert first.context.startswith("Writing the: A person opens the ")
    assert ".  then. The self" not in first.context and ". then. The import" not in first.context
    assert first.choices[0].endswith("é.") and "[" not in "".join(first.choices)
    hub, original = examples["arc"][:2]
    assert isinstance(hub, Choice) and isinstance(original, Choice)
    assert hub.context.startswith("Question: What is") and hub.context.endswith("?\nAnswer:")
    assert (len(hub.choices), hub.gold, len(original.choices), original.gold) == (3, 0, 4, 1)
    assert [example.gold for example in examples["piqa"] if isinstance(example, Choice)] == [0, 1, 0, 1]
    last = examples["lambada"][0]
    assert isinstance(last, LastWord)
    assert f"{last.context} {last.word}" == KINDS["lambada"](0)["text"]


def test_a_byte_order_mark_and_many_brackets_in_a_task_file(tmp_path: Path) -> None:
    text = "a [step]\n[" + "[" * 200_000
    line = {"activity_label": "A", "ctx_a": text, "ctx_b": "b", "endings": ["[x] y", "z"], "label": 0}
    (tmp_path / "a.jsonl").write_text("\ufeff" + json.dumps(line), encoding="utf-8")
    [example] = read_examples(tmp_path / "a.jsonl", "")  # at once: from each bracket to the end it would take minutes
    assert isinstance(example, Choice)
    assert example.context == "A: a \n[" + "[" * 200_000 + " B" and example.choices == (" y", "z")


def test_solved_examples_are_the_first_others(tmp_path: Path) -> None:
    path = write(tmp_path, "piqa", 5)
    (task,) = find_tasks(Evaluation(tasks=[str(path)], num_fewshot=2, limit=2))
    examples = read_examples(path, "")
    asked: Any = task.requests(encoder(1000))
    contexts = [text_of(example[0])[0] for example in asked]
    assert contexts == [
        f"{examples[first].solved}\n\n{examples[second].solved}\n\n{examples[number].context}"
        for number, first, second in ((0, 1, 2), (1, 0, 2))
    ]


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        ('{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n{"goal": ', (), "line 2: not JSON"),
        ('{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n\n[1]', (), "line 3: not a JSON object"),
        ('{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n{"goal": "a"}', (), "line 2: sol1, sol2, label miss"),
        ('{"goal": "a", "sol1": "b", "sol2": "c", "label": 2}', (), "line 1: the right choice is number 2"),
        (
            '{"question": "a", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "C"}',
            (),
            "line 1: ans",
        ),
        ('{"text": "one"}', (), "line 1: text must have at least two words"),
        ('{"text": "one \\ud800two"}', (), "holds half of a surrogate pair"),
        ('{"prompt": "one"}', (), "line 1: its fields (prompt) match no known format"),
        ("", (), "is empty"),
        ('{"text": "a b"}', {"num_fewshot": 1}, "evaluation.num_fewshot = 1 needs 2 examples"),
    ],
)
def test_files_that_cannot_be_used(content: str, flags: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        find_tasks(Evaluation(tasks=[str(path)], **dict(flags)))
    (line,) = str(caught.value).splitlines()
    assert words in line and "evaluation." in line
    assert str(path) in line


def test_tasks_that_are_not_there() -> None:
    for name, words in (
        ("stdlib_bracket", "did you mean stdlib_brackets"),
        ("/nowhere.jsonl", "'/nowhere.jsonl' is neither a task nor a file"),
        ("text:/nowhere.txt", "evaluation.tasks: there is no file or folder /nowhere.txt"),
        ("held_out", "only available in a training run"),
        ("s3://bucket/a.jsonl", "'s3://bucket/a.jsonl' is no path on this machine"),
        ("text:nowhere://bucket/a.txt", "'nowhere://bucket/a.txt' cannot be read"),
        ("/dev/zero", "/dev/zero cannot be read (it is a device, not a file)"),
    ):
        with pytest.raises(UserError, match=r"evaluation\.tasks") as caught:
            list(find_tasks(Evaluation(tasks=[name])))
        assert words in str(caught.value)
    with pytest.raises(UserError, match="two tasks are named stdlib_brackets"):
        find_tasks(Evaluation(tasks=["stdlib_brackets", "stdlib_brackets"]))


def test_mistakes_end_a_run_before_it_trains(tmp_path: Path) -> None:
    status, output = failure(*TINY, into(tmp_path), "--evaluation.tasks=stdlib_bracket")
    assert status == 2
    (line,) = [line for line in output.splitlines() if line.startswith("Error")]
    assert "evaluation.tasks" in line and "stdlib_brackets" in line
    status, output = failure(*TINY, into(tmp_path), "--evaluation.tasks=held_out")
    assert status == 2 and "held_out needs text that is not trained on: set validation.enabled = true" in output


def test_lm_eval_that_is_not_installed(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(
        UserError, match=r"evaluation\.tasks: lm_eval:piqa needs lm_eval, .* 'torchtitan-toml\[lm_eval\]'"
    ):
        find_tasks(Evaluation(tasks=["lm_eval:piqa"]))


def test_tasks_of_lm_eval_that_cannot_be_asked(group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    pytest.importorskip("lm_eval")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_lm_eval(tmp_path, 3)
    kept = f"dataset_kwargs: {{data_files: {{validation: {tmp_path}/data.jsonl}}}}"
    for of, name, old, new in (
        ("whole_text", "on_the_hub", f"json\n{kept}", "nobody/nothing"),
        ("whole_text", "on_disk", "data.jsonl", "nowhere.jsonl"),
        ("continue", "sampled", "max_gen_toks", "do_sample: true, temperature: 0.7, max_gen_toks"),
    ):
        text = (tmp_path / f"{of}.yaml").read_text()
        assert old in text
        (tmp_path / f"{name}.yaml").write_text(text.replace(old, new).replace(f"task: {of}", f"task: {name}"))
    for name, words in (
        (
            "whole_txt",
            f"the folder {tmp_path} has no task 'whole_txt' (did you mean whole_text?); `lm_eval ls",
        ),
        ("on_the_hub", f"'nobody/nothing'.*: run `lm_eval .*--include_path {tmp_path} --tasks on_the_hub`"),
        ("on_disk", "lm_eval cannot load"),
        ("sampled", "sampled generates 12 tokens with .*'temperature': 0.7.* writes only the most likely tokens"),
        ("continue", "continue generates 12 tokens with .* fewer than the 8 that it sees at once"),
    ):
        with pytest.raises(UserError, match=r"evaluation\.tasks") as caught:
            (task,) = find_tasks(Evaluation(tasks=[f"lm_eval:{tmp_path}/{name}"]))
            task.requests(encoder(8))
        assert re.search(words if ".*" in words else re.escape(words), str(caught.value)), caught.value
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="an entry before it both ask choose"):
        find_tasks(Evaluation(tasks=[f"lm_eval:{tmp_path}/{name}" for name in ("both", "choose")]))


def test_a_frequency_without_tasks_is_told(tmp_path: Path) -> None:
    output = train(*TINY, into(tmp_path), "--evaluation.freq=5", "--training.steps=1")
    assert "evaluation.freq: no effect in this run without evaluation.tasks" in output


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a held-out mixture, evaluated as it goes, and exported."""
    folder = tmp_path_factory.mktemp("run")
    for name in ("one", "two"):
        lines = [json.dumps({"text": f"{name} {number} " * 30}) for number in range(300)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    files = ",".join(str(write(folder, task, 6)) for task in KINDS)
    mixture = f"{folder / 'one.jsonl'}:0.7,{folder / 'two.jsonl'}:0.3"
    train(*TINY, *CHECKPOINTS, into(folder / "run"), "--training.steps=4", "--checkpoint.last_save_in_hf",
          f"--training.dataset_mixture={mixture}", "--validation.enabled", "--validation.local_batch_size=2",
          "--metrics.enable_tensorboard",
          f"--evaluation.tasks={files},held_out,text:{folder / 'one.jsonl'}", "--evaluation.freq=2",
          "--evaluation.limit=5")  # fmt: skip
    return folder


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return python("-m", "torchtitan.tools.evaluate", *arguments, "--custom-import", "tiny")


def test_sources_have_names_in_metrics_and_no_paths(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "x.jsonl", tmp_path / "b" / "x.jsonl", tmp_path / "b" / "y.jsonl"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert short_names([*map(str, paths), "web", "allenai/c4/en"]) == [
        "a/x.jsonl",
        "b/x.jsonl",
        "y.jsonl",
        "web",
        "allenai/c4/en",
    ]


def test_results_in_the_loop(trained: Path) -> None:
    lines = [line for line in lines_of(trained / "run" / "metrics.jsonl") if "evaluation_seconds" in line]
    assert [line["step"] for line in lines] == [2, 4]
    for source in ("one", "two"):
        key = f"held_out/{source}.jsonl/bits_per_byte"
        assert lines[1][key] < lines[0][key]
    assert 0 < lines[1]["evaluation_share"] < 1
    assert lines[0]["arc/chance"] == pytest.approx((1 / 3 + 1 / 4 + 1 / 5 + 1 / 3 + 1 / 4) / 5)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(trained / "run" / "tb")).Reload()
    assert [event.step for event in board.Scalars("hellaswag/acc_norm")] == [2, 4]


@pytest.mark.full
def test_the_command_agrees_with_the_loop_and_with_transformers(trained: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    line = lines_of(trained / "run" / "metrics.jsonl")[-1]
    tasks = [*(trained / f"{task}.jsonl" for task in KINDS), f"text:{trained / 'one.jsonl'}"]
    details = {}
    for place in ("run", "run/checkpoint/step-4-hf"):
        out = tmp_path / "out.jsonl"
        result = command(trained / place, "--tasks", *tasks, "--limit", 5, "--dtype", "float32", "--out", out,
                         "--dump-folder", tmp_path)  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert "hellaswag" in result.stdout and "chance" in result.stdout
        details[place] = lines_of(out)
    # The second evaluation adds to the first.
    lines, files = lines_of(tmp_path / "metrics.jsonl"), [*(tmp_path / "tb").iterdir()]
    assert [entry["step"] for entry in lines] == [4, 0] and len(files) == 2
    for entry in lines:
        for key in entry.keys() - {"step"}:
            assert entry[key] == pytest.approx(line[key], rel=1e-4), key
        assert len(entry) > 12
    for ours, exported in zip(details["run"], details["run/checkpoint/step-4-hf"], strict=True):
        assert ours.get("answer") == exported.get("answer")
    folder = trained / "run" / "checkpoint" / "step-4-hf"
    judge = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for detail in [detail for detail in details["run"] if detail["task"] == "piqa"]:
        for choice, log_likelihood in zip(detail["choices"], detail["log_likelihoods"], strict=True):
            before = tokenizer(detail["context"])["input_ids"]
            ids = torch.tensor([tokenizer(f"{detail['context']} {choice}")["input_ids"]])[:, -65:]
            scored = ids.shape[1] - len(before)
            logits = judge(ids[:, :-1]).logits[0, -scored:].log_softmax(-1)
            expected = float(logits.gather(-1, ids[0, -scored:, None]).sum())
            assert log_likelihood == pytest.approx(expected, abs=1e-4)


def test_a_model_without_finite_numbers_is_null(trained: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(trained / "run" / "checkpoint" / "step-4-hf", broken)
    (broken / SUMS).unlink()
    (weights,) = broken.glob("*.safetensors")
    # NaN would be refused; these numbers are finite, but the logits are not.
    large = ("model.norm.weight", "lm_head.weight")
    save_file(
        {name: tensor * 1e30 if name in large else tensor for name, tensor in load_file(weights).items()}, weights
    )
    tasks = [*(trained / f"{task}.jsonl" for task in KINDS), f"text:{trained / 'one.jsonl'}", "stdlib_brackets"]
    result = command(broken, "--tasks", *tasks, "--limit", 2, "--seq-len", 32,
                     "--out", tmp_path / "out.jsonl", "--dump-folder", tmp_path)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "stdlib_brackets: 6 of 6 likelihoods are not finite" in result.stderr
    for file, kept in (("out.jsonl", ("answer", "greedy")), ("metrics.jsonl", ())):
        for line in (tmp_path / file).read_text().splitlines():
            values = json.loads(line, parse_constant=pytest.fail)
            assert None in values.values()
            assert all(values.get(key) is None for key in kept)
    metrics = lines_of(tmp_path / "metrics.jsonl")[-1]
    assert {key for key, value in metrics.items() if value is not None} == {
        "step", *(f"{task}/chance" for task in ("hellaswag", "arc", "piqa", "stdlib_brackets"))
    }  # fmt: skip


def test_a_model_without_finite_numbers_writes_no_samples(group: None) -> None:
    model = Llama(LlamaArgs(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=TOKENIZER.vocab_size))
    sampler = Sampler(["import", "def f("], TOKENIZER, scorer_of_model(model, 64, 512, "Llama"))
    samples = sampler.samples()
    assert samples is not None and all(text for _, text in samples)
    torch.nn.init.constant_(model.get_parameter("norm.weight"), math.nan)
    assert sampler.samples() == [("import", None), ("def f(", None)]


def test_mistakes_of_the_command() -> None:
    for arguments, words in (
        (("/nowhere", "--tasks", "stdlib_brackets"), "/nowhere does not exist"),
        (("docs", "--tasks", "brackets"), "--tasks: 'brackets' is neither a task"),
        (("docs/tokenizer", "--tasks", "stdlib_brackets"), "docs/tokenizer does not exist."),
        (("docs", "--tasks", "stdlib_brackets", "--num-fewshot", "500"), "--num-fewshot = 500 needs 501 examples"),
        (("docs", "--tasks", "stdlib_brackets", "--limit", "0"), "--limit must be above 0"),
        (("docs", "--tasks", "stdlib_brackets", "--seq-len", "0"), "--seq-len must be above 0"),
    ):
        result = command(*arguments)
        assert result.returncode == 2, result.stderr
        assert words in result.stderr
        assert "Traceback" not in result.stderr
