"""Every recipe on other kinds of CPU: oneDNN and torch are limited to their instructions."""

from pathlib import Path

import pytest
from runs import CHECKPOINTS, SMALL, into, losses, train

AUTO = (*SMALL, "--training.mixed_precision_param=auto", "--training.steps=3")
LAPTOP = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
SERVER = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512"}  # without VNNI
RECIPES = {
    "tensorwise": ["--model.converters=float8"],
    "rowwise": ["--model.converters=float8", "--float8.recipe_name=rowwise"],
    "rowwise_with_gw_hp": ["--model.converters=float8", "--float8.recipe_name=rowwise_with_gw_hp"],
    "delayed": ["--model.converters=float8", "--float8.recipe_name=delayed"],
    "int8": ["--model.converters=int8"],
    "mx": ["--model.converters=mx", "--mx.emulate"],
}


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses with this machine's best instructions."""
    folder = tmp_path_factory.mktemp("bfloat16")
    train(*AUTO, "--training.mixed_precision_param=bfloat16", into(folder))
    return losses(folder)


def test_a_laptop_computes_in_float32_and_a_resumed_run_goes_on_in_it(
    bfloat16: dict[int, float], tmp_path: Path
) -> None:
    output = train(*AUTO, *CHECKPOINTS, into(tmp_path), **LAPTOP)
    assert "float32 GEMMs (this CPU has no bfloat16 instructions, so bfloat16 GEMMs would be slower)" in output
    assert losses(tmp_path) == pytest.approx(bfloat16, abs=3e-2)
    assert "float32 GEMMs" in train(*AUTO, *CHECKPOINTS, "--training.steps=5", into(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("kind", [LAPTOP, SERVER, {}], ids=["laptop", "server", "this machine"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains(recipe: str, kind: dict[str, str], bfloat16: dict[int, float], tmp_path: Path) -> None:
    output = train(*AUTO, *RECIPES[recipe], into(tmp_path), **kind)
    assert "low-precision GEMMs ran in this step" in output and "times as long as in" in output
    assert losses(tmp_path) == pytest.approx(bfloat16, abs=3e-2)
