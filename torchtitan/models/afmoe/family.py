"""What `MODELS` calls afmoe."""

from torchtitan.models.afmoe.args import AFMOE
from torchtitan.models.afmoe.hf import AFMOE_NAMING
from torchtitan.models.moe import SparseTransformer
from torchtitan.models.registry import ModelSpec

FAMILY = ModelSpec(AFMOE, build=SparseTransformer, hf=AFMOE_NAMING)
