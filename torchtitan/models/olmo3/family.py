"""What `MODELS` calls olmo3."""

from torchtitan.models.olmo3.args import OLMO3
from torchtitan.models.olmo3.hf import OLMO3_NAMING
from torchtitan.models.parallelize import SHARDING
from torchtitan.models.registry import ModelSpec
from torchtitan.models.transformer import Transformer

# A rank has some of the channels that queries and keys are normalized over.
FULL_WIDTH = SHARDING | {"attention.q_norm": "colwise_norm", "attention.k_norm": "colwise_norm"}
FAMILY = ModelSpec(OLMO3, build=Transformer, sharding=FULL_WIDTH, hf=OLMO3_NAMING)
