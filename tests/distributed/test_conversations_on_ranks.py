"""Conversations on several ranks, mixed with text, some rows of which have nothing that counts: as on one."""

import json
from pathlib import Path

import pytest
from chat_templates import TEMPLATES, chat_folder, said
from data_helpers import close, loaders_of
from equality import degrees
from runs import (
    HELD,
    TINY,
    assert_equal_bit_for_bit,
    checkpoint_steps,
    hold,
    into,
    last_step,
    losses,
    reports,
    started,
    tensors_of,
    train,
)

from torchtitan.config import ConfigManager
from torchtitan.data import load_tokenizer
from torchtitan.protocols import IGNORE_INDEX

STEPS = 4


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Two of three conversations begin with a question longer than a window, so nothing in them counts."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer = chat_folder(folder / "tokenizer", TEMPLATES["Qwen3"])
    questions = [said("user", f"{n}? " * (40 if n % 3 else n % 7)) for n in range(400)]
    answers = [said("assistant", f"It is {n}. " * (n % 5 + 1)) for n in range(400)]
    lines = [{"messages": [*turns]} for turns in zip(questions, answers, strict=True)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": f"text {n} " * 9}) + "\n" for n in range(400)))
    mixture = f"--training.dataset_mixture={folder}/chats.jsonl:0.8,{folder}/texts.jsonl:0.2"
    return (
        *TINY,
        f"--model.tokenizer_path={tokenizer}",
        mixture,
        "--training.train_on=assistant",
        "--training.document_mask",
        "--training.global_batch_size=4",
        f"--training.steps={STEPS}",
    )


@pytest.fixture(scope="module")
def alone(flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train(*flags, "--training.local_batch_size=4", into(folder))
    return folder


def test_some_ranks_have_nothing_that_counts(flags: tuple[str, ...]) -> None:
    """In the steps that the layouts below are compared in."""
    config = ConfigManager().parse_args([*flags, "--training.local_batch_size=1"])
    loaders = loaders_of(config.training, 4, 4, tokenizer=load_tokenizer(config.model.tokenizer_path))
    steps = [[loader.next()[0] for loader in loaders] for _ in range(STEPS)]
    close(loaders)
    counts = [[int((batch.labels != IGNORE_INDEX).sum()) for batch in step] for step in steps]
    assert any(min(step) == 0 < max(step) for step in counts), counts


@pytest.mark.parametrize(
    ("processes", "rows", "layout"),
    [
        pytest.param(2, 1, (), id="FSDP 2, accumulation"),
        pytest.param(4, 1, (), id="FSDP 4", marks=pytest.mark.full),
        pytest.param(4, 4, degrees(tp=2, cp=2), id="TP 2 x CP 2", marks=pytest.mark.full),
        pytest.param(4, 2, degrees(pp=2), id="PP 2 x FSDP 2", marks=pytest.mark.full),
    ],
)
def test_a_layout_equals_one_process(
    processes: int, rows: int, layout: tuple[str, ...], flags: tuple[str, ...], alone: Path, tmp_path: Path
) -> None:
    train(*flags, f"--training.local_batch_size={rows}", *layout, into(tmp_path), processes=processes)
    one, several = reports(alone), reports(tmp_path)
    of_sources = {key for report in one for key in report if key.startswith("loss/")}
    assert len(of_sources) == 2
    for key in ("loss", "grad_norm", "counted_tokens", *of_sources):
        assert [report.get(key) for report in several] == [
            report.get(key) and pytest.approx(report[key], rel=2e-5) for report in one
        ]
    counts = [report["counted_tokens"] for report in one]
    assert len(set(counts)) > 1 and all(0 < count < 0.9 * 4 * 64 for count in counts)


@pytest.mark.full
@pytest.mark.parametrize(("packing", "kills"), [("concatenate", 12), ("best_fit", 1)])
def test_killed_and_resumed_it_ends_bit_for_bit_the_same(
    packing: str, kills: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Killed in the step after each checkpoint, and once more at the end."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    flags = (*flags, f"--training.packing={packing}", f"--training.steps={kills + 2}")
    flags = (*flags, "--checkpoint.enable_checkpoint", "--checkpoint.interval=1")
    train(*flags, into(whole))
    for step in range(1, kills + 1):
        hold(killed, step + 1)
        with started(*flags, *HELD, into(killed)) as run:
            run.wait_until(lambda step=step: step in checkpoint_steps(killed) and last_step(killed) > step)  # type: ignore[misc]
            run.kill()
    train(*flags, into(killed))
    assert losses(killed) == losses(whole)
    assert_equal_bit_for_bit(tensors_of(killed, kills + 2), tensors_of(whole, kills + 2))
