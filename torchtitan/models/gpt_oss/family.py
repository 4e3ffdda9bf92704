"""What `MODELS` calls gpt_oss."""

from torchtitan.models.gpt_oss.args import GPT_OSS
from torchtitan.models.gpt_oss.hf import GPT_OSS_NAMING
from torchtitan.models.moe import SparseTransformer
from torchtitan.models.registry import ModelSpec

FAMILY = ModelSpec(GPT_OSS, build=SparseTransformer, hf=GPT_OSS_NAMING)
