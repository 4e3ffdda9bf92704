"""Block-scaled number formats: the numbers of a block are elements of few bits, times a scale of the block.

A format is data, a `BlockFormat`, and `BLOCK_FORMATS` is the table of them. The functions here are its definition, in
plain torch: they run on any device, and judge faster kernels.

- OCP Microscaling Formats (MX) specification 1.0: mxfp8, mxint8
- "Pretraining Large Language Models with NVFP4", arXiv 2509.25149: nvfp4
- DeepSeek-V3, arXiv 2412.19437, section 3.3: blockwise float8

A tensor is (..., rows, columns), and GEMMs sum over its columns, so blocks extend along them (and, for weights, along
the rows as well). The last blocks may be short; they compute as if filled up with zeros. If a block contains an
infinity or a NaN, all its numbers become NaN; with a scale of the matrix, all of the matrix.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from torchtitan.kernels import block_rounding
from torchtitan.kernels.operator import operator
from torchtitan.kernels.quantize import float8_scale, powers_of_two


class Element(NamedTuple):
    """A type of few bits. Below 2^smallest_exponent its numbers are as dense as just above."""

    mantissa_bits: int  # after the point
    smallest_exponent: int  # the smallest of a normal number
    largest: float  # number that scales map the amax of a block to; larger ones saturate


ELEMENTS = {
    "e2m1": Element(1, 0, 6.0),
    "e4m3": Element(3, -6, 448.0),
    "e5m2": Element(2, -14, 57344.0),
    "int8": Element(6, 0, 127 / 64),  # multiples of 1/64, as the MX specification counts them
}
CASTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}  # torch rounds to these itself

ScaleMode = Literal["rceil", "floor", "even", "ceil"]
"""The exponent of an E8M0 scale. rceil: of amax / largest, rounded up, so nothing saturates. floor: of amax, rounded
down, less the exponent of `largest` (the MX specification, 6.3). ceil: the same, rounded up. even: the same, of amax
rounded to the element's mantissa."""


class BlockFormat(NamedTuple):
    """A block-scaled format."""

    element: str  # key of `ELEMENTS`
    # Sizes of a block.
    rows: int
    columns: int
    scale: Literal["e8m0", "e4m3", "float32"]  # type of a block's scale
    scale_mode: ScaleMode = "rceil"  # how an E8M0 scale is chosen
    tensor_scale: bool = False  # the scales of blocks are multiples of a float32 scale of the matrix
    # Rounds to one of the two neighbors, with the number as the expectation unless it saturates; else to the nearest.
    stochastic: bool = False
    # Blocks of 16 columns are first multiplied by a random Hadamard matrix, which spreads outliers. It is orthogonal,
    # so transforming both operands leaves their product unchanged.
    hadamard: bool = False
    symmetric: bool = True  # int8 ends at -127, not at -128

    @property
    def smallest(self) -> float:
        """The negative number of largest magnitude."""
        return -2.0 if self.element == "int8" and not self.symmetric else -ELEMENTS[self.element].largest


class KnownFormat(NamedTuple):
    """A format and its rounding error, relative in the 2-norm, on normally distributed data."""

    format: BlockFormat
    error: float


NVFP4 = BlockFormat("e2m1", 1, 16, "e4m3", tensor_scale=True)
BLOCK_FORMATS = {
    "mxfp8": KnownFormat(BlockFormat("e4m3", 1, 32, "e8m0"), 0.026),
    "mxint8": KnownFormat(BlockFormat("int8", 1, 32, "e8m0"), 0.0083),
    "nvfp4": KnownFormat(NVFP4, 0.095),
    "nvfp4 weights": KnownFormat(NVFP4._replace(rows=16), 0.11),
    "nvfp4 gradients": KnownFormat(NVFP4._replace(stochastic=True), 0.137),
    "float8 1x128": KnownFormat(BlockFormat("e4m3", 1, 128, "float32"), 0.026),
    "float8 128x128": KnownFormat(BlockFormat("e4m3", 128, 128, "float32"), 0.026),
}


def known_error(form: BlockFormat) -> float:
    """The error of the usual format in `BLOCK_FORMATS`; the choices of a variant change it by less than half."""
    usual = form._replace(scale_mode="rceil", hadamard=False, symmetric=True)
    return next(known.error for known in BLOCK_FORMATS.values() if known.format == usual)


HADAMARD = 16  # points of the transform
# Fixed, and the same for all layers, as in the paper: so there is nothing to save, and all ranks agree.
SIGNS = 0b1101100010110100  # a bit for each; 1: negative
SMALLEST_TENSOR_SCALE = 2.0**-100  # so that its inverse, divided by the smallest E4M3 scale, is finite
E4M3_SMALLEST, E4M3_LARGEST = 2.0**-9, 448.0


@dataclasses.dataclass(frozen=True)
class BlockScaledTensor:
    """A tensor in a block-scaled format. Everything is float32, which holds the numbers of all these types.

    Attributes:
        data: (..., rows, columns), in numbers of the element type; columns are a multiple of 16 after a transform.
        scale: (..., blocks of rows, blocks of columns).
        tensor_scale: (..., 1, 1), or None.
        factor: what the operand was multiplied by, in the shape of `scale`; its inverse, up to rounding.
    """

    format: BlockFormat
    data: torch.Tensor
    scale: torch.Tensor
    tensor_scale: torch.Tensor | None
    factor: torch.Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """(..., rows, columns); still transformed if the format has a transform. Exact in float64; in float32 if scales
        are E8M0 or E4M3 without a scale of the matrix; in bfloat16 if they are E8M0. Otherwise the result is
        rounded."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scale = self.scale.to(wide)
        if self.tensor_scale is not None:
            scale = self.tensor_scale.to(wide) * scale
        return times(self.data.to(wide), scale, self.format).to(dtype)


def quantize_blocks(x: torch.Tensor, form: BlockFormat) -> BlockScaledTensor:
    """Rounds (..., rows, columns), float32 or bfloat16."""
    x = x.to(torch.float32, memory_format=torch.contiguous_format)  # many passes follow
    if form.hadamard:
        x = hadamard(x)
    factor, scale, tensor_scale = scales(amax_of_blocks(x.abs(), form), form)
    exact = times(x, factor, form)
    noise = noise_from(x) if form.stochastic else None
    return BlockScaledTensor(form, round_elements(exact, form, noise), scale, tensor_scale, factor)


def round_to_blocks(x: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """`quantize_blocks` and `dequantize` in the dtype of x."""
    return _round(x, *form)


@operator("round_to_blocks", lambda x, *form: _empty(x, BlockFormat(*form).hadamard))
def _round(
    x: torch.Tensor,
    element: str,
    rows: int,
    columns: int,
    scale: str,
    scale_mode: str,
    tensor_scale: bool,
    stochastic: bool,
    hadamard: bool,
    symmetric: bool,
) -> torch.Tensor:
    form = BlockFormat(element, rows, columns, scale, scale_mode, tensor_scale, stochastic, hadamard, symmetric)  # type: ignore[arg-type]
    if not x.numel():
        return _empty(x, hadamard)
    if (kernels := block_rounding.kernels_for(x)) is None:
        return quantize_blocks(x, form).dequantize(x.dtype).contiguous()
    numbers = x.contiguous()
    if hadamard:
        numbers = block_rounding.hadamard_kernel(kernels, numbers, SIGNS)
    amax, bits = block_rounding.survey_blocks(kernels, numbers, (rows, columns))
    factor, of_blocks, of_matrix = scales(amax, form)
    if of_matrix is not None:
        of_blocks = of_matrix * of_blocks
    of_type = ELEMENTS[element]
    limits = form.smallest, of_type.largest, 2.0**of_type.smallest_exponent, 2.0**-of_type.mantissa_bits
    seed = bits if stochastic else None
    return block_rounding.round_blocks(kernels, numbers, (rows, columns), limits, factor, of_blocks, seed, x.dtype)


def _empty(x: torch.Tensor, hadamard: bool) -> torch.Tensor:
    columns = x.shape[-1]
    return x.new_empty(*x.shape[:-1], -(-columns // HADAMARD) * HADAMARD if hadamard else columns)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Multiplies each 16 consecutive columns of a float32 tensor, the last ones filled up with zeros, by the same
    orthogonal matrix: diag(`SIGNS`) H / 4, with H of only 1 and -1."""
    x = F.pad(x, (0, -x.shape[-1] % HADAMARD))
    negative = SIGNS >> torch.arange(HADAMARD, device=x.device) & 1  # not a tensor copied from the host, which waits
    signs = (1 - 2 * negative) / math.sqrt(HADAMARD)
    x = x.unflatten(-1, (-1, HADAMARD)) * signs
    step = 1
    while step < HADAMARD:
        first, second = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        step *= 2
    return x.flatten(-2)


def amax_of_blocks(magnitudes: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """(..., blocks of rows, blocks of columns)"""
    rows, columns = magnitudes.shape[-2:]
    missing = (0, -columns % form.columns, 0, -rows % form.rows)
    if any(missing):  # else it would copy
        magnitudes = F.pad(magnitudes, missing)
    amax: torch.Tensor = magnitudes.unflatten(-1, (-1, form.columns)).amax(-1)
    return amax if form.rows == 1 else amax.unflatten(-2, (-1, form.rows)).amax(-2)


def times(x: torch.Tensor, of_blocks: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """The numbers of x, (..., rows, columns), times their block's number."""
    rows, columns = x.shape[-2:]
    if form.rows > 1:
        of_blocks = of_blocks.repeat_interleave(form.rows, -2)[..., :rows, :]
    return x * of_blocks.repeat_interleave(form.columns, -1)[..., :columns]


def scales(amax: torch.Tensor, form: BlockFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Factors of blocks, the scales that undo them, and the scale of the matrix, from the amax of blocks."""
    largest = ELEMENTS[form.element].largest
    tensor_scale: torch.Tensor | None = None
    if form.scale == "e8m0":
        scale = _power_of_two(amax, form)
        factor = scale.reciprocal()
    elif form.scale == "e4m3":
        scale = amax / largest
        if form.tensor_scale:
            tensor_scale = amax.amax((-2, -1), keepdim=True) / (E4M3_LARGEST * largest)
            tensor_scale = tensor_scale.clamp_min(SMALLEST_TENSOR_SCALE)
            scale = scale / tensor_scale
        scale = scale.clamp(E4M3_SMALLEST, E4M3_LARGEST).to(torch.float8_e4m3fn).float()
        factor = (1 if tensor_scale is None else tensor_scale.reciprocal()) / scale
    else:
        factor = float8_scale(amax, CASTS[form.element])
        scale = factor.reciprocal()
    return factor, scale, tensor_scale


def _power_of_two(amax: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """E8M0 scales; NaN if the amax is not finite."""
    element, mode = ELEMENTS[form.element], form.scale_mode
    mantissa, exponent = torch.frexp(amax / element.largest if mode == "rceil" else amax)  # 1/2 <= mantissa < 1
    exponent = torch.where(mantissa == 0, -1000, exponent - 1)  # 0 has an exponent far below all others
    if mode in ("rceil", "ceil"):
        exponent = exponent + (mantissa > 0.5)
    elif mode == "even":  # its mantissa is rounded up to 1
        exponent = exponent + (mantissa >= 1 - 2.0 ** -(element.mantissa_bits + 2))
    if mode != "rceil":
        exponent = exponent - math.floor(math.log2(element.largest))
    scale: torch.Tensor = torch.ldexp(torch.ones_like(amax), exponent.clamp(-127, 127))
    return scale.masked_fill(~amax.isfinite(), torch.nan)


def round_elements(exact: torch.Tensor, form: BlockFormat, noise: torch.Tensor | None) -> torch.Tensor:
    """`exact` rounded to numbers of the element type: to nearest, ties to even, or stochastically with `noise` of its
    shape."""
    element = ELEMENTS[form.element]
    exact = exact.clamp(form.smallest, element.largest)
    steps = powers_of_two(exact).clamp_min(2.0**element.smallest_exponent) * 2.0**-element.mantissa_bits
    in_steps = exact / steps
    if noise is None:
        return in_steps.round() * steps
    low = in_steps.floor()
    return (low + (in_steps - low > noise)) * steps


def noise_from(x: torch.Tensor) -> torch.Tensor:
    """Numbers from 0 to 1 (excluded), uniform and independent, one per number of x (float32), seeded by x itself.

    So they need no state: a resumed run rounds as the run would have; ranks, layers and micro-batches with different
    gradients draw different noise; and ranks with the same tensor, under tensor parallelism, round it alike. They are
    hashes of integers, so all devices agree. (SplitMix, doi 10.1145/2714064.2660195, with 32 bits.)
    """
    seed = _hash(x.contiguous().view(torch.int32).sum(dtype=torch.int32))
    position = torch.arange(x.numel(), device=x.device, dtype=torch.int32).view(x.shape)
    return (_hash(position * _signed(0x9E3779B9) + seed) >> 8 & 0xFFFFFF).float() * 2.0**-24


def _hash(x: torch.Tensor) -> torch.Tensor:
    """int32 to int32: the finalizer of MurmurHash3."""
    x = (x ^ (x >> 16 & 0xFFFF)) * _signed(0x85EBCA6B)  # the masks keep what a logical shift would
    x = (x ^ (x >> 13 & 0x7FFFF)) * _signed(0xC2B2AE35)
    return x ^ (x >> 16 & 0xFFFF)


def _signed(bits: int) -> int:
    return bits - (1 << 32)  # products of int32 wrap around
