"""Sizes of the dense Qwen3 models (arXiv 2505.09388, table 1, and the released configurations)."""

from dataclasses import dataclass

from torchtitan.models.args import TransformerArgs
from torchtitan.models.rope import Positive, Size, Theta


@dataclass(frozen=True)
class Qwen3Args(TransformerArgs):
    """Sizes of one dense Qwen3; `head_dim` is not dim / n_heads."""

    norm_eps: Positive = 1e-6
    rope_theta: Theta = 1000000.0
    head_dim: Size = 128


def _qwen3(dim: int, n_layers: int, n_heads: int, ffn_dim: int, tied: bool = False) -> Qwen3Args:
    return Qwen3Args(dim, n_layers, n_heads, 8, ffn_dim, vocab_size=151936, tied_embeddings=tied)


QWEN3 = {
    "debugmodel": Qwen3Args(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=None, head_dim=64),
    "0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "8B": _qwen3(4096, 36, 32, 12288),
    "14B": _qwen3(5120, 40, 40, 17408),
    "32B": _qwen3(5120, 64, 64, 25600),
}
