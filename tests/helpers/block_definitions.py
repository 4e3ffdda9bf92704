"""What `kernels.packed_blocks` computes on a GPU, by definition, on a CPU."""

from typing import Any

import torch
import torch.nn.functional as F

from torchtitan.kernels import packed_blocks
from torchtitan.kernels.block_formats import BLOCK_FORMATS, NVFP4, ScaleMode, hadamard, quantize_blocks
from torchtitan.kernels.packed_blocks import FLOAT8_BLOCK, MX_BLOCK, NVFP4_BLOCK, Packed


def pack_mx(x: torch.Tensor, mode: ScaleMode, both: bool) -> list[torch.Tensor]:
    packed = []
    for operand in (x, x.t())[: 1 + both]:
        blocks = quantize_blocks(operand, BLOCK_FORMATS["mxfp8"].format._replace(scale_mode=mode))
        packed += [blocks.data.to(torch.float8_e4m3fn).contiguous(), swizzle(blocks.scale, torch.float8_e8m0fnu)]
    return packed


def survey_nvfp4(x: torch.Tensor, stochastic: bool, transform: bool, both: bool) -> torch.Tensor:
    if both:
        return torch.stack(
            (survey_nvfp4(x, stochastic, False, False), survey_nvfp4(x.t(), stochastic, transform, False))
        )
    x = hadamard(x.float()) if transform else x.float()
    bits = x.contiguous().view(torch.int32)
    return torch.stack((x.abs().amax().view(torch.int32), bits.sum(dtype=torch.int32) * stochastic))


def pack_nvfp4(
    x: torch.Tensor, survey: torch.Tensor, squares: bool, stochastic: bool, transform: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = NVFP4_BLOCK if squares else 1
    blocks = quantize_blocks(x, NVFP4._replace(rows=rows, stochastic=stochastic, hadamard=transform))
    size = blocks.data.abs()  # its place among 0, 0.5, 1, 1.5, 2, 3, 4, 6, and then a bit for the sign
    code = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4)).long()
    code = code & 7 | blocks.data.signbit().long() << 3
    packed = (code.unflatten(1, (-1, NVFP4_BLOCK)) << 4 * torch.arange(NVFP4_BLOCK)).sum(2)
    assert blocks.tensor_scale is not None
    return packed, swizzle(blocks.scale.repeat_interleave(rows, 0)), blocks.tensor_scale.reshape(())


def block_mm(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    left_tensor_scale: torch.Tensor | None,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    right_tensor_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The float64 product, rounded."""
    exact_left = unpack(Packed(left, left_scale, left_tensor_scale))
    exact_right = unpack(Packed(right.t(), right_scale, right_tensor_scale))
    return (exact_left @ exact_right.t()).float().to(dtype)


def swizzle(scale: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Scales of blocks, (rows, blocks of columns) float32, in the order that `Packed` describes."""
    rows, columns = scale.shape
    tiles = F.pad(scale, (0, -columns % 4, 0, -rows % 128)).unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))
    swizzled: torch.Tensor = tiles.permute(0, 3, 2, 1, 4).to(dtype).contiguous().flatten()
    return swizzled


def unswizzle(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse of `swizzle`, to (rows, columns) float32."""
    tiles = scale.view(-(-rows // 128), -(-columns // 4), 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-(-rows // 128) * 128, -1)[:rows, :columns].float()


def unpack(operand: Packed) -> torch.Tensor:
    """(rows, columns), in float64, exactly."""
    data, scale, tensor_scale = operand
    if scale.dtype == torch.float8_e8m0fnu:
        of_32 = unswizzle(scale, data.shape[0], data.shape[1] // MX_BLOCK).double()
        return data.double() * of_32.repeat_interleave(MX_BLOCK, 1)
    if tensor_scale is None:
        if scale.shape != (data.shape[0], data.shape[1] // FLOAT8_BLOCK):  # of squares
            scale = scale.t()[:, : data.shape[1] // FLOAT8_BLOCK].repeat_interleave(FLOAT8_BLOCK, 0)
        return data.double() * scale.double().repeat_interleave(FLOAT8_BLOCK, 1)
    codes = data.unsqueeze(2) >> 4 * torch.arange(NVFP4_BLOCK) & 15
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    numbers = torch.cat((numbers, -numbers))[codes]
    of_blocks = unswizzle(scale, *data.shape).double() * tensor_scale.double()
    return (numbers * of_blocks.unsqueeze(2)).flatten(1)


def register() -> None:
    """From now on the operators compute this on a CPU."""
    operators: tuple[Any, ...] = (
        packed_blocks._pack_mx,
        packed_blocks._survey,
        packed_blocks._pack_nvfp4,
        packed_blocks._block_mm,
    )
    definitions: tuple[Any, ...] = (pack_mx, survey_nvfp4, pack_nvfp4, block_mm)
    for operator, definition in zip(operators, definitions, strict=True):
        torch.library.register_kernel(operator, "cpu", definition)
