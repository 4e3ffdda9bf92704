"""Storage formats of optimizer moments between updates: float32, bfloat16, or quantized in blocks.

The codes are the same as in torchao's optimizers: 8 bits by a table (arXiv 2110.02861), 4 bits by a table (arXiv
2309.01507), and float8 e4m3. Beside them there is float8 e5m2, for second moments (arXiv 2409.12517). The layout is our
own: a block lies within a row. So a matrix that is sharded by rows has the same blocks under any number of ranks, and
its codes and scales are sharded like the matrix.
"""

import math
from collections.abc import Callable, Mapping

import torch

from torchtitan.registry import deferred

_create_dynamic_map: Callable[..., list[float]] = deferred("torchtitan.compat.torchao:create_dynamic_map")

SCALE_BLOCK = 128  # maximum numbers per scale
LEAST_BLOCK = 32  # below, the scales would take more memory than the codes save
SMALLEST_BLOCK_SCALE = 1e-30
FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

State = Mapping[str, torch.Tensor]
"""This rank's shards of a parameter's optimizer state, by name."""


class StateFormat:
    """How the moment `name` is stored: here plainly, in float32 or bfloat16, which is rounded stochastically.

    Rounded to nearest, a number that changes by less than half of bfloat16's spacing (1/512 of itself) would never
    change. That happens to the second moment with beta2 = 0.999 once gradients become small.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype
        self.stochastic = dtype == torch.bfloat16

    def layout(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor in the state, by name, for a parameter of this shape."""
        return {self.name: (shape, self.dtype)}

    def read(self, state: State) -> torch.Tensor:
        """The numbers in float32."""
        return state[self.name].float()

    def write(
        self, state: State, value: torch.Tensor, noise: torch.Tensor | None, skip: torch.Tensor | None = None
    ) -> None:
        """Stores the float32 numbers of `value`, rounded to the format, unless `skip`, a scalar, is above 0."""
        store(state[self.name], value, noise, skip)


class BlockQuantized(StateFormat):
    """Codes of numbers between -1 and 1 ("8bit", "4bit" or one of `FLOAT8`), and a float32 scale for each block of a
    row. Numbers that are not `signed` are second moments. `row`: length of a row of this rank's shard."""

    def __init__(self, name: str, quantization: str, signed: bool, row: int, device: torch.device) -> None:
        super().__init__(f"{name}.{quantization}", FLOAT8.get(quantization, torch.uint8))
        self.scale = f"{name}.scale"
        self.block = block_size(row)
        self.per_byte = 2 if quantization == "4bit" else 1
        numbers = [] if quantization in FLOAT8 else _table(quantization, signed)
        self.table = torch.tensor(numbers, dtype=torch.float32, device=device)
        self.between = (self.table[1:] + self.table[:-1]) / 2
        # The smallest number above 0 that a code of a second moment represents; 0 where nothing rounds to 0.
        self.least = 0.0
        if not signed and quantization != "4bit":
            self.least = min(number for number in numbers if number > 0) if numbers else _least_of(self.dtype)

    def layout(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        *rows, row = shape
        return {
            self.name: ((*rows, row // self.per_byte), self.dtype),
            self.scale: ((*rows, row // self.block), torch.float32),
        }

    def read(self, state: State) -> torch.Tensor:
        quantized, scale = state[self.name], state[self.scale]
        if not len(self.table):
            numbers = quantized.float() / torch.finfo(quantized.dtype).max
        else:
            if self.per_byte == 2:
                quantized = torch.stack([quantized >> 4, quantized & 15], dim=-1)
            numbers = self.table[quantized.int()]
        return (numbers.view(*scale.shape, self.block) * scale.unsqueeze(-1)).flatten(-2)

    def write(
        self, state: State, value: torch.Tensor, noise: torch.Tensor | None, skip: torch.Tensor | None = None
    ) -> None:
        quantized, blocks = state[self.name], value.unflatten(-1, (-1, self.block))
        scale = blocks.abs().amax(-1).clamp_min(SMALLEST_BLOCK_SCALE)
        numbers = (blocks / scale.unsqueeze(-1)).flatten(-2)
        if self.least:  # Updates are divided by the root of a second moment, so only 0 is stored as 0.
            numbers = torch.maximum(numbers, numbers.sign() * self.least)
        _copy_unless(skip, state[self.scale], scale)
        if not len(self.table):
            _copy_unless(skip, quantized, numbers * torch.finfo(quantized.dtype).max)
            return
        nearest = torch.bucketize(numbers, self.between, out_int32=True, right=True).to(torch.uint8)
        codes = (nearest[..., ::2] << 4) | nearest[..., 1::2] if self.per_byte == 2 else nearest
        _copy_unless(skip, quantized, codes)


def block_size(row: int) -> int:
    """Numbers per scale for rows of this length; 0 if they do not divide into blocks."""
    block = math.gcd(SCALE_BLOCK, row)
    return block if row and block >= LEAST_BLOCK else 0


def _table(name: str, signed: bool) -> list[float]:
    """The numbers that the codes represent, in increasing order."""
    if name == "4bit" and not signed:
        return [code / 16 for code in range(1, 17)]  # no 0, since the update divides by it
    return _create_dynamic_map(signed) if name == "8bit" else _create_dynamic_map(signed, 3, 4)


def _least_of(dtype: torch.dtype) -> float:
    """The smallest number above 0 that a float8 format represents, a subnormal one, as a part of its largest."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / torch.finfo(dtype).max


def store(
    target: torch.Tensor, value: torch.Tensor, noise: torch.Tensor | None, skip: torch.Tensor | None = None
) -> None:
    """Writes float32 numbers to `target`, unless `skip`, a scalar, is above 0. With noise (int32, 0 to 65535), rounds
    stochastically to bfloat16, so that the expected value is exact."""
    if noise is not None:
        # Add the noise to the 16 bits that bfloat16 drops; a carry rounds the number up.
        value = ((value.view(torch.int32) + noise) & -65536).view(torch.float32)
    _copy_unless(skip, target, value)


def _copy_unless(skip: torch.Tensor | None, target: torch.Tensor, value: torch.Tensor) -> None:
    """Chooses between numbers as they are stored, since quantizing them once more might change them."""
    target.copy_(value if skip is None else torch.where(skip > 0, target.to(value.dtype), value))
