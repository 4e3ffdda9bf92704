"""Causal attention over packed sequences.

Shapes: B batch, H query heads, G key-value heads, S sequence, D channels of a head.
"""

import torch
import torch.nn.functional as F

from torchtitan.kernels import attention_gpu
from torchtitan.kernels.attention_cpu import causal_attention_cpu


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(head_dim)) v, where each position attends to itself and earlier ones.

    Args:
        q: (B, H, S, D).
        k, v: (B, G, S, D); H is a multiple of G.
        document_ids: (B, S) integers that never decrease along a sequence; if given, a position attends only within its
            document.

    Returns:
        (B, H, S, D) in the dtype of q.
    """
    grouped = q.shape[1] != k.shape[1]
    if document_ids is None:
        if has_own_kernel(q):
            return causal_attention_cpu(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if attention_gpu.has_own_kernel(q):
        return attention_gpu.causal_attention_gpu(q, k, v, document_ids)
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=same & causal, enable_gqa=grouped)


def has_own_kernel(q: torch.Tensor) -> bool:
    """Whether these queries use the CPU attention kernel."""
    return q.device.type == "cpu" and q.dtype == torch.bfloat16
