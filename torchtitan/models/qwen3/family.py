"""What `MODELS` calls qwen3 and qwen3_moe."""

from torchtitan.models.qwen3.args import QWEN3, QWEN3_MOE
from torchtitan.models.qwen3.hf import HUGGING_FACE_MOE, QWEN3_NAMING
from torchtitan.models.qwen3.model import SHARDING, Qwen3, Qwen3MoE
from torchtitan.models.registry import ModelSpec

DENSE = ModelSpec(QWEN3, build=Qwen3, sharding=SHARDING, hf=QWEN3_NAMING)
MIXTURE = ModelSpec(QWEN3_MOE, build=Qwen3MoE, sharding=SHARDING, hf=HUGGING_FACE_MOE)
