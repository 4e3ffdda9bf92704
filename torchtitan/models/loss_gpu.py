"""The parts of the chunked loss (`models.loss`) that only a GPU uses."""

import torch

from torchtitan.compat.dynamo import compile_for_size
from torchtitan.kernels.dispatch import device_type
from torchtitan.kernels.operator import fused
from torchtitan.models.loss import soft_cap
from torchtitan.protocols import IGNORE_INDEX


@fused
def fused_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, z_loss: float | None, softcap: float | None
) -> torch.Tensor:
    """`cross_entropy` for a GPU: one kernel reads the logits twice and overwrites them."""
    compile_for_size(logits, -1)
    counted = (labels != IGNORE_INDEX).unsqueeze(-1)
    label = labels.where(labels != IGNORE_INDEX, 0).unsqueeze(-1)
    wide = soft_cap(logits.float(), softcap)
    log_sums = wide.logsumexp(-1, keepdim=True)
    loss = ((log_sums - wide.gather(-1, label)) * counted).sum()
    is_label = torch.arange(logits.shape[-1], device=logits.device) == label
    probabilities = (wide - log_sums).exp()
    if z_loss is not None:
        probabilities = probabilities * (1 + 2 * z_loss * log_sums)
    grad = (probabilities - is_label.float()) * counted
    logits.copy_(grad if softcap is None else grad * (1 - (wide / softcap).square()))
    return loss


def add_mm(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """total + a @ b in float32, in place if there is a total."""
    if device_type(a) != "cuda" or a.dtype == torch.float32:  # only CUDA has the GEMM of bfloat16 operands
        return (a @ b).float() if total is None else total.add_(a @ b)
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
