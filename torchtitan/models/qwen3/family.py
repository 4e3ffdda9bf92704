"""What `MODELS` calls qwen3 and qwen3_moe."""

from torchtitan.models.moe import SparseTransformer
from torchtitan.models.qwen3.args import QWEN3, QWEN3_MOE
from torchtitan.models.qwen3.hf import HUGGING_FACE_MOE, QWEN3_NAMING
from torchtitan.models.registry import ModelSpec
from torchtitan.models.transformer import Transformer

DENSE = ModelSpec(QWEN3, build=Transformer, hf=QWEN3_NAMING)
MIXTURE = ModelSpec(QWEN3_MOE, build=SparseTransformer, hf=HUGGING_FACE_MOE)
