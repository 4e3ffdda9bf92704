"""Sizes of gpt-oss (arXiv 2508.10925, and the released configurations)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import BeforeValidator

from torchtitan.models.args import LayerArgs
from torchtitan.models.rope import Positive, RopeScaling, Size, Theta, YarnScaling, read_scaling
from torchtitan.models.sparse_args import MoEArgs, SparseArgs


def windows_in_every_other(window: int) -> tuple[LayerArgs, ...]:
    return LayerArgs(window), LayerArgs()


LONGER_CONTEXT = YarnScaling(factor=32.0, original=4096, truncate=False)


@dataclass(frozen=True)
class GptOssArgs(SparseArgs):
    """Sizes of one gpt-oss, in which all layers have experts; `head_dim` is not dim / n_heads."""

    norm_eps: Positive = 1e-5
    rope_theta: Theta = 150000.0
    rope_scaling: Annotated[RopeScaling | None, BeforeValidator(read_scaling)] = LONGER_CONTEXT
    head_dim: Size = 64
    pattern: tuple[LayerArgs, ...] = windows_in_every_other(128)  # type: ignore[misc]  # of the instance
    sinks: ClassVar[bool] = True
    qkv_bias: ClassVar[bool] = True
    wo_bias: ClassVar[bool] = True


def experts(n_experts: int, ffn_dim: int = 2880, top_k: int = 4) -> MoEArgs:
    return MoEArgs(n_experts, top_k, ffn_dim, activation="clamped_swiglu", biases=True)


GPT_OSS = {
    "debugmodel": GptOssArgs(256, 6, 8, 4, 256, None, rope_scaling=None, moe=experts(8, 256, 2)),
    "20B-A4B": GptOssArgs(2880, 24, 64, 8, 2880, 201088, moe=experts(32)),
    "120B-A5B": GptOssArgs(2880, 36, 64, 8, 2880, 201088, moe=experts(128)),
}
