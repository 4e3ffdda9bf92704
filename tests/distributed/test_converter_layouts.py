"""Low precision with every other feature: the same training as in one process without it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import TINY, assert_equal_bit_for_bit, into, losses, tensors_of, train, train_here
from workers import once

CONVERTERS = {
    "float8": (
        "--model.converters=float8",
        "--float8.enable_fsdp_float8_all_gather",
        "--float8.precompute_float8_dynamic_scale_for_fsdp",
    ),
    "int8": ("--model.converters=int8", "--int8.enable_fsdp_int8_all_gather"),
    "mx": ("--model.converters=mx", "--mx.emulate"),
    "mx nvfp4": ("--model.converters=mx", "--mx.emulate", "--mx.recipe_name=nvfp4"),
    "float8 delayed": ("--model.converters=float8", "--float8.recipe_name=delayed", "--float8.delayed_history_len=3"),
    "float8 bound": (
        "--model.converters=float8",
        "--float8.enable_fsdp_float8_all_gather",
        "--float8.weight_scale=bound",
        "--float8.weight_scale_freq=3",
    ),
}
FEATURES = {
    "accumulation and recomputation": ("--training.local_batch_size=1", "--activation_checkpoint.mode=full"),
    "DDP": ("--parallelism.data_parallel_replicate_degree=2",),
    "compile": ("--training.compile",),
    "tensor parallel": ("--parallelism.tensor_parallel_degree=2", "--training.local_batch_size=4"),
    "tensor parallel and compile": (
        "--parallelism.tensor_parallel_degree=2",
        "--training.local_batch_size=4",
        "--training.compile",
    ),
    "FSDP and tensor parallel": ("--parallelism.tensor_parallel_degree=2",),
    "context parallel": ("--parallelism.context_parallel_degree=2", "--training.local_batch_size=4"),
    "pipeline": ("--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4"),
}
PROCESSES = {"FSDP and tensor parallel": 4}
# These represent the others in the short form, next to the first feature with each converter.
# (test_weight_classes.py covers more layouts in less time.)
SHORT = [
    ("DDP", "int8"),
    ("pipeline", "float8"),
]
# Each converter under the features that it meets in code of its own. test_weight_classes.py has what is left out, with
# the losses of one process: every recipe under FSDP 2 x TP 2 with recomputation and under TP 2 x PP 2, and int8's
# gathers under DDP and CP, too. Compiled, most of the time is the compiler's, and the recipes of a converter are alike
# to it (test_float8_delayed.py compiles its records).
WITH = {
    "DDP": ["float8", "int8", "mx", "float8 delayed", "float8 bound"],
    "compile": ["float8", "int8", "mx"],
    "tensor parallel": ["float8", "float8 delayed"],
    "tensor parallel and compile": ["float8"],
    "FSDP and tensor parallel": ["float8 bound"],
    "context parallel": ["float8", "mx", "float8 delayed"],
    "pipeline": ["float8", "int8", "float8 delayed", "float8 bound"],
}
BASE = (*TINY, "--training.steps=3", "--training.mixed_precision_param=bfloat16")


Losses = Callable[[str], list[float]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Losses of a converter in one process."""

    def run(converter: str) -> list[float]:
        folder = tmp_path_factory.mktemp("alone")
        train(*BASE, into(folder), "--training.local_batch_size=4", *CONVERTERS[converter])
        return list(losses(folder).values())

    return lambda converter: once(tmp_path_factory, f"{converter}_alone", lambda: run(converter))


COMBINATIONS = [
    pytest.param(converter, feature, marks=[] if (feature, converter) in SHORT else [pytest.mark.full])
    for converter in CONVERTERS
    for feature in FEATURES
    if converter in WITH.get(feature, CONVERTERS)
]


@pytest.mark.parametrize(("converter", "feature"), COMBINATIONS)
def test_converter_with_feature(converter: str, feature: str, alone: Losses, tmp_path: Path) -> None:
    flags = (*CONVERTERS[converter], *FEATURES[feature])
    output = train(*BASE, into(tmp_path), *flags, processes=PROCESSES.get(feature, 2))
    assert list(losses(tmp_path).values()) == pytest.approx(alone(converter), abs=5e-3)
    counted = "low-precision GEMMs ran in this step" in output
    assert counted != (converter.startswith("mx") and "compile" in feature)  # (`checked_gemms`)


@pytest.mark.full
def test_rowwise_float8_gathered_by_tensor_parallelism(tmp_path: Path) -> None:
    flags = ("--model.converters=float8", "--float8.recipe_name=rowwise")
    train(*BASE, into(tmp_path / "alone"), "--training.local_batch_size=4", *flags)
    expected = pytest.approx(list(losses(tmp_path / "alone").values()), abs=5e-3)
    for feature in ("tensor parallel", "tensor parallel and compile", "FSDP and tensor parallel"):
        folder = tmp_path / feature.replace(" ", "_")
        train(*BASE, into(folder), *flags, *FEATURES[feature], processes=PROCESSES.get(feature, 2))
        assert list(losses(folder).values()) == expected, feature


GPU = (*BASE, "--experimental.custom_import=gemms_of_gpus", "--model.flavor=blocks")


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [
        # Codes of 4 bits differ where sums differ in their last bits: losses by up to 5.1e-3 on the CPUs seen.
        (("--model.converters=mx_of_a_gpu", "--mx.recipe_name=nvfp4", "--mx.keep_last_blocks_fraction=0"), 1e-2),
        (("--model.converters=float8_of_a_gpu", "--float8.recipe_name=blockwise"), 5e-3),
    ],
    ids=["nvfp4", "blockwise"],
)
def test_block_scaled_gemms_of_gpus(flags: tuple[str, ...], tolerance: float, tmp_path: Path) -> None:
    """By their definition, the same training in one process, emulated, and on four."""
    train(*GPU, *flags, into(tmp_path / "one"), "--training.local_batch_size=4")
    emulated = (flag.replace("_of_a_gpu", "") for flag in (*flags, "--mx.emulate"))
    train(*GPU, *emulated, into(tmp_path / "emulated"), "--training.local_batch_size=4")
    output = train(*GPU, *flags, into(tmp_path / "four"), *FEATURES["FSDP and tensor parallel"], processes=4)
    assert "low-precision GEMMs ran in this step" in output
    expected = pytest.approx(list(losses(tmp_path / "one").values()), abs=tolerance)
    assert list(losses(tmp_path / "emulated").values()) == expected
    assert list(losses(tmp_path / "four").values()) == expected


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "converter", "converted"),
    [
        ("tiny_qwen3", "float8", "14 of 15"),  # heads are wider than dim / heads: the shapes of wq and wo differ
        ("tiny_qwen3", "int8", "14 of 15"),
        ("tiny_olmo3", "mx", "10 of 15"),  # norms over all heads
        ("tiny_glm4_moe", "float8", "14 of 19"),  # biases; tensorwise float8 leaves experts out
        ("tiny_afmoe", "int8", "19 of 21"),  # gates
        ("tiny_gemma3", "float8", "14 of 14"),  # tied, GeGLU
        ("tiny_gpt_oss", "int8", "14 of 17"),  # biases after the sum over ranks, and of experts
        ("tiny_deepseek_v3", "mx", "19 of 21"),  # latents
    ],
)
def test_converter_with_another_family(family: str, converter: str, converted: str, tmp_path: Path) -> None:
    base = (*BASE, f"--model.name={family}", *CONVERTERS[converter])
    train(*base, into(tmp_path / "one"), "--training.local_batch_size=4")
    output = train(*base, into(tmp_path / "four"), *FEATURES["FSDP and tensor parallel"], processes=4)
    expected = pytest.approx(list(losses(tmp_path / "one").values()), abs=5e-3)
    assert list(losses(tmp_path / "four").values()) == expected
    assert converted in output and "low-precision GEMMs ran in this step" in output


@pytest.mark.full
def test_a_run_goes_on_in_another_precision_and_back(tmp_path: Path) -> None:
    """Checkpoints hold plain high-precision weights, regardless of the precision of computation and all_gathers."""
    saved = (*BASE, into(tmp_path), "--checkpoint.enable_checkpoint", "--checkpoint.interval=2")
    train(*saved, "--training.steps=2", *CONVERTERS["int8"], processes=2)
    train(*saved, "--training.steps=4", "--training.local_batch_size=4")
    train(*saved, "--training.steps=6", *CONVERTERS["float8"], processes=2)
    train(*BASE, into(tmp_path / "bf16"), "--training.steps=6", "--training.local_batch_size=4")
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert list(losses(tmp_path).values()) == pytest.approx(list(losses(tmp_path / "bf16").values()), abs=5e-3)


# Only shards that a converter wraps, and its scales, may differ from one process.
RESUMED = [*((name, 1) for name in CONVERTERS), *((name, 2) for name in ("int8", "float8 delayed", "float8 bound"))]


@pytest.mark.full
@pytest.mark.parametrize(
    ("converter", "processes"),
    RESUMED,
)
def test_resumed_bit_for_bit(converter: str, processes: int, tmp_path: Path) -> None:
    """Twice, with accumulation. Scales with a history are part of a checkpoint; others can be recomputed."""
    flags = (*BASE, *CONVERTERS[converter], "--training.local_batch_size=1", "--optimizer.lr=1e-2")
    saved = (*flags, "--checkpoint.enable_checkpoint", "--checkpoint.interval=2")

    def run(*more: str) -> None:
        if processes == 1:
            train_here(*saved, *more)
        else:
            train(*saved, *more, processes=processes)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(into(whole), "--training.steps=6")
    shutil.copytree(whole / "checkpoint" / "step-2", parts / "checkpoint" / "step-2")
    for steps in (4, 6):
        run(into(parts), f"--training.steps={steps}")
    assert losses(parts) == {step: loss for step, loss in losses(whole).items() if step > 2}
    assert_equal_bit_for_bit(tensors_of(parts, 6), tensors_of(whole, 6))
