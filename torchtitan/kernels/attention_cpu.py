"""Causal attention on CPU.

`attention_bfloat16.cpp` computes it in bfloat16 where the CPU has instructions for that (AMX, or AVX-512's), else, and
within windows, `attention_float32.cpp` with float32 arithmetic. Without a C++ compiler torch's kernel does. All save
the output and the log-sum-exp. `benchmarks/attention_cpu.py` compares them.

Shapes: B batch, H query heads, G key-value heads, S sequence, D channels of a head.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchtitan.kernels.attention_sinks import gradient_of_sinks, with_sinks
from torchtitan.kernels.cpp_extension import isa_flags, load_library
from torchtitan.kernels.operator import Function, operator
from torchtitan.logging import logger

DTYPES = (torch.bfloat16, torch.float32)

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def causal_attention_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(head_dim)) v with a causal mask, in the shape and dtype of q. q: (B, H, S, D), bfloat16 or
    float32; k, v: (B, G, S, D); H is a multiple of G. A position attends to itself and the `window` - 1 before it, or,
    with None, all before it. sinks: (H,), a further logit of each head."""
    return _CausalAttention.apply(q, k, v, None if window is None or window >= q.shape[2] else window, sinks)


class _CausalAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        out, logsumexp = causal_attention_and_logsumexp(q, k, v, window)
        if sinks is not None:
            out, logsumexp = with_sinks(out, logsumexp, sinks)
        ctx.save_for_backward(q, k, v, out, logsumexp, sinks)
        ctx.window = window
        return out

    @staticmethod
    def backward(ctx: Any, out_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, logsumexp, sinks = ctx.saved_tensors
        sinks_grad = None if sinks is None else gradient_of_sinks(out, logsumexp, sinks, out_grad)
        return *causal_attention_gradients(q, k, v, out, logsumexp, out_grad, ctx.window), None, sinks_grad


@operator("causal_attention", lambda q, k, v, window: _empty_results(q))
def causal_attention_and_logsumexp(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`causal_attention_cpu`, plus the log-sum-exp of q kᵀ / sqrt(head_dim), (B, H, S), float32. A window is shorter
    than the sequence."""
    if library := _library_for(q, window):
        return attention_by(library, q, k, v, window)
    out, logsumexp = attention_by_torch(q, _for_each_head(k, q), _for_each_head(v, q), window)
    return _rows_of_heads(q).copy_(out), logsumexp.contiguous()


@operator("causal_attention_gradients", lambda q, k, v, *_: tuple(map(_rows_of_heads, (q, k, v))))
def causal_attention_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    out_grad: torch.Tensor,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, in their shapes and dtype, from what `causal_attention_and_logsumexp` returned."""
    if library := _library_for(q, window):
        return gradients_by(library, (q, k, v, out, logsumexp), out_grad, window)
    saved = q, _for_each_head(k, q), _for_each_head(v, q), out, logsumexp
    dq, dk, dv = gradients_by_torch(saved, out_grad, window)
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    dk, dv = (grad.unflatten(1, groups).sum(2, dtype=torch.float32) for grad in (dk, dv))
    return _rows_of_heads(q).copy_(dq), _rows_of_heads(k).copy_(dk), _rows_of_heads(v).copy_(dv)


def _for_each_head(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _rows_of_heads(x: torch.Tensor) -> torch.Tensor:
    """Uninitialized, shaped like x, in the memory layout that projections read and write: (B, S, H, D)."""
    batch, heads, seq, head_dim = x.shape
    return x.new_empty(batch, seq, heads, head_dim).transpose(1, 2)


def _empty_results(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialized output and log-sum-exp."""
    return _rows_of_heads(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _library_for(q: torch.Tensor, window: int | None) -> ctypes.CDLL | None:
    pairs = q.dtype == torch.bfloat16 and q.shape[-2] % 2 == 0 and q.shape[-1] % 2 == 0 and window is None
    return (bfloat16_library() if pairs else None) or float32_library()


def own_kernel_name(q: torch.Tensor, window: int | None = None) -> str:
    """What computes attention with queries of this shape and dtype, for the log."""
    if (library := _library_for(q, window)) is None:
        return "torch's for CPUs"
    return "own kernel, " + ("bfloat16 instructions" if library is bfloat16_library() else "float32 arithmetic")


@functools.cache
def bfloat16_library() -> ctypes.CDLL | None:
    """`attention_bfloat16.cpp`, for even seq and head_dim; compiled once per torch version. None without such
    instructions, or, with a warning, if it cannot run."""
    matrix_unit = torch.cpu._is_amx_tile_supported()
    if not (matrix_unit or torch.cpu._is_avx512_bf16_supported()):
        return None
    # Every CPU with AMX supports at least what Sapphire Rapids, the first of them, does.
    isa = ["-march=sapphirerapids"] if matrix_unit else [*isa_flags(), "-mavx512bf16"]
    flags = "-ffp-contract=off", f"-L{torch.__path__[0]}/lib", "-ltorch_cpu"
    library = load_library("attention_bfloat16.cpp", "attention", *isa, *flags)
    if library is None:
        return None
    library.attention_works.restype = ctypes.c_bool
    if not library.attention_works():
        logger.warning("attention is computed in float32: oneDNN cannot use this CPU's bfloat16 instructions")
        return None
    return library


@functools.cache
def float32_library() -> ctypes.CDLL | None:
    """`attention_float32.cpp`, for tensors of either dtype. None, with a warning, if it cannot be compiled."""
    return load_library("attention_float32.cpp", "attention", *isa_flags())


class _Matrices(ctypes.Structure):
    """(batch, heads, rows, columns): data pointer and strides of all dimensions but columns, which are contiguous."""

    _fields_ = [("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 3)]


def attention_by(
    library: ctypes.CDLL, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`causal_attention_and_logsumexp`."""
    out, logsumexp = _empty_results(q)
    _call(library.attention_forward, [*map(_in_pairs, (q, k, v)), out], logsumexp, k.shape[1], window)
    return out, logsumexp


def gradients_by(
    library: ctypes.CDLL, saved: Sequence[torch.Tensor], out_grad: torch.Tensor, window: int | None = None
) -> Gradients:
    """`causal_attention_gradients`. `saved`: q, k, v, out, logsumexp."""
    q, k, v, out, logsumexp = saved
    grads = (_rows_of_heads(q), _rows_of_heads(k), _rows_of_heads(v))
    tensors = [*map(_in_pairs, (q, k, v, out, out_grad)), *grads]
    _call(library.attention_backward, tensors, logsumexp, k.shape[1], window)
    return grads


def _call(
    function: Callable[..., object],
    tensors: Sequence[torch.Tensor],
    logsumexp: torch.Tensor,
    kv_heads: int,
    window: int | None,
) -> None:
    batch, heads, seq, head_dim = tensors[0].shape
    sizes = map(ctypes.c_int64, (batch, heads, kv_heads, seq, head_dim, seq if window is None else window))
    matrices = (_Matrices * len(tensors))(*map(_matrices, tensors))
    function(matrices, ctypes.byref(_matrices(logsumexp)), *sizes, tensors[0].dtype == torch.float32)


def _matrices(x: torch.Tensor) -> _Matrices:
    return _Matrices(x.data_ptr(), (ctypes.c_int64 * 3)(*x.stride()[:3]))


def _in_pairs(x: torch.Tensor) -> torch.Tensor:
    """x with contiguous rows, aligned so that they can be read two numbers at a time."""
    even = x.data_ptr() % 4 == 0 and all(stride % 2 == 0 for stride in x.stride()[:3])
    return x if x.stride(3) == 1 and even else x.clone(memory_format=torch.contiguous_format)


def attention_by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`causal_attention_and_logsumexp` for as many key-value heads as query heads, in any memory layout."""
    results: tuple[torch.Tensor, torch.Tensor]
    mask = _mask(q, window)
    results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, mask is None, attn_mask=mask)
    return results


def gradients_by_torch(saved: Sequence[torch.Tensor], out_grad: torch.Tensor, window: int | None = None) -> Gradients:
    """`causal_attention_gradients` for the shapes that `attention_by_torch` takes."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    mask = _mask(saved[0], window)
    gradients: Gradients = kernel(out_grad, *saved, 0.0, mask is None, attn_mask=mask)
    return gradients


def _mask(q: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """(S, S) in the dtype of q, added to the logits; None if the causal mask is all."""
    if window is None:
        return None
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().triu(1 - window)
    return torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, -torch.inf)
