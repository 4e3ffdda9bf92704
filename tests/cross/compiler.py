"""The compiler for a GPU that is not there. Only for a process of its own: `simulate` changes it for good.

- `_decomp.decomposition_table`: what fake tensors do in place of an operator
- `_subclasses.fake_tensor.init_gpu_context`, `FakeTensorMode.avoid_device_init`: would initialize CUDA
- `_dynamo.device_interface.CudaInterface`: what the compiler asks about the device
- `_functorch.partitioners.has_recomputable_rng_ops`: whether random states are kept for recomputation
- `_inductor.config`: whether the caches are off
- `_inductor.graph.GraphLowering`, its `compile_to_module`: a lowered graph, whose code is kept instead of loaded
- `_inductor.codecache.compiled_fx_graph_hash`: what the compiler's cache knows a graph by
- `_inductor.compile_fx.fx_codegen_and_compile`: lowers a graph, so that one that was lowered before can be left out
- `_inductor.ir.ExternKernel`: a call of an operator in place of a kernel
- `_inductor.runtime.triton_helpers`: would look for Triton's driver
- `_inductor.fx_passes.joint_graph.UniformValueConstantFolder`, its `_deduce_value`: computes constants
- `utils._python_dispatch.TorchDispatchMode`: redirects that to the CPU
- `distributed.device_mesh.DeviceMesh`, its `_concatenate`: computes ranks, for which fake tensors have no numbers
- attributes of `torch.cuda`, lazily initialized or missing without CUDA
"""

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

__all__ = [
    "bytes_of",
    "in_compiled_code",
    "launches",
    "on_lowered",
    "operator_of",
    "remember",
    "simulate",
    "without_code",
]


class _Stream:
    """A stream or event on which nothing happens."""

    cuda_stream = stream_id = device_index = 0
    device_type = 1
    device = "cuda:0"

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: None

    def query(self) -> bool:
        return True


def simulate(properties: Any, triton_limits: dict[str, int]) -> None:
    """Makes this process believe in one GPU, with these `torch.cuda.get_device_properties()` and limits of Triton's
    driver. What works on fake tensors works; nothing can be computed."""
    import torch
    import torch._functorch.partitioners as partitioners
    import torch._subclasses.fake_tensor as fake_tensor
    import triton
    from torch._decomp import decomposition_table
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime import triton_helpers
    from torch.distributed.device_mesh import DeviceMesh
    from triton.backends.compiler import GPUTarget

    capability = (properties.major, properties.minor)
    state = torch.zeros(16, dtype=torch.uint8)
    stream = _Stream()
    answers = {
        "is_available": True,
        "is_initialized": True,
        "init": None,
        "_lazy_init": None,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "is_bf16_supported": True,
        "synchronize": None,
        "current_stream": stream,
        "default_stream": stream,
        "set_stream": None,
        "get_rng_state": state,
        "set_rng_state": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "is_current_stream_capturing": False,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **options: answer)
    torch.cuda.Stream = torch.cuda.Event = torch.Event = _Stream  # type: ignore[assignment, misc]
    torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign, assignment]
    torch.cuda.default_generators = (torch.Generator(),)
    # Attention counts as random, because of dropout; a state of the generator is then an input of the graph.
    partitioners.has_recomputable_rng_ops = lambda fx_g: False
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda mode: True)  # type: ignore[assignment]
    fake_tensor.init_gpu_context = lambda device: None  # type: ignore[assignment]
    DeviceMesh._concatenate = staticmethod(  # type: ignore[method-assign]
        fake_tensor.unset_fake_temporarily()(DeviceMesh._concatenate)
    )
    # torch 2.11 decomposes this as if the dtype were a factor.
    decomposition_table.pop(torch.ops.aten.addmm.dtype_out, None)
    torch.library.register_fake("aten::addmm.dtype_out", lambda *args, out, **options: out, allow_override=True)
    torch.version.cuda = "13.0"
    interface = {
        "is_available": True,
        "get_compute_capability": 10 * capability[0] + capability[1],
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "current_device": 0,
        "device_count": 1,
        "get_device_properties": properties,
        "exchange_device": 0,
        "maybe_exchange_device": 0,
        "synchronize": None,
    }
    for name, answer in interface.items():
        setattr(CudaInterface, name, staticmethod(lambda *args, answer=answer, **options: answer))
    CudaInterface.Worker.get_device_properties = staticmethod(lambda *args, **options: properties)  # type: ignore[method-assign]
    CudaInterface.Worker.current_device = staticmethod(lambda: 0)  # type: ignore[method-assign]
    _fold_constants_on_cpu()
    triton_helpers.set_driver_to_gpu = lambda: None  # called by the source of each kernel
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(  # Triton's driver
            utils=SimpleNamespace(get_device_properties=lambda device: triton_limits),
            get_current_target=lambda: target,
            get_active_torch_device=lambda: torch.device("cuda", 0),
            get_device_interface=lambda: torch.cuda,
            get_current_device=lambda: 0,
            get_current_stream=lambda device=0: 0,
            is_active=lambda: True,
        )
    )


def _fold_constants_on_cpu() -> None:
    """The compiler computes constants, such as a tensor of ones times two, on their device."""
    import torch
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch.utils._python_dispatch import TorchDispatchMode

    def on_cpu(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) else value

    class OnCpu(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*map(on_cpu, args), **{name: on_cpu(value) for name, value in (kwargs or {}).items()})

    deduce = UniformValueConstantFolder._deduce_value

    def deduce_on_cpu(self: Any, node: Any) -> Any:
        with OnCpu():
            return deduce(self, node)

    UniformValueConstantFolder._deduce_value = deduce_on_cpu  # type: ignore[method-assign]


def on_lowered(take: Callable[[Any, str], Callable[[list[Any]], None] | None]) -> None:
    """From now on, `take` gets each graph that the compiler lowers, and its code. Compiled functions then return fake
    tensors. What `take` returns, if not None, is called with the graph's inputs whenever it runs. Raises a RuntimeError
    if the compiler's caches are on: they would give other processes graphs without code."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    if not config.force_disable_caches:
        raise RuntimeError("set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 before torch is imported")

    def compile_to_module(self: Any) -> Any:
        code, _ = self.codegen()
        on_run = take(self, getattr(code, "value", code))
        return _module(self, on_run)

    GraphLowering.compile_to_module = compile_to_module  # type: ignore[method-assign]


@contextlib.contextmanager
def without_code() -> Iterator[None]:
    """Within this context, graphs are neither scheduled nor taken, which saves time where only what runs is watched:
    compiled functions return fake tensors all the same."""
    from torch._inductor.graph import GraphLowering

    def compile_to_module(self: Any) -> Any:
        self.scheduler = SimpleNamespace(nodes=[])  # whose collectives the compiler would log
        return _module(self, None)

    with patch.object(GraphLowering, "compile_to_module", compile_to_module):
        yield


def _module(graph: Any, on_run: Callable[[list[Any]], None] | None) -> Any:
    return SimpleNamespace(call=_Fake(graph.orig_gm, on_run), __file__="", key="", runner=None)


@contextlib.contextmanager
def remember(seen: list[Any], known: dict[str, tuple[Any, list[Any]]] | None = None) -> Iterator[None]:
    """Within this context, a graph that has been lowered within another one in this process is not lowered again, and
    what `take` then added to `seen` is added again. By the key of the compiler's cache; a graph without a key, or with
    symbolic sizes, is lowered each time. `known`: the graphs, instead of all of this process."""
    import torch
    from torch._inductor import compile_fx
    from torch._inductor.codecache import BypassFxGraphCache, compiled_fx_graph_hash

    lower, known = compile_fx.fx_codegen_and_compile, _LOWERED if known is None else known

    def lower_once(gm: Any, example_inputs: Any, inputs_to_check: Any, *more: Any, **options: Any) -> Any:
        sizes = [x for x in example_inputs if not isinstance(x, torch.Tensor)]
        kwargs: Any = options
        key = None
        if not sizes and not any(isinstance(s, torch.SymInt) for x in example_inputs for s in x.shape):
            with contextlib.suppress(BypassFxGraphCache):
                key, _ = compiled_fx_graph_hash(gm, example_inputs, kwargs, inputs_to_check)
        if key in known:
            compiled, added = known[key]
            seen.extend(added)
            return copy.copy(compiled)
        before = len(seen)
        compiled = lower(gm, example_inputs, inputs_to_check, *more, **options)
        if key is not None:
            known[key] = copy.copy(compiled), seen[before:]
        return compiled

    compile_fx.fx_codegen_and_compile = lower_once
    try:
        yield
    finally:
        compile_fx.fx_codegen_and_compile = lower


_LOWERED: dict[str, tuple[Any, list[Any]]] = {}
_running = 0


def in_compiled_code() -> bool:
    """Whether a compiled function is being run on fake tensors."""
    return _running > 0


class _Fake:
    """Calls a graph on fake tensors in place of its code."""

    def __init__(self, graph_module: Any, on_run: Callable[[list[Any]], None] | None) -> None:
        self.graph_module = graph_module
        self.on_run = on_run

    def __call__(self, inputs: Any) -> Any:
        global _running
        import torch

        arguments = list(inputs)
        inputs.clear()
        if self.on_run is not None:
            self.on_run(arguments)
        _running += 1
        try:
            with torch.no_grad():
                return self.graph_module(*arguments)
        finally:
            _running -= 1


OPERATORS = {"int8_gemm_kernel": "torchtitan.int8_mm"}
"""By the kernels of our own that compiled code launches in their place."""


READ_TWICE = {"torchtitan.round_swiglu_gradients"}
"""Operators that read their operands for the amaxes, and again to round them. The compiler counts one pass, as these
figures do of round_rows_and_columns, which reads twice, too."""


def operator_of(node: Any) -> str | None:
    """The operator that a scheduled node calls, such as "aten.mm", or whose kernel it launches; None for one that
    became a kernel."""
    from torch._inductor.ir import ExternKernel

    if is_own_kernel(node):
        kernel, *_ = node.node.get_kernel_and_metadata()
        return OPERATORS[kernel.__name__]
    if not isinstance(node.node, ExternKernel):
        return None
    overload = getattr(node.node, "op_overload", None)
    return str(overload).removesuffix(".default") if overload is not None else node.node.python_kernel_name


def is_own_kernel(node: Any) -> bool:
    """Whether a scheduled node launches a kernel of our own."""
    from torch._inductor.ir import UserDefinedTritonKernel

    return isinstance(node.node, UserDefinedTritonKernel)


def bytes_of(node: Any) -> int:
    """That a scheduled node reads and writes. Of several kernels in one launch, the sum over all: the compiler would
    count what they keep in registers. A result of a kernel of our own counts once: the compiler takes what was there
    before for an operand."""
    again = node.get_write_buffer_sizes() if is_own_kernel(node) else 0
    again -= node.get_read_buffer_sizes() if operator_of(node) in READ_TWICE else 0
    members = node.snodes if node.is_foreach() else [node]
    return sum(member.get_read_write_buffers_sizes() for member in members) - again


def launches(code: str) -> int:
    """Of the compiler's Triton kernels in the code of a lowered graph."""
    return len(re.findall(r"^\s+triton_\w+\.run\(", code, re.M))
