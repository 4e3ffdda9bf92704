"""What `MODELS` calls deepseek_v3."""

from torchtitan.models.deepseek_v3.args import DEEPSEEK_V3
from torchtitan.models.deepseek_v3.hf import DEEPSEEK_V3_NAMING
from torchtitan.models.deepseek_v3.model import DeepseekV3
from torchtitan.models.parallelize import SHARDING
from torchtitan.models.registry import ModelSpec
from torchtitan.parallel.dims import Style

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
    hf=DEEPSEEK_V3_NAMING,
)
