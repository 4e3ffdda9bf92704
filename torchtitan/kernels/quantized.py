"""8-bit data: the data and the scale that dequantizes them stay together."""

from typing import NamedTuple

import torch


class Quantized(NamedTuple):
    """int8 or float8 `data` and their float32 `scale_inverse`; dequantized: data * scale_inverse.

    Everything that is gathered or saved for the backward pass has this type. A scale that a recipe stores elsewhere may
    change in the meantime; the scale of the data must not.

    data: (..., rows, columns); scale_inverse: (..., rows, 1), (..., 1, columns), (1, 1) or ().
    """

    data: torch.Tensor
    scale_inverse: torch.Tensor

    def transpose(self) -> "Quantized":
        """A view."""
        scale_inverse = self.scale_inverse
        return Quantized(self.data.mT, scale_inverse.mT if scale_inverse.dim() else scale_inverse)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (self.data.float() * self.scale_inverse).to(dtype)
