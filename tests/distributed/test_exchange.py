"""Under every layout: a run that starts from published weights, and one that exports its own."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CHECKPOINTS, TINY, failure, into, losses, started, train
from safetensors.torch import load_file

QWEN3 = ("--model.name=tiny_qwen3", "--model.flavor=tied")
LAYOUTS = {
    "one process": (1, ()),
    "TP 2": (2, ("--parallelism.tensor_parallel_degree=2",)),
    "PP 2": (2, ("--parallelism.pipeline_parallel_degree=2",)),
    "Qwen3 tied, FSDP 2 x TP 2": (4, ("--parallelism.tensor_parallel_degree=2", *QWEN3)),
    "FSDP 2, int8 gather": (2, ("--model.converters=int8", "--int8.enable_fsdp_int8_all_gather")),
}
RUN = (*TINY, "--optimizer.weight_decay=0", "--training.global_batch_size=8")


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight for path in folder.glob("*.safetensors") for name, weight in load_file(path).items()}


@pytest.fixture(scope="module")
def published_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The checkpoint folder of a run with these further flags, which has published its weights."""

    @functools.cache
    def run(*flags: str) -> Path:
        folder = tmp_path_factory.mktemp("first")
        train(*RUN, *flags, *CHECKPOINTS, into(folder), "--training.steps=4", "--checkpoint.last_save_in_hf")
        return folder / "checkpoint"

    return run


@pytest.fixture
def published(published_by: Callable[..., Path]) -> Path:
    return published_by()


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[pytest.mark.full] * (layout != "TP 2")) for layout in LAYOUTS]
)
def test_a_run_starts_from_published_weights_and_leaves_its_own(
    layout: str, published_by: Callable[..., Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    processes, flags = LAYOUTS[layout]
    published = published_by(*(flag for flag in flags if flag in QWEN3))
    run = (*RUN, *flags, *CHECKPOINTS, "--training.steps=2")
    start = "--checkpoint.initial_load_path="
    from_export, from_checkpoint = into(tmp_path / "one"), into(tmp_path / "other")
    output = train(
        *run, from_export, f"{start}{published / 'step-4-hf'}", "--checkpoint.last_save_in_hf", processes=processes
    )
    assert f"loaded the weights of {published / 'step-4-hf'}" in output
    train(*run, from_checkpoint, f"{start}{published / 'step-4'}", processes=processes)
    assert losses(tmp_path / "one") == losses(tmp_path / "other")
    folder = tmp_path / "one" / "checkpoint" / "step-2-hf"
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    model, report = loaded
    assert not any(report.values())
    # Loaded and exported again immediately, without a step: the same bits.
    train(*RUN, *flags, into(tmp_path / "three"), f"{start}{folder}", *CHECKPOINTS, "--training.steps=1",
          "--checkpoint.last_save_in_hf", "--optimizer.lr=1e-30", processes=processes)  # fmt: skip
    again, weights = weights_in(tmp_path / "three" / "checkpoint" / "step-1-hf"), weights_in(folder)
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
    assert model.config.vocab_size == 4096


@pytest.mark.full
def test_an_export_that_is_missing_is_made_up_for(published: Path, tmp_path: Path) -> None:
    run = (*RUN, *CHECKPOINTS, into(tmp_path), "--training.steps=2", "--checkpoint.export_dtype=bfloat16")
    train(*run)
    output = train(*run, "--checkpoint.last_save_in_hf")
    assert "already finished its 2 steps" in output
    config = json.loads((tmp_path / "checkpoint" / "step-2-hf" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    train(*run, "--checkpoint.last_save_in_hf")  # once is enough


@pytest.mark.full
def test_another_model_is_refused(published: Path, tmp_path: Path) -> None:
    start = f"--checkpoint.initial_load_path={published / 'step-4-hf'}"
    status, output = failure(*RUN, into(tmp_path), start, "--model.flavor=wide", processes=2)
    assert status == 2
    assert "its dim is 64, this run's is 128" in output
    assert "Traceback" not in output


def test_a_full_disk_leaves_the_checkpoint(published: Path, tmp_path: Path) -> None:
    """A folder in the way represents anything that can prevent an export."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "step-2-hf.tmp").write_text("no folder")
    with started(*RUN, *CHECKPOINTS, into(tmp_path), "--training.steps=2", "--checkpoint.last_save_in_hf") as run:
        status, output = run.finish()
    assert status == 2, output
    assert "step-2-hf could not be written" in output
    assert "Traceback" not in output
    assert (tmp_path / "checkpoint" / "step-2" / "manifest.json").exists()


def test_optimizer_and_step_cannot_come_from_published_weights(published: Path, tmp_path: Path) -> None:
    start = f"--checkpoint.initial_load_path={published / 'step-4-hf'}"
    status, output = failure(*RUN, into(tmp_path), start, "--checkpoint.no_initial_load_model_weights_only")
    assert status == 2
    assert "checkpoint.initial_load_model_weights_only is off, but" in output


@pytest.mark.full
def test_a_tokenizer_that_is_gone_at_the_end_was_copied(published: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes((published / "step-4-hf" / "tokenizer.model").read_bytes())
    flags = (f"--model.tokenizer_path={tokenizer}", "--training.steps=40", "--checkpoint.last_save_in_hf")
    with started(*RUN, *CHECKPOINTS, "--checkpoint.interval=10", *flags, into(tmp_path / "run"), processes=2) as run:
        run.wait_until(lambda: "saved" in run.output())
        tokenizer.unlink()
        status, output = run.finish(90)
    assert status == 0, output
    assert (tmp_path / "run" / "checkpoint" / "step-40-hf" / "tokenizer.json").exists()
