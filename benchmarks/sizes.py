"""Llama flavors in steps of about four times the parameters, and one for each vocabulary size, for scaling curves.

--experimental.custom_import=benchmarks.sizes --model.name=sizes --model.flavor=100M

The names count the embedding and the output layer for the bundled tokenizer (4,096 tokens).
"""

from dataclasses import replace

from torchtitan.models import MODELS, ModelSpec
from torchtitan.models.llama.args import LLAMA3, LlamaArgs

SIZES = {
    "1M": LlamaArgs(dim=96, n_layers=4, n_heads=6, n_kv_heads=6, ffn_dim=256, vocab_size=None),
    "6M": replace(LLAMA3["debugmodel"]),
    "25M": LlamaArgs(dim=512, n_layers=6, n_heads=8, n_kv_heads=8, ffn_dim=1536, vocab_size=None),
    "100M": LlamaArgs(dim=768, n_layers=12, n_heads=12, n_kv_heads=12, ffn_dim=2304, vocab_size=None),
    "100M_wide": LlamaArgs(dim=1024, n_layers=7, n_heads=8, n_kv_heads=2, ffn_dim=3584, vocab_size=None),
    "320M": LlamaArgs(dim=1024, n_layers=24, n_heads=16, n_kv_heads=16, ffn_dim=2816, vocab_size=None),
}
VOCABULARIES = (4096, 16384, 65536, 128256)

MODELS.register(
    "sizes",
    ModelSpec({**SIZES, **{f"vocabulary_{size}": replace(SIZES["6M"], vocab_size=size) for size in VOCABULARIES}}),
)
