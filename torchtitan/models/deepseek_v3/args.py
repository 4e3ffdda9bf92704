"""Sizes of DeepSeek-V3 (arXiv 2412.19437), and of models like it (the released configurations)."""

import math
from dataclasses import dataclass

from torchtitan.models.rope import Positive, Size, Theta, YarnScaling
from torchtitan.models.sparse_args import MoEArgs, SparseArgs


@dataclass(frozen=True)
class DeepseekV3Args(SparseArgs):
    """Sizes of one DeepSeek-V3. Each head has keys and values of its own, made from latents that all heads share."""

    norm_eps: Positive = 1e-6
    rope_theta: Theta = 10000.0
    q_lora_rank: Size | None = 1536  # width of the latent of queries; None: queries are made without one
    kv_lora_rank: Size = 512  # width of the latent of keys and values
    qk_nope_head_dim: Size = 128  # channels of a head's queries and keys that are not rotated
    qk_rope_head_dim: Size = 64  # and that RoPE rotates; keys have these in common
    v_head_dim: Size = 128  # channels of a head's values

    def __post_init__(self) -> None:
        """Raises a ValueError if heads share keys and values, or values are wider than keys."""
        super().__post_init__()
        if self.n_kv_heads != self.n_heads:
            raise ValueError(f"{self.n_heads} heads have {self.n_kv_heads} keys and values, but each has its own")
        if self.v_head_dim > self.head_dim:
            raise ValueError(f"values of {self.v_head_dim} channels are wider than keys, which have {self.head_dim}")

    @property
    def head_dim(self) -> int:
        """Channels of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rope_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def query_factor(self) -> float:
        """Factor on queries, and so on the logits of attention: with YaRN, the square of 0.1 x ln(factor) + 1 with
        `mscale_all_dim` as x (the released code)."""
        scaling = self.rope_scaling
        if not isinstance(scaling, YarnScaling):
            return 1.0
        return (0.1 * (scaling.mscale_all_dim or 0.0) * math.log(scaling.factor) + 1) ** 2


def _experts(
    n_experts: int, top_k: int, ffn_dim: int, shared: int, dense: int, scale: float, groups: int = 1, of_token: int = 1
) -> MoEArgs:
    return MoEArgs(n_experts, top_k, ffn_dim, shared, dense, "sigmoid", True, scale, groups, of_token)


DEEPSEEK_V3 = {
    "debugmodel": DeepseekV3Args(
        256, 6, 4, 4, 768, None,
        q_lora_rank=128, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
        moe=_experts(8, 2, 256, 1, 1, 2.5, 4, 2),
    ),
    "Moonlight-16B-A3B": DeepseekV3Args(
        2048, 27, 16, 16, 11264, 163840, 1e-5, 50000.0, q_lora_rank=None, moe=_experts(64, 6, 1408, 2, 1, 2.446)
    ),
    "671B-A37B": DeepseekV3Args(
        7168, 61, 128, 128, 18432, 129280, moe=_experts(256, 8, 2048, 1, 3, 2.5, 8, 4)
    ),
}  # fmt: skip
