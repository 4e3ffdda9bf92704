"""Which dtypes this CPU multiplies fast: those for which it has instructions.

A measurement would depend on what else the machine does at that moment, and the answer decides numerics.
"""

import functools

import torch

from torchtitan.device import ONEDNN_ISAS, cpu_flags, onednn_limit

# Instructions that oneDNN's GEMMs use, by dtype: the flag in /proc/cpuinfo, and the first of `ONEDNN_ISAS` that allows
# it (None: not x86, so no limit applies). With AVX-512 alone, oneDNN widens bfloat16 to float32, which takes 20 to 75
# times as long as a float32 GEMM; AVX_NE_CONVERT only converts.
INSTRUCTIONS: dict[torch.dtype, dict[str, str | None]] = {
    torch.bfloat16: {"avx512_bf16": "AVX512_CORE_BF16", "amx_bf16": "AVX512_CORE_AMX", "bf16": None},
    torch.int8: {
        "avx_vnni": "AVX2_VNNI",
        "avx512_vnni": "AVX512_CORE_VNNI",
        "amx_int8": "AVX512_CORE_AMX",
        "asimddp": None,
    },
}


def _has_instructions(dtype: torch.dtype) -> bool:
    limit = ONEDNN_ISAS.index(onednn_limit())
    return torch.backends.mkldnn.is_available() and any(
        flag in cpu_flags() and (least is None or ONEDNN_ISAS.index(least) <= limit)
        for flag, least in INSTRUCTIONS[dtype].items()
    )


@functools.cache
def bfloat16_is_fast() -> bool:
    """Whether a bfloat16 GEMM is faster than a float32 one."""
    return _has_instructions(torch.bfloat16)


@functools.cache
def int8_is_fast() -> bool:
    """Whether an int8 GEMM is faster than a float32 one and exact. Without VNNI, oneDNN's int8 GEMM adds pairs of
    products in 16 bits, where large ones saturate."""
    if not _has_instructions(torch.int8):
        return False
    matrix = large_int8_numbers(256, 256)
    low = matrix.to(torch.int8)
    return torch.equal(torch._int_mm(low, low).float(), matrix @ matrix)


def large_int8_numbers(*shape: int) -> torch.Tensor:
    """Large int8 values of both signs, as float32, which sums up to a thousand of their products exactly."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(100, 128, shape, generator=generator).float() * (
        2.0 * torch.randint(2, shape, generator=generator) - 1
    )


def fast_dtype() -> torch.dtype:
    """The dtype to multiply numbers in that both bfloat16 and float32 represent exactly."""
    return torch.bfloat16 if bfloat16_is_fast() else torch.float32
