"""What runs in a process with a simulated GPU: training steps on fake tensors, watched.

Importing it changes the compiler for good, so the tests must not, not even to unpickle what a function returns.
"""

import contextlib
import dataclasses
import functools
import itertools
import re
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock, patch

import numpy as np
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from compiler import in_compiled_code, remember
from lowered import Call, binaries, is_mask, kernels, record, resource_usage, spilled, spills
from simulated import Report
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen import triton as triton_code
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchtitan.checks.config_checks import check
from torchtitan.compat import inductor
from torchtitan.config import ConfigManager
from torchtitan.converters.formats import OPS
from torchtitan.converters.gemm_check import _count
from torchtitan.converters.linear_converter import LinearConverter
from torchtitan.converters.scaling import amax_histories
from torchtitan.data import Batch
from torchtitan.data.loader import BatchSpec, build_batch
from torchtitan.data.packing import Window
from torchtitan.device import find_device
from torchtitan.engine.engine import Engine, build_engine, train_step
from torchtitan.kernels import (
    gemm_triton,
    mx_triton,
    nvfp4_triton,
    rounding_triton,
    swiglu_triton,
)
from torchtitan.kernels.attention import kernel_name
from torchtitan.kernels.block_formats import SIGNS, SMALLEST_TENSOR_SCALE, ScaleMode
from torchtitan.kernels.cpu_gemm import int8_mm
from torchtitan.kernels.grouped_gemm import ALIGNMENT
from torchtitan.kernels.quantize import WIDEST
from torchtitan.models import MODELS
from torchtitan.optim import muon, state_formats
from torchtitan.optim.low_bit_adamw import update
from torchtitan.optim.skip_step import UpdateGuard
from torchtitan.optim.state_formats import StateFormat
from torchtitan.parallel import async_tensor
from torchtitan.parallel.dims import build_meshes
from torchtitan.protocols import AttentionSpec
from torchtitan.tools.plan.simulation import fake_process_group

ROOT = Path(__file__).parents[2]
aten = torch.ops.aten
ATTENTION_WITH_BIAS = {
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}


LOWERED = record()
REDUCTION_FUNCTION = triton_code.get_triton_reduction_function
NO_PASSES: dict[str, Any] = {
    "_micro_pipeline_tp": False,
    "post_grad_custom_pre_pass": None,
    "post_grad_custom_post_pass": None,
}


class Watch(TorchDispatchMode):
    """Sees each operation outside compiled code."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.report = Report(LOWERED, [], [], Counter(), 0)

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # so that torch.compile works within

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            if args[0].device.type == "cuda":
                self.report.waits.append(f"{func} {place()}")
            return 0
        out = func(*args, **kwargs)
        if (
            not isinstance(func, torch._ops.OpOverload)
            or in_compiled_code()
            or (func is aten.copy_.default and args[0] is args[1])  # does nothing
            or not all(tensor_type in (torch.Tensor, torch.nn.Parameter, FakeTensor) for tensor_type in types)
        ):
            return out
        read = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        wrote = [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in (*read, *wrote) if tensor.dim() or tensor.device.type != "cpu"}
        if func in (aten._to_copy.default, aten.copy_.default) and len(devices) == 2:
            asynchronous = kwargs.get("non_blocking") or (func is aten.copy_.default and len(args) > 2 and args[2])
            source = args[0] if func is aten._to_copy.default else args[1]
            if not asynchronous or (source.device.type == "cpu" and not hasattr(source, "is_in_pinned_memory")):
                self.report.waits.append(f"{func} between host and device {place()}")
        for tensor in wrote:
            if tensor.dtype == torch.bool and is_mask(tensor.shape):
                self.report.masks.append(f"{func} {tuple(tensor.shape)} {place()}")
        if func in ATTENTION_WITH_BIAS and args[3] is not None:
            self.report.masks.append(f"{func} {place()}")
        if "cuda" in devices and not func.is_view and func.namespace in ("aten", "fsdp"):
            self.report.calls[str(func)] += 1
            self.report.bytes += sum(tensor.nbytes for tensor in (*read, *wrote))
        return out


def place() -> str:
    """The line of this project that runs."""
    frames = [f for f in traceback.extract_stack() if f.filename.startswith(str(ROOT / "torchtitan"))]
    return f"in {Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else "elsewhere"


def train(
    flags: Sequence[str],
    world_size: int = 1,
    family: str = "llama3",
    flavor: str = "8B",
    layers: int = 2,
    batches: Sequence[tuple[int, int]] = ((1, 8192), (1, 8192)),
    look_for_spills: bool = False,
    remembered: bool = True,
) -> Report:
    """Training steps of rank 0, one per (batch size, sequence length).

    Args:
        flags: of the command line.
        world_size: ranks of the run, of which the others do not exist.
        layers: of the model; all are compiled as one.
        look_for_spills: compile the kernels to their registers.
        remembered: do not lower what this process has lowered before.
    """
    watch = Watch()
    flags = ("--training.compile", *flags)
    memory = remember(LOWERED) if remembered else contextlib.nullcontext()
    with memory, build(flags, world_size, family, flavor, layers, batches[0]) as (engine, guard):
        for number, shape in enumerate(batches):
            batch = make_batch(shape, engine.config.training.document_mask)
            with watch:
                watch.report = Report(LOWERED, [], [], Counter(), 0)
                train_step(engine, [batch], 1e-4, guard.should_skip, number)
            delayed = [layer for layer in amax_histories([engine.model]).values() if not layer.has_scales]
            for layer in delayed:
                layer.has_scales = True  # real numbers would give it scales in the first step
            if delayed:  # blocks are compiled once more; the first step's count no longer
                LOWERED[:] = [graph for graph in LOWERED if not graph.is_block]
    report = watch.report
    report.lowered = list(LOWERED)
    if look_for_spills:
        report.spilling = {name: usage for graph in LOWERED for name, usage in spills(graph).items()}
    if engine.fused_gemms is not None:
        report.fused = engine.fused_gemms.count, engine.fused_gemms.separate
    return report


@contextlib.contextmanager
def build(
    flags: Sequence[str], world_size: int, family: str, flavor: str, layers: int, shape: tuple[int, int]
) -> Iterator[tuple[Engine, UpdateGuard]]:
    """What `train_step` needs, on fake tensors, which are made within this context, too."""
    rows, seq_len = shape
    config = ConfigManager().parse_args(
        [
            f"--model.name={family}",
            f"--model.flavor={flavor}",
            f"--training.seq_len={seq_len}",
            f"--training.local_batch_size={rows}",
            "--training.mixed_precision_param=bfloat16",
            f"--job.dump_folder={tempfile.gettempdir()}/no_run",  # not a user's
            *flags,
        ]
    )
    torch.compiler.reset()
    LOWERED.clear()
    spec, mode = MODELS.get(family), FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        device = find_device(0)
    dims = check(config, world_size, device.type)
    holder = "cpu" if config.training.enable_cpu_offload else device.torch_device
    with fake_process_group(0, world_size):
        args = dataclasses.replace(spec.flavor(flavor), n_layers=layers)
        meshes = build_meshes(dims, device.type, args)
        with mode, torch._inductor.config.patch(**NO_PASSES):
            engine = build_engine(
                config,
                meshes,
                device,
                args,
                rows * dims.dp,
                allocate=lambda model, stages, *_: [stage.to_empty(device=holder) for stage in stages],  # type: ignore[arg-type]
            )
            yield engine, UpdateGuard(config.training, lambda *_: None)


def attention_names() -> list[str]:
    """What the log of a run calls attention: plain, within documents, under context parallelism, in float32 too."""
    with FakeTensorMode():
        q = torch.empty(1, 32, 2, 128, dtype=torch.bfloat16, device="cuda")
        variants = [(q, False, False), (q, True, False), (q, False, True), (q.float(), False, True)]
        return [kernel_name(AttentionSpec(), q, 8, *masks) for q, *masks in variants]


def make_batch(shape: tuple[int, int], document_mask: bool, pin_memory: bool = True) -> Batch:
    """As the loader makes it."""
    rows, seq_len = shape
    window = Window(np.zeros(seq_len + 1, np.int64), np.zeros(seq_len + 1, np.int64), [])
    return build_batch([window] * rows, BatchSpec(range(rows), rows, rows, document_mask, False, pin_memory))


def _pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    pinned: Any = tensor.clone()
    pinned.is_in_pinned_memory = True
    return pinned


torch.Tensor.pin_memory = _pin_memory  # type: ignore[method-assign, assignment]


NAN_INSTRUCTION = re.compile(r"m(?:in|ax)\.(?:\w+\.)*NaN")
EIGHT_BITS = re.compile(r"out_ptr\d+': '\*(?:fp8|[iu]8)")


def nan_instructions(flags: Sequence[str], avoided: bool = True) -> list[str]:
    """Kernels of a step that write 8-bit numbers beside minima or maxima that keep NaN, of a compiler that uses these
    as torch 2.14's and later ones do. Only the first one where they are not avoided."""

    @triton.jit
    def minimum(a, b):  # type: ignore[no-untyped-def]
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)

    @triton.jit
    def maximum(a, b):  # type: ignore[no-untyped-def]
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

    overrides, pattern = triton_code.TritonOverrides, "tl.{}({}, {}, tl.PropagateNan.ALL)"
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (overrides, "minimum", staticmethod(functools.partial(pattern.format, "minimum"))),
            (overrides, "maximum", staticmethod(functools.partial(pattern.format, "maximum"))),
            (triton_helpers, "minimum", minimum),
            (triton_helpers, "maximum", maximum),
            (triton_code, "get_triton_reduction_function", REDUCTION_FUNCTION),
            *(() if avoided else ((inductor, "avoid_nan_instructions", lambda: None),)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        lowered = train(flags, layers=1, batches=((1, 512),), remembered=False).lowered
        found = (
            name
            for graph in lowered
            for name, kernel, source in kernels(graph)
            if EIGHT_BITS.search(source)
            and any(NAN_INSTRUCTION.search(binary["ptx"]) for binary in binaries(source, kernel, False))
        )
        return list(itertools.islice(found, None if avoided else 1))


def counted_launches() -> int:
    """Of three int8 GEMMs in compiled code, those that the check of a run's GEMMs counts. The launches do nothing."""
    torch.compiler.reset()
    LOWERED.clear()
    with FakeTensorMode():
        a, scale = torch.empty(64, 64, dtype=torch.int8, device="cuda"), torch.empty(64, 1, device="cuda")
        torch.compile(lambda a, scale: int8_mm(a, scale, a.t(), scale.t(), torch.bfloat16))(a, scale)
    ((_, name, source),) = kernels(LOWERED[0])
    tuner = getattr(PyCodeCache.load(source), name)
    tuner.launchers = [Mock(config=tuner.configs[0], store_cubin=False, cache_hash="")]
    op, _ = OPS["int8", "gpu"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=False) as recorded:
        for _ in range(3):
            tuner.run(stream=0)
    return sum(_count(recorded.profiler.kineto_results.events(), {op})[op].values())


def loops_over_gathered_rows(separate: bool) -> list[str]:
    """Sources of the kernels that gather rows, add and normalize them, with what `compat.inductor` changes or without.
    One loop writes the sums and the next reads them."""

    def normalized(x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sums = x[places].sum(1)
        return sums, torch.nn.functional.rms_norm(sums, (4096,))

    torch.compiler.reset()
    LOWERED.clear()
    inductor.separate_loops()
    body: Any = triton_code.TritonKernel.codegen_body
    with (
        patch.object(triton_code.TritonKernel, "codegen_body", body if separate else body.__wrapped__),
        FakeTensorMode(),
    ):
        x = torch.empty(512, 4096, dtype=torch.bfloat16, device="cuda")
        torch.compile(normalized)(x, torch.zeros(256, 2, dtype=torch.int64, device="cuda"))
    return [source for graph in LOWERED for _, _, source in kernels(graph)]


def operations_of_an_update(multiplied: bool) -> dict[str, int]:
    """How often AdamW's update of float32 numbers has each float32 operation in a GPU's assembly; with the factor of
    clipping or without."""
    torch.compiler.reset()
    LOWERED.clear()
    formats = StateFormat("exp_avg", torch.float32), StateFormat("exp_avg_sq", torch.float32)
    with FakeTensorMode():
        weight, grad, first, second = (torch.empty(1024, 512, device="cuda") for _ in range(4))
        step, factor = (torch.empty((), device="cuda") for _ in range(2))
        state = {"step": step, "exp_avg": first, "exp_avg_sq": second}
        compiled = torch.compile(update, fullgraph=True, dynamic=False, options=inductor.few_launches())
        shards: Any = [(weight, grad, state, torch.empty((), dtype=torch.int64))]
        constants = (0.9, 0.95, 1e-8, 0.1)
        compiled(shards, formats, torch.empty(()), None, False, *constants, factor if multiplied else None)
    [(_, name, source)] = [kernel for graph in LOWERED for kernel in kernels(graph)]
    [binary] = binaries(source, name, False)
    return Counter(re.findall(r"^\s*((?:fma|mul|add|sub|div|neg|selp)\b[\w.]*f32)\b", binary["ptx"], re.MULTILINE))


def with_fault(fault: str) -> tuple[list[Call], list[Any], list[str]]:
    """Calls, masks and waits of something wrong."""
    torch.compiler.reset()
    LOWERED.clear()
    watch = Watch()
    with FakeTensorMode(allow_non_fake_inputs=True):
        a, b = (torch.empty(256, 256, dtype=torch.int8, device="cuda") for _ in range(2))
        x = torch.empty(1, 4, 4096, 64, dtype=torch.bfloat16, device="cuda")
        batch = make_batch((1, 4096), False, pin_memory=False)
        with watch:
            if fault == "column-major operand":
                torch.compile(lambda a, b: torch._int_mm((a + 1).t().contiguous(), b.t()))(a, b)
            elif fault == "item":
                x.sum().item()
            elif fault == "unpinned batch":
                batch.tokens.to("cuda", non_blocking=True)
            else:
                mask = torch.ones(4096, 4096, dtype=torch.bool, device="cuda").tril()
                torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    return [call for graph in LOWERED for call in graph.calls], watch.report.masks, watch.report.waits


def spilling_kernel() -> bool:
    """Whether a kernel spills that holds 512 numbers in each thread."""
    source = ASTSource(normalize, {"numbers": "*fp32", "SIZE": "constexpr"}, {"SIZE": 2**14})
    binary = triton.compile(source, target=triton.runtime.driver.active.get_current_target(), options={"num_warps": 1})
    return spilled(resource_usage(binary.asm["cubin"]))


def spills_of_8_bits(capability: int) -> list[str]:
    """Configurations of our kernels for 8 bits that spill registers on this GPU, and what they use. Of Blackwell only
    GEMMs, whose instructions are its own; what rounds uses Hopper's."""
    spilling = []
    formats = {"*i8": torch.int8, "*fp8e4nv": torch.float8_e4m3fn} if capability >= 89 else {"*i8": torch.int8}
    scales = {"out": "*bf16", "row_scale": "*fp32", "column_scale": "*fp32", "ends": "*i32"}
    for config in gemm_triton.CONFIGS:
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        kernels: list[tuple[Any, str, dict[str, Any]]]
        kernels = [(gemm_triton.int8_gemm_kernel, "*i8", {"GROUP": gemm_triton.GROUP})]
        for low, data_type in formats.items():
            grouped = [(gemm_triton.grouped_kernel, {"EXPERTS": 128, "FAST": fast}) for fast in (False, True)]
            for kernel, more in (*grouped, (gemm_triton.over_rows_kernel, {"ALIGNMENT": ALIGNMENT})):
                if gemm_triton.fitting([config], {"a": torch.empty(0, dtype=data_type)}, bool(more.get("FAST"))):
                    kernels.append((kernel, low, more))
        for kernel, low, more in kernels:
            gemm = {"a": low, "b": low, **scales}
            spilling += _spills_of_kernel(kernel, gemm, {**config.kwargs, **more}, options, capability)
    if capability >= 100:
        return spilling
    for dtype, columns, low in itertools.product(("*bf16", "*fp32"), (64, 4096, WIDEST), formats):
        rounding = {"x": dtype, "data": low, "scale_inverse": "*fp32", "column_amax": "*i32"}
        constants = {**rounding_triton.constants_of(formats[low]), "ROWS": 32, "BLOCK": columns}
        options = {"num_warps": rounding_triton.warps(columns)}
        spilling += _spills_of_kernel(rounding_triton.round_rows_kernel, rounding, constants, options, capability)
    matrices = {**dict.fromkeys(("x", "factor"), "*bf16"), "source": "*i64"}
    amaxes = dict.fromkeys(("row_amax", "column_amax"), "*i32")
    for gather, factor in ((False, False), (True, False), (True, True)):
        tile = {"GATHER": gather, "FACTOR": factor, "EXPERTS": 128, **rounding_triton.TILE}
        pointers = {**matrices, **amaxes, "ends": "*i32"}
        spilling += _spills_of_kernel(rounding_triton.amax_kernel, pointers, tile, {}, capability)
        pointers |= dict.fromkeys(("row_amax", "column_amax", "row_inverse", "column_inverse"), "*fp32")
        for data, data_type in formats.items():
            pointers |= {"by_row": data, "by_column": data, "padded_ends": "*i32"}
            constants = {**rounding_triton.constants_of(data_type), **tile}
            spilling += _spills_of_kernel(rounding_triton.round_kernel, pointers, constants, {}, capability)
    for operand, (data, data_type) in itertools.product(("*bf16", "*fp32"), formats.items()):
        pointers = {**dict.fromkeys(OF_SWIGLU[:3], operand), **amaxes}
        options, tile = WARPS_OF_SWIGLU, rounding_triton.TILE
        spilling += _spills_of_kernel(swiglu_triton.swiglu_amax_kernel, pointers, dict(tile), options, capability)
        pointers |= dict.fromkeys(("row_amax", "column_amax", "row_inverse", "column_inverse"), "*fp32")
        pointers |= dict.fromkeys(OF_SWIGLU[3:], data)
        constants = {**rounding_triton.constants_of(data_type), **tile}
        spilling += _spills_of_kernel(swiglu_triton.swiglu_round_kernel, pointers, constants, options, capability)
    return spilling


def mx_spills() -> list[str]:
    """The same for our mxfp8 kernel, of matrices and of transposed ones."""
    strides = ("row_stride", "column_stride")
    names = ("by_row", "by_column"), ("row_scale", "column_scale")
    outputs = {**dict.fromkeys(names[0], "*fp8e4nv"), **dict.fromkeys(names[1], "*u8")}
    spilling = []
    for number, (mode, both, stride) in enumerate(itertools.product(get_args(ScaleMode), (False, True), strides)):
        dtype = ("*bf16", "*fp32")[(number + number // 2) % 2]  # so that each pair of values meets
        constants = {"MODE": mode, "BOTH": both, stride: 1, **mx_triton.TILE}
        options = {"num_warps": mx_triton.WARPS}
        spilling += _spills_of_kernel(mx_triton.mx_pack_kernel, {"x": dtype, **outputs}, constants, options, 100)
    return spilling


def nvfp4_spills() -> list[str]:
    """The same for our nvfp4 kernels, of matrices and of transposed ones."""
    variants = [(False, False, False), (True, False, False), (False, True, False), (False, True, True)]
    spilling = []
    for number, (variant, stride) in enumerate(itertools.product(variants, ("row_stride", "column_stride"))):
        squares, stochastic, hadamard = variant
        dtype = ("*bf16", "*fp32")[(number + number // 2) % 2]  # so that each pair of values meets
        pointers = {"x": dtype, "totals": "*i32", "data": "*i64", "scale": "*fp8e4nv", "tensor_scale": "*fp32"}
        shared = {"HADAMARD": hadamard, "SIGNS": SIGNS, stride: 1, **nvfp4_triton.TILE}
        pack = {"SQUARES": squares, "STOCHASTIC": stochastic, "SMALLEST": SMALLEST_TENSOR_SCALE, **shared}
        for kernel, constants, warps in (
            (nvfp4_triton.survey_kernel, {"SEED": stochastic, "BOTH": True, **shared}, nvfp4_triton.SURVEY_WARPS),
            (nvfp4_triton.nvfp4_pack_kernel, pack, nvfp4_triton.PACK_WARPS),
        ):
            spilling += _spills_of_kernel(kernel, pointers, constants, {"num_warps": warps}, 100)
    return spilling


def _spills_of_kernel(
    kernel: Any, pointers: dict[str, str], constants: dict[str, Any], options: dict[str, int], capability: int
) -> list[str]:
    binary = _compiled(kernel, pointers, constants, options, capability)
    usage, nans = resource_usage(binary.asm["cubin"]), NAN_INSTRUCTION.findall(binary.asm["ptx"])
    fits = not spilled(usage) and binary.metadata.shared <= SHARED_MEMORY[capability] and not nans
    return [] if fits else [f"{kernel.__name__} {constants} {options}: {usage} {binary.metadata.shared} {nans}"]


def _compiled(
    kernel: Any, pointers: dict[str, str], constants: dict[str, Any], options: dict[str, int], capability: int
) -> Any:
    """With pointers and sizes that are multiples of 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if signature[name] != "constexpr"
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stores(kernel: str) -> list[str]:
    """Instructions with which a kernel writes float8 numbers for both sums, and scales: `rounding_triton.round_kernel`,
    or `swiglu_triton.swiglu_round_kernel`."""
    constants: dict[str, Any] = {**rounding_triton.constants_of(torch.float8_e4m3fn), **rounding_triton.TILE}
    pointers = dict.fromkeys(("row_amax", "column_amax", "row_inverse", "column_inverse"), "*fp32")
    if kernel == "swiglu":
        pointers |= {**dict.fromkeys(OF_SWIGLU[:3], "*bf16"), **dict.fromkeys(OF_SWIGLU[3:], "*fp8e4nv")}
        compiled = _compiled(swiglu_triton.swiglu_round_kernel, pointers, constants, WARPS_OF_SWIGLU, 90)
    else:
        pointers |= {"x": "*bf16", "ends": "*i32", "padded_ends": "*i32", "by_row": "*fp8e4nv", "by_column": "*fp8e4nv"}
        constants |= {"source": None, "factor": None, "GATHER": False, "FACTOR": False, "EXPERTS": 128}
        compiled = _compiled(rounding_triton.round_kernel, pointers, constants, {}, 90)
    return re.findall(r"st\.global\.\S+", compiled.asm["ptx"])


OF_SWIGLU = ("grad", "gate", "up", "gate_rows", "up_rows", "gate_columns", "up_columns", "product_columns")
WARPS_OF_SWIGLU = {"num_warps": swiglu_triton.WARPS}


SHARED_MEMORY = {
    80: 163 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
}  # bytes of a block of threads: CUDA C++ programming guide


@triton.jit
def normalize(numbers, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, SIZE)
    x = tl.load(numbers + places)
    tl.store(numbers + places, x / tl.sum(x))


def _outside_fake_mode(function: Any) -> Any:
    def run(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return function(*arguments, **options)

    return run


class _NoGenerator:
    """Replaces a random generator, of which a GPU's library has the state."""

    def __init__(self, device: Any = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        """Random operations take None for the default generator."""


torch.Generator = _NoGenerator  # type: ignore[misc, assignment]

# What needs numbers: meshes, tables of codes, and the comparison of a converted layer with its copy.
DeviceMesh._concatenate = staticmethod(_outside_fake_mode(DeviceMesh._concatenate))  # type: ignore[method-assign]
muon.sharding_of = _outside_fake_mode(muon.sharding_of)  # type: ignore[attr-defined]
state_formats._table = _outside_fake_mode(state_formats._table)
LinearConverter.check_swap = lambda self: None  # type: ignore[method-assign]
# What needs several GPUs.
async_tensor.enable_symmetric_memory = lambda name: None  # type: ignore[attr-defined, assignment]
_symmetric_memory.is_symm_mem_enabled_for_group = lambda name: True  # type: ignore[assignment]
dist.is_nccl_available = lambda: True
