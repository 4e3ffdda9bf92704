"""Sizes of the Llama models."""

from dataclasses import dataclass, replace

from torchtitan.models.args import TransformerArgs
from torchtitan.models.rope import Llama3Scaling, Positive, RopeScaling, Theta


@dataclass(frozen=True)
class LlamaArgs(TransformerArgs):
    """Sizes of one Llama model."""

    norm_eps: Positive = 1e-5
    rope_theta: Theta = 500000.0


def scaled(factor: float) -> Llama3Scaling:
    """RoPE of Llama 3.1 (8) and 3.2 (32)."""
    return Llama3Scaling(factor=factor, original=8192)


def _llama2(dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn_dim: int) -> LlamaArgs:
    return LlamaArgs(dim, n_layers, n_heads, n_kv_heads, ffn_dim, vocab_size=32000, rope_theta=10000.0)


def _llama3(
    dim: int, n_layers: int, n_heads: int, ffn_dim: int, scaling: RopeScaling | None = None, tied: bool = False
) -> LlamaArgs:
    return LlamaArgs(dim, n_layers, n_heads, 8, ffn_dim, 128256, rope_scaling=scaling, tied_embeddings=tied)


_DEBUG = LlamaArgs(dim=256, n_layers=6, n_heads=16, n_kv_heads=16, ffn_dim=768, vocab_size=None)

LLAMA2 = {
    "debugmodel": replace(_DEBUG, rope_theta=10000.0),
    "7B": _llama2(4096, 32, 32, 32, 11008),
    "13B": _llama2(5120, 40, 40, 40, 13824),
    "70B": _llama2(8192, 80, 64, 8, 28672),
}
LLAMA3_1 = {
    "8B": _llama3(4096, 32, 32, 14336, scaled(8.0)),
    "70B": _llama3(8192, 80, 64, 28672, scaled(8.0)),
    "405B": _llama3(16384, 126, 128, 53248, scaled(8.0)),
}
LLAMA3_2 = {
    "1B": _llama3(2048, 16, 32, 8192, scaled(32.0), tied=True),
    "3B": _llama3(3072, 28, 24, 8192, scaled(32.0), tied=True),
}
LLAMA3 = {
    "debugmodel": _DEBUG,
    # 1B and 3B exist only in Llama 3.2, 405B only in 3.1.
    **LLAMA3_2,
    "8B": _llama3(4096, 32, 32, 14336),
    "70B": _llama3(8192, 80, 64, 28672),
    "405B": LLAMA3_1["405B"],
}
