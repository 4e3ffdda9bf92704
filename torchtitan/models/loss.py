"""Next-token cross-entropy without ever holding all the logits.

Shapes: B batch, S sequence, D channels, V vocabulary, T tokens (B x S or a part of them).
"""

from collections.abc import Callable

import torch

from torchtitan.protocols import IGNORE_INDEX, CrossEntropyFunction

# Logits are computed for so many tokens at once that they hold about this many numbers: 64 MiB in float32. A GEMM
# of fewer than 512 rows uses a GPU badly, and low-precision kernels want multiples of 32: so multiples of 512.
CHUNK_ELEMENTS = 2**24
CHUNK_MULTIPLE = 512
# On a CPU fewer rows go through the softmax at once: 1 MiB in float32 stays in the cache.
CPU_ELEMENTS, CPU_ROWS = 2**18, 16


def chunk_tokens(vocab_size: int) -> int:
    """Tokens whose logits are computed at once."""
    return max(1, CHUNK_ELEMENTS // vocab_size // CHUNK_MULTIPLE) * CHUNK_MULTIPLE


def chunks(tokens: int, vocab_size: int) -> int:
    """How many such chunks there are."""
    return -(-tokens // chunk_tokens(vocab_size))


def rows_at_once(logits: torch.Tensor) -> int:
    """How many rows of logits go through the softmax together."""
    return max(CPU_ROWS, CPU_ELEMENTS // logits.shape[-1]) if logits.device.type == "cpu" else len(logits)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cross-entropy and its gradient, softmax - onehot(label), which takes the place of the logits."""
    rows = rows_at_once(logits)
    total = torch.zeros((), device=logits.device)
    for part, label in zip(logits.split(rows), labels.split(rows), strict=True):
        log_probabilities = torch.log_softmax(part, -1, dtype=torch.float32)
        counted = (label != IGNORE_INDEX).unsqueeze(-1)
        label = label.where(label != IGNORE_INDEX, 0).unsqueeze(-1)
        total -= (log_probabilities.gather(-1, label) * counted).sum()
        probabilities = log_probabilities.exp_()
        probabilities.scatter_add_(-1, label, torch.full_like(label, -1.0, dtype=torch.float32))
        if logits.device.type != "cpu" or not counted.all():  # elsewhere the question would wait for the device
            probabilities *= counted
        part.copy_(probabilities)
    return total, logits


def chunked_cross_entropy(
    output: Callable[[torch.Tensor], torch.Tensor],
    weight: torch.Tensor,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    cross_entropy: CrossEntropyFunction = cross_entropy,
) -> torch.Tensor:
    """The cross-entropy of `output(hidden)`, a chunk of tokens at a time.

    Gradients are taken chunk by chunk during the forward pass, while the chunk's logits are there, so nothing of the
    size (T, V) outlives its chunk and nothing is computed twice.

    Args:
        output: the output layer, from (T, D) to (T, V).
        weight: its parameter, (V, D).
        hidden: (B, S, D).
        labels: (B, S), IGNORE_INDEX where there is no loss.
        cross_entropy: of a chunk's logits.

    Returns:
        The sum over tokens, a float32 scalar.
    """
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    chunk = chunk_tokens(weight.shape[0])
    if not torch.is_grad_enabled():
        parts = zip(hidden.split(chunk), labels.split(chunk), strict=True)
        return torch.stack([cross_entropy(output(part), label)[0] for part, label in parts]).sum()
    return _ChunkedCrossEntropy.apply(output, cross_entropy, chunk, labels, hidden, weight)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, cross_entropy, chunk, labels, hidden, weight):  # type: ignore[no-untyped-def, override]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grads = []
        weight_grad: torch.Tensor | None = None
        parts = hidden.split(chunk)
        for part, label in zip(parts, labels.split(chunk), strict=True):
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                logits = output(part)
            # data: no GEMM needs its own result again, so that it is written over is nothing to autograd
            loss, logits_grad = cross_entropy(logits.data, label)
            hidden_grad, grad = torch.autograd.grad(logits, [part, weight], logits_grad)
            total += loss
            hidden_grads.append(hidden_grad)
            # The chunks' sum is kept in float32, as one GEMM over all tokens would keep it.
            if weight_grad is None:
                weight_grad = grad if len(parts) == 1 else grad.float()
            else:
                weight_grad += grad
        ctx.save_for_backward(torch.cat(hidden_grads), weight_grad)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def, override]
        hidden_grad, weight_grad = ctx.saved_tensors
        return None, None, None, None, hidden_grad * grad, (weight_grad * grad).to(ctx.weight_dtype)
