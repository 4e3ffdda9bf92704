"""What runs in a process with a simulated GPU and Triton's interpreter: the code that the compiler generates for a GPU
computes on the CPU, and is compared with eager code there.

A fake tensor on the GPU has numbers on the CPU, by its storage. Generated code gets these and returns others.
"""

import copy
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import nn
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from triton.language.extra import libdevice
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.models.rope import rope_table
from torchtitan.parallel.compile import apply_compile

NUMBERS: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""By storage: a fake tensor, which keeps it, and the real one."""


def on_gpu(real: torch.Tensor) -> torch.Tensor:
    """A fake tensor on the GPU with these numbers. Call it in a FakeTensorMode."""
    fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cuda")
    with unset_fake_temporarily():
        NUMBERS[fake.untyped_storage()._cdata] = fake, real.detach()
    return fake


def numbers(fake: torch.Tensor) -> torch.Tensor:
    """Those of a fake tensor, which may be a view."""
    _, real = NUMBERS[fake.untyped_storage()._cdata]
    assert fake.dtype == real.dtype
    with unset_fake_temporarily():
        return real.as_strided(fake.shape, fake.stride(), real.storage_offset() + fake.storage_offset())


def compile_to_module(graph: Any) -> Any:
    """In place of the compiler's, which loads the code for a GPU. It interprets kernels if TRITON_INTERPRET is 1."""
    code, _ = graph.codegen()
    text = getattr(code, "value", code).replace("empty_strided_cuda(", "empty_strided_cpu(")
    with unset_fake_temporarily():
        module = PyCodeCache.load(text)
    for kernel in vars(module).values():
        if isinstance(kernel, CachingAutotuner) and kernel.configs[0].kwargs.keys() == {"XBLOCK"}:
            kernel.configs[0].kwargs["XBLOCK"] = 256  # a GPU may choose it, too; here, more programs take longer

    def call(inputs: list[Any]) -> tuple[Any, ...]:
        arguments = [numbers(value) if isinstance(value, torch.Tensor) else value for value in inputs]
        inputs.clear()
        with unset_fake_temporarily():
            results = module.call(arguments)
        return tuple(on_gpu(result) if isinstance(result, torch.Tensor) else result for result in results)

    return SimpleNamespace(call=call, __file__="", key="", runner=None)


LOW = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
CAST, DOT = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot


def widened(handle: TensorHandle) -> TensorHandle:
    """A tensor of the interpreter in float32, if NumPy lacks its dtype: the interpreter has its bits."""
    low = LOW.get(handle.dtype.scalar)
    if low is None:
        return handle
    return TensorHandle(torch.from_numpy(np.asarray(handle.data)).view(low).float().numpy(), tl.float32)


def cast(builder: Any, source: TensorHandle, to: Any, *rest: Any) -> TensorHandle:
    """The interpreter's truncates to bfloat16, and rounds to float8 wrongly."""
    if to.scalar not in LOW:
        return CAST(builder, widened(source), to)
    rounded = torch.from_numpy(np.asarray(widened(source).data)).to(LOW[to.scalar])
    return TensorHandle(rounded.view(torch.uint16 if rounded.itemsize == 2 else torch.uint8).numpy(), to.scalar)


def dot(builder: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
    """The interpreter's multiplies the bits of bfloat16 numbers."""
    return DOT(builder, widened(a), widened(b), *rest)


def computed_by(function: Callable[..., torch.Tensor]) -> Callable[..., tl.tensor]:
    """In place of a function of NVIDIA's library, which the interpreter does not have."""

    def compute(*arguments: Any) -> tl.tensor:
        like = next(x for x in arguments if isinstance(x, tl.tensor))
        values = [torch.from_numpy(x.handle.data) if isinstance(x, tl.tensor) else torch.tensor(x) for x in arguments]
        result = function(*values).numpy().astype(like.handle.data.dtype, copy=False)
        return tl.tensor(TensorHandle(result, like.dtype), tl.block_type(like.dtype, list(result.shape)))

    return compute


GraphLowering.compile_to_module = compile_to_module  # type: ignore[method-assign]
torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined, assignment]
InterpreterBuilder.cast_impl = InterpreterBuilder.create_fp_to_fp = cast
InterpreterBuilder.create_dot = dot
for name in ("exp", "floor", "pow", "rsqrt", "trunc"):
    setattr(libdevice, name, computed_by(getattr(torch, name)))
libdevice.nearbyint = computed_by(torch.round)


ROWS, LENGTH = 2, 320
ARGS = LlamaArgs(dim=32, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=64, vocab_size=16)


def documents() -> torch.Tensor:
    """Ids of two sequences, which see different blocks of 128 keys."""
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
    ids[0, 100:], ids[0, 256:], ids[1, 300:] = 1, 2, 1
    return ids


def block(masked: bool) -> dict[str, float]:
    """Of a transformer block in bfloat16: its output and gradients."""
    torch.manual_seed(0)
    model = Llama(ARGS).bfloat16()
    simulated = copy.deepcopy(model)
    x, grad = torch.randn(2, ROWS, LENGTH, ARGS.dim, dtype=torch.bfloat16)
    rope, ids = rope_table(ARGS.head_dim, torch.arange(LENGTH), ARGS.rope_theta, None), documents()

    def run(layer: nn.Module, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, grad, rope, ids = tensors
        out = layer(x.requires_grad_(), rope, ids if masked else None)
        return out, *torch.autograd.grad(out, (x, *layer.parameters()), grad)

    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in simulated.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(on_gpu(parameter)))
        apply_compile([simulated.layers["0"]], "cuda")
        found = run(simulated.layers["0"], *map(on_gpu, (x, grad, rope, ids)))
    expected = run(model.layers["0"], x, grad, rope, ids)
    return errors(["output", "x", *(name for name, _ in model.layers["0"].named_parameters())], found, expected)


def errors(names: Iterable[str], found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> dict[str, float]:
    """By name, the norm of the difference, in units of that of the expected numbers."""
    return {
        name: float((numbers(one).double() - other.detach()).norm() / other.detach().double().norm())
        for name, one, other in zip(names, found, expected, strict=True)
    }
