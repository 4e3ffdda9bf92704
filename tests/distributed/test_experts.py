"""Mixtures of experts over several processes: checkpoints, balance, published weights, compiled code."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import (
    CHECKPOINTS,
    SMALL,
    assert_equal_bit_for_bit,
    into,
    lines_of,
    losses,
    python,
    tensors_of,
    train,
    train_here,
)
from safetensors.torch import load_file

from torchtitan.checks.config_checks import check
from torchtitan.config import ConfigManager
from torchtitan.errors import ConfigError
from torchtitan.tools.generation.open import open_model

SPARSE = (*SMALL, "--experimental.custom_import=tiny", "--model.name=sparse", "--model.flavor=deep")
EP = "--parallelism.expert_parallel_degree=2"
TP = "--parallelism.tensor_parallel_degree=2"
STEPS = 8
RUN = (*SPARSE, f"--training.steps={STEPS}", "--checkpoint.enable_checkpoint", "--checkpoint.interval=4")
NO_STEP = (*CHECKPOINTS, "--training.steps=1", "--optimizer.lr=1e-30", "--moe.bias_update_speed=1e-30")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(*RUN, EP, into(folder), processes=2)
    return folder


OTHERS = {
    "one process": (1, ("--training.local_batch_size=4",)),
    "TP 2, EP 2": (2, (TP, EP, "--training.local_batch_size=4")),
    "FSDP 4, EP 4": (4, ("--parallelism.expert_parallel_degree=4", "--training.local_batch_size=1")),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[pytest.mark.full] * (layout != "TP 2, EP 2")) for layout in OTHERS]
)
def test_another_expert_degree_goes_on(layout: str, uninterrupted: Path, tmp_path: Path) -> None:
    """From the same bits of weights, biases and moments, to the same losses."""
    processes, flags = OTHERS[layout]
    shutil.copytree(uninterrupted / "checkpoint" / "step-4", tmp_path / "checkpoint" / "step-4")
    again = (*RUN, *flags, into(tmp_path), "--training.steps=5", "--checkpoint.interval=1")
    train(*again, "--optimizer.lr=1e-30", "--moe.bias_update_speed=1e-30", processes=processes)
    before, after = tensors_of(tmp_path, 4), tensors_of(tmp_path, 5)
    weights = [name for name in before if not name.startswith("optimizer.")]
    assert sum(name.endswith("expert_bias") for name in weights) == 3
    assert_equal_bit_for_bit(*({name: tensors[name] for name in weights} for tensors in (before, after)))
    shutil.rmtree(tmp_path / "checkpoint" / "step-5")
    train(*RUN, *flags, into(tmp_path), processes=processes)
    expected = losses(uninterrupted)
    assert list(losses(tmp_path).values()) == pytest.approx([expected[step] for step in range(5, 9)], abs=1e-5)


@pytest.mark.full
def test_resumed_it_ends_bit_for_bit_the_same(uninterrupted: Path, tmp_path: Path) -> None:
    shutil.copytree(uninterrupted / "checkpoint" / "step-4", tmp_path / "checkpoint" / "step-4")
    train(*RUN, EP, into(tmp_path), processes=2)
    assert losses(tmp_path) == {step: loss for step, loss in losses(uninterrupted).items() if step > 4}
    assert_equal_bit_for_bit(tensors_of(tmp_path, STEPS), tensors_of(uninterrupted, STEPS))


def largest_load(folder: Path) -> float:
    """Of any expert in the last 4 steps, in units of its layer's mean."""
    entries = [line["expert_load"] for line in lines_of(folder / "metrics.jsonl") if "expert_load" in line]
    loads = torch.tensor([list(entry.values()) for entry in entries[-4:]])
    torch.testing.assert_close(loads.mean(-1), torch.ones(loads.shape[:-1]), rtol=0, atol=1e-3)
    return float(loads.mean(0).max())


@pytest.mark.full
def test_experts_get_an_even_load(tmp_path: Path) -> None:
    run = (*SPARSE, "--model.flavor=narrow", "--training.steps=60", "--optimizer.lr=3e-3", "--training.seq_len=128")
    train_here(*run, into(tmp_path / "none"), "--moe.balance=none")
    assert largest_load(tmp_path / "none") > 2.5
    for balance, more in {"bias": "--moe.bias_update_speed=3e-2", "loss": "--moe.loss_coefficient=0.1"}.items():
        train(*run, into(tmp_path / balance), f"--moe.balance={balance}", more, EP, processes=2)
        assert largest_load(tmp_path / balance) < 1.8


EP_2 = "FSDP 2, EP 2"


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "layout", "published"),
    [
        ("sparse", "one process", 2 * 8 * 3),
        ("sparse", EP_2, 2 * 8 * 3),
        ("tiny_glm4_moe", EP_2, 8 * 3),  # the first layer is dense
        ("tiny_gpt_oss", EP_2, 2 * 4),  # all experts in a tensor, and all biases
    ],
)
def test_published_experts(family: str, layout: str, published: int, tmp_path: Path) -> None:
    """They are exported, read by `transformers` with the same result, and imported again with the same bits. GLM-4.5
    has a place for the biases that balance them."""
    from transformers import AutoModelForCausalLM

    processes, flags = (1, ("--training.local_batch_size=4",)) if layout == "one process" else (2, (EP,))
    balance = "--moe.bias_update_speed=0.1" if family == "tiny_glm4_moe" else "--moe.balance=loss"
    run = (*SPARSE, f"--model.name={family}", "--model.flavor=narrow", balance, *flags, "--checkpoint.last_save_in_hf")
    train(*run, *CHECKPOINTS, into(tmp_path / "first"), "--training.steps=2", processes=processes)
    folder = tmp_path / "first" / "checkpoint" / "step-2-hf"
    weights = load_file(folder / "model.safetensors")
    biases = [weight for name, weight in weights.items() if name.endswith("e_score_correction_bias")]
    assert sum("mlp.experts." in name for name in weights) == published
    assert len(biases) == (family == "tiny_glm4_moe") and all(bias.any() for bias in biases)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    model, report = loaded
    assert not any(report.values())
    tokens = torch.arange(64).view(2, 32)
    ours = open_model(tmp_path / "first", torch.device("cpu"), torch.float32).model
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), model(tokens).logits, rtol=1e-5, atol=1e-5)
    start = f"--checkpoint.initial_load_path={folder}"
    train(*run, *NO_STEP, into(tmp_path / "second"), start, processes=processes)
    before, after = (
        load_file(path / "model.safetensors") for path in (folder, tmp_path / "second/checkpoint/step-1-hf")
    )
    assert_equal_bit_for_bit(before, after)


def test_biases_are_not_lost_in_an_export(uninterrupted: Path, tmp_path: Path) -> None:
    ended = python("-m", "torchtitan.tools.convert", "to-hf", uninterrupted, tmp_path / "hf", "--custom-import=tiny")
    assert ended.returncode == 2
    assert "--moe.balance=loss" in ended.stderr
    assert not (tmp_path / "hf").exists()


BAD = {
    "3 experts for 8": (("--parallelism.expert_parallel_degree=3",), 3, "these degrees do: 1, 2, 4, 8"),
    "more than ranks": (("--parallelism.expert_parallel_degree=4",), 2, "does not divide the 2 ranks"),
    "dense": (("--parallelism.expert_parallel_degree=2", "--model.name=tiny"), 2, "this model has no experts"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_degrees(case: str) -> None:
    flags, processes, sentence = BAD[case]
    with pytest.raises(ConfigError, match=sentence):
        check(ConfigManager().parse_args([*SPARSE, "--training.local_batch_size=1", *flags]), processes, "cpu")


@pytest.mark.full
def test_compiled_experts_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though every step sends other numbers of rows to each rank, here with activations kept in 8 bits."""
    monkeypatch.setenv("TORCH_LOGS", "recompiles")
    run = (*SPARSE, "--model.flavor=narrow", "--training.steps=6", "--training.mixed_precision_param=bfloat16")
    train_here(*run, into(tmp_path / "bfloat16"))
    keys = (EP, "--training.compile", "--activation_checkpoint.swiglu_dtype=float8")
    output = train(*run, *keys, into(tmp_path / "float8"), processes=2)
    assert "Recompiling" not in output
    lines = [line for line in lines_of(tmp_path / "float8" / "metrics.jsonl") if "expert_load" in line]
    assert len({json.dumps(line["expert_load"]) for line in lines}) == 6
    assert losses(tmp_path / "float8")[3] == pytest.approx(losses(tmp_path / "bfloat16")[3], abs=3e-2)
