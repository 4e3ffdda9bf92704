"""Sinks: the softmax of each head has a further, learned logit, whose value is zero (gpt-oss; arXiv 2309.17453).

Given the output and the log-sum-exp of attention without it, the sink scales the output by its part of the sum. The
backward pass of a kernel needs no change: with the scaled output and the log-sum-exp of all logits it returns the exact
gradients of queries, keys and values.

Shapes: B batch, H query heads, G key-value heads, Q queries, S keys, D channels of a head.
"""

import torch
import torch.nn.functional as F


def with_sinks(out: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, (B, H, Q, D), and log-sum-exp, (B, H, Q) or (B, H, Q, 1) in float32, with a logit more; sinks: (H,)."""
    heads = sinks.float().view(-1, *[1] * (logsumexp.ndim - 2))
    total = torch.logaddexp(logsumexp, heads)
    share = (logsumexp - total).exp().view(*out.shape[:3], 1)
    return (out * share).to(out.dtype), total


def gradient_of_sinks(
    out: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor, out_grad: torch.Tensor
) -> torch.Tensor:
    """(H,), from what `with_sinks` returned. A sink's probability p takes p out from the output."""
    heads = sinks.float().view(-1, 1)
    probabilities = (heads - logsumexp.view(out.shape[:3])).exp()
    products = torch.linalg.vecdot(out.float(), out_grad.float())
    gradient: torch.Tensor = -(probabilities * products).sum((0, 2)).to(sinks.dtype)
    return gradient


def with_sink_key(
    k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and an additive mask for kernels that know no sinks: with one key more, of zeros, whose logit the
    mask makes the sink.

    Args:
        k, v: (B, G, S, D).
        seen: (B or 1, 1, Q or 1, S), which keys a query attends to; None: all.
        sinks: (1, H, Q or 1, 1).
    """
    if seen is None:
        seen = torch.ones(1, 1, 1, k.shape[2], dtype=torch.bool, device=k.device)
    bias = torch.zeros((), dtype=k.dtype, device=k.device).masked_fill(~seen, -torch.inf)
    shape = torch.broadcast_shapes(bias.shape[:3], sinks.shape[:3])
    column = sinks.to(k.dtype).expand(*shape, 1)
    mask = torch.cat([bias.expand(*shape, -1), column], -1)
    return F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), mask
