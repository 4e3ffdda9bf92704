"""Training steps as a GPU would get them, on a machine without one: every recipe of a Llama 3 8B with two layers, and
those for experts of a Qwen3 30B-A3B with two.

Nothing is computed. The compiler lowers the real training code for a simulated GPU (`lowering.py`), and
what would go wrong or slowly there is looked for in what it generates, and in the operations outside it.
"""

import dataclasses
import fcntl
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered import Call, Lowered, kernels, slow_parts
from simulated import needs_triton, on_gpu

pytestmark = needs_triton

FIGURES = Path(__file__).with_name("figures.json")
VERSION = ".".join(torch.__version__.split(".")[:2])
ROUNDING = 1.005

# Layouts of 8-bit operands that cuBLASLt takes.
# - _int_mm: NVIDIA's cuBLAS documentation, cublasLtMatmul(), "to use IMMA kernels": A transposed and B not (the "TN
#   format"), in its column-major terms; leading dimensions are multiples of 4, pointers aligned by 4. torch itself
#   requires K and N to be multiples of 8 (aten/src/ATen/native/cuda/Blas.cpp, _int_mm_out_cuda).
# - _scaled_mm: the same documentation, "to use FP8 kernels": the TN format before compute capability 10.0, dimensions
#   multiples of 16. torch requires the same of all capabilities for scales of rows (ScaledBlas.cpp).
# - torchtitan.block_mm (kernels/packed_blocks.py): see `check_blocks`.
# - torchtitan.int8_mm: our own kernel (kernels/gemm_triton.py), which reads both operands along K.
# By operator: places of the operands, and what their sizes are multiples of. The left one is row-major, the right one
# column-major.
LAYOUTS = {"aten._int_mm": (0, 1, 8), "aten._scaled_mm": (0, 1, 16), "torchtitan.int8_mm": (0, 2, 16)}

NO_CHECKPOINTING = "--activation_checkpoint.mode=none"


@dataclasses.dataclass(frozen=True)
class Case:
    """Of a run: its flags in addition to --training.compile, and its size."""

    flags: Sequence[str] = ()
    world_size: int = 1
    batches: Sequence[tuple[int, int]] = ((1, 8192), (1, 8192))
    gpu: str = "sm_90"
    checkpointing: bool = False
    model: tuple[str, str] = ("llama3", "8B")
    layers: int = 2


def float8(recipe: str, *flags: str, **more: Any) -> Case:
    return Case(("--model.converters=float8", f"--float8.recipe_name={recipe}", *flags), **more)


def int8(recipe: str, *flags: str, **more: Any) -> Case:
    return Case(("--model.converters=int8", f"--int8.recipe_name={recipe}", *flags), **more)


def tensor_parallel(*flags: str, **more: Any) -> Case:
    return Case(("--parallelism.tensor_parallel_degree=4", *flags), world_size=4, **more)


def experts(*flags: str, **more: Any) -> Case:
    return Case(flags, model=("qwen3_moe", "30B-A3B"), **more)


ASYNC = "--parallelism.enable_async_tensor_parallel"
CONTEXT = "--parallelism.context_parallel_degree=4"
HEADS = "--parallelism.context_parallel_rotate_method=alltoall"
DOCUMENTS = "--training.document_mask"
EXPERTS = "--parallelism.expert_parallel_degree=4"

CASES = {
    "selective recomputation": Case(
        ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"),
        checkpointing=True,
    ),
    "float8 tensorwise": float8("tensorwise"),
    "bf16": Case(),
    "int8 rowwise": int8("rowwise"),
    "8 ranks": Case(world_size=8),
    "async tensor parallel": tensor_parallel(ASYNC),
    "documents": Case((DOCUMENTS,)),
    "nvfp4, sm_100": Case(
        ("--model.converters=mx", "--mx.recipe_name=nvfp4", "--mx.keep_last_blocks_fraction=0"), gpu="sm_100"
    ),
    "float8 rowwise_with_gw_hp": float8("rowwise_with_gw_hp"),
    "mx, sm_100": Case(("--model.converters=mx",), gpu="sm_100"),
    "context parallel": Case((CONTEXT,), world_size=4),
    "context parallel, sm_80": Case((CONTEXT,), world_size=4, gpu="sm_80"),
    "dynamic shapes": Case(batches=((1, 8192), (2, 4096), (2, 4096))),
    "experts": experts(),
    "experts, int8 rowwise": experts("--model.converters=int8"),
    "experts, int8 gathered": experts("--model.converters=int8", "--int8.enable_fsdp_int8_all_gather"),
    "experts, int8 all-gather": experts("--model.converters=int8", "--int8.enable_fsdp_int8_all_gather", world_size=8),
    "experts over 4 ranks": experts(EXPERTS, world_size=4),
    "float8 rowwise": float8("rowwise"),
    "float8 blockwise": float8("blockwise"),
    "nvfp4, tensor parallel, sm_100": tensor_parallel(
        "--model.converters=mx", "--mx.recipe_name=nvfp4", "--mx.keep_last_blocks_fraction=0", gpu="sm_100"
    ),
    "float8 delayed": float8("delayed", batches=((1, 8192),) * 3),
    "float8 rowwise, sm_100": float8("rowwise", gpu="sm_100"),
    "float8 all-gather": float8(
        "tensorwise",
        "--float8.enable_fsdp_float8_all_gather",
        "--float8.precompute_float8_dynamic_scale_for_fsdp",
        world_size=8,
    ),
    "float8 of the output layer": float8("tensorwise", "--float8.filter_fqns=layers.0"),
    "float8, async tensor parallel": tensor_parallel(
        ASYNC, "--model.converters=float8", "--float8.recipe_name=tensorwise"
    ),
    "float8 rowwise, tensor parallel": tensor_parallel("--model.converters=float8", "--float8.recipe_name=rowwise"),
    "float8 rowwise, async tensor parallel": tensor_parallel(
        ASYNC, "--model.converters=float8", "--float8.recipe_name=rowwise", batches=((2, 8192), (2, 8192))
    ),
    "float8 rowwise_with_gw_hp, async tensor parallel": tensor_parallel(
        ASYNC, "--model.converters=float8", "--float8.recipe_name=rowwise_with_gw_hp"
    ),
    "int8, async tensor parallel": tensor_parallel(ASYNC, "--model.converters=int8"),
    "int8 tensorwise, gathered": int8("tensorwise", "--int8.enable_fsdp_int8_all_gather"),
    "int8 rowwise, gathered": int8("rowwise", "--int8.enable_fsdp_int8_all_gather"),
    "int8 rowwise, sm_100": int8("rowwise", gpu="sm_100"),
    "int8 rowwise, dynamic shapes": int8("rowwise", batches=((1, 8192), (2, 4096), (2, 4096))),
    "int8 all-gather": int8("rowwise", "--int8.enable_fsdp_int8_all_gather", world_size=8),
    "context parallel by heads": Case((CONTEXT, HEADS), world_size=4),
    "context parallel, documents": Case((CONTEXT, DOCUMENTS), world_size=4),
    "async tensor parallel, 2 sequences": tensor_parallel(ASYNC, batches=((2, 8192), (2, 8192))),
    "full recomputation": Case(("--activation_checkpoint.mode=full",), checkpointing=True),
    "experts, float8 rowwise": experts("--model.converters=float8", "--float8.recipe_name=rowwise"),
    "experts, selective recomputation": experts(
        "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op", checkpointing=True
    ),
    "experts over 4 ranks, float8 rowwise": experts(
        EXPERTS, "--model.converters=float8", "--float8.recipe_name=rowwise", world_size=4
    ),
    "SwiGLU in int8": int8("rowwise", "--activation_checkpoint.swiglu_dtype=int8"),
    "documents, 2 sequences": Case((DOCUMENTS,), batches=((2, 4096),) * 2),
    "AdamW8bit": Case(("--optimizer.name=AdamW8bit",), layers=1),
    "AdamW4bit": Case(("--optimizer.name=AdamW4bit",), layers=1),
    "AdamW, bfloat16 states": Case(("--optimizer.state_dtype=bfloat16",), layers=1),
    "AdamW, bfloat16 weights": Case(("--training.weight_dtype=bfloat16",), layers=1),
}
# Compiled; of 9 matrices and 3 vectors.
UPDATES = {"AdamW8bit", "AdamW4bit", "AdamW, bfloat16 states", "AdamW, bfloat16 weights"}
# Down to registers of the GPU.
COMPILED = {"AdamW, bfloat16 weights", "documents", "float8 all-gather", "float8 rowwise", "int8 rowwise"}

# Where kernels of the compiler's still do what `slow_parts` looks for; all other cases must not.
SLOW = {
    # The second copy of what is rounded is written by the kernel that normalizes, gates or reduces its rows.
    "transposed": {
        *("float8 rowwise", "float8 rowwise, sm_100", "float8 tensorwise", "float8 of the output layer"),
        *("float8 all-gather", "float8 delayed", "float8 blockwise", "int8 rowwise", "int8 rowwise, dynamic shapes"),
        *("int8 rowwise, gathered", "int8 tensorwise, gathered", "int8 all-gather", "SwiGLU in int8"),
        *("int8 rowwise, sm_100", "int8, async tensor parallel", "experts, float8 rowwise", "experts, int8 rowwise"),
        *("experts, int8 gathered", "experts, int8 all-gather"),
        "experts over 4 ranks, float8 rowwise",
    },
    # Where batches have several shapes, tokens are counted through sequences of any length.
    "divisor": {"dynamic shapes", "int8 rowwise, dynamic shapes"},
    # There is a scale for each 128 numbers, and torchao computes it so.
    "float64": {"float8 blockwise"},
    # The compiler repeats no more than 30 operations: it keeps the results of more.
    "float32": {"SwiGLU in int8", "float8 blockwise"},
}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_step(name: str, request: pytest.FixtureRequest) -> None:
    case = CASES[name]
    flags = case.flags if case.checkpointing else (*case.flags, NO_CHECKPOINTING)
    report = on_gpu(
        *(case.gpu, "steps.train", flags, case.world_size, *case.model, case.layers, case.batches, name in COMPILED)
    )
    # With 128 channels a head, torch's own template keeps 240 bytes a thread on the stack.
    assert [kernel for kernel in report.spilling if "flex_attention_backward" not in kernel] == []
    check_layouts([call for graph in report.lowered for call in graph.calls])
    assert not report.masks and not any(graph.masks for graph in report.lowered)
    assert not any(same_blocks_for_all_sequences(graph.code) for graph in report.lowered)
    assert not any(unordered(source) for graph in report.lowered for _, _, source in kernels(graph))
    if json.loads(FIGURES.read_text())["torch"] == VERSION:  # others generate other kernels
        found = (slow_parts(source) for graph in report.lowered for _, _, source in kernels(graph))
        assert set[str]().union(*found) == {part for part, cases in SLOW.items() if name in cases}
    assert not report.waits
    products = [call for graph in report.lowered for call in graph.calls if ".mm" in call.operator]
    assert not any(call.operands[0].dtype == "float32" for call in products)  # those run without tensor cores
    attention = {call.operator for graph in report.lowered for call in graph.calls if "attention" in call.operator}
    assert all(("flash" if case.gpu == "sm_80" else "cudnn") in operator for operator in attention)
    assert len(attention) == (0 if DOCUMENTS in case.flags else 2)  # forward and backward
    if ASYNC in case.flags:
        # The sum before a backward reduce-scatter is over several GEMMs. torch has no operator for int8 GEMMs.
        # rowwise_with_gw_hp gathers tokens once more, for its weight gradients.
        assert report.fused == {"int8": (0, 8), "gw_hp": (10, 2)}.get(name.split(",")[0].split("_with_")[-1], (6, 2))
    if "--parallelism.tensor_parallel_degree=4" in flags and "--float8.recipe_name=rowwise" in flags:
        assert tokens_gathered(report.lowered) == {"float8_e4m3fn": 4}
    blocks = [graph for graph in report.lowered if graph.is_block]
    if name in UPDATES:
        assert sum(graph.kernels for graph in report.lowered if graph not in blocks) < 22
    assert any(graph.backward for graph in blocks)
    figures = {
        "kernels of a block": sum(graph.kernels for graph in blocks),
        "GB of a block": round(sum(graph.bytes for graph in blocks) / 1e9, 3),
        "GB of other compiled code": round(sum(g.bytes for g in report.lowered if g not in blocks) / 1e9, 3),
        "GB of uncompiled operations": round(report.bytes / 1e9, 3),
    }
    compare(name, figures, renew=request.config.getoption("--renew", False))


@pytest.mark.full
@pytest.mark.parametrize("gpu, backend", [("sm_90", "cudnn"), ("sm_80", "flash")])
def test_the_log_names_the_kernel_of_attention(gpu: str, backend: str) -> None:
    assert on_gpu(gpu, "steps.attention_names") == [backend, "flex", backend, "flex"]


@pytest.mark.full
def test_the_factor_of_clipping_is_rounded_as_if_gradients_were_multiplied_before() -> None:
    """A GPU multiplies once more, and does all else as without it. A product that goes into a fused multiply-add is not
    rounded: it would make another first moment."""
    without, multiplied = (on_gpu("sm_90", "steps.operations_of_an_update", factor) for factor in (False, True))
    numbers = multiplied.pop("selp.f32") - without.pop("selp.f32", 0)
    assert numbers > 0 and without["fma.rn.f32"] > 0
    products = {key: count for key, count in multiplied.items() if key.startswith("mul")}
    assert sum(products.values()) == numbers + sum(without.get(key, 0) for key in products)
    others = {key for key in {*without, *multiplied} if not key.startswith("mul")}
    assert {key: multiplied.get(key) for key in others} == {key: without.get(key) for key in others}


def tokens_gathered(graphs: Sequence[Lowered]) -> dict[str, int]:
    """How often tokens of a block are all-gathered, with a GEMM or without, by dtype; not counting scales."""
    gathers = [call.operands[0] for graph in graphs for call in graph.calls if "all_gather" in call.operator]
    return dict(Counter(operand.dtype for operand in gathers if operand.shape[-1] > 1))


def same_blocks_for_all_sequences(code: str) -> bool:
    """Whether flex attention takes the blocks that documents see from the first sequence for the others too."""
    several = re.search(r"SPARSE_Z = (?!1\b)", code)
    return bool(several and re.search(r"stride_\w*(?:blks|idx)_h = 0\b", code))


def unordered(source: str) -> bool:
    """Whether a loop of a kernel reads what one before has written, or writes what one before has read, without a
    barrier in between: other threads may be at it."""
    loop, last = 0, {"load": dict[str, int](), "store": dict[str, int]()}
    for line in source.splitlines():
        loop += " in tl.range(" in line
        if "tl.debug_barrier()" in line:
            last = {"load": {}, "store": {}}
        elif access := re.search(r"tl\.(load|store)\((\w+) ", line):
            access_type, pointer = access.groups()
            if last["store" if access_type == "load" else "load"].get(pointer, loop) < loop:
                return True
            last[access_type][pointer] = loop
    return False


# Of kernels as the compiler writes them.
PER_NUMBER = """
    size_hints={'x': 33554432},
    triton_meta={'signature': {'in_ptr0': '*bf16', 'in_ptr1': '*fp32', 'out_ptr0': '*fp8e4nv', 'ks0': 'i64'}}
    x0 = (xindex % 4096)
    tmp0 = tl.load(in_ptr0 + (x2), None).to(tl.float32)
    tmp1 = tl.load(in_ptr1 + (x0), None, eviction_policy='evict_last')
    tmp2 = tmp0 * tmp1
    tl.store(out_ptr0 + (x2), tmp2, None)
"""
ALONG_ROWS = """
    size_hints={'x': 8192, 'r0_': 4096},
    triton_meta={'signature': {'in_ptr0': '*bf16', 'out_ptr1': '*fp8e4nv', 'out_ptr2': '*fp32'}}
    x0 = xindex
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_1 = r0_index
        tmp0 = tl.load(in_ptr0 + (r0_1 + 4096*x0), r0_mask, other=0.0).to(tl.float32)
    tmp1 = triton_helpers.max2(_tmp1, 1)[:, None]
    tmp2 = tmp1.to(tl.float64)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_1 = r0_index
        tmp3 = tl.load(in_ptr0 + (r0_1 + 4096*x0), r0_mask, other=0.0).to(tl.float32)
        tl.store(out_ptr1 + (r0_1 + 4096*x0), tmp3, r0_mask)
    tl.store(out_ptr2 + (x0), tmp2, None)
"""


@pytest.mark.parametrize(
    "part, source, good, slow",
    [
        ("divisor", PER_NUMBER, "% 4096", "% ks0"),
        ("float64", PER_NUMBER, "tmp0 * tmp1", "tmp1.to(tl.float64)"),
        ("float64", ALONG_ROWS, "tl.store(out_ptr1", "tmp4 = tmp3.to(tl.float64)\n        tl.store(out_ptr1"),
        ("transposed", ALONG_ROWS, "out_ptr1 + (r0_1 + 4096*x0)", "out_ptr1 + (x0 + 8192*r0_1)"),
        (
            "float32",
            ALONG_ROWS,
            "    tmp1 =",
            "        tl.store(out_ptr2 + (r0_1), tmp0, r0_mask)\n    tmp1 = tl.load(out_ptr2 + (x0))\n    tmp1 =",
        ),
    ],
)
def test_slow_parts_of_a_kernel_are_seen(part: str, source: str, good: str, slow: str) -> None:
    """Not float64 of one number a row, nor a small kernel. And the table of what is left names cases that there are."""
    assert set().union(*SLOW.values()) <= CASES.keys()
    assert slow_parts(source) == set()
    planted = source.replace(good, slow)
    assert slow_parts(planted) == {part}
    assert slow_parts(re.sub(r"size_hints={'x': \d+", "size_hints={'x': 1", planted)) == set()


@pytest.mark.full
@pytest.mark.skipif(torch.__version__ >= "2.14", reason="the compiler adds this barrier itself")
def test_a_loop_waits_for_what_another_has_written() -> None:
    """Triton does not (triton-lang/triton#10924): on an H100 gradients before experts came from earlier steps."""
    without, separate = (on_gpu("sm_90", "steps.loops_over_gathered_rows", how) for how in (False, True))
    assert any(map(unordered, without))
    assert separate and not any(map(unordered, separate))


def check_layouts(calls: Sequence[Call]) -> None:
    """Fails if an operand of an 8-bit GEMM has a layout that cuBLASLt refuses."""
    for call in calls:
        if call.operator.startswith("torchtitan.block_mm"):
            check_blocks(call)
        for operator, (left_place, right_place, multiple) in LAYOUTS.items():
            if call.operator.startswith(operator):
                left, right = call.operands[left_place], call.operands[right_place]
                assert left.strides[1] == 1 and right.strides[0] == 1, call
                sizes = [size for size in (*left.shape[1:], *right.shape) if isinstance(size, int)]
                assert not any(size % multiple for size in sizes), call


def check_blocks(call: Call) -> None:
    """Fails if operands of a block-scaled GEMM are not as cuBLASLt takes them, by the checks in torch's ScaledBlas.cpp
    (`_scaled_nvfp4_nvfp4`, `_scaled_mxfp8_mxfp8`, `_scaled_block1x128_block128x128` and
    `_scaled_block1x128_block1x128`)."""
    half = len(call.operands) // 2
    (left, left_scale, *_), (right, right_scale, *_) = call.operands[:half], call.operands[half:]
    (m, k), (_, n) = left.shape, right.shape
    assert left.strides == (k, 1) and right.strides == (1, k), call
    if left.dtype == "int64" or left_scale.dtype == "float8_e8m0fnu":
        # 16 numbers of nvfp4, an even number of blocks; or mxfp8, in blocks of 32
        (blocks, rest) = (k, k % 2) if left.dtype == "int64" else divmod(k, 32)
        assert rest == 0 and n % 16 == 0, call
        for rows, scale in ((m, left_scale), (n, right_scale)):
            assert scale.dtype == ("float8_e4m3fn" if left.dtype == "int64" else "float8_e8m0fnu"), call
            assert scale.shape == (-(-rows // 128) * 128 * -(-blocks // 4) * 4,), call
        assert left.dtype != "int64" or call.operands[half - 1].shape == (), call
        return
    assert left_scale.shape == (m, k // 128) and left_scale.strides == (1, m) and k % 128 == 0, call
    rows = right_scale.shape[0]
    assert right_scale.shape in ((n, k // 128), (-(-k // 512) * 4, n // 128)) and right_scale.strides == (1, rows), call


def compare(name: str, figures: dict[str, float], renew: bool) -> None:
    """Fails if kernels or bytes are more than recorded for this version of torch."""
    with FIGURES.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        recorded = json.load(file)
        if renew:
            cases = {**(recorded["cases"] if recorded["torch"] == VERSION else {}), name: figures}
            file.seek(0)
            file.truncate()
            json.dump({**recorded, "torch": VERSION, "cases": dict(sorted(cases.items()))}, file, indent=1)
            file.write("\n")
            return
    if recorded["torch"] == VERSION:
        known = recorded["cases"][name]
        more = {key: (number, known[key]) for key, number in figures.items() if number > known[key] * ROUNDING}
        assert not more, f"more than recorded: {more}; if that is meant: python -m pytest tests/cross --renew -m ''"


@pytest.mark.full
@pytest.mark.parametrize("name", ["float8 rowwise", "float8 tensorwise", "mx, sm_100", "SwiGLU in int8"])
def test_8_bit_results_are_not_beside_minima_that_keep_nan(name: str) -> None:
    """Triton writes wrong ones there (triton-lang/triton#11111), and torch's compiler from 2.14 on generates both."""
    case = CASES[name]
    flags = (*case.flags, NO_CHECKPOINTING)
    assert on_gpu(case.gpu, "steps.nan_instructions", flags) == []
    if name == "float8 rowwise":
        assert on_gpu(case.gpu, "steps.nan_instructions", flags, avoided=False) != []


@pytest.mark.parametrize("fault", ["column-major operand", "item", "dense mask", "unpinned batch"])
def test_a_planted_fault_is_seen(fault: str) -> None:
    """The checks above find what they are for."""
    calls, masks, waits = on_gpu("sm_90", "steps.with_fault", fault)
    if fault == "column-major operand":
        with pytest.raises(AssertionError, match="_int_mm"):
            check_layouts(calls)
    elif fault == "dense mask":
        assert masks
    else:
        assert len(waits) == 1 and ("between host and device" in waits[0]) == (fault == "unpinned batch")


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["nvfp4", "mx"])
def test_kernels_of_blocks_compile_without_spilling_registers(recipe: str) -> None:
    """Our own, with what a layer's three tensors need."""
    assert on_gpu("sm_100", f"steps.{recipe}_spills") == []


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_of_8_bits_compile_without_spilling_registers(capability: int) -> None:
    """Our own, for Ampere, Hopper and Blackwell, in all their configurations."""
    assert on_gpu("sm_90", "steps.spills_of_8_bits", capability) == []


# The most bytes that a block may move, as a multiple of what it moves in bf16.
LARGEST_SHARES = {
    **dict.fromkeys(("int8 rowwise", "int8 rowwise, gathered", "int8 tensorwise, gathered"), 1.15),
    **dict.fromkeys(("float8 rowwise", "float8 rowwise, sm_100"), 1.15),
    "float8 delayed": 1.05,
    **dict.fromkeys(("experts, float8 rowwise", "experts, int8 rowwise"), 1.18),
    **{"experts, int8 gathered": 0.9, "experts, int8 all-gather": 1.05},
    "mx, sm_100": 1.2,
}


@pytest.mark.parametrize("name, share", LARGEST_SHARES.items())
def test_8_bits_move_hardly_more_bytes_than_bf16(name: str, share: float) -> None:
    """By the recorded figures, which `test_a_step` compares with new ones."""
    recorded = json.loads(FIGURES.read_text())["cases"]
    bf16 = recorded["experts" if name.startswith("experts") else "bf16"]
    assert recorded[name]["GB of a block"] <= share * bf16["GB of a block"]


@pytest.mark.parametrize("recipe", ["bf16", "float8 tensorwise", "float8 rowwise"])
def test_a_block_moves_fewer_bytes_than_torchtitan_0_1_0(recipe: str) -> None:
    """By recorded figures: ours, and the other's, which `python -m benchmarks block_bytes` measures again."""
    recorded = json.loads(FIGURES.read_text())
    ours, other = recorded["cases"][recipe], recorded["torchtitan 0.1.0"]["cases"][recipe]
    assert ours["GB of a block"] <= 0.9 * other["GB of a block"]


@pytest.mark.full
def test_what_spills_is_seen() -> None:
    assert on_gpu("sm_90", "steps.spilling_kernel")
