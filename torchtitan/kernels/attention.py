"""Attention as a layer declares it, by the first kernel of the table that does all of it.

Shapes: B batch, H query heads, G key-value heads, Q queries, S keys, D channels of a head.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from torchtitan.compat.dynamo import is_compiling
from torchtitan.kernels import attention_cpu
from torchtitan.kernels.attention_gpu import BACKENDS, causal_attention_gpu, right_kernels, torchs_choice
from torchtitan.kernels.attention_sinks import with_sink_key
from torchtitan.kernels.dispatch import KERNELS, SIMULATED, Kernel, find_attention
from torchtitan.protocols import AttentionSpec

OF_ALL, OF_LAST = "attention", "attention of the last queries"  # operations of the table


def attend(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ids: torch.Tensor | None,
    last: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(head_dim)) v, changed and masked as `spec` says; a UserError if no kernel does so. q: (B, H,
    Q, D), like the result; k, v: (B, G, S, D), where H is a multiple of G; ids: (B, S) document ids, which never
    decrease along a sequence; sinks: (H,), if the layer declares them. With `last`, queries are the last positions of
    the keys, and the ids may go on."""
    if spec.sinks != (sinks is not None):
        raise ValueError(
            f"the layer declares sinks = {spec.sinks}, but attention got {'no' if sinks is None else 'some'}"
        )
    kernel = find_attention(OF_LAST if last else OF_ALL, spec, q, ids is not None)
    out: torch.Tensor = kernel.run(spec, q, k, v, ids) if sinks is None else kernel.run(spec, q, k, v, ids, sinks)
    return out


def kernel_name(spec: AttentionSpec, q: torch.Tensor, kv_heads: int, documents: bool, context_parallel: bool) -> str:
    """What computes attention in training, for the log. `context_parallel`: a rank has only the last queries, q."""
    kernel = find_attention(OF_LAST if context_parallel else OF_ALL, spec, q, documents)
    return kernel.label(spec, q, kv_heads) if kernel.label else kernel.name


def _by_torch(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: None) -> torch.Tensor:
    with right_kernels(q.device, k.shape[1]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _masked_by_torch(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ids: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    queries, keys = q.shape[2], k.shape[2]
    only_causal = ids is None and spec.window is None and sinks is None
    if only_causal and not (is_compiling() or SIMULATED):  # it can neither be compiled nor planned
        mask: torch.Tensor = causal_lower_right(queries, keys)  # keeps flash attention
    else:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        if spec.window is not None:
            mask = mask.triu(keys - queries + 1 - spec.window)
        if ids is not None:
            ids = ids[:, None, :keys]
            mask = mask & (ids[..., keys - queries :, None] == ids[..., None, :])
        if sinks is not None:
            k, v, mask = with_sink_key(k, v, mask.view(-1, 1, queries, keys), sinks.view(1, -1, 1, 1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def _torchs_choice(spec: AttentionSpec, q: torch.Tensor, kv_heads: int) -> str:
    choice: str = torchs_choice(q.device, q.dtype, q.shape[1], kv_heads, q.shape[3])
    return choice.removesuffix("_ATTENTION").lower()


def _in_two_parts(spec: AttentionSpec, q: torch.Tensor, kv_heads: int) -> str:
    choice = _torchs_choice(spec, q, kv_heads)
    return choice if f"{choice.upper()}_ATTENTION" in BACKENDS else "flex"


OWN = Kernel(
    "torchtitan's for CPUs",
    lambda spec, q, k, v, ids, sinks=None: attention_cpu.causal_attention_cpu(q, k, v, spec.window, sinks),
    lambda q: q.device.type == "cpu" and q.dtype in attention_cpu.DTYPES,
    ["window", "sinks"],
    lambda spec, q, kv_heads: attention_cpu.own_kernel_name(q, spec.window),
)
TORCHS = Kernel("torch's", _by_torch, label=_torchs_choice)
TWO_PARTS, FLEX = (
    Kernel(
        name,
        lambda spec, q, k, v, ids, sinks=None: causal_attention_gpu(q, k, v, ids, spec.window, sinks),
        lambda q: q.device.type == "cuda",
        does,
        label,
    )
    for name, does, label in [
        ("torch's, in two parts", ["sinks"], _in_two_parts),
        ("flex", ["documents", "window", "sinks"], None),
    ]
)
MASKED = Kernel(
    "torch's, with a mask", _masked_by_torch, lambda q: q.device.type != "cuda", ["documents", "window", "sinks"]
)
KERNELS[OF_ALL] = [OWN, TORCHS, TWO_PARTS, FLEX, MASKED]
KERNELS[OF_LAST] = [TWO_PARTS, FLEX, MASKED]
