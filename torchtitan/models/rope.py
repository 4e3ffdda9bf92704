"""Rotary position embedding (RoFormer, arXiv 2104.09864), with the frequency scaling of Llama 3.1.

Shapes: B batch, S sequence, H heads, D channels of a head.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Gt, Lt
from pydantic import AllowInfNan, Strict

from torchtitan.kernels import pointwise

# What sizes may be that come from a file.
Size = Annotated[int, Strict(), Gt(0), Lt(2**31)]
Positive = Annotated[float, Gt(0), AllowInfNan(False)]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of low RoPE frequencies for long contexts.

    Source: section 3.4.1 of "The Llama 3 Herd of Models" (arXiv 2407.21783) and the released model configurations.
    """

    factor: Positive = 8.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_seq_len: Size = 8192

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: no frequencies lie between the two factors.
        """
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor is {self.low_freq_factor}, but must be below high_freq_factor")


def rope_table(head_dim: int, positions: torch.Tensor, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """cos and sin for positions (seq,) and all frequencies: (seq, head_dim / 2, 2), float32, on the same device."""
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / theta ** (steps / head_dim)
    if scaling is not None:
        frequencies = _scale(frequencies, scaling)
    angles = torch.outer(positions.float(), frequencies)
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


def _scale(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Stretches wavelengths longer than the original context by `factor`, keeps short ones, and interpolates between.

    Source: arXiv 2407.21783, section 3.4.1, and the parameters in Llama 3.1's released configurations.
    """
    rotations = scaling.original_seq_len * frequencies / (2 * math.pi)
    keep = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def apply_rope(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotates each pair of adjacent channels (2i, 2i + 1), the layout of Meta's checkpoints, in float32. x: (B, S, H,
    D); table: (seq, head_dim / 2, 2) float32, from `rope_table`."""
    if pointwise.has_own_kernel(x):
        return _RotationOnCpu.apply(x, table)
    pairs = x.float().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # inductor does not generate code for complex numbers
        (even, odd), (cos, sin) = pairs.unbind(-1), table[:, None].unbind(-1)
        rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    else:  # one complex multiplication is three times as fast as six real operations
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table)[:, None])
    return rotated.flatten(-2).to(x.dtype)


class _RotationOnCpu(torch.autograd.Function):
    apply: ClassVar[Callable[..., torch.Tensor]]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(table)
        return _rotated(x.contiguous(), table, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (table,) = ctx.saved_tensors
        return _rotated(grad.contiguous(), table, -1.0), None


def _rotated(x: torch.Tensor, table: torch.Tensor, sign: float) -> torch.Tensor:
    batch, seq, heads, dim = x.shape
    pointwise.run("rotate", batch, seq, heads, dim // 2, x, table, sign, out := torch.empty_like(x))
    return out
