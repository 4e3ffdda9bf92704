"""Next-token cross-entropy that never materializes all logits.

Shapes: B batch, S sequence, D channels, V vocabulary, T tokens (B x S or a part of them).
"""

from collections.abc import Callable
from typing import Any

import torch

from torchtitan.kernels.dispatch import KERNELS, Kernel, device_type, find_kernel
from torchtitan.kernels.operator import Function, fused
from torchtitan.protocols import IGNORE_INDEX, CrossEntropyFunction
from torchtitan.registry import deferred

# Logits per chunk: 64 MiB in float32 on CPU, 1 GiB in bfloat16 on a GPU, where each chunk reads and writes the sum of
# the weight gradient. The number of tokens per chunk is a multiple of 512, since a GEMM with fewer rows utilizes a GPU
# poorly and low-precision kernels need multiples of 32.
CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS = 2**24, 2**29
CHUNK_MULTIPLE = 512
# A CPU applies the softmax to fewer rows at a time: 1 MiB in float32, which stays in the cache.
CPU_ELEMENTS, CPU_ROWS = 2**18, 16

# What a GPU uses.
_fused_cross_entropy = deferred("torchtitan.models.loss_gpu:fused_cross_entropy")
_add_mm = deferred("torchtitan.models.loss_gpu:add_mm")


def chunk_tokens(vocab_size: int, on_gpu: bool) -> int:
    """Tokens per chunk of logits."""
    elements = GPU_CHUNK_ELEMENTS if on_gpu else CHUNK_ELEMENTS
    return max(1, elements // vocab_size // CHUNK_MULTIPLE) * CHUNK_MULTIPLE


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, z_loss: float | None = None, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A `CrossEntropyFunction`: its gradient, softmax - onehot(label) without z-loss and softcap, overwrites logits."""
    return find_kernel("cross_entropy", logits)(logits, labels, z_loss, softcap), logits


def soft_cap(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """softcap * tanh(logits / softcap) (Gemma 2, arXiv 2408.00118); for None the logits themselves."""
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def _cross_entropy_in_rows(
    logits: torch.Tensor, labels: torch.Tensor, z_loss: float | None, softcap: float | None
) -> torch.Tensor:
    """`cross_entropy` for a CPU."""
    rows = max(CPU_ROWS, CPU_ELEMENTS // logits.shape[-1])  # that go through the softmax together on CPU
    total = torch.zeros((), device=logits.device)
    for chunk, label in zip(logits.split(rows), labels.split(rows), strict=True):
        capped = chunk if softcap is None else soft_cap(chunk.float(), softcap)
        log_probabilities = torch.log_softmax(capped, -1, dtype=torch.float32)
        log_sums = capped[:, :1] - log_probabilities[:, :1]
        counted = (label != IGNORE_INDEX).unsqueeze(-1)
        label = label.where(label != IGNORE_INDEX, 0).unsqueeze(-1)
        total -= (log_probabilities.gather(-1, label) * counted).sum()
        probabilities = log_probabilities.exp_()
        if z_loss is not None:
            probabilities *= 1 + 2 * z_loss * log_sums
        probabilities.scatter_add_(-1, label, torch.full_like(label, -1.0, dtype=torch.float32))
        if not counted.all():
            probabilities *= counted
        if softcap is not None:
            probabilities *= 1 - (capped / softcap).square()
        chunk.copy_(probabilities)
    return total


KERNELS["cross_entropy"] = [
    Kernel("fused", _fused_cross_entropy, lambda logits: device_type(logits) == "cuda"),
    Kernel("in rows", _cross_entropy_in_rows),
]


def chunked_cross_entropy(
    output: Callable[[torch.Tensor], torch.Tensor],  # the output layer, from (T, D) to (T, V)
    weight: torch.Tensor,  # (V, D), its parameter
    hidden: torch.Tensor,  # (B, S, D)
    labels: torch.Tensor,  # (B, S); IGNORE_INDEX for positions without loss
    cross_entropy: CrossEntropyFunction = cross_entropy,
    # `weight` as `output` sees it, if `output` is hidden @ linear.T; a GPU then sums its gradient within the GEMM.
    linear: torch.Tensor | None = None,
) -> torch.Tensor:
    """The cross-entropy of `output(hidden)`, one chunk of tokens at a time; the sum over tokens, a float32 scalar.

    Each chunk's gradients are computed during the forward pass, while its logits exist. So nothing of size (T, V)
    outlives its chunk, and nothing is computed twice.
    """
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    chunk = chunk_tokens(weight.shape[0], device_type(hidden) == "cuda")
    if not torch.is_grad_enabled():
        chunks = zip(hidden.split(chunk), labels.split(chunk), strict=True)
        return torch.stack([cross_entropy(output(x), label)[0] for x, label in chunks]).sum()
    if linear is not None and device_type(hidden) == "cuda":
        return _ChunkedCrossEntropy.apply(None, cross_entropy, chunk, labels, hidden, linear)
    return _ChunkedCrossEntropy.apply(output, cross_entropy, chunk, labels, hidden, weight)


class _ChunkedCrossEntropy(Function):
    """If `output` is None, the logits are hidden @ weight.T, and a chunk's GEMM adds to the gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Callable[[torch.Tensor], torch.Tensor] | None,
        cross_entropy: CrossEntropyFunction,
        chunk: int,
        labels: torch.Tensor,
        hidden: torch.Tensor,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grad, single = torch.empty_like(hidden), len(hidden) <= chunk
        weight_grad: torch.Tensor | None = None  # sums several chunks in float32, which equals one GEMM over all tokens
        chunks = zip(hidden.split(chunk), labels.split(chunk), hidden_grad.split(chunk), strict=True)
        for x, label, x_grad in chunks:
            if output is None:
                loss, logits_grad = cross_entropy(x @ weight.T, label)
                torch.mm(logits_grad, weight, out=x_grad)
                weight_grad = logits_grad.T @ x if single else _add_mm(weight_grad, logits_grad.T, x)
            else:
                x = x.detach().requires_grad_()
                with torch.enable_grad():
                    logits = output(x)
                # .data: the matmul backward never reads its output, so autograd need not see it overwritten
                loss, logits_grad = cross_entropy(logits.data, label)
                gradient, grad = torch.autograd.grad(logits, [x, weight], logits_grad)
                x_grad.copy_(gradient)
                if weight_grad is None:
                    weight_grad = grad if single else grad.float()
                else:
                    weight_grad += grad
            total += loss
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.scale = _scale_fused if output is None else _scale
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return None, None, None, None, hidden_grad * grad, ctx.scale(weight_grad, grad, ctx.weight_dtype)


def _scale(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (x * factor).to(dtype)


_scale_fused = fused(_scale)
