"""A user's module, `--experimental.custom_import=tiny`: models so small that a run is dominated by start-up, and one
for GPUs."""

from dataclasses import dataclass, replace

import torch

from torchtitan.models import MODELS, ModelSpec
from torchtitan.models.attention import Attention
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.hf import HUGGING_FACE
from torchtitan.models.llama.model import Llama
from torchtitan.models.moe import MoEArgs, SparseArgs, SparseTransformer

TINY = LlamaArgs(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=None)

MODELS.register(
    "tiny",
    ModelSpec(
        {
            "narrow": TINY,
            "wide": replace(TINY, dim=128),
            "blocks": replace(TINY, dim=256, ffn_dim=256),
            "shallow": replace(TINY, n_layers=1),
            "deep": replace(TINY, n_layers=4),
            "tied": replace(TINY, tied_embeddings=True),
            "few_words": replace(TINY, vocab_size=100),
            "gibibytes": LlamaArgs(dim=2048, n_layers=8, n_heads=16, n_kv_heads=8, ffn_dim=5632, vocab_size=None),
        },
        hf=HUGGING_FACE,
    ),
)


@dataclass(frozen=True)
class SparseTinyArgs(SparseArgs):
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0


class SparseTiny(SparseTransformer):
    def make_attention(self, args: SparseTinyArgs) -> Attention:
        return Attention(args)


SPARSE = SparseTinyArgs(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=None, moe=MoEArgs(8, 2, 32)
)
MODELS.register(
    "sparse",
    ModelSpec(
        {
            "narrow": SPARSE,
            "deep": replace(
                SPARSE,
                n_layers=4,
                moe=MoEArgs(8, 2, 32, n_shared_experts=1, n_dense_layers=1, score="sigmoid", scale=2.0),
            ),
        },
        SparseTiny,
    ),
)


def nontrivial_llama(args: LlamaArgs) -> Llama:
    """With weights that make every part matter: non-uniform attention, norms other than 1."""
    model = Llama(args)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
    return model
