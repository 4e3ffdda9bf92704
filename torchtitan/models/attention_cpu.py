"""Causal attention on CPU whose backward pass is made of matrix products over tiles that fit the cache.

torch's own backward kernel for CPU takes most of a training step of a model with narrow heads in bfloat16. This one
takes about half as long there, and is more exact, since it computes in float32 (benchmarks/attention_cpu.py). It keeps
what torch's forward kernel keeps: output and log-sum-exp.
"""

import torch

QUERIES, HEADS = 128, 8  # of a tile: 8 x 128 x 512 scores in float32 are 2 MiB


def causal_attention_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(head_dim)) v with a causal mask.

    Args:
        q, k, v: (batch, heads, seq, head_dim), bfloat16.

    Returns:
        The same shape and dtype.
    """
    return _CausalAttention.apply(q, k, v)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):  # type: ignore[no-untyped-def, override]
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx, out_grad):  # type: ignore[no-untyped-def, override]
        return causal_attention_gradients(*ctx.saved_tensors, out_grad)


# An operator of its own: the compiler calls it as it is, where it would unroll its loops.
@torch.library.custom_op("torchtitan::causal_attention_gradients", mutates_args=())
def causal_attention_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    out_grad: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of FlashAttention (arXiv 2205.14135, algorithm 4), a tile of queries and heads at a time.

    With P = exp(scale q kᵀ - logsumexp): dv = Pᵀ do, ds = P * (do vᵀ - rowsum(do * o)), dq = scale ds k,
    dk = scale dsᵀ q. What is subtracted goes through the products as one more column against ones.
    """
    shape, dtype = q.shape, q.dtype
    seq, head_dim = shape[-2:]
    scale = head_dim**-0.5
    row_sums = (out_grad.float() * out).sum(-1)
    queries, keys = _with_column(q, -logsumexp), _with_column(k, 1.0)
    out_grads, values = _with_column(out_grad, -row_sums), _with_column(v, 1.0)
    queries[..., :head_dim] *= scale
    q_grad, k_grad, v_grad = (queries.new_empty(queries.shape[0], seq, head_dim) for _ in range(3))
    # Results go to the same memory again and again, which stays in the cache.
    p_space, s_space = (queries.new_empty(HEADS * QUERIES * seq) for _ in range(2))
    space = queries.new_empty(HEADS * seq * head_dim)
    for first_head in range(0, queries.shape[0], HEADS):
        heads = slice(first_head, first_head + HEADS)
        q_, k_, v_, o_grad = queries[heads], keys[heads], values[heads], out_grads[heads]
        dq, dk, dv = q_grad[heads], k_grad[heads], v_grad[heads]
        for start in reversed(range(0, seq, QUERIES)):  # the last queries see all keys, and begin the sums
            rows, seen = slice(start, start + QUERIES), slice(0, start + QUERIES)
            p = _bmm(q_[:, rows], k_[:, seen].mT, p_space)
            s_grad = _bmm(o_grad[:, rows], v_[:, seen].mT, s_space)
            diagonal = p[:, :, start:]
            diagonal.clamp_(max=0)  # only where a later key is masked; else its exponential might be infinite
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
    dq, dk, dv = (grad.to(dtype).view(shape) for grad in (q_grad, k_grad, v_grad))
    return dq, dk, dv


@causal_attention_gradients.register_fake
def _(q, k, v, out, logsumexp, out_grad):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _with_column(x: torch.Tensor, column: torch.Tensor | float) -> torch.Tensor:
    """(batch, heads, seq, n) and (batch, heads, seq) to (batch * heads, seq, n + 1), float32."""
    wide = x.new_empty(*x.shape[:-1], x.shape[-1] + 1, dtype=torch.float32)
    wide[..., :-1] = x
    wide[..., -1] = column
    return wide.flatten(0, 1)


def _bmm(a: torch.Tensor, b: torch.Tensor, space: torch.Tensor) -> torch.Tensor:
    """The batched product a b, in memory that is there already."""
    shape = (*a.shape[:2], b.shape[2])
    return torch.bmm(a, b, out=space[: shape[0] * shape[1] * shape[2]].view(shape))
