"""Evaluation in the loop: the same results under every layout, and a training that does not notice it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import ALL_TO_ALL, COMPILE, SCHEDULE, degrees
from runs import CHECKPOINTS, TINY, assert_equal_bit_for_bit, into, lines_of, losses, tensors_of, train
from task_files import write

from torchtitan.tools.generation.open import open_model
from torchtitan.tools.generation.sample import Sampling, generate
from torchtitan.tools.interchange import convert

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "FSDP 2": (2, ()),
    "TP 2": (2, degrees(tp=2)),
    "TP 2, logits gathered": (2, (*degrees(tp=2), "--parallelism.disable_loss_parallel")),
    "PP 2": (2, degrees(pp=2)),
    "PP 2, ZBVZeroBubble": (2, (*degrees(pp=2), f"{SCHEDULE}ZBVZeroBubble")),
    "PP 2, DualPipeV": (2, (*degrees(pp=2), f"{SCHEDULE}DualPipeV")),
    "CP 2": (2, degrees(cp=2)),
    "CP 2, all-to-all": (2, (*degrees(cp=2), ALL_TO_ALL)),
    "HSDP 2 x 2": (4, degrees(replicate=2)),
    "TP 2 x PP 2": (4, degrees(tp=2, pp=2)),
    "one process, compile": (1, (COMPILE,)),
}
MODEL = (
    *TINY,
    "--training.steps=1",
    "--training.local_batch_size=4",
    "--training.global_batch_size=16",
    "--optimizer.lr=1e-12",  # so that the step does not move what is validated
    "--model.flavor=deep",
    *("--validation.enabled", "--validation.steps=-1", "--validation.local_batch_size=4"),
)
Results = tuple[dict[str, Any], list[list[Any]], float]


def evaluated(folder: Path, tasks: list[Path], processes: int, *flags: str) -> Results:
    """The line of metrics.jsonl, each rank's scores, and the validation loss."""
    folder.mkdir()
    corpus = folder / "held_out.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"document {n} " * (n + 3)}) + "\n" for n in range(23)))
    names = ",".join(str(path) if path.suffix == ".jsonl" else f"text:{path}" for path in tasks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEEP_SCORES", str(folder))
        train(*MODEL, into(folder), f"--evaluation.tasks={names}", "--evaluation.num_fewshot=1",
              "--experimental.custom_import=keep_scores", f"--validation.dataset_path={corpus}", *flags,
              processes=processes)  # fmt: skip
    lines = lines_of(folder / "metrics.jsonl")
    (line,) = [line for line in lines if "evaluation_seconds" in line]
    (loss,) = [line["validation_loss"] for line in lines if "validation_loss" in line]
    scores = [json.loads((folder / f"scores_of_rank_{rank}.json").read_text()) for rank in range(processes)]
    return line, scores, float(loss)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("tasks")
    text = folder / "some_text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 20)
    return [write(folder, "hellaswag", 7), write(folder, "arc", 5), write(folder, "lambada", 6), text]


@pytest.fixture(scope="module")
def one_process(tasks: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    return evaluated(tmp_path_factory.mktemp("one") / "run", tasks, 1)


def flat(scores: Any) -> list[float]:
    return [score[0] for task in scores for example in task for score in example]


CORE = ("FSDP 2", "TP 2", "PP 2")


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in CORE else [pytest.mark.full]) for name in LAYOUTS]
)
def test_every_layout_gives_the_same_scores_and_validates_on_the_whole_set(
    layout: str, tasks: list[Path], one_process: Results, tmp_path: Path
) -> None:
    processes, flags = LAYOUTS[layout]
    line, scores, loss = evaluated(tmp_path / "run", tasks, processes, *flags)
    expected, (of_one,), loss_of_one = one_process
    assert loss == pytest.approx(loss_of_one, rel=1e-6 if COMPILE not in flags else 1e-4)  # it rounds elsewhere
    assert len(flat(of_one)) > 40
    for of_rank in scores:
        assert flat(of_rank) == pytest.approx(flat(of_one), abs=1e-4)
    assert {key for key in line if "/" in key} == {key for key in expected if "/" in key}
    for key in line:
        if "/" in key:
            assert line[key] == pytest.approx(expected[key], rel=1e-4), key
    assert {"hellaswag/acc", "hellaswag/acc_norm", "arc/chance", "lambada/perplexity"} <= line.keys()
    assert 0 < line["evaluation_share"] < 1


@pytest.mark.full
@pytest.mark.parametrize("layout", ["one process", "FSDP 2", "PP 2"])
def test_the_training_does_not_notice(layout: str, tmp_path: Path, tasks: list[Path]) -> None:
    processes, parallel = {"one process": (1, ()), **LAYOUTS}[layout]
    run = (*TINY, *CHECKPOINTS, "--model.flavor=deep", "--training.global_batch_size=16", *parallel)
    if layout == "PP 2":
        run = (*run, "--validation.local_batch_size=4")
    evaluating = (*run, f"--evaluation.tasks={tasks[0]}", "--evaluation.freq=2")
    train(*run, into(tmp_path / "without"), "--training.steps=4", processes=processes)
    train(*evaluating, into(tmp_path / "with"), "--training.steps=4", processes=processes)
    train(*evaluating, into(tmp_path / "resumed"), "--training.steps=2", processes=processes)
    train(*evaluating, into(tmp_path / "resumed"), "--training.steps=4", processes=processes)
    expected = losses(tmp_path / "without")
    assert losses(tmp_path / "with") == losses(tmp_path / "resumed") == expected
    results = {}
    for name in ("with", "resumed"):
        assert_equal_bit_for_bit(tensors_of(tmp_path / name, 4), tensors_of(tmp_path / "without", 4))
        lines = [line for line in lines_of(tmp_path / name / "metrics.jsonl") if "hellaswag/acc" in line]
        assert [line["step"] for line in lines] == [2, 4]
        results[name] = [{key: value for key, value in line.items() if "/" in key} for line in lines]
    assert results["with"] == results["resumed"]


def sampled(folder: Path, prompts: list[str], layout: str = "one process") -> Path:
    """A run that samples after steps 2 and 4."""
    processes, parallel = {"one process": (1, ()), **LAYOUTS}[layout]
    file = folder / "config.toml"
    file.write_text(f"[validation]\nsample_prompts = {json.dumps(prompts)}")
    train(*TINY, *CHECKPOINTS, "--training.global_batch_size=16", "--training.steps=4", "--optimizer.lr=3e-3",
          "--training.local_batch_size=4", "--validation.enabled", "--validation.freq=2", "--validation.steps=1",
          "--validation.local_batch_size=4", "--metrics.enable_tensorboard", "--metrics.report",
          f"--job.config_file={file}", into(folder / "run"), *parallel, processes=processes)  # fmt: skip
    return folder / "run"


PROMPTS = ["import os\n", "", "def f(x):\n    return"]


@pytest.fixture(scope="module")
def samples_of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sampled(tmp_path_factory.mktemp("sampled"), PROMPTS)


@pytest.mark.full
def test_samples_are_what_the_checkpoint_writes(samples_of_one: Path, tmp_path: Path) -> None:
    folder = samples_of_one
    samples = lines_of(folder / "samples.jsonl")
    assert [(line["step"], line["prompt"]) for line in samples[::3]] == [(2, "import os\n"), (4, "import os\n")]
    assert len(samples) == 6
    device, dtype = torch.device("cpu"), torch.float32
    with convert.one_process("tiny"):
        for step, first in ((2, 0), (4, 3)):
            opened = open_model(folder / "checkpoint" / f"step-{step}", device, dtype)
            for line in samples[first : first + 3]:
                ids = [1, *opened.tokenizer.encode(line["prompt"])]
                # One row at a time, and no cache: the model sees the last 64 tokens at most.
                new = generate(opened.model, [ids], Sampling(64 - len(ids)), opened.tokenizer.stop_ids)[0]
                text = opened.tokenizer.decode([id for id in new if id != opened.tokenizer.eos_id])
                assert line["text"].startswith(text)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tb")).Reload()
    assert [event.step for event in board.Tensors("sample 1/text_summary")] == [2, 4]
    assert samples[-1]["prompt"] in (folder / "report.html").read_text()
    without = sampled(tmp_path, [])
    assert losses(folder) == losses(without)
    assert not (without / "samples.jsonl").exists()


@pytest.mark.full
@pytest.mark.parametrize("layout", ["CP 2", "FSDP 2", "TP 2 x PP 2"])
def test_every_layout_writes_the_same(layout: str, samples_of_one: Path, tmp_path: Path) -> None:
    assert lines_of(sampled(tmp_path, PROMPTS, layout) / "samples.jsonl") == lines_of(samples_of_one / "samples.jsonl")
