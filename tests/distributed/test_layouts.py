"""The same training under every layout."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import equality
import pytest
import torch
from runs import SMALL, TINY, grad_norms, into, losses, train, train_here
from workers import once

LONGER = (*SMALL, "--training.seq_len=128")
# Rows that another row shows, which has their dimensions and more; a Qwen3 has all that a Llama has, and experts have a
# Qwen3's attention. Compiling takes a minute: test_converter_layouts.py compiles under FSDP and under TP, and
# test_low_precision_experts.py with recomputation by operation.
SHOWN = {
    "FSDP 4": "experts, FSDP 4, EP 2",
    "HSDP 2 x 2": "Qwen3, HSDP 2 x 2 x TP 2",
    "FSDP 2 x CP 2": "Qwen3, FSDP 2 x CP 2, all-to-all",
    "TP 2 x CP 2": "Qwen3, CP 2 x TP 2 x PP 2",
    "TP 2 x PP 2": "Qwen3, CP 2 x TP 2 x PP 2",
    "CP 2 x PP 2": "Qwen3, CP 2 x TP 2 x PP 2",
    "CP 2 x TP 2 x PP 2": "Qwen3, CP 2 x TP 2 x PP 2",
    "FSDP 2 x TP 2 x PP 2": "experts, FSDP 2 x TP 2 x PP 2, EP 4",
    "HSDP 2 x 2 x TP 2": "Qwen3, HSDP 2 x 2 x TP 2",
    "PP 2 x FSDP 2": "PP 2 x FSDP 2, accumulation",
    "PP 2 x FSDP 2, ZBVZeroBubble": "Qwen3, PP 2 x FSDP 2, ZBVZeroBubble, accumulation",
    "FSDP 2 x TP 2, accumulation": "Qwen3, tied, FSDP 2 x TP 2, accumulation",
    "FSDP 2, compile": "PP 2, compile",
    "Qwen3, FSDP 2": "Qwen3, HSDP 2 x 2 x TP 2",
    "Qwen3, FSDP 2 x TP 2": "Qwen3, HSDP 2 x 2 x TP 2",
    "experts, FSDP 4, EP 4": "experts, FSDP 2, EP 2",
    "experts, FSDP 2 x TP 2, EP 2": "experts, FSDP 2 x TP 2, EP 2, Muon",
    "experts, FSDP 2 x TP 2, EP 4": "experts, FSDP 2 x TP 2 x PP 2, EP 4",
    "experts, CP 2, EP 2": "experts, TP 2 x CP 2, EP 2, loss for an even load",
    "experts, PP 2": "experts, PP 2 x FSDP 2, EP 2, loss for an even load, accumulation",
    "experts, PP 2 x FSDP 2, EP 2": "experts, PP 2 x FSDP 2, EP 2, loss for an even load, accumulation",
    "experts, PP 2 x FSDP 2, EP 2, ZBVZeroBubble": (
        "experts, PP 2 x FSDP 2, EP 2, loss for an even load, ZBVZeroBubble"
    ),
    "experts, FSDP 2, EP 2, compile, recomputation by operation": "experts, TP 2, EP 2, compile",
    "DeepSeek-V3, FSDP 2 x CP 2, all-to-all": "DeepSeek-V3, no latent of queries, TP 2 x CP 2, all-to-all",
    "GLM-4.5, TP 2, EP 2, compile": "DeepSeek-V3, TP 2, EP 2, compile",
    "Muon, FSDP 2": "Muon, FSDP 2, accumulation",
    "Muon, FSDP 4": "NorMuon, HSDP 2 x 2",
    "Muon, HSDP 2 x 2": "NorMuon, HSDP 2 x 2",
    "Muon, TP 2": "NorMuon, FSDP 2 x TP 2",
    "Muon, FSDP 2 x TP 2": "NorMuon, FSDP 2 x TP 2",
    "Muon, CP 2": "Muon, FSDP 2, accumulation",  # its shards are the same
    "Muon, TP 2 x PP 2": "Muon, FSDP 2 x TP 2 x PP 2",
    "Muon, HSDP 2 x 2 x TP 2": "Muon, FSDP 2 x TP 2 x PP 2",
}
# These need four layers: two stages on a rank, or four ranks, or two layers of which none is the last.
FOUR_LAYERS = (equality.SPLIT, *equality.EVERY_SECOND[1:], "--parallelism.pipeline_parallel_degree=4")
SHORTER = {
    "tiny": "narrow",
    "tiny_capped": "narrow",
    "tiny_qwen3": "narrow",
    "tiny_olmo3": "narrow",
    "tiny_glm4_moe": "narrow",
    "tiny_afmoe": "narrow",
    "tiny_deepseek_v3": "narrow",
    "tiny_gpt_oss": "narrow",
    "tiny_gemma3": "narrow",
    "sparse": "mixed",
}
# Both layers with experts, so that one compilation, of 20 to 40 kernels, is enough: Trinity's without RoPE, which no
# other family has. "experts, TP 2, EP 2, compile" compiles feed-forwards and layers of two kinds, Gemma 3's windows.
ALIKE = {"tiny_afmoe", "tiny_deepseek_v3"}


def with_fewest_layers(layout: equality.Layout) -> equality.Layout:
    """The row with two layers, of which each kind is one, unless it needs the four of the table."""
    deep = any(flag.startswith((*FOUR_LAYERS, equality.SCHEDULE)) for flag in layout.flags)
    short = layout.flavor == "deep" and not deep
    if short and layout.model in ALIKE and equality.COMPILE in layout.flags:
        return dataclasses.replace(layout, flavor="alike")
    return dataclasses.replace(layout, flavor=SHORTER.get(layout.model, "narrow")) if short else layout


ROWS = [
    pytest.param(with_fewest_layers(layout), id=layout.name, marks=[] if layout.core else [pytest.mark.full])
    for layout in equality.LAYOUTS
    if layout.name not in SHOWN
]
run = functools.partial(equality.run, steps=equality.ENOUGH)

Reference = Callable[[equality.Layout], equality.Training]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The training of one process that a layout must equal; run once for each model."""

    @functools.cache
    def training(layout: equality.Layout) -> equality.Training:
        name = hashlib.sha256(repr(layout).encode()).hexdigest()
        return once(tmp_path_factory, f"one_process_{name}", lambda: run(layout, tmp_path_factory.mktemp("one")))

    return training


@pytest.mark.parametrize("layout", ROWS)
def test_layout_equals_one_process(layout: equality.Layout, reference: Reference, tmp_path: Path) -> None:
    alone = reference(equality.one_process(layout))
    deviations = equality.deviations(alone, run(layout, tmp_path))
    assert equality.within_tolerance(deviations), deviations


def test_rows_that_are_left_out_are_shown_by_rows_that_run() -> None:
    names = {layout.name for layout in equality.LAYOUTS}
    assert set(SHOWN) < names and set(SHOWN.values()) < names - set(SHOWN)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["NotSummed", "SummedTwice"])
def test_a_gradient_summed_over_the_wrong_ranks_is_found(fault: str, reference: Reference, tmp_path: Path) -> None:
    """Although the losses look right."""
    right = equality.qwen3("TP 2", 2, 8, (*equality.degrees(tp=2), "--experimental.custom_import=wrong_gradients"))
    expected = reference(equality.one_process(right))
    actual = run(dataclasses.replace(right, model=fault), tmp_path)
    deviations = equality.deviations(expected, actual)
    assert not equality.within_tolerance(deviations)
    wrong = {name for name, off in equality.by_name(expected.gradients, actual.gradients).items() if off > 0.1}
    assert wrong == {f"layers.{layer}.attention.q_norm.weight" for layer in range(4)}
    assert deviations["loss"] < equality.TOLERANCE


@pytest.mark.full
def test_gradients_of_experts_averaged_over_the_wrong_ranks_are_found(reference: Reference, tmp_path: Path) -> None:
    module = "--experimental.custom_import=wrong_gradients"
    right = equality.experts("FSDP 2, EP 2", 2, 4, (*equality.degrees(ep=2), module))
    expected = reference(equality.one_process(right))
    actual = run(dataclasses.replace(right, model="WrongGroup"), tmp_path)
    deviations = equality.deviations(expected, actual)
    assert not equality.within_tolerance(deviations)
    wrong = {name for name, off in equality.by_name(expected.gradients, actual.gradients).items() if off > 0.1}
    assert wrong == {name for name in expected.gradients if ".moe.experts." in name}
    assert deviations["loss"] < equality.TOLERANCE


@pytest.mark.parametrize("field", ["losses", "grad_norms", "gradients", "weights"])
def test_a_number_that_is_not_finite_equals_none(field: str) -> None:
    """Wherever it occurs among the others."""

    def training() -> equality.Training:
        ones = torch.ones(equality.STEPS, dtype=torch.float64)
        gradients, weights = ({name: torch.ones(2) for name in ("a", "b", "c")} for _ in range(2))
        return equality.Training(ones, ones.clone(), gradients, weights)

    assert equality.within_tolerance(equality.deviations(training(), training()))
    spoiled = training()
    numbers = getattr(spoiled, field)
    numbers = numbers["b"] if isinstance(numbers, dict) else numbers
    numbers[1] = float("nan")
    assert not equality.within_tolerance(equality.deviations(training(), spoiled))


def test_tensor_parallelism_with_an_output_layer_that_is_the_embedding(tmp_path: Path) -> None:
    tied = (*TINY, "--model.flavor=tied", "--training.steps=4", "--training.local_batch_size=4")
    train_here(*tied, into(tmp_path / "one"))
    train(*tied, into(tmp_path / "tp"), "--parallelism.tensor_parallel_degree=2", processes=2)
    assert list(losses(tmp_path / "tp").values()) == pytest.approx(list(losses(tmp_path / "one").values()), rel=1e-5)
    assert grad_norms(tmp_path / "tp") == pytest.approx(grad_norms(tmp_path / "one"), rel=1e-5)


@pytest.mark.full
def test_computes_in_bfloat16_whatever_the_layout(tmp_path: Path) -> None:
    steps = (*LONGER, "--training.steps=3")
    bfloat16 = (*steps, "--training.mixed_precision_param=bfloat16")
    train_here(*steps, into(tmp_path / "float32"), "--training.local_batch_size=4")
    train_here(*bfloat16, into(tmp_path / "one"), "--training.local_batch_size=4")
    train(*bfloat16, into(tmp_path / "fsdp"), processes=2)
    tensor_parallel = "--parallelism.tensor_parallel_degree=2"
    train(*bfloat16, into(tmp_path / "tp"), "--training.local_batch_size=4", tensor_parallel, processes=2)
    expected = list(losses(tmp_path / "float32").values())
    for layout in ("one", "fsdp", "tp"):
        actual = list(losses(tmp_path / layout).values())
        assert actual == pytest.approx(expected, abs=2e-2)
        # float32 agrees to 1e-6 (above); bfloat16 has 8 bits
        assert actual != pytest.approx(expected, abs=2e-5)
