"""Orthogonalization of matrices by iteration: the polar factor U V^T of M = U S V^T, with GEMMs alone."""

from collections.abc import Sequence

import torch

Polynomial = tuple[float, float, float]
"""(a, b, c) of a step X -> a X + b (X X^T) X + c (X X^T)^2 X, which maps a singular value s to a s + b s^3 + c s^5."""

QUINTIC: Polynomial = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's coefficients (kellerjordan.github.io/posts/muon): singular values end between about 0.7 and 1.2."""

# Polar Express (arXiv 2505.16932, algorithm 1): optimal for singular values above 1e-3, one polynomial per step.
_POLAR_EXPRESS: Sequence[Polynomial] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_SAFETY = 1.01  # so that rounding to bfloat16 takes no singular value out of the interval of convergence


def polynomials(steps: int, coefficients: Polynomial = QUINTIC, polar_express: bool = False) -> list[Polynomial]:
    """The polynomial of each step: always `coefficients`, or Polar Express, whose last polynomial repeats."""
    if not polar_express:
        return [coefficients] * steps
    safe = [(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS[:-1]]
    return [*safe, *[_POLAR_EXPRESS[-1]] * steps][:steps]


def orthogonalize(matrices: torch.Tensor, steps: Sequence[Polynomial]) -> torch.Tensor:
    """Replaces the singular values of each matrix, (B, rows, columns), by numbers close to 1; zeros stay zeros.
    Computes in the dtype of the matrices, which it does not modify."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # The Frobenius norm bounds the largest singular value. Rows first: torch's CPU kernel is inexact for long vectors.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    norm = torch.linalg.vector_norm(norm, dim=-2, keepdim=True)
    x = (x / (norm * _SAFETY + 1e-7)).to(matrices.dtype)
    for a, b, c in steps:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def flops(rows: int, columns: int, steps: int) -> int:
    """Floating-point operations to orthogonalize a matrix; a multiply-add counts as two."""
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)
