"""Causal attention on CPU in bfloat16.

With a matrix unit (AMX) and a C++ compiler, `attention_cpu.cpp` computes it. Elsewhere torch's kernel does, except for
the backward pass of narrow heads, which runs float32 GEMMs over tiles that fit the cache. All variants save the output
and the log-sum-exp. `benchmarks/attention_cpu.py` compares them.

Shapes: B batch, H query heads, G key-value heads, S sequence, D channels of a head.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from torchtitan.kernels.cpp_extension import load
from torchtitan.logging import logger

WIDE_HEADS = 64  # from this head_dim on, torch's kernel is faster than tiles
QUERIES, HEADS = 128, 8  # per tile: 8 x 128 x 512 scores in float32 take 2 MiB

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class SavedTensors(NamedTuple):
    """Saved for the backward pass; shapes as in `causal_attention_and_logsumexp`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    logsumexp: torch.Tensor


def causal_attention_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(head_dim)) v with a causal mask.

    Args:
        q: (B, H, S, D), bfloat16.
        k, v: (B, G, S, D), bfloat16; H is a multiple of G.

    Returns:
        Same shape and dtype as q.
    """
    return _CausalAttention.apply(q, k, v)


class _CausalAttention(torch.autograd.Function):
    apply: ClassVar[Callable[..., torch.Tensor]]

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor
        out, logsumexp = causal_attention_and_logsumexp(q, k, v)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, out_grad: torch.Tensor) -> Gradients:
        gradients: Gradients = causal_attention_gradients(*ctx.saved_tensors, out_grad)
        return gradients


# Both are custom operators, so the compiler calls them without tracing into them.
@torch.library.custom_op("torchtitan::causal_attention", mutates_args=())
def causal_attention_and_logsumexp(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`causal_attention_cpu`, plus the log-sum-exp of q kᵀ / sqrt(head_dim), (B, H, S), float32."""
    if library := _matrix_unit_for(q):
        return attention_by_matrix_unit(library, q, k, v)
    out, logsumexp = attention_by_torch(q, _for_each_head(k, q), _for_each_head(v, q))
    return _rows_of_heads(q).copy_(out), logsumexp.contiguous()


@causal_attention_and_logsumexp.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _rows_of_heads(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("torchtitan::causal_attention_gradients", mutates_args=())
def causal_attention_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    out_grad: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, in their shapes and dtype, from what `causal_attention_and_logsumexp` returned."""
    if library := _matrix_unit_for(q):
        return gradients_by_matrix_unit(library, SavedTensors(q, k, v, out, logsumexp), out_grad)
    by = gradients_by_tiles if q.shape[-1] < WIDE_HEADS else gradients_by_torch
    dq, dk, dv = by(SavedTensors(q, _for_each_head(k, q), _for_each_head(v, q), out, logsumexp), out_grad)
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    dk, dv = (grad.unflatten(1, groups).sum(2, dtype=torch.float32) for grad in (dk, dv))
    return _rows_of_heads(q).copy_(dq), _rows_of_heads(k).copy_(dk), _rows_of_heads(v).copy_(dv)


@causal_attention_gradients.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    out_grad: torch.Tensor,
) -> Gradients:
    return _rows_of_heads(q), _rows_of_heads(k), _rows_of_heads(v)


def _for_each_head(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _rows_of_heads(x: torch.Tensor) -> torch.Tensor:
    """Uninitialized, shaped like x, in the memory layout that projections read and write: (B, S, H, D)."""
    batch, heads, seq, head_dim = x.shape
    return x.new_empty(batch, seq, heads, head_dim).transpose(1, 2)


def _matrix_unit_for(q: torch.Tensor) -> ctypes.CDLL | None:
    return matrix_unit_library() if q.shape[-2] % 2 == 0 and q.shape[-1] % 2 == 0 else None


@functools.cache
def matrix_unit_library() -> ctypes.CDLL | None:
    """`attention_cpu.cpp`, compiled once per torch version. None without AMX, or, with a warning, if it cannot run."""
    if not torch.cpu._is_amx_tile_supported():
        return None
    # Every CPU with AMX supports at least what Sapphire Rapids, the first of them, does.
    flags = ("-march=sapphirerapids", "-ffp-contract=off", f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu")
    library = load(Path(__file__).with_suffix(".cpp"), "attention", *flags)
    if library is None:
        return None
    library.attention_works.restype = ctypes.c_bool
    if not library.attention_works():
        logger.warning("attention falls back to a slower kernel: oneDNN cannot use the matrix unit")
        return None
    return library


class _Matrices(ctypes.Structure):
    """(batch, heads, rows, columns): data pointer and strides of all dimensions but columns, which are contiguous."""

    _fields_ = [("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 3)]


def attention_by_matrix_unit(
    library: ctypes.CDLL, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`causal_attention_and_logsumexp` for even seq and head_dim."""
    out, logsumexp = _rows_of_heads(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    _call(library.attention_forward, [*map(_in_pairs, (q, k, v)), out], logsumexp, k.shape[1])
    return out, logsumexp


def gradients_by_matrix_unit(library: ctypes.CDLL, saved: SavedTensors, out_grad: torch.Tensor) -> Gradients:
    """`causal_attention_gradients` for even seq and head_dim."""
    q, k, v, out, logsumexp = saved
    grads = (_rows_of_heads(q), _rows_of_heads(k), _rows_of_heads(v))
    tensors = [*map(_in_pairs, (q, k, v, out, out_grad)), *grads]
    _call(library.attention_backward, tensors, logsumexp, k.shape[1])
    return grads


def _call(
    function: Callable[..., object], tensors: Sequence[torch.Tensor], logsumexp: torch.Tensor, kv_heads: int
) -> None:
    batch, heads, seq, head_dim = tensors[0].shape
    sizes = map(ctypes.c_int64, (batch, heads, kv_heads, seq, head_dim))
    function((_Matrices * len(tensors))(*map(_matrices, tensors)), ctypes.byref(_matrices(logsumexp)), *sizes)


def _matrices(x: torch.Tensor) -> _Matrices:
    return _Matrices(x.data_ptr(), (ctypes.c_int64 * 3)(*x.stride()[:3]))


def _in_pairs(x: torch.Tensor) -> torch.Tensor:
    """x with contiguous rows, aligned so that they can be read two numbers at a time."""
    even = x.data_ptr() % 4 == 0 and all(stride % 2 == 0 for stride in x.stride()[:3])
    return x if x.stride(3) == 1 and even else x.clone(memory_format=torch.contiguous_format)


def attention_by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`causal_attention_and_logsumexp` for as many key-value heads as query heads, in any memory layout."""
    results: tuple[torch.Tensor, torch.Tensor]
    results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return results


def gradients_by_torch(saved: SavedTensors, out_grad: torch.Tensor) -> Gradients:
    """`causal_attention_gradients` for the shapes that `attention_by_torch` takes."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients: Gradients = kernel(out_grad, *saved, 0.0, True)
    return gradients


def gradients_by_tiles(saved: SavedTensors, out_grad: torch.Tensor) -> Gradients:
    """`gradients_by_torch` as FlashAttention (arXiv 2205.14135, algorithm 4), one tile of queries and heads at a time.

    With P = exp(scale q kᵀ - logsumexp): dv = Pᵀ do, ds = P * (do vᵀ - rowsum(do * o)), dq = scale ds k,
    dk = scale dsᵀ q, all in float32. The subtracted terms go through the GEMMs as one more column, against ones.
    """
    q, k, v, out, logsumexp = saved
    shape = q.shape
    seq, head_dim = shape[-2:]
    scale = head_dim**-0.5
    row_sums = (out_grad.float() * out).sum(-1)
    queries, keys = _with_column(q, -logsumexp), _with_column(k, 1.0)
    out_grads, values = _with_column(out_grad, -row_sums), _with_column(v, 1.0)
    queries[..., :head_dim] *= scale
    q_grad, k_grad, v_grad = (queries.new_empty(queries.shape[0], seq, head_dim) for _ in range(3))
    # Results reuse the same buffers, which stay in the cache.
    p_space, s_space = (queries.new_empty(HEADS * QUERIES * seq) for _ in range(2))
    space = queries.new_empty(HEADS * seq * head_dim)
    for first_head in range(0, queries.shape[0], HEADS):
        heads = slice(first_head, first_head + HEADS)
        q_, k_, v_, o_grad = queries[heads], keys[heads], values[heads], out_grads[heads]
        dq, dk, dv = q_grad[heads], k_grad[heads], v_grad[heads]
        for start in reversed(range(0, seq, QUERIES)):  # last queries first: they see all keys and initialize the sums
            rows, seen = slice(start, start + QUERIES), slice(0, start + QUERIES)
            p = _bmm(q_[:, rows], k_[:, seen].mT, p_space)
            s_grad = _bmm(o_grad[:, rows], v_[:, seen].mT, s_space)
            diagonal = p[:, :, start:]
            diagonal.clamp_(max=0)  # affects only masked scores, whose exponential could overflow
            p.exp_()
            diagonal.tril_()
            s_grad *= p
            for grad, weights, other in ((dv, p, o_grad), (dk, s_grad, q_)):
                if start + QUERIES >= seq:
                    torch.bmm(weights.mT, other[:, rows, :head_dim], out=grad)
                else:
                    grad[:, seen] += _bmm(weights.mT, other[:, rows, :head_dim], space)
            dq[:, rows] = _bmm(s_grad, k_[:, seen, :head_dim], space)
    q_grad *= scale
    return q_grad.view(shape), k_grad.view(shape), v_grad.view(shape)


def _with_column(x: torch.Tensor, column: torch.Tensor | float) -> torch.Tensor:
    """Appends a column: (B, H, S, n) and (B, H, S) to (B * H, S, n + 1), float32."""
    wide = x.new_empty(*x.shape[:-1], x.shape[-1] + 1, dtype=torch.float32)
    wide[..., :-1] = x
    wide[..., -1] = column
    return wide.flatten(0, 1)


def _bmm(a: torch.Tensor, b: torch.Tensor, space: torch.Tensor) -> torch.Tensor:
    """The batched GEMM a b, written into preallocated memory."""
    shape = (*a.shape[:2], b.shape[2])
    return torch.bmm(a, b, out=space[: shape[0] * shape[1] * shape[2]].view(shape))
