"""Weights of experts that are published in MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss's are.

Shapes: E experts, N outputs, K inputs.
"""

from dataclasses import dataclass
from typing import Any

import torch

from torchtitan.errors import CheckpointError

BLOCK = 32  # inputs that share a scale, packed into 16 bytes, of which the lower half comes first
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of FP4 (E2M1), without the sign bit
BIAS = 127  # of a scale's exponent
BLOCKS, SCALES = "_blocks", "_scales"  # ends of names


def merge_names(file_of: dict[str, str]) -> dict[str, str]:
    """The file of each weight, where blocks and scales are one weight."""
    packed = {name.removesuffix(BLOCKS) for name in file_of if name.endswith(BLOCKS)}
    packed = {name for name in packed if name + SCALES in file_of}
    parts = {name + end for name in packed for end in (BLOCKS, SCALES)}
    return {name: file for name, file in file_of.items() if name not in parts} | {
        name: file_of[name + BLOCKS] for name in sorted(packed)
    }


@dataclass(frozen=True)
class Mxfp4Slice:
    """A weight, (E, K, N), with the methods of `safe_open`'s slices.

    Attributes:
        name: for messages.
        blocks: a slice, (E, N, K / 32, 16) uint8.
        scales: a slice, (E, N, K / 32) uint8.
    """

    name: str
    blocks: Any
    scales: Any

    def get_shape(self) -> list[int]:
        """Raises a CheckpointError if the tensors do not fit together."""
        blocks, scales = self.blocks.get_shape(), self.scales.get_shape()
        if len(blocks) != 4 or blocks[3] != BLOCK // 2 or blocks[:3] != scales:
            raise CheckpointError(f"{self.name} has blocks {blocks} and scales {scales}, which is not MXFP4.")
        experts, outputs, count, _ = blocks
        return [experts, count * BLOCK, outputs]

    def __getitem__(self, box: tuple[slice, slice, slice]) -> torch.Tensor:
        """The numbers in this box, in bfloat16, which holds them exactly."""
        experts, inputs, outputs = box
        first, last = inputs.start // BLOCK, -(-inputs.stop // BLOCK)
        place = experts, outputs, slice(first, max(first, last))
        packed, exponents = self.blocks[place], self.scales[place].int() - BIAS
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
        table = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
        numbers = torch.ldexp(table[codes.int()], exponents.unsqueeze(-1)).bfloat16().flatten(-2)
        start = inputs.start - first * BLOCK
        return numbers[..., start : start + inputs.stop - inputs.start].mT
