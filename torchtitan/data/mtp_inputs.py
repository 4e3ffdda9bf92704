"""What the layers of multi-token prediction read and predict (`models.mtp`)."""

import torch
import torch.nn.functional as F

from torchtitan.data.packing import PADDING


def mtp_inputs(
    tokens: torch.Tensor, labels: torch.Tensor, document_ids: torch.Tensor, depths: int
) -> dict[str, torch.Tensor]:
    """Tokens and labels of each depth, (B, depths, S) int64: at depth k, counted from 1, those k positions ahead.

    A position has a label at depth k only if it has one at all smaller depths, and the target is in the same document.

    Args:
        tokens: (B, S + 1) int64, with the last label.
        labels: (B, S); `PADDING` for positions without loss.
        document_ids: (B, S + 1), of `tokens`.
    """
    seq_len, counted = labels.shape[1], labels != PADDING
    further_tokens, further_labels = [], []
    for depth in range(1, depths + 1):
        ahead = F.pad(labels[:, depth:], (0, depth), value=PADDING)
        alike = document_ids[:, depth + 1 :] == document_ids[:, : seq_len - depth]
        counted = counted & (ahead != PADDING) & F.pad(alike, (0, depth))
        further_labels.append(ahead.where(counted, PADDING))
        further_tokens.append(F.pad(tokens[:, depth:seq_len].clamp(min=0), (0, depth)))
    return {"mtp_tokens": torch.stack(further_tokens, 1), "mtp_labels": torch.stack(further_labels, 1)}
