"""What runs in a process with a simulated GPU and Triton's interpreter: the code that the compiler generates for a GPU
computes on the CPU, and is compared with eager code there.

A fake tensor on the GPU has numbers on the CPU, by its storage. Generated code gets these and returns others.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import quick_interpreter  # noqa: F401  for speed
import torch
import torch.nn.functional as F
import triton.language as tl
from torch import nn
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.select_algorithm import extern_kernels
from torch._library.simple_registry import singleton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from triton.language.extra import libdevice
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from torchtitan.compat.inductor import few_launches
from torchtitan.config import ConfigManager
from torchtitan.converters import apply_converters
from torchtitan.converters.converter import Target
from torchtitan.converters.linear_converter import LinearConverter
from torchtitan.kernels.attention_gpu import causal_attention_gpu
from torchtitan.kernels.exact_gemm import exact_linear
from torchtitan.models.args import TransformerArgs
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.models.moe import SparseTransformer, reset_buffers
from torchtitan.models.qwen3 import Qwen3MoEArgs
from torchtitan.models.rope import rope_table
from torchtitan.models.sparse_args import MoEArgs
from torchtitan.optim.low_bit import random_bits
from torchtitan.optim.low_bit_adamw import LowBitAdamW, update
from torchtitan.parallel.compile import apply_compile

NUMBERS: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""By storage: a fake tensor, which keeps it, and the real one."""


def on_gpu(real: torch.Tensor, device: str = "cuda") -> torch.Tensor:
    """A fake tensor there with these numbers. Call it in a FakeTensorMode."""
    fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
    with unset_fake_temporarily():
        NUMBERS[fake.untyped_storage()._cdata] = fake, real.detach()
    return fake


def numbers(fake: torch.Tensor) -> torch.Tensor:
    """The numbers of a fake tensor, which may be a view; a real one has its own."""
    if not isinstance(fake, FakeTensor):
        return fake
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
        if isinstance(kernel, CachingAutotuner):
            # A GPU may choose these, too; here, more programs take longer.
            blocks = kernel.configs[0].kwargs
            for name, size in (kernel.size_hints or {}).items():
                if (block := f"{name.upper()}BLOCK") in blocks.keys() & {"XBLOCK", "YBLOCK"}:
                    blocks[block] = max(blocks[block], min(1024 if len(blocks) == 1 else 64, size))

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
    """In place of a function that the interpreter does not have, or calls for each number."""

    def compute(*arguments: Any) -> tl.tensor:
        like = next(x for x in arguments if isinstance(x, tl.tensor))
        values = [torch.from_numpy(x.handle.data) if isinstance(x, tl.tensor) else x for x in arguments]
        result = function(*values).numpy().astype(like.handle.data.dtype, copy=False)
        return tl.tensor(TensorHandle(result, like.dtype), tl.block_type(like.dtype, list(result.shape)))

    return compute


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[Any, ...]:
    """cuDNN's attention, by an operator of the CPU: output and log-sum-exp, then what is not used."""
    repeated = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, *repeated, 0.0, is_causal=options[3])
    no = torch.empty((), dtype=torch.int64)
    return torch.empty_like(q).copy_(out), lse.unsqueeze(-1).contiguous(), no, no, q.shape[2], k.shape[2], no, no, no


def cudnn_backward(grad: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """Its gradients."""
    (q, k, v, out, lse), causal = arguments[:5], arguments[13]
    groups = q.shape[1] // k.shape[1]
    repeated = (x.repeat_interleave(groups, 1) for x in (k, v))
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, *repeated, out, lse.squeeze(-1), 0.0, causal
    )
    return tuple(
        torch.empty_like(x).copy_(gradient.unflatten(1, (x.shape[1], -1)).sum(2))
        for x, gradient in zip((q, k, v), gradients, strict=True)
    )


def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, *, out: torch.Tensor, **options: Any
) -> None:
    """In float32, since the CPU's takes fewer layouts of scales than a GPU's, and before torch 2.13 one scale only."""
    out.copy_(a.float() @ b.float() * a_scale * b_scale)


aten = torch.ops.aten
extern_kernels._scaled_mm = scaled_mm  # type: ignore[attr-defined]
library = torch.library.Library("aten", "IMPL", "CPU")
library.impl("_scaled_dot_product_cudnn_attention", cudnn)
library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward)
library.impl("mm.dtype_out", lambda a, b, dtype, *, out: out.copy_(a.to(dtype) @ b.to(dtype)))
GraphLowering.compile_to_module = compile_to_module  # type: ignore[method-assign, assignment]
torch._C._cuda_getCurrentRawStream = lambda device: 0
InterpreterBuilder.cast_impl = InterpreterBuilder.create_fp_to_fp = cast
InterpreterBuilder.create_dot = dot
for name in ("exp", "floor", "isnan", "log", "pow", "rsqrt", "trunc"):
    setattr(libdevice, name, computed_by(getattr(torch, name)))
libdevice.nearbyint, triton_helpers.max2 = computed_by(torch.round), computed_by(torch.amax)
LinearConverter.check_swap = lambda self: None  # type: ignore[method-assign]
# The compiler cannot launch interpreted kernels of our own: it calls the operator, which computes on the CPU.
singleton.find("torchtitan::int8_mm").torch_dispatch_rules._data.clear()


ROWS, LENGTH = 2, 320
ARGS = LlamaArgs(dim=32, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=64, vocab_size=16)
EXPERTS = Qwen3MoEArgs(32, 1, 2, 1, 64, 16, head_dim=16, moe=MoEArgs(n_experts=4, top_k=2, ffn_dim=48))


def documents() -> torch.Tensor:
    """Ids of two sequences, which see different blocks of 128 keys."""
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
    ids[0, 150:], ids[0, 256:], ids[1, 300:] = 1, 2, 1
    return ids


def experts(*flags: str) -> dict[str, float]:
    """Of a block with a mixture of experts, as `block`."""
    return block(False, *flags, args=EXPERTS)


def block(masked: bool, *flags: str, args: TransformerArgs = ARGS) -> dict[str, float]:
    """Of a transformer block in bfloat16: its output and gradients."""
    torch.manual_seed(0)
    config = ConfigManager().parse_args(list(flags))
    model = (SparseTransformer if isinstance(args, Qwen3MoEArgs) else Llama)(args).bfloat16()
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            nn.init.normal_(parameter, std=0.1)
    reset_buffers(model)
    simulated = copy.deepcopy(model)
    x, grad = torch.randn(2, ROWS, LENGTH, args.dim, dtype=torch.bfloat16)
    rope, ids = rope_table(ARGS.head_dim, torch.arange(LENGTH), ARGS.rope_theta, None), documents()

    def run(model: Any, target: Target, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        apply_converters(model, config.model.converters, functools.partial(getattr, config), target)
        layer = model.layers["0"]
        if target.compile:
            apply_compile([layer], target.device_type)
        x, grad, rope, ids = tensors
        out = layer(x.requires_grad_(), rope, ids if masked else None)
        return out, *torch.autograd.grad(out, (x, *layer.parameters()), grad)

    cpu = Target("cpu", tokens=ROWS * LENGTH)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in simulated.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(on_gpu(parameter)))
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, on_gpu(buffer))
        gpu = dataclasses.replace(cpu, device_type="cuda", compute_capability=(9, 0), compile=True)
        actual = run(simulated, gpu, *map(on_gpu, (x, grad, rope, ids)))
    expected = run(model, cpu, x, grad, rope, ids)
    return errors(["output", "x", *(name for name, _ in model.layers["0"].named_parameters())], actual, expected)


def last_queries(masked: bool, window: int | None = None) -> dict[str, float]:
    """Of attention in float32, for the last queries, as under context parallelism: its output and gradients."""
    torch.manual_seed(0)
    queries, ids = 130, documents()
    q, k, v = (torch.randn(ROWS, heads, length, 16) for heads, length in ((2, queries), (1, LENGTH), (1, LENGTH)))
    grad = torch.randn(q.shape)
    with FakeTensorMode():
        fake_ids = on_gpu(ids) if masked else None
        fakes = fake_q, fake_k, fake_v = [on_gpu(tensor).requires_grad_() for tensor in (q, k, v)]
        out = torch.compile(causal_attention_gpu, fullgraph=True)(fake_q, fake_k, fake_v, fake_ids, window)
        actual = out, *torch.autograd.grad(out, fakes, on_gpu(grad))
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(1 - (window or LENGTH))
    mask = mask & (ids[:, None, :, None] == ids[:, None, None, :]) if masked else mask.expand(ROWS, 1, -1, -1)
    reals = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, :, -queries:], enable_gqa=True)
    return errors(["output", "q", "k", "v"], actual, (out, *torch.autograd.grad(out, reals, grad)))


def router() -> dict[str, float]:
    """Of the gradient of a router's weight, which is the sum of many."""
    torch.manual_seed(0)
    x, weight, grad = torch.randn(4096, 64).bfloat16(), torch.randn(8, 64).bfloat16(), torch.randn(4096, 8)
    with FakeTensorMode():
        fake = on_gpu(weight).requires_grad_()
        out = torch.compile(exact_linear, fullgraph=True)(on_gpu(x), fake)
        (weight_grad,) = torch.autograd.grad(out, fake, on_gpu(grad))
    return errors(["weight"], [weight_grad], [grad.double().t() @ x.double()])


def noise() -> dict[str, float]:
    """Of stochastic rounding's random bits."""
    key, step = torch.tensor(0x00ABCDEF01234567), torch.tensor(3.0)
    with FakeTensorMode():
        bits = torch.compile(random_bits)(on_gpu(key, "cpu"), on_gpu(step), 1000)
    return {"bits": float(not torch.equal(numbers(bits), random_bits(key, step, 1000)))}


def adamw(quantization: str, dtype: str) -> dict[str, float]:
    """Of two updates of a matrix and a vector: weights and moments."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    parameters = [nn.Parameter(torch.randn(shape).to(getattr(torch, dtype))) for shape in ((24, 128), (128,))]
    optimizer = LowBitAdamW(parameters, **settings, quantization=quantization)
    actual: dict[str, torch.Tensor] = {}
    expected = []
    for parameter in parameters:
        formats: Any = optimizer._formats[parameter]
        state = optimizer.local_state(parameter)
        weight, lr, key = parameter.detach(), torch.tensor(settings["lr"]), torch.tensor(12345)
        with FakeTensorMode():
            fake_formats: Any = tuple(map(copy.copy, formats))
            for form in fake_formats:
                for name in ("table", "between"):
                    if hasattr(form, name):
                        setattr(form, name, on_gpu(getattr(form, name)))
            fake_state = {name: on_gpu(clone(value)) for name, value in state.items()}
            fake_weight: Any = on_gpu(clone(weight))
            compiled = torch.compile(update, fullgraph=True, dynamic=False, options=few_launches())
        for step in (torch.tensor(1.0), torch.tensor(2.0)):
            grad = torch.randn(weight.shape).to(weight.dtype)
            beta1, beta2 = settings["betas"]
            constants = (False, beta1, beta2, settings["eps"], settings["weight_decay"])
            factor = torch.tensor(0.3) if dtype == "float32" else None
            update([(weight, grad, {**state, "step": step}, key)], formats, lr, None, *constants, factor)
            with fake_weight.fake_mode:
                fake_state["step"] = on_gpu(step)
                shard = fake_weight, on_gpu(grad), fake_state, on_gpu(key, "cpu")
                fake_factor = None if factor is None else on_gpu(factor)
                compiled([shard], fake_formats, on_gpu(lr, "cpu"), None, *constants, fake_factor)
        name = f"of {weight.ndim} dimensions"
        expected.append(weight)
        actual[f"weight {name}"] = fake_weight
        for moment, form in zip(optimizer.moment_names, formats, strict=True):
            expected.append(form.read(state))
            actual[f"{moment} {name}"] = form.read({key: numbers(value) for key, value in fake_state.items()})
    return errors(actual, actual.values(), expected)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    with unset_fake_temporarily():
        return tensor.clone()


def errors(names: Iterable[str], actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> dict[str, float]:
    """By name, the norm of the difference, in units of the expected numbers' norm."""
    pairs = zip(map(numbers, actual), (tensor.detach().double() for tensor in expected), strict=True)
    return {
        name: float((computed.double() - reference).norm() / reference.norm())
        for name, (computed, reference) in zip(names, pairs, strict=True)
    }
