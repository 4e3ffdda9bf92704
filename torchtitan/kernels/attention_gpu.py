"""Causal attention on GPUs where `scaled_dot_product_attention` would take a dense mask: for queries at the end of a
longer sequence, and within documents. No tensor of queries x keys is made, and blocks that see nothing are skipped.

Shapes: B batch, H query heads, G key-value heads, Q queries, S keys, D channels of a head.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from torchtitan.cache import keep_compiled_code_private

BLOCK = 128  # queries and keys of a block
# For texts of many lengths. cuDNN's kernel, which torch prefers on recent GPUs, builds a plan for each new length
# (pytorch #155958) and is wrong on B200 with few key heads (pytorch #193893).
ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def causal_attention_gpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(D)) v for the last Q of S positions, each of which attends to itself and earlier ones.

    Args:
        q: (B, H, Q, D).
        k, v: (B, G, S, D); H is a multiple of G.
        document_ids: (B, S) integers that never decrease along a sequence; if given, a position attends only within its
            document.

    Returns:
        (B, H, Q, D) in the dtype of q.
    """
    if document_ids is None and _fits_flash(q):
        # This operator aligns the causal mask with the last key (torch.nn.attention.bias relies on it as well).
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        return out
    if document_ids is None:
        document_ids = q.new_zeros((q.shape[0], k.shape[2]), dtype=torch.int32)
    attend: Callable[..., torch.Tensor] = flex_attention if torch.compiler.is_compiling() else _compiled()  # type: ignore[assignment]
    grouped = q.shape[1] != k.shape[1]
    return attend(q, k, v, block_mask=block_mask(document_ids, q.shape[2]), enable_gqa=grouped)


def has_own_kernel(q: torch.Tensor) -> bool:
    """Whether these queries are on a GPU, where a dense mask would cost more than attention."""
    return q.device.type == "cuda"


def _fits_flash(q: torch.Tensor) -> bool:
    return q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0


@functools.cache
def _compiled() -> Callable[..., Any]:
    keep_compiled_code_private()
    return torch.compile(flex_attention)


def block_mask(document_ids: torch.Tensor, queries: int) -> BlockMask:
    """Which keys the last `queries` positions may attend to, from the first and last document of each block. A row of
    blocks sees some blocks in part (where documents begin, and on the diagonal), and all of those in between.

    Args:
        document_ids: (B, S), non-decreasing along a sequence.
    """
    keys = document_ids.shape[1]
    offset, device = keys - queries, document_ids.device
    first_query = torch.arange(0, queries, BLOCK, device=device) + offset
    last_query = (first_query + (BLOCK - 1)).clamp(max=keys - 1)
    first_key = torch.arange(0, keys, BLOCK, device=device)
    last_key = (first_key + (BLOCK - 1)).clamp(max=keys - 1)
    starts, ends = document_ids[:, first_key], document_ids[:, last_key]
    # (B, rows): the first block with keys of a row's documents, and the first that lies in its last document alone.
    begin = (ends[:, None, :] < document_ids[:, first_query, None]).sum(-1)
    full_begin = (starts[:, None, :] < document_ids[:, last_query, None]).sum(-1)
    # A row that lies in several documents sees no block in full.
    one_document = document_ids[:, first_query] == document_ids[:, last_query]
    diagonal = (last_query // BLOCK).expand_as(begin)
    full_end = ((first_query + 1) // BLOCK).expand_as(begin)
    full_begin = full_begin.where(one_document, full_end)
    full_count = (full_end - full_begin).clamp(min=0)
    full_begin = full_begin.where(full_count > 0, diagonal + 1)
    places = torch.arange(len(first_key), device=device)
    before = full_begin - begin  # blocks seen in part before those seen in full
    partial_count = diagonal + 1 - begin - full_count
    partial = begin[..., None] + places + full_count[..., None] * (places >= before[..., None])
    full = full_begin[..., None] + places

    def allowed(batch: Any, head: Any, query: Any, key: Any) -> Any:
        position = query + offset
        return (key <= position) & (document_ids[batch, key] == document_ids[batch, position])

    def with_head(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.int32).unsqueeze(1)

    last = len(first_key) - 1
    return BlockMask.from_kv_blocks(
        with_head(partial_count),
        with_head(partial.clamp(max=last)),
        with_head(full_count),
        with_head(full.clamp(max=last)),
        BLOCK_SIZE=BLOCK,
        mask_mod=allowed,
        seq_lengths=(queries, keys),
    )
