"""Next-token cross-entropy that never materializes all logits.

Shapes: B batch, S sequence, D channels, V vocabulary, T tokens (B x S or a part of them).
"""

from collections.abc import Callable
from typing import Any

import torch

from torchtitan.compat.autograd import Function
from torchtitan.kernels.quantize import fused
from torchtitan.protocols import IGNORE_INDEX, CrossEntropyFunction

# Logits per chunk: 64 MiB in float32 on CPU, 1 GiB in bfloat16 on a GPU, where each chunk reads and writes the sum of
# the weight gradient. The number of tokens per chunk is a multiple of 512, since a GEMM with fewer rows utilizes a GPU
# poorly and low-precision kernels need multiples of 32.
CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS = 2**24, 2**29
CHUNK_MULTIPLE = 512
# A CPU applies the softmax to fewer rows at a time: 1 MiB in float32, which stays in the cache.
CPU_ELEMENTS, CPU_ROWS = 2**18, 16


def is_on_gpu(x: torch.Tensor) -> bool:
    return x.device.type == "cuda"


def chunk_tokens(vocab_size: int, on_gpu: bool) -> int:
    """Tokens per chunk of logits."""
    elements = GPU_CHUNK_ELEMENTS if on_gpu else CHUNK_ELEMENTS
    return max(1, elements // vocab_size // CHUNK_MULTIPLE) * CHUNK_MULTIPLE


def chunks(tokens: int, vocab_size: int, on_gpu: bool) -> int:
    """Number of chunks."""
    return -(-tokens // chunk_tokens(vocab_size, on_gpu))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed cross-entropy and its gradient, softmax - onehot(label), which overwrites the logits."""
    if is_on_gpu(logits):
        return _fused_cross_entropy(logits, labels), logits
    rows = max(CPU_ROWS, CPU_ELEMENTS // logits.shape[-1])  # that go through the softmax together on CPU
    total = torch.zeros((), device=logits.device)
    for part, label in zip(logits.split(rows), labels.split(rows), strict=True):
        log_probabilities = torch.log_softmax(part, -1, dtype=torch.float32)
        counted = (label != IGNORE_INDEX).unsqueeze(-1)
        label = label.where(label != IGNORE_INDEX, 0).unsqueeze(-1)
        total -= (log_probabilities.gather(-1, label) * counted).sum()
        probabilities = log_probabilities.exp_()
        probabilities.scatter_add_(-1, label, torch.full_like(label, -1.0, dtype=torch.float32))
        if not counted.all():
            probabilities *= counted
        part.copy_(probabilities)
    return total, logits


@fused
def _fused_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`cross_entropy` for a GPU: one kernel reads the logits twice and overwrites them."""
    counted = (labels != IGNORE_INDEX).unsqueeze(-1)
    label = labels.where(labels != IGNORE_INDEX, 0).unsqueeze(-1)
    wide = logits.float()
    log_sums = wide.logsumexp(-1, keepdim=True)
    loss = ((log_sums - wide.gather(-1, label)) * counted).sum()
    is_label = torch.arange(logits.shape[-1], device=logits.device) == label
    logits.copy_(((wide - log_sums).exp() - is_label.float()) * counted)
    return loss


def chunked_cross_entropy(
    output: Callable[[torch.Tensor], torch.Tensor],
    weight: torch.Tensor,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    cross_entropy: CrossEntropyFunction = cross_entropy,
    linear: torch.Tensor | None = None,
) -> torch.Tensor:
    """The cross-entropy of `output(hidden)`, one chunk of tokens at a time.

    Each chunk's gradients are computed during the forward pass, while its logits exist. So nothing of size (T, V)
    outlives its chunk, and nothing is computed twice.

    Args:
        output: the output layer, from (T, D) to (T, V).
        weight: parameter of the output layer, (V, D).
        hidden: (B, S, D).
        labels: (B, S); IGNORE_INDEX for positions without loss.
        cross_entropy: loss and gradient of a chunk's logits.
        linear: `weight` as `output` sees it, if that computes hidden @ linear.T and nothing else. A GPU then sums its
            gradient over the chunks within the GEMM.

    Returns:
        The sum over tokens, a float32 scalar.
    """
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    chunk = chunk_tokens(weight.shape[0], is_on_gpu(hidden))
    if not torch.is_grad_enabled():
        parts = zip(hidden.split(chunk), labels.split(chunk), strict=True)
        return torch.stack([cross_entropy(output(part), label)[0] for part, label in parts]).sum()
    if linear is not None and is_on_gpu(hidden):
        return _LinearCrossEntropy.apply(cross_entropy, chunk, labels, hidden, linear)
    return _ChunkedCrossEntropy.apply(output, cross_entropy, chunk, labels, hidden, weight)


class _ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        output: Callable[[torch.Tensor], torch.Tensor],
        cross_entropy: CrossEntropyFunction,
        chunk: int,
        labels: torch.Tensor,
        hidden: torch.Tensor,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grads = []
        weight_grad: torch.Tensor | None = None
        parts = hidden.split(chunk)
        for part, label in zip(parts, labels.split(chunk), strict=True):
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                logits = output(part)
            # .data: the matmul backward never reads its output, so autograd need not see it overwritten
            loss, logits_grad = cross_entropy(logits.data, label)
            hidden_grad, grad = torch.autograd.grad(logits, [part, weight], logits_grad)
            total += loss
            hidden_grads.append(hidden_grad)
            # Sum the chunks in float32, as one GEMM over all tokens would.
            if weight_grad is None:
                weight_grad = grad if len(parts) == 1 else grad.float()
            else:
                weight_grad += grad
        ctx.save_for_backward(torch.cat(hidden_grads), weight_grad)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return None, None, None, None, hidden_grad * grad, (weight_grad * grad).to(ctx.weight_dtype)


class _LinearCrossEntropy(Function):
    """`_ChunkedCrossEntropy` for logits hidden @ weight.T: the GEMM of a chunk adds to the weight gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        cross_entropy: CrossEntropyFunction,
        chunk: int,
        labels: torch.Tensor,
        hidden: torch.Tensor,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grad = torch.empty_like(hidden)
        weight_grad: torch.Tensor | None = None
        parts = zip(hidden.split(chunk), labels.split(chunk), hidden_grad.split(chunk), strict=True)
        for part, label, part_grad in parts:
            loss, logits_grad = cross_entropy(part @ weight.T, label)
            total += loss
            torch.mm(logits_grad, weight, out=part_grad)
            if len(hidden) <= chunk:
                weight_grad = logits_grad.T @ part
            elif weight_grad is None:
                weight_grad = _mm_float32(logits_grad.T, part)
            else:
                _add_mm_float32(weight_grad, logits_grad.T, part)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return None, None, None, hidden_grad * grad, _scaled(weight_grad, grad, ctx.weight_dtype)


def _mm_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in float32."""
    if a.device.type != "cuda" or a.dtype == torch.float32:  # only CUDA has the GEMM of bfloat16 operands
        return (a @ b).float()
    return torch.mm(a, b, out_dtype=torch.float32)


def _add_mm_float32(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Adds a @ b to `total`, float32."""
    if a.device.type != "cuda" or a.dtype == torch.float32:
        total += a @ b
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


@fused
def _scaled(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (x * factor).to(dtype)
