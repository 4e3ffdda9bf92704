"""Causal attention over packed sequences, and the layer around it.

Shapes: B batch, H query heads, G key-value heads, S sequence, D channels of a head, E channels of the residual stream.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.kernels import attention_cpu, attention_gpu
from torchtitan.models.args import TransformerArgs
from torchtitan.models.rope import apply_rope
from torchtitan.parallel.context import attention_of_last
from torchtitan.protocols import AttentionFunction


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(head_dim)) v, where each position attends to itself and earlier ones; with `document_ids`,
    (B, S) integers that never decrease along a sequence, only within its document. q: (B, H, S, D), like the result;
    k and v: (B, G, S, D), where H is a multiple of G."""
    if document_ids is not None:
        return attention_of_last(q, k, v, document_ids)
    if has_own_kernel(q):
        return attention_cpu.causal_attention_cpu(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def kernel_name(q: torch.Tensor, kv_heads: int, documents: bool, context_parallel: bool) -> str:
    """What computes attention in training, for the log. `context_parallel`: a rank has only the last queries, q."""
    on_gpu = attention_gpu.has_own_kernel(q)
    if not on_gpu and (documents or context_parallel):
        return "torch's, with a mask"
    if has_own_kernel(q):
        return attention_cpu.kernel_name(q)
    choice: str = attention_gpu.torchs_choice(q.device, q.dtype, q.shape[1], kv_heads, q.shape[3])
    if documents or (context_parallel and choice not in attention_gpu.BACKENDS):
        return "flex"
    return choice.removesuffix("_ATTENTION").lower()


def has_own_kernel(q: torch.Tensor) -> bool:
    """Whether these queries use the CPU attention kernel."""
    return q.device.type == "cpu" and q.dtype in attention_cpu.DTYPES


class Attention(nn.Module):
    """Grouped-query attention with rotary position embedding."""

    __call__: Callable[..., torch.Tensor]

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.attend: AttentionFunction = causal_attention
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)

    def forward(self, x: torch.Tensor, rope: torch.Tensor, document_ids: torch.Tensor | None) -> torch.Tensor:
        """(B, S, E) to (B, S, E). The number of heads comes from the projections, which may be sharded."""
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = self.before_rope(q, k)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), document_ids)
        mixed: torch.Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return mixed

    def before_rope(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries (B, S, H, D) and keys (B, S, G, D) as RoPE gets them; families that normalize them override this."""
        return q, k
