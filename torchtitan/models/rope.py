"""Rotary position embedding (RoFormer, arXiv 2104.09864), and its scaling for longer contexts.

Shapes: B batch, S sequence, H heads, D channels of a head.
"""

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import pydantic
import torch
from annotated_types import Ge, Gt, Lt
from pydantic import AllowInfNan, Strict

from torchtitan.compat.dynamo import is_compiling
from torchtitan.config.fields import RopeTheta
from torchtitan.errors import nearest
from torchtitan.kernels import pointwise
from torchtitan.kernels.dispatch import KERNELS, Kernel, find_kernel
from torchtitan.kernels.operator import Function
from torchtitan.strict_json import first_fault

# Types of sizes that come from a file.
Size = Annotated[int, Strict(), Gt(0), Lt(2**31)]
Positive = Annotated[float, Gt(0), AllowInfNan(False)]
Theta = RopeTheta
StrictPositive = Annotated[float, Strict(), Gt(0), AllowInfNan(False)]
MScale = Annotated[float, Strict(), Ge(0), AllowInfNan(False)]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Stretches wavelengths of RoPE that are long for the context that a model was trained on: divides frequencies by
    `factor`, except for what is kept of them. The fields of the types are the keys of `model.rope_scaling`."""

    type: str
    factor: Annotated[float, Strict(), Ge(1), AllowInfNan(False)]

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin, so its square is one on the logits of attention."""
        return 1.0

    def kept(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """The part of each frequency, in [0, 1], that is not divided. frequencies: (head_dim / 2,) float32, falling."""
        return torch.zeros_like(frequencies)


@dataclass(frozen=True, kw_only=True)
class LinearScaling(RopeScaling):
    """Position interpolation (arXiv 2306.15595): all frequencies alike."""

    type: Literal["linear"] = "linear"


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1's: divides wavelengths longer than the original context, keeps short ones, and interpolates between.

    Source: section 3.4.1 of "The Llama 3 Herd of Models" (arXiv 2407.21783) and the released model configurations.
    """

    type: Literal["llama3"] = "llama3"
    original: Size  # tokens of the context before
    low_freq_factor: StrictPositive = 1.0  # rotations within it, up to which a frequency is divided
    high_freq_factor: StrictPositive = 4.0  # rotations within it, from which a frequency is kept

    def __post_init__(self) -> None:
        """Raises a ValueError if no frequencies lie between the two factors."""
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor is {self.low_freq_factor}, but must be below high_freq_factor")

    def kept(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        rotations = self.original * frequencies / (2 * math.pi)
        kept = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return kept.clamp(0, 1)


@dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeScaling):
    """YaRN (arXiv 2309.00071), with the options of `transformers`: a ramp over channels instead of over frequencies,
    and a factor on the logits of attention."""

    type: Literal["yarn"] = "yarn"
    original: Size  # tokens of the context before
    attention_factor: StrictPositive | None = None  # `amplitude`; None: from the scales, or 0.1 ln(factor) + 1
    beta_fast: StrictPositive = 32.0  # rotations within the original context at which the ramp begins
    beta_slow: StrictPositive = 1.0  # and ends
    # If both are above 0, the quotient of 0.1 x ln(factor) + 1 for each as x (DeepSeek-V2, arXiv 2405.04434).
    mscale: MScale | None = None
    mscale_all_dim: MScale | None = None
    truncate: pydantic.StrictBool = True  # the ramp begins and ends at whole channels

    def __post_init__(self) -> None:
        """Raises a ValueError if the ramp would end before it begins."""
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow is {self.beta_slow}, but must be below beta_fast")

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        scale = 0.1 * math.log(self.factor)
        if self.mscale and self.mscale_all_dim:
            return (scale * self.mscale + 1) / (scale * self.mscale_all_dim + 1)
        return scale + 1

    def kept(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        channels = 2 * len(frequencies)
        low, high = (
            channels * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))
            for rotations in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, channels - 1)
        width = high - low or 0.001
        places = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
        return 1 - ((places - low) / width).clamp(0, 1)


ROPE = frozenset({"rope_theta", "rope_scaling"})
"""Fields of a model's sizes that may change while it is trained, and keys of [model] that set them."""

SCALINGS: dict[str, type[RopeScaling] | None] = {
    "default": None,  # what `transformers` calls no scaling
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}
SPELLINGS = {
    "rope_type": "type",
    "original_max_position_embeddings": "original",
    "original_seq_len": "original",  # in checkpoints of earlier versions
}
"""Keys of `transformers` (`type` is its own older one) and what they are here."""


def read_scaling(table: Any, ignore_unknown: bool = False) -> RopeScaling | None:
    """The scaling in a table of its type and keys; None for the type `default`. Returns anything but a table unchanged.
    Raises a ValueError if a type or value is wrong or missing, or, without `ignore_unknown`, a key is unknown."""
    if not isinstance(table, dict):
        return table  # type: ignore[no-any-return]
    # If a key has two spellings, the one of `transformers` counts.
    values = {SPELLINGS.get(key, key): table[key] for key in sorted(table, key=SPELLINGS.__contains__)}
    if "original_seq_len" in table:  # a checkpoint from when there was one type
        values.setdefault("type", "llama3")
    name = values.pop("type", None)
    if not isinstance(name, str) or name not in SCALINGS:
        *others, last = SCALINGS
        problem = "no type is given" if name is None else f"type {name!r:.60} is not supported"
        raise ValueError(f"{problem}{nearest(str(name), list(SCALINGS))}; known are {', '.join(others)} and {last}")
    scaling = SCALINGS[name]
    known = [field.name for field in fields(scaling)] if scaling is not None else []
    unknown = [key for key in values if key not in known]
    if unknown and not ignore_unknown:
        keys = f"has only {', '.join(known[1:])}" if known else "has no keys"
        raise ValueError(f"unknown key {unknown[0]!r:.60}{nearest(unknown[0], known)}: type {name} {keys}")
    if scaling is None:
        return None
    try:
        return pydantic.TypeAdapter(scaling).validate_python({key: values[key] for key in values if key in known})
    except pydantic.ValidationError as error:
        raise ValueError(f"{first_fault(error)}, for type {name}") from None


def rope_frequencies(
    channels: int, theta: float, scaling: RopeScaling | None, device: torch.device | None = None
) -> torch.Tensor:
    """(channels / 2,) float32, in radians per token. channels: those of a head that are rotated."""
    steps = torch.arange(0, channels, 2, device=device, dtype=torch.float32)
    frequencies = 1.0 / theta ** (steps / channels)
    if scaling is None:
        return frequencies
    kept = scaling.kept(frequencies, theta)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rope_table(channels: int, positions: torch.Tensor, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """cos and sin for positions (seq,) and all frequencies: (seq, channels / 2, 2), float32, on the same device."""
    angles = torch.outer(positions.float(), rope_frequencies(channels, theta, scaling, positions.device))
    table = torch.stack([angles.cos(), angles.sin()], dim=-1)
    return table if scaling is None else table * scaling.amplitude


def apply_rope(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotates each pair of adjacent channels (2i, 2i + 1), the layout of Meta's checkpoints, in float32. x: (B, S, H,
    D); table: (seq, channels / 2, 2) float32, from `rope_table`, of the first channels of a head. Others stay."""
    channels = 2 * table.shape[1]
    if channels < x.shape[-1]:
        return torch.cat([apply_rope(x[..., :channels], table), x[..., channels:]], -1)
    rotated: torch.Tensor = find_kernel("rope", x)(x, table)
    return rotated


def _rotate_by_torch(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    pairs = x.float().unflatten(-1, (-1, 2))
    if is_compiling():  # inductor does not generate code for complex numbers
        (even, odd), (cos, sin) = pairs.unbind(-1), table[:, None].unbind(-1)
        rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    else:  # one complex multiplication is three times as fast as six real operations
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table)[:, None])
    return rotated.flatten(-2).to(x.dtype)


class _RotationOnCpu(Function):
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
    pointwise.run_kernel("rotate", batch, seq, heads, dim // 2, x, table, sign, out := torch.empty_like(x))
    return out


_CPP = Kernel("pointwise.cpp", _RotationOnCpu.apply, pointwise.applies_to)
KERNELS["rope"] = [_CPP, Kernel("torch's", _rotate_by_torch)]
