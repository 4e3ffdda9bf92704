"""DeepSeek-V3 (arXiv 2412.19437), and models like it (the released configurations). Its attention is multi-head latent
attention (MLA, arXiv 2405.04434, section 2.1).

Shapes: B batch, S sequence, H heads, D channels of a head's queries and keys, E channels of the residual stream.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional
import torch.nn.functional as F
from torch import nn

from torchtitan.config.fields import NonNegativeInt
from torchtitan.kernels.attention import attend
from torchtitan.models.hf_config import ENTRIES, GroupedMoEConfig
from torchtitan.models.moe import SparseTransformer
from torchtitan.models.naming import AFTER_THE_LAST, EXPERTS, GATES, LAYER, NAMES, SHARED_EXPERTS, HuggingFaceNaming
from torchtitan.models.norm import RMSNorm
from torchtitan.models.parallelize import SHARDING
from torchtitan.models.registry import ModelSpec
from torchtitan.models.rope import Positive, Size, Theta, YarnScaling, apply_rope
from torchtitan.models.sparse_args import MoEArgs, SparseArgs
from torchtitan.models.transformer import Attention
from torchtitan.parallel.dims import Style


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


LATENT_EPS = 1e-6  # norms of latents have it, whatever the model's `norm_eps` (the released code)


class LatentNorm(RMSNorm):
    """An RMSNorm of the first channels, which leaves the others as they are. So what comes from one projection stays
    together, and under tensor parallelism one all-gather serves all of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalized = self.normalized_shape[0]
        return torch.cat([super().forward(x[..., :normalized]), x[..., normalized:]], -1)


class LatentAttention(Attention):
    """Attention whose keys and values are made from a narrow latent, and whose queries are, too, if `q_lora_rank` says
    so. RoPE rotates the last channels of queries, and a key that all heads share."""

    def make_layers(self, args: DeepseekV3Args) -> None:  # type: ignore[override]  # of this family only
        self.latent_and_key = [args.kv_lora_rank, args.qk_rope_head_dim]  # widths of what is split
        self.query_parts = [args.qk_nope_head_dim, args.qk_rope_head_dim]
        self.key_and_value = [args.qk_nope_head_dim, args.v_head_dim]
        heads = args.n_heads
        if args.q_lora_rank is None:
            self.wq = nn.Linear(args.dim, heads * args.head_dim, bias=False)
        else:
            self.wq_a = nn.Linear(args.dim, args.q_lora_rank, bias=False)
            self.q_norm = RMSNorm(args.q_lora_rank, eps=LATENT_EPS)
            self.wq_b = nn.Linear(args.q_lora_rank, heads * args.head_dim, bias=False)
        self.wkv_a = nn.Linear(args.dim, sum(self.latent_and_key), bias=False)
        self.kv_norm = LatentNorm(args.kv_lora_rank, eps=LATENT_EPS)
        self.wkv_b = nn.Linear(args.kv_lora_rank, heads * sum(self.key_and_value), bias=False)
        self.wo = nn.Linear(heads * args.v_head_dim, args.dim, bias=False)

    def forward(self, x: torch.Tensor, rope: torch.Tensor | None, document_ids: torch.Tensor | None) -> torch.Tensor:
        """(B, S, E) to (B, S, E). Values get zeros up to the width of keys, which every kernel requires."""
        assert rope is not None
        q = self.wq_b(self.q_norm(self.wq_a(x))) if hasattr(self, "wq_a") else self.wq(x)
        q = (q if self.query_factor == 1 else q * self.query_factor).unflatten(-1, (-1, self.head_dim))
        latent, shared = self.kv_norm(self.wkv_a(x)).split(self.latent_and_key, -1)
        q, rotary_q = q.split(self.query_parts, -1)
        k, v = self.wkv_b(latent).unflatten(-1, (-1, sum(self.key_and_value))).split(self.key_and_value, -1)
        rotary_k = apply_rope(shared.unsqueeze(2), rope).expand(-1, -1, k.shape[2], -1)
        q, k = torch.cat([q, apply_rope(rotary_q, rope)], -1), torch.cat([k, rotary_k], -1)
        v_head_dim = v.shape[-1]
        q, k, v = (t.transpose(1, 2) for t in (q, k, F.pad(v, (0, self.head_dim - v_head_dim))))
        out = (self._kernel.run if self._kernel else attend)(self.spec, q, k, v, document_ids)
        mixed: torch.Tensor = self.wo(out.transpose(1, 2)[..., :v_head_dim].flatten(2))
        return mixed


class DeepseekV3(SparseTransformer):
    """A `SparseTransformer` with latent attention."""

    args: DeepseekV3Args
    attention: ClassVar[type[Attention]] = LatentAttention

    def init_std(self, name: str) -> float | None:
        """As for other models, by the fan-in of the layers that read latents and values."""
        args = self.args
        match name.split("."):
            case ["layers", layer, _, "wo", "weight"]:
                return float((2 * (int(layer) + 1) * args.n_heads * args.v_head_dim) ** -0.5)
            case [*_, "wq_b", "weight"] if args.q_lora_rank is not None:
                return float(args.q_lora_rank**-0.5)
            case [*_, "wkv_b", "weight"]:
                return float(args.kv_lora_rank**-0.5)
        return super().init_std(name)


LATENT_NAMES = {
    f"{LAYER}.attention.{ours}.weight": f"model.{LAYER}.self_attn.{theirs}.weight"
    for ours, theirs in {
        "wq_a": "q_a_proj",
        "q_norm": "q_a_layernorm",
        "wq_b": "q_b_proj",
        "wkv_a": "kv_a_proj_with_mqa",
        "kv_norm": "kv_a_layernorm",
        "wkv_b": "kv_b_proj",
    }.items()
}


class DeepseekV3Config(GroupedMoEConfig):
    """`config.json` (DeepseekV3Config)."""

    ARGS, MODEL_TYPE, ARCHITECTURE = DeepseekV3Args, "deepseek_v3", "DeepseekV3ForCausalLM"
    ENTRIES = ENTRIES | {
        name: name for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    }

    q_lora_rank: Size | None = None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    first_k_dense_replace: NonNegativeInt = 3
    routed_scaling_factor: Positive = 2.5
    n_group: Size
    topk_group: Size
    rope_interleave: Literal[True] = True  # RoPE's pairs are adjacent channels
    moe_layer_freq: Literal[1] = 1
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"

    @classmethod
    def to_config(cls, args: Any) -> dict[str, Any]:
        """As in `CommonConfig`."""
        return super().to_config(args) | {"head_dim": args.qk_rope_head_dim}

    @property
    def sizes(self) -> dict[str, Any]:
        """As in `CommonConfig`; `head_dim` follows from the others."""
        if self.head_dim not in (None, self.qk_rope_head_dim):
            raise ValueError(
                f"head_dim is {self.head_dim}, but only qk_rope_head_dim, which RoPE rotates, is supported"
            )
        return super().sizes


# Adjacent channels are pairs in these files, too, so no rows have to change places.
NAMING = HuggingFaceNaming(
    NAMES | LATENT_NAMES | EXPERTS | SHARED_EXPERTS | GATES, frozenset(), DeepseekV3Config, ignored=AFTER_THE_LAST
)

# Latents are made from a part of the sequence, and gathered, since they are narrower than the residual stream.
LATENTS: dict[str, Style] = {
    "attention.wq": "gather_colwise",
    "attention.wq_a": "sequence",
    "attention.q_norm": "sequence_gather",
    "attention.wq_b": "colwise",
    "attention.wkv_a": "sequence",
    "attention.kv_norm": "sequence_gather",
    "attention.wkv_b": "colwise",
}
FAMILY = ModelSpec(
    DEEPSEEK_V3,
    build=DeepseekV3,
    sharding={name: style for name, style in SHARDING.items() if name != "attention"} | LATENTS,
    hf=NAMING,
)
