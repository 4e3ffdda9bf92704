"""Weights that are published in 8 or 4 bits, with scales beside them.

Shapes: E experts, N outputs, K inputs.
"""

from dataclasses import dataclass
from typing import Any

import torch

from torchtitan.errors import CheckpointError

SCALE_INVERSE = "_scale_inv"  # end of the name of an FP8 weight's scales
BLOCKS, SCALES = "_blocks", "_scales"  # ends of the two names of an MXFP4 weight
BLOCK_8 = 128  # rows and columns of an FP8 weight that share a scale
BLOCK_4 = 32  # inputs of MXFP4 that share a scale, packed into 16 bytes, of which the lower half comes first
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # FP4 (E2M1) without the sign bit
BIAS = 127  # what MXFP4 adds to a scale's exponent


def parts_of(name: str, file_of: dict[str, str]) -> list[str]:
    """The names under which a weight is stored: its own, or those of its parts."""
    if name + SCALE_INVERSE in file_of:
        return [name, name + SCALE_INVERSE]
    return [name] if name in file_of else [name + BLOCKS, name + SCALES]


def whole_weights(file_of: dict[str, str]) -> dict[str, str]:
    """The file of each weight, where one and its scales are one weight."""
    whole = {}
    for name, file in file_of.items():
        if name.endswith(SCALE_INVERSE) and name.removesuffix(SCALE_INVERSE) in file_of:
            continue
        if name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in file_of:
            continue
        if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in file_of:
            name = name.removesuffix(BLOCKS)
        whole[name] = file
    return whole


@dataclass(frozen=True)
class Fp8Slice:
    """A weight, (N, K), with the methods of `safe_open`'s slices (as in DeepSeek-V3, arXiv 2412.19437, section 3.3).

    Attributes:
        name: for messages.
        data: a slice, (N, K) float8_e4m3fn.
        scales: a slice, (N / 128, K / 128) float32, rounded up. Each multiplies its block.
    """

    name: str
    data: Any
    scales: Any

    def get_shape(self) -> list[int]:
        """Raises a CheckpointError if the tensors do not fit together."""
        shape, scales = list(self.data.get_shape()), list(self.scales.get_shape())
        if scales != [-(-size // BLOCK_8) for size in shape]:
            raise CheckpointError(
                f"{self.name} is {shape}, its scales {scales}, which is not FP8 in blocks of {BLOCK_8}."
            )
        return shape

    def __getitem__(self, box: tuple[slice, ...]) -> torch.Tensor:
        """The numbers in this box, rounded to bfloat16."""
        data = _read(self.name, self.data, box, torch.float8_e4m3fn)
        scales = self.scales[tuple(_blocks(side, BLOCK_8) for side in box)].float()
        for dim, side in enumerate(box):
            scales = _within_blocks(scales.repeat_interleave(BLOCK_8, dim), dim, side, BLOCK_8)
        numbers: torch.Tensor = (data.float() * scales).bfloat16()
        return numbers


@dataclass(frozen=True)
class Mxfp4Slice:
    """Weights of experts, (E, K, N), with the methods of `safe_open`'s slices (OCP Microscaling Formats 1.0).

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
        blocks, scales = list(self.blocks.get_shape()), list(self.scales.get_shape())
        if len(blocks) != 4 or blocks[3] != BLOCK_4 // 2 or blocks[:3] != scales:
            raise CheckpointError(f"{self.name} has blocks {blocks} and scales {scales}, which is not MXFP4.")
        experts, outputs, count, _ = blocks
        return [experts, count * BLOCK_4, outputs]

    def __getitem__(self, box: tuple[slice, ...]) -> torch.Tensor:
        """The numbers in this box, in bfloat16, which holds them exactly."""
        experts, inputs, outputs = box
        place = experts, outputs, _blocks(inputs, BLOCK_4)
        packed, exponents = (_read(self.name, part, place, torch.uint8) for part in (self.blocks, self.scales))
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
        table = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
        numbers = torch.ldexp(table[codes.int()], exponents.int().unsqueeze(-1) - BIAS).bfloat16().flatten(-2)
        return _within_blocks(numbers, -1, inputs, BLOCK_4).mT


def _read(name: str, part: Any, box: tuple[slice, ...], dtype: torch.dtype) -> torch.Tensor:
    """Raises a CheckpointError for another dtype, such as that of a weight beside which its scales were left."""
    numbers: torch.Tensor = part[box]
    if numbers.dtype != dtype:
        raise CheckpointError(f"{name} is {numbers.dtype} beside scales for {dtype}; remove those if it is scaled.")
    return numbers


def _blocks(side: slice, size: int) -> slice:
    """The blocks that have numbers in this range."""
    first = side.start // size
    return slice(first, -(-side.stop // size) if side.stop > side.start else first)


def _within_blocks(numbers: torch.Tensor, dim: int, side: slice, size: int) -> torch.Tensor:
    """Of all numbers of these blocks, those in the range."""
    return numbers.narrow(dim, side.start % size, side.stop - side.start) if side.stop > side.start else numbers
