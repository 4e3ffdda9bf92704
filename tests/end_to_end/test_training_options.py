"""Keys that change how a step is computed, but not its result."""

import shutil
from pathlib import Path

import pytest
from runs import SMALL, TINY, assert_equal_bit_for_bit, into, losses, tensors_of, train, train_here

STEPS = "--training.steps=3"
BFLOAT16 = "--training.mixed_precision_param=bfloat16"


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activation_checkpointing_changes_no_loss(dtype: str, tmp_path: Path) -> None:
    flags = (*TINY, STEPS, f"--training.mixed_precision_param={dtype}")
    train_here(*flags, into(tmp_path / "none"))
    for mode, option in [("full", "2"), ("selective", "1"), ("selective", "2"), ("selective", "op")]:
        folder = tmp_path / f"{mode}_{option}"
        keys = [f"--activation_checkpoint.mode={mode}", f"--activation_checkpoint.selective_ac_option={option}"]
        train_here(*flags, *keys, into(folder))
        assert losses(folder) == pytest.approx(losses(tmp_path / "none"), abs=1e-6)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for CPU needs g++")
def test_compiled_losses_equal_eager_ones(tmp_path: Path) -> None:
    train_here(*TINY, STEPS, into(tmp_path / "eager"))
    train(*TINY, STEPS, "--training.compile", into(tmp_path / "compiled"), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), abs=1e-5)
    # All that the compiler loads is where nobody else could have put it.
    folder = tmp_path / "cache" / "torchtitan" / "inductor-2"
    assert list(folder.rglob("*.so")) and list(folder.rglob("*.gch"))


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bfloat16")
    train_here(*SMALL, STEPS, BFLOAT16, into(folder))
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=[pytest.mark.full] * (name != "rowwise"))
        for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    ],
)
def test_float8_trains_a_little_off_bfloat16(
    recipe: str, bfloat16: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("--model.converters=float8", f"--float8.recipe_name={recipe}")
    train_here(*SMALL, STEPS, BFLOAT16, *keys, into(tmp_path))
    assert "42 of 43 linear layers" in capsys.readouterr().out  # all but the output layer
    assert losses(tmp_path) == pytest.approx(losses(bfloat16), abs=3e-2)
    assert losses(tmp_path)[3] != losses(bfloat16)[3]


@pytest.mark.full
def test_all_converters_and_layers_of_a_filter_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("--model.converters=float8", "--float8.filter_fqns=output,attention.wk")
    train_here(*SMALL, BFLOAT16, "--training.steps=1", *keys, into(tmp_path))
    assert "36 of 43 linear layers" in capsys.readouterr().out


def test_the_report_of_conversion_is_of_this_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_here(*TINY, BFLOAT16, "--training.steps=1", "--model.converters=int8", into(tmp_path))
    assert (tmp_path / "conversion.json").exists() and "after conversion" not in capsys.readouterr().out
    train_here(*TINY, BFLOAT16, "--training.steps=1", "--model.print_after_conversion", into(tmp_path))
    assert not (tmp_path / "conversion.json").exists()
    assert "(tok_embeddings): Embedding(" in capsys.readouterr().out


def test_profiling_a_run_in_low_precision_waits_for_its_products_to_be_counted(tmp_path: Path) -> None:
    """Counting also uses torch's profiler, and two active profilers crash the process."""
    flags = ("--model.converters=float8", "--profiling.enable_profiling", "--profiling.profile_freq=1")
    bfloat16 = "--training.mixed_precision_param=bfloat16"
    output = train(*TINY, into(tmp_path), bfloat16, "--training.steps=3", *flags)
    assert "84 low-precision GEMMs ran in this step, 84 expected" in output
    assert {path.parent.name for path in (tmp_path / "profile_traces").rglob("*.json")} == {
        "iteration_2",
        "iteration_3",
    }


@pytest.mark.full
def test_what_is_decayed_may_change_at_a_resume(tmp_path: Path) -> None:
    """As in older checkpoints, whose optimizer has a single parameter group."""
    flags = (*TINY, "--training.local_batch_size=4", "--optimizer.weight_decay=0", "--checkpoint.enable_checkpoint")
    all_alike = "--optimizer.no_weight_decay="
    train_here(*flags, all_alike, into(tmp_path / "whole"), "--training.steps=4")
    train_here(*flags, all_alike, into(tmp_path / "parts"), "--training.steps=2")
    train_here(*flags, into(tmp_path / "parts"), "--training.steps=4")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert_equal_bit_for_bit(tensors_of(tmp_path / "parts", 4), tensors_of(tmp_path / "whole", 4))


LAYOUTS = {
    "one process": (None, ()),
    "TP, compiled": (2, ("--parallelism.tensor_parallel_degree=2", "--training.compile")),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", ["one process", pytest.param("TP, compiled", marks=pytest.mark.full)])
def test_activations_in_8_bits_train_a_little_off(layout: str, bfloat16: Path, tmp_path: Path) -> None:
    processes, keys = LAYOUTS[layout]
    keys = (*keys, "--activation_checkpoint.swiglu_dtype=int8")
    train(*SMALL, STEPS, BFLOAT16, *keys, into(tmp_path), processes=processes)
    assert losses(tmp_path)[3] == pytest.approx(losses(bfloat16)[3], abs=3e-2)
    assert losses(tmp_path)[3] != losses(bfloat16)[3]
