"""Causal attention on GPUs where `scaled_dot_product_attention` would take a dense mask: for queries at the end of a
longer sequence, within documents and within windows. No tensor of queries x keys is made, and blocks that see nothing
are skipped.

Queries at the end attend to all keys before them, and causally to their own. Torch's fastest kernel for this GPU
computes both parts, and their log-sum-exps say how much each counts (arXiv 2310.01889).

Shapes: B batch, H query heads, G key-value heads, Q queries, S keys, D channels of a head.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from torchtitan.cache import keep_compiled_code_private
from torchtitan.compat.dynamo import is_compiling
from torchtitan.kernels.attention_sinks import gradient_of_sinks, with_sinks
from torchtitan.kernels.operator import Function

aten = torch.ops.aten
BLOCK = 128  # queries and keys of a block
# cuDNN's kernel, which torch prefers on recent GPUs, builds a plan for each new length of a text (pytorch #155958).
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def causal_attention_gpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    document_ids: torch.Tensor | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kernels.attention.attend` on a GPU, for the last Q of S positions: q is (B, H, Q, D)."""
    if document_ids is None and window is None:
        backend = torchs_choice(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[3])
        # cuDNN's backward pass without a causal mask gives NaN where the last block of keys is half full and
        # log-sum-exps are below -88 (cudnn-frontend #628, trl #7181).
        wrong = backend == "CUDNN_ATTENTION" and (k.shape[2] - q.shape[2]) % BLOCK != 0
        if backend in BACKENDS and not wrong:
            return _InTwoParts.apply(q, k, v, backend, sinks)
    if document_ids is None:
        document_ids = q.new_zeros((q.shape[0], k.shape[2]), dtype=torch.int32)
    attend: Callable[..., torch.Tensor] = flex_attention if is_compiling() else _compiled()  # type: ignore[assignment]
    grouped = q.shape[1] != k.shape[1]
    mask = block_mask(document_ids[:, : k.shape[2]], q.shape[2], window)
    if sinks is None:
        return attend(q, k, v, block_mask=mask, enable_gqa=grouped)
    out, logsumexp = attend(q, k, v, block_mask=mask, enable_gqa=grouped, return_lse=True)
    return with_sinks(out, logsumexp, sinks)[0]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def torchs_choice(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> str:
    """The backend of `scaled_dot_product_attention` for causal training without a mask: a name of `SDPBackend`."""
    return _torchs_choice(device, dtype, heads, kv_heads, head_dim)


@functools.cache
def _torchs_choice(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> str:
    shapes = [(1, count, BLOCK, head_dim) for count in (heads, kv_heads)]
    q, k = (torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
    with right_kernels(device, kv_heads):
        choice = torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=heads != kv_heads)
    return str(SDPBackend(choice).name)


def right_kernels(device: torch.device, kv_heads: int) -> AbstractContextManager[None]:
    """In which `scaled_dot_product_attention` takes no kernel that is known to be wrong: on B200, cuDNN's with fewer
    than 8 key-value heads is (pytorch #193893)."""
    return sdpa_kernel(WITHOUT_CUDNN) if kv_heads < 8 and _is_blackwell(device) else nullcontext()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_blackwell(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Output (B, H, Q, D); log-sum-exp (B, H, Q) or (B, H, Q, 1), float32; two tensors of dropout, which is not used."""


class Backend(NamedTuple):
    """An operator that returns the log-sum-exp."""

    # Takes queries, keys, values, and whether Q = S and the mask is causal.
    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Saved]
    # Gradients of q, k and v from the output's and what the forward pass got and returned.
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _saved(results: Sequence[Any]) -> Saved:
    out, lse, _, _, _, _, seed, offset, _ = results
    return out, lse, seed, offset


BACKENDS = {
    "CUDNN_ATTENTION": Backend(
        lambda q, k, v, causal: _saved(aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)),
        lambda grad, q, k, v, saved, causal: aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, *saved, None, None, None, q.shape[2], k.shape[2], 0.0, causal
        ),
    ),
    "FLASH_ATTENTION": Backend(
        lambda q, k, v, causal: _saved(aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)),
        lambda grad, q, k, v, saved, causal: aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, *saved[:2], None, None, q.shape[2], k.shape[2], 0.0, causal, *saved[2:]
        ),
    ),
}
"""By their names in `SDPBackend`. With `torch.nn.attention.activate_flash_attention_impl`, the second is what the user
has activated."""


class _InTwoParts(Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        before, ctx.backend = k.shape[2] - q.shape[2], backend
        attend = BACKENDS[backend].forward
        out, lse, *random = attend(q, k[:, :, before:], v[:, :, before:], True)
        if before:
            full, full_lse, *_ = attend(q, k[:, :, :before], v[:, :, :before], False)
            share = torch.sigmoid(full_lse - lse).view(*q.shape[:3], 1)
            out = out.float().lerp(full.float(), share).to(out.dtype)
            lse = torch.logaddexp(lse, full_lse)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *random)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, *saved = ctx.saved_tensors
        before, gradients = k.shape[2] - q.shape[2], BACKENDS[ctx.backend].backward
        # Given output and log-sum-exp of all keys, each part's gradients are its parts of the gradients of the whole.
        dq, dk, dv = gradients(grad, q, k[:, :, before:], v[:, :, before:], tuple(saved), True)
        if before:
            full_dq, *full = gradients(grad, q, k[:, :, :before], v[:, :, :before], tuple(saved), False)
            dq = dq + full_dq
            dk, dv = (torch.cat(pair, 2) for pair in zip(full, (dk, dv), strict=True))
        sinks_grad = None if sinks is None else gradient_of_sinks(saved[0], saved[1], sinks, grad)
        return dq, dk, dv, None, sinks_grad


@functools.cache
def _compiled() -> Callable[..., Any]:
    keep_compiled_code_private()
    return torch.compile(flex_attention)


def block_mask(document_ids: torch.Tensor, queries: int, window: int | None = None) -> BlockMask:
    """Which keys the last `queries` positions may attend to, from the first and last document of each block. A row of
    blocks sees some blocks in part (where documents or windows begin, and on the diagonal), and all of those between.
    document_ids: (B, S), non-decreasing along a sequence."""
    keys = document_ids.shape[1]
    offset, device = keys - queries, document_ids.device
    first_query = torch.arange(0, queries, BLOCK, device=device) + offset
    last_query = (first_query + (BLOCK - 1)).clamp(max=keys - 1)
    first_key = torch.arange(0, keys, BLOCK, device=device)
    last_key = (first_key + (BLOCK - 1)).clamp(max=keys - 1)
    # (B, 1, S), from here on: with heads added last, the compiler takes 0 for the stride from one sequence to the next,
    # and all get the blocks of the first.
    ids = document_ids.unsqueeze(1)
    of_first, of_last = ids[..., first_query], ids[..., last_query]
    starts, ends = ids[..., first_key], ids[..., last_key]
    # (B, 1, rows): the first block with keys of a row's documents, and the first that lies in its last document alone.
    begin = (ends[..., None, :] < of_first[..., None]).sum(-1)
    full_begin = (starts[..., None, :] < of_last[..., None]).sum(-1)
    if window is not None:
        # No query sees a block before the window of the row's first; not all see one that the last one's window cuts.
        begin = begin.maximum((last_key <= first_query[:, None] - window).sum(-1))
        full_begin = full_begin.maximum((first_key <= last_query[:, None] - window).sum(-1))
    # A row that lies in several documents sees no block in full.
    diagonal = (last_query // BLOCK).expand_as(begin)
    full_end = ((first_query + 1) // BLOCK).expand_as(begin)
    full_begin = full_begin.where(of_first == of_last, full_end)
    full_count = (full_end - full_begin).clamp(min=0)
    full_begin = full_begin.where(full_count > 0, diagonal + 1)
    places = torch.arange(len(first_key), device=device)
    before = full_begin - begin  # blocks seen in part before those seen in full
    partial_count = diagonal + 1 - begin - full_count
    partial = begin[..., None] + places + full_count[..., None] * (places >= before[..., None])
    full = full_begin[..., None] + places

    def allowed(batch: Any, head: Any, query: Any, key: Any) -> Any:
        position = query + offset
        seen = (key <= position) & (document_ids[batch, key] == document_ids[batch, position])
        return seen if window is None else seen & (key > position - window)

    last = len(first_key) - 1
    return BlockMask.from_kv_blocks(
        partial_count.int(),
        partial.clamp(max=last).int(),
        full_count.int(),
        full.clamp(max=last).int(),
        BLOCK_SIZE=BLOCK,
        mask_mod=allowed,
        seq_lengths=(queries, keys),
    )
