"""What `MODELS` calls glm4_moe."""

from torchtitan.models.glm4_moe.args import GLM4_MOE
from torchtitan.models.glm4_moe.hf import GLM4_MOE_NAMING
from torchtitan.models.moe import SparseTransformer
from torchtitan.models.registry import ModelSpec

FAMILY = ModelSpec(GLM4_MOE, build=SparseTransformer, hf=GLM4_MOE_NAMING)
