"""Our own operators: what a call costs the host, and how the profiler counts those that compiled code replaces."""

import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan.converters.formats import OPS
from torchtitan.converters.gemm_check import _runs
from torchtitan.kernels.grouped_8bit import grouped_8bit_mm
from torchtitan.kernels.operator import operator

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no triton for this platform")


@operator("twice", lambda x: torch.empty_like(x))
def twice(x: torch.Tensor) -> torch.Tensor:
    return x + x


def test_a_call_runs_no_python_but_the_operators() -> None:
    """The wrapper of `torch.library.custom_op` took the host three times as long as the call itself, and small models
    on GPUs wait for the host."""
    x, called = torch.ones(3), []
    twice(x)
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        twice(x)
    finally:
        sys.setprofile(None)
    assert [name for name in called if name != "__call__"] == ["twice"]


def test_the_profiler_shows_an_operator_and_the_kernel_that_compiled_code_launches_in_its_place() -> None:
    op, of_experts = OPS["int8", "gpu"]
    assert _runs("torchtitan::int8_mm", op) and _runs("int8_gemm_kernel_12", op)
    assert not _runs("int8_gemm_kernel_12", of_experts)
    assert not any(_runs("triton_poi_fused_int8_gemm_kernel_0", op) for op in OPS["float8", "gpu"])
    assert not any(_runs("int8_gemm_kernel_0", op) for op in OPS["float8", "gpu"])
    assert str(grouped_8bit_mm) == of_experts.operation.replace("::", ".") + ".default"


@needs_triton
def test_int8_gemms_are_timed_once_for_similar_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation has other lengths than training, and the last batch fewer rows."""
    from torchtitan.kernels import gemm_triton

    timed, launched = [], []

    class Tuned:
        best_config = gemm_triton.CONFIGS[1]

        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **constants: timed.append(arguments[5:8])

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **constants: launched.append((grid, arguments[5:8], constants))

    monkeypatch.setattr(gemm_triton, "tuned_int8", Tuned())
    monkeypatch.setattr(gemm_triton, "int8_gemm_kernel", Kernel())
    monkeypatch.setattr(gemm_triton, "_CHOSEN", {})
    for m, n in ((2048, 256), (1025, 256), (2048, 256), (2049, 256), (2048, 512)):
        a, b = torch.ones(m, 64, dtype=torch.int8), torch.ones(n, 64, dtype=torch.int8).t()
        out = gemm_triton.int8_gemm(a, torch.ones(m, 1), b, torch.ones(1, n), torch.bfloat16)
        assert out.shape == (m, n) and out.dtype == torch.bfloat16
    assert timed == [(2048, 256, 64), (2049, 256, 64), (2048, 512, 64)]
    chosen = SimpleNamespace(**launched[0][2])
    assert (chosen.BLOCK_M, chosen.BLOCK_N, chosen.num_warps, chosen.GROUP) == (128, 128, 8, gemm_triton.GROUP)
    assert [(grid, sizes) for grid, sizes, _ in launched] == [((9 * 2,), (1025, 256, 64)), ((16 * 2,), (2048, 256, 64))]


@needs_triton
@pytest.mark.parametrize("shape, grid", [((128, 768, 64), (24, 128)), ((4096, 64), (256, 1)), ((2, 20, 64), (3, 2))])
def test_few_programs_write_magnitudes_of_the_same_columns(
    shape: tuple[int, ...], grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of many experts occupy a GPU with more rows for each program than one of them alone."""
    from torchtitan.kernels import rounding_triton

    grids: dict[tuple[int, int], Any] = {}

    class Kernel:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            return grids.setdefault(grid, lambda *arguments, **constants: None)

    monkeypatch.setattr(rounding_triton, "round_rows_kernel", Kernel())
    rounding_triton.round_rows_triton(torch.ones(shape), torch.int8)
    assert [*grids] == [grid]


@needs_triton
def test_any_number_of_experts_rows_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA has at most 65,535 programs along all dimensions of a grid but the first."""
    from torchtitan.kernels import rounding_triton

    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *arguments, **constants: None

    monkeypatch.setattr(rounding_triton, "amax_kernel", Kernel())
    monkeypatch.setattr(rounding_triton, "round_kernel", Kernel())
    rows, ends = torch.empty(5_000_000, 64, device="meta"), torch.empty(8, dtype=torch.int32, device="meta")
    rounding_triton.round_both(rows, ends, 5_000_192, torch.int8)
    assert len(grids) == 2 and all(max(grid[1:], default=1) < 2**16 and grid[0] > 70_000 for grid in grids)
