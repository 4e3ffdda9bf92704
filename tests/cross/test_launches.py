"""Compiled code for a GPU launches our own kernels itself: calling operators takes the host as long as small GEMMs take
the GPU. And what these kernels write at once."""

import pytest
from simulated import needs_triton, on_gpu

pytestmark = [needs_triton, pytest.mark.full]

SELECTIVE = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op")


def test_compiled_code_launches_int8_gemms() -> None:
    """Seven in the forward pass of a block, and two for each in the backward pass: selective recomputation keeps their
    results, as those of other GEMMs."""
    flags = "--model.converters=int8", *SELECTIVE
    report = on_gpu("sm_90", "steps.train", flags, layers=1, batches=((1, 512), (1, 512)))
    blocks = sorted((graph for graph in report.lowered if graph.is_block), key=lambda graph: graph.backward)
    gemms = [sum(call.operator == "torchtitan.int8_mm" for call in graph.calls) for graph in blocks]
    assert gemms == [launched(graph.code) for graph in blocks] == [7, 14]
    assert not any("torchtitan.int8_mm" in graph.code for graph in blocks)


def launched(code: str) -> int:
    return sum(line.lstrip().startswith("int8_gemm_kernel_") and ".run(" in line for line in code.splitlines())


def test_gemms_that_compiled_code_launches_are_counted() -> None:
    """By the profiler, in which each launch has the kernel's name."""
    assert on_gpu("sm_90", "steps.counted_launches") == 3


@pytest.mark.parametrize("kernel", ["experts", "swiglu"])
def test_what_is_rounded_is_written_16_bytes_at_once(kernel: str) -> None:
    """Also transposed, and experts' rows filled up, where each thread wrote 32 single bytes; and scales."""
    assert set(on_gpu("sm_90", "steps.stores", kernel)) == {"st.global.v4.b32", "st.global.b32"}
