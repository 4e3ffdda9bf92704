"""The decoder of DeepSeek-V3: multi-head latent attention (MLA, arXiv 2405.04434, section 2.1).

Shapes: B batch, S sequence, H heads, D channels of a head's queries and keys, E channels of the residual stream.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.kernels.attention import attend
from torchtitan.models.attention import Attention
from torchtitan.models.deepseek_v3.args import DeepseekV3Args
from torchtitan.models.moe import SparseTransformer
from torchtitan.models.norm import RMSNorm
from torchtitan.models.rope import apply_rope

LATENT_EPS = 1e-6  # of norms of latents, whatever the model's `norm_eps` (the released code)


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
