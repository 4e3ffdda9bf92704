"""The types of numbers rounded to 8 bits: they and what brings them back travel together.

Shapes: M tokens, K inputs of a layer.
"""

from typing import NamedTuple

import torch


class Quantized(NamedTuple):
    """int8 or float8 `data` and their float32 `scale_inverse`: high precision is data * scale_inverse.

    Whatever is gathered, or kept for the backward pass, is of this type. A scale that a recipe keeps elsewhere may
    change meanwhile; the one that the data was made with cannot.

    data: (rows, columns); scale_inverse: (rows, 1), (1, 1) or ().
    """

    data: torch.Tensor
    scale_inverse: torch.Tensor

    def transpose(self) -> "Quantized":
        """A view."""
        return Quantized(self.data.t(), self.scale_inverse.t())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (self.data.float() * self.scale_inverse).to(dtype)


class QuantizedInput(NamedTuple):
    """A layer's input x, (M, K), as two of its GEMMs take it; None for x itself.

    left: the left operand of the output's GEMM.
    right: the right operand of the weight gradient's GEMM.
    """

    left: Quantized | None
    right: Quantized | None
