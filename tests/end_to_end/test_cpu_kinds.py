"""Every recipe on other kinds of CPU: oneDNN and torch are limited to their instructions."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CHECKPOINTS, TINY, into, losses, train

AUTO = (*TINY, "--training.mixed_precision_param=auto", "--training.steps=3")
LAPTOP: dict[str, Any] = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
SERVER = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512"}  # without VNNI
needs_avx512 = pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="this CPU has no AVX-512 instructions"
)
RECIPES = {
    "tensorwise": ["--model.converters=float8"],
    "rowwise": ["--model.converters=float8", "--float8.recipe_name=rowwise"],
    "rowwise_with_gw_hp": ["--model.converters=float8", "--float8.recipe_name=rowwise_with_gw_hp"],
    "delayed": ["--model.converters=float8", "--float8.recipe_name=delayed"],
    "int8": ["--model.converters=int8"],
    "mx": ["--model.converters=mx", "--mx.emulate"],
}

NEXT = "== next run"
ONE_PROCESS = f"""
import sys, runs
for flags in sys.argv[1:]:
    print("{NEXT}", flush=True)
    runs.train_here(*flags.split())
"""  # a process starts as slowly as it trains


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses with this machine's best instructions."""
    folder = tmp_path_factory.mktemp("bfloat16")
    train(*AUTO, "--training.mixed_precision_param=bfloat16", into(folder))
    return losses(folder)


@pytest.mark.full
def test_a_laptop_computes_in_float32_and_a_resumed_run_goes_on_in_it(
    bfloat16: dict[int, float], tmp_path: Path
) -> None:
    output = train(*AUTO, *CHECKPOINTS, into(tmp_path), **LAPTOP)
    assert "float32 GEMMs (this CPU has no bfloat16 instructions, so bfloat16 GEMMs would be slower)" in output
    assert losses(tmp_path) == pytest.approx(bfloat16, abs=3e-2)
    assert "float32 GEMMs" in train(*AUTO, *CHECKPOINTS, "--training.steps=5", into(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize(
    "environment",
    [LAPTOP, pytest.param(SERVER, marks=needs_avx512), {}],
    ids=["laptop", "server", "this machine"],
)
def test_every_recipe_trains(environment: dict[str, Any], bfloat16: dict[int, float], tmp_path: Path) -> None:
    runs = [" ".join((*AUTO, *flags, into(tmp_path / recipe))) for recipe, flags in RECIPES.items()]
    output = train(*runs, command=[sys.executable, "-c", ONE_PROCESS], **environment)
    for recipe, log in zip(RECIPES, output.split(NEXT)[1:], strict=True):
        assert "low-precision GEMMs ran in this step" in log and "times as long as in" in log, recipe
        assert losses(tmp_path / recipe) == pytest.approx(bfloat16, abs=3e-2), recipe
